import pytest
from builders import PLAN, failure, measurement, trial_config, usage
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.objective import Objective
from pipetune.core.record import Arm, Certification, TrialRecord
from pipetune.core.space import Amp
from pipetune.core.study import Budget
from pipetune.core.throughput import EpochStart
from pipetune.search.certify import MAX_FINALISTS, choose, finalists, ranked, reported

BASELINE = trial_config(0)
NO_COST = EpochStart(fresh_s=0.0, refill_s=0.0)
WAVERING = [0.9, 1.1] * 5
"""Window rates, as shares of their mean, that leave 7 % of doubt."""


def record(number, rate, config=None, **changes):
    config = config or trial_config(number + 1)
    return TrialRecord(number=number, config=config, outcome=measurement(config, rate=rate, **changes), seconds=7.0)


def arm(config, *rounds, gpus=None):
    """One configuration with the rate (or the window rates) of each round."""
    measured = []
    for number, rate in enumerate(rounds):
        changes = {"gpu": usage(gpus[number]), "gpu_reason": None} if gpus else {}
        rates = rate if isinstance(rate, list) else [rate] * 10
        measured.append(measurement(config, rates=rates, epoch_start=NO_COST, **changes))
    return Arm(config=config, rounds=tuple(measured))


def winner(*arms, objective=Objective.THROUGHPUT):
    """The configuration that is chosen; the last arm is the baseline."""
    certification = Certification(arms=arms, seconds=60.0, budget=Budget(seconds=60.0, trials=None))
    return arms[choose(certification, PLAN, objective)].config


# --- who is measured again -------------------------------------------------------------------------------------


def test_ranked_is_best_first_and_leaves_failures_out():
    failed = TrialRecord(number=9, config=trial_config(9), outcome=failure(), seconds=1.0)
    found = ranked([record(0, 100.0), failed, record(1, 300.0), record(2, 200.0)], PLAN, Objective.THROUGHPUT, 1.0)
    assert [one.number for one in found] == [1, 2, 0]


def test_ranked_by_weight_may_differ_from_ranked_by_rate():
    busy = record(0, 100.0, gpu=usage(100.0), gpu_reason=None)
    fast = record(1, 105.0, gpu=usage(10.0), gpu_reason=None)
    order = {
        objective: [one.number for one in ranked([busy, fast], PLAN, objective, 100.0)]
        for objective in (Objective.WEIGHTED, Objective.PARETO)
    }
    assert order == {Objective.WEIGHTED: [0, 1], Objective.PARETO: [1, 0]}


def finalists_of(*rates):
    """Worker counts of the finalists where trial i has i + 1 workers."""
    best_first = ranked([record(number, rate) for number, rate in enumerate(rates)], PLAN, Objective.THROUGHPUT, 1.0)
    return [config.num_workers for config in finalists(best_first, BASELINE, PLAN)]


def test_a_clear_leader_meets_only_the_baseline():
    assert finalists_of(1000.0, 900.0, 800.0) == [1, 0]


def test_those_that_are_tied_with_the_leader_are_measured_again():
    assert finalists_of(1000.0, 995.0, 800.0) == [1, 2, 0]


def test_no_more_than_a_few_are_measured_again():
    assert finalists_of(*[1000.0 - i for i in range(10)]) == [*range(1, MAX_FINALISTS + 1), 0]


def test_the_baseline_alone_is_measured_again():
    assert finalists([record(0, 1000.0, BASELINE)], BASELINE, PLAN) == [BASELINE]


def test_the_baseline_as_the_leader_still_meets_the_next():
    best_first = [record(0, 1000.0, BASELINE), record(1, 900.0)]
    assert finalists(best_first, BASELINE, PLAN) == [trial_config(2), BASELINE]


@given(st.lists(st.floats(10.0, 1e4), min_size=1, max_size=12))
def test_the_baseline_is_the_last_arm_and_comes_once(rates):
    records = [record(0, 500.0, BASELINE), *(record(i + 1, rate) for i, rate in enumerate(rates))]
    found = finalists(ranked(records, PLAN, Objective.THROUGHPUT, 1.0), BASELINE, PLAN)
    assert found[-1] == BASELINE
    assert len(set(found)) == len(found)
    assert 2 <= len(found) <= MAX_FINALISTS + 1


# --- what is reported ------------------------------------------------------------------------------------------


def test_the_round_that_chose_is_not_reported():
    found = reported(arm(BASELINE, 5000.0, 1000.0, 1000.0), PLAN)
    assert found.steady_samples_per_sec.value == pytest.approx(1000.0)
    assert found.steady_samples_per_sec.high == pytest.approx(1000.0)


def test_a_single_round_is_all_there_is():
    assert reported(arm(BASELINE, 1000.0), PLAN).steady_samples_per_sec.value == pytest.approx(1000.0)


def test_the_interval_spans_what_fresh_processes_differed_by():
    # GIVEN two processes that are sure of themselves, and differ by 10 %
    found = reported(arm(BASELINE, 1.0, 950.0, 1050.0), PLAN)
    for figure in (found.steady_samples_per_sec, found.effective_samples_per_sec):
        assert figure.high / figure.low > 1.09
        assert figure.low < figure.value < figure.high


def test_the_interval_spans_what_epoch_starts_differed_by():
    # GIVEN equal rates, and epoch starts of 1 and 3 s in epochs of 50 s
    rounds = [
        measurement(BASELINE, rate=1000.0, epoch_start=EpochStart(fresh_s=fresh_s, refill_s=None))
        for fresh_s in (0.0, 1.0, 3.0)
    ]
    found = reported(Arm(config=BASELINE, rounds=tuple(rounds)), PLAN).effective_samples_per_sec
    assert found.low == pytest.approx(50_000 / 53)
    assert found.high == pytest.approx(50_000 / 51)
    assert found.value == pytest.approx(50_000 / 52)


def test_utilisation_is_pooled_over_the_reported_rounds():
    found = reported(arm(BASELINE, 1000.0, 1000.0, 1000.0, gpus=[0.0, 80.0, 90.0]), PLAN)
    assert found.gpu_utilization_percent.value == pytest.approx(85.0)
    assert found.gpu_utilization_percent.low < 84.0


def test_where_one_round_lacks_utilisation_there_is_either_a_figure_or_a_reason():
    # GIVEN a round in which NVML gave nothing, and one in which it did
    blind = measurement(BASELINE, gpu=None, gpu_reason="NVML gave no samples")
    seen = measurement(BASELINE, gpu=usage(80.0), gpu_reason=None)
    for rounds in ((seen, blind, seen), (seen, seen, blind), (blind, blind, seen)):
        found = reported(Arm(config=BASELINE, rounds=rounds), PLAN)
        # THEN the reason is set exactly where utilisation is None
        assert (found.gpu_utilization_percent is None) == (found.gpu_utilization_reason is not None)


# --- who wins --------------------------------------------------------------------------------------------------


def test_the_faster_one_wins():
    assert winner(arm(trial_config(4), 1300.0, 1300.0, 1300.0), arm(BASELINE, 1000.0, 1000.0, 1000.0)).num_workers == 4


def test_the_baseline_wins_a_tie():
    assert winner(arm(trial_config(4), 1015.0, 1015.0, 1015.0), arm(BASELINE, 1000.0, 1000.0, 1000.0)) == BASELINE


def test_a_slower_finalist_loses():
    assert winner(arm(trial_config(4), 900.0, 900.0, 900.0), arm(BASELINE, 1000.0, 1000.0, 1000.0)) == BASELINE


def test_the_baseline_alone_wins():
    assert winner(arm(BASELINE, 1000.0, 1000.0, 1000.0)) == BASELINE


def test_a_gain_that_only_the_choosing_round_saw_is_none():
    assert winner(arm(trial_config(4), 1300.0, 1000.0, 1000.0), arm(BASELINE, 1000.0, 1000.0, 1000.0)) == BASELINE


def test_processes_that_differ_by_more_than_the_gain_prove_none():
    assert winner(arm(trial_config(4), 1100.0, 960.0, 1240.0), arm(BASELINE, 1000.0, 1000.0, 1000.0)) == BASELINE


def test_among_tied_finalists_the_simpler_one_wins():
    many, few = trial_config(8), trial_config(2)
    chosen = winner(
        arm(many, 1310.0, 1310.0, 1310.0), arm(few, 1300.0, 1300.0, 1300.0), arm(BASELINE, 1000.0, 1000.0, 1000.0)
    )
    assert chosen == few


def test_a_simpler_finalist_without_a_gain_does_not_hide_a_leader_with_one():
    # GIVEN a bf16 leader at +5 % whose choosing round was noisy, and an fp32 one at +1.5 %: tied in that round
    leader = trial_config(8, amp=Amp.BF16)
    noisy = [1050.0 * share for share in WAVERING]
    chosen = winner(
        arm(leader, noisy, 1050.0, 1050.0),
        arm(trial_config(2), 1015.0, 1015.0, 1015.0),
        arm(BASELINE, 1000.0, 1000.0, 1000.0),
    )
    # THEN the gain beyond the noise is named, and not lost to the baseline
    assert chosen == leader


# --- who wins by weight ----------------------------------------------------------------------------------------

BASE_ARM = arm(BASELINE, 1000.0, 1000.0, 1000.0, gpus=[50.0, 50.0, 50.0])


def test_by_weight_utilisation_may_win():
    busy = arm(trial_config(4), 1010.0, 1010.0, 1010.0, gpus=[99.0, 99.0, 99.0])
    assert winner(busy, BASE_ARM, objective=Objective.WEIGHTED).num_workers == 4


def test_by_weight_the_baseline_wins_a_tie():
    alike = arm(trial_config(4), 1010.0, 1010.0, 1010.0, gpus=[51.0, 51.0, 51.0])
    assert winner(alike, BASE_ARM, objective=Objective.WEIGHTED) == BASELINE


def test_by_weight_too_the_reported_rounds_do_not_choose():
    # GIVEN one that led in the choosing round, and one that led in the reported rounds
    first = arm(trial_config(4), 2000.0, 1600.0, 1600.0, gpus=[50.0] * 3)
    later = arm(trial_config(8), 1500.0, 1900.0, 1900.0, gpus=[50.0] * 3)
    # THEN figures of rounds that chose are never reported
    assert winner(first, later, BASE_ARM, objective=Objective.WEIGHTED) == first.config


def test_by_weight_too_the_simpler_of_tied_ones_wins():
    many = arm(trial_config(8, amp=Amp.BF16), 1510.0, 1510.0, 1510.0, gpus=[80.0] * 3)
    few = arm(trial_config(2), 1500.0, 1500.0, 1500.0, gpus=[80.0] * 3)
    assert winner(many, few, BASE_ARM, objective=Objective.WEIGHTED) == few.config


def test_pareto_names_the_fastest():
    fast = arm(trial_config(4), 1500.0, 1500.0, 1500.0, gpus=[30.0] * 3)
    busy = arm(trial_config(2), 1300.0, 1300.0, 1300.0, gpus=[99.0] * 3)
    assert winner(fast, busy, BASE_ARM, objective=Objective.PARETO) == fast.config
