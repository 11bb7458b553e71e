import math
import random
from dataclasses import replace

import pytest
from builders import PLAN, failure, measurement, trial_config, usage
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetune.core.objective import Objective
from pipetune.core.record import Round, Stage, TrialRecord
from pipetune.core.repeats import LOOKS, PRIOR, Noise, Verdict
from pipetune.core.space import Amp
from pipetune.core.throughput import EpochStart
from pipetune.search.certify import MAX_FINALISTS, MAX_TRIES, Answer, Step, next_step, question, succession
from pipetune.search.ranking import Yardstick, merged, ranked, search_noise
from pipetune.search.reference import drift_note

BASELINE = trial_config(0)
ONE, TWO, THREE, FOUR = (trial_config(count) for count in (1, 2, 3, 4))
NO_COST = EpochStart(fresh_s=0.0, refill_s=0.0)
YARDSTICK = Yardstick(objective=Objective.THROUGHPUT, plan=PLAN, baseline_rate=1000.0)
QUIET = Noise(sd=0.004, freedom=20.0)
NOISY = Noise(sd=0.08, freedom=20.0)


def found(config, rate, **changes):
    return measurement(config, rate=rate, epoch_start=NO_COST, **changes)


def record(number, rate, config=None, **changes):
    config = config or trial_config(number + 1)
    return TrialRecord(number=number, config=config, outcome=found(config, rate, **changes), seconds=7.0)


def asked(rates, *, noise=QUIET, yardstick=YARDSTICK, **changes):
    """What is open after a search that measured these rates."""
    records = [record(number, rate, config) for number, (config, rate) in enumerate(rates.items())]
    return replace(question(records, BASELINE, yardstick), noise=noise, **changes)


def choosing(*rounds):
    return [Round(stage=Stage.CHOOSING, outcomes=tuple(found(c, r) for c, r in one.items())) for one in rounds]


def verifying(candidate, *pairs):
    return [
        Round(stage=Stage.VERIFYING, outcomes=(found(candidate, theirs), found(BASELINE, base)))
        for theirs, base in pairs
    ]


def always(_):
    return True


def never(_):
    return False


def driven(question_, rate, *, allows=always, limit=60):
    """The answer, and the steps to it, where each process of a configuration runs at `rate(config)`."""
    rounds, steps = [], []
    while isinstance(step := next_step(question_, rounds, allows), Step):
        steps.append(step)
        outcomes = tuple(
            found(config, value) if (value := rate(config)) else failure(config) for config in step.configs
        )
        rounds.append(Round(stage=step.stage, outcomes=outcomes))
        assert len(rounds) < limit
    return step, steps


def stages(steps):
    return [step.stage for step in steps]


# --- the order of merit ----------------------------------------------------------------------------------------


def test_ranked_is_best_first_and_leaves_failures_out():
    failed = TrialRecord(number=9, config=trial_config(9), outcome=failure(), seconds=1.0)
    order = ranked([record(0, 100.0), failed, record(1, 300.0), record(2, 200.0)], YARDSTICK)
    assert [one.number for one in order] == [1, 2, 0]


def test_ranked_by_weight_may_differ_from_ranked_by_rate():
    busy = record(0, 1000.0, gpu=usage(100.0), gpu_reason=None)
    fast = record(1, 1050.0, gpu=usage(10.0), gpu_reason=None)
    order = {
        objective: [one.number for one in ranked([busy, fast], replace(YARDSTICK, objective=objective))]
        for objective in (Objective.WEIGHTED, Objective.PARETO)
    }
    assert order == {Objective.WEIGHTED: [0, 1], Objective.PARETO: [1, 0]}


def test_a_lucky_repeat_leads_nobody():
    # GIVEN a reference that was once fast by luck, and one that is always a little faster
    records = [record(0, 1000.0, ONE), record(1, 1100.0, TWO), record(2, 1180.0, ONE)]
    assert [one.number for one in ranked(records, YARDSTICK)] == [1, 0]


def test_repeats_are_one_trial_under_their_first_number():
    (one,) = merged([record(3, 900.0, ONE), record(8, 1100.0, ONE)])
    assert one.number == 3
    assert one.measurement.steady().value == pytest.approx(1000.0)


def test_a_repeat_that_failed_does_not_spoil_what_ran():
    failed = TrialRecord(number=8, config=ONE, outcome=failure(ONE), seconds=1.0)
    assert merged([record(3, 900.0, ONE), failed]) == [record(3, 900.0, ONE)]


def test_a_trial_that_was_ended_early_is_no_repeat_of_a_whole_one():
    early = TrialRecord(number=2, config=ONE, outcome=measurement(ONE, rate=600.0, censored=True), seconds=2.0)
    whole = record(5, 1000.0, ONE)
    assert merged([early, whole]) == [whole]
    assert merged([early]) == [early]
    assert search_noise([early, whole], YARDSTICK).freedom == 0
    assert drift_note([early, whole], whole, PLAN) is None


def test_noise_of_the_search_comes_from_repeats():
    records = [record(0, 1000.0, ONE), record(1, 5000.0, TWO), record(2, 1100.0, ONE)]
    noise = search_noise(records, YARDSTICK)
    assert noise.freedom == 1.0
    assert noise.sd == pytest.approx(math.log(1.1) / math.sqrt(2))


# --- who is compared -------------------------------------------------------------------------------------------


def test_a_clear_leader_meets_the_baseline_at_once():
    step = next_step(asked({BASELINE: 500.0, ONE: 1000.0, TWO: 900.0}), [], always)
    assert step == Step(stage=Stage.VERIFYING, configs=(ONE, BASELINE), done=0)


def test_those_that_noise_could_have_put_behind_are_compared_first():
    step = next_step(asked({BASELINE: 500.0, ONE: 1000.0, TWO: 990.0, THREE: 800.0}), [], always)
    assert step == Step(stage=Stage.CHOOSING, configs=(ONE, TWO), done=0)


def test_the_baseline_is_not_among_those_that_are_compared():
    step = next_step(asked({BASELINE: 1000.0, ONE: 1000.0, TWO: 990.0}), [], always)
    assert step.configs == (ONE, TWO)


def test_where_the_baseline_is_far_ahead_there_is_nothing_to_choose():
    records = [record(0, 1000.0, BASELINE), record(1, 500.0, ONE), record(2, 499.0, TWO)]
    assert question(records, BASELINE, YARDSTICK).finalists() == [ONE]
    ahead = [record(0, 1000.0, BASELINE), record(1, 1010.0, ONE), record(2, 1009.0, TWO)]
    assert question(ahead, BASELINE, YARDSTICK).finalists() == [ONE, TWO]


def test_no_more_than_a_few_are_compared():
    rates = {trial_config(count): 1000.0 for count in range(1, 40)}
    assert len(asked({BASELINE: 1000.0} | rates, noise=NOISY).finalists()) == MAX_FINALISTS
    assert asked(rates, most=1).finalists() == [ONE]


def test_what_the_search_repeated_is_added_to_what_was_believed():
    records = [record(0, 1000.0, ONE), record(1, 1000.0, ONE), record(2, 900.0, BASELINE)]
    noise = question(records, BASELINE, YARDSTICK).noise
    assert noise.freedom == PRIOR.freedom + 1
    assert noise.sd < PRIOR.sd


def test_every_other_round_runs_backwards():
    open_ = asked({ONE: 1000.0, TWO: 999.0, THREE: 998.0}, noise=NOISY, most=3)
    first = next_step(open_, [], always)
    second = next_step(open_, choosing(dict.fromkeys(first.configs, 1000.0)), always)
    assert (first.done, second.done) == (0, 1)
    assert second.configs == first.configs[::-1]
    pair = next_step(asked({BASELINE: 1.0, ONE: 9.0}), verifying(ONE, (9.0, 1.0)), always)
    assert pair == Step(stage=Stage.VERIFYING, configs=(BASELINE, ONE), done=1)


# --- who is chosen ---------------------------------------------------------------------------------------------

TRIO = {ONE: 1000.0, TWO: 999.0, THREE: 998.0}


def test_who_is_behind_in_fresh_processes_is_out():
    rounds = choosing({ONE: 800.0, TWO: 1000.0, THREE: 700.0}, {THREE: 700.0, TWO: 1001.0, ONE: 801.0})
    step = next_step(asked(TRIO), rounds, always)
    assert step == Step(stage=Stage.VERIFYING, configs=(TWO, BASELINE), done=0)


def test_two_that_are_left_meet_once_more():
    rounds = choosing({ONE: 1000.0, TWO: 1100.0, THREE: 100.0}, {THREE: 100.0, TWO: 1000.0, ONE: 1040.0})
    step = next_step(asked(TRIO, noise=NOISY, most=3), rounds, always)
    assert (step.stage, set(step.configs), step.done) == (Stage.CHOOSING, {ONE, TWO}, 2)


def test_noise_that_the_rounds_themselves_show_keeps_arms_in():
    # GIVEN a search that took the machine for quiet, and rounds that contradict each other
    rounds = choosing({ONE: 1100.0, TWO: 900.0, THREE: 1000.0}, {THREE: 1000.0, TWO: 1040.0, ONE: 950.0})
    step = next_step(asked(TRIO, noise=Noise(sd=0.005, freedom=3.0), most=3), rounds, always)
    assert (step.stage, step.done) == (Stage.CHOOSING, 2)


def test_among_the_tied_the_preferred_is_chosen():
    # GIVEN the fastest with 4 workers, and one with a single worker that is 0.5 % slower
    rounds = choosing({FOUR: 1005.0, ONE: 1000.0}, {ONE: 1000.0, FOUR: 1005.0})
    assert succession(asked({FOUR: 1005.0, ONE: 1000.0}), rounds)[0] == ONE


def test_full_precision_is_preferred_among_the_tied():
    reduced = trial_config(1, amp=Amp.BF16)
    rounds = choosing({reduced: 1005.0, FOUR: 1000.0}, {FOUR: 1000.0, reduced: 1005.0})
    assert succession(asked({reduced: 1005.0, FOUR: 1000.0}), rounds)[0] == FOUR


def test_a_busier_gpu_is_preferred_among_the_tied():
    rates = {ONE: (1000.0, 50.0), FOUR: (1001.0, 90.0)}
    outcomes = tuple(found(c, rate, gpu=usage(gpu), gpu_reason=None) for c, (rate, gpu) in rates.items())
    rounds = [Round(stage=Stage.CHOOSING, outcomes=outcomes)] * 2
    assert succession(asked({ONE: 1000.0, FOUR: 1001.0}), rounds)[0] == FOUR


def test_what_is_clearly_behind_is_not_preferred_however_simple():
    rounds = choosing({FOUR: 1100.0, ONE: 1000.0}, {ONE: 1000.0, FOUR: 1100.0})
    assert succession(asked({FOUR: 1100.0, ONE: 1090.0}), rounds)[0] == FOUR


def test_choosing_ends_with_the_budget():
    step = next_step(asked(TRIO, noise=NOISY), choosing(TRIO), lambda step: step.stage is Stage.VERIFYING)
    assert (step.stage, step.done) == (Stage.VERIFYING, 0)


def test_choosing_is_over_once_the_baseline_is_met():
    rounds = [*choosing(TRIO), *verifying(ONE, (1000.0, 900.0))]
    assert next_step(asked(TRIO, noise=NOISY), rounds, always).stage is Stage.VERIFYING


def test_where_the_machine_is_noisier_than_was_known_more_are_compared():
    # GIVEN a search that left all but two out
    rates = {trial_config(count): 1000.0 - 30.0 * count for count in range(1, 9)}
    open_ = asked(rates, noise=Noise(sd=0.02, freedom=3.0))
    few = open_.finalists()
    assert len(few) < 6
    # WHEN these differ by 20 % from round to round
    wild = [{c: 1000.0 * (1.2 if (n + i) % 2 else 0.9) for i, c in enumerate(few)} for n in range(2)]
    step = next_step(open_, choosing(*wild), always)
    # THEN those that were left out are compared too, with all of them anew
    assert step.done == 0
    assert set(few) < set(step.configs)
    # AND only those rounds count that compare all
    again = choosing(*wild, dict.fromkeys(step.configs, 1000.0))
    assert next_step(open_, again, always).done == 1


def test_where_the_machine_is_quiet_nobody_joins():
    rates = {trial_config(count): 1000.0 - 8.0 * count for count in range(1, 9)}
    open_ = asked(rates, noise=Noise(sd=0.01, freedom=5.0))
    few = open_.finalists()
    rounds = choosing(*[{c: rates[c] for c in few}] * 2)
    assert next_step(open_, rounds, always).stage is Stage.VERIFYING


def test_without_time_to_compare_the_contract_breaks_the_tie():
    # GIVEN two that the search cannot tell apart, the faster in reduced precision, and no time to choose
    reduced, full = trial_config(2, amp=Amp.BF16), trial_config(2, amp=Amp.FP32)
    open_ = asked({reduced: 1010.0, full: 1000.0, BASELINE: 500.0}, most=1)
    answer, steps = driven(open_, {reduced: 1010.0, full: 1000.0, BASELINE: 500.0}.get)
    assert answer.winner == full
    assert stages(steps) == [Stage.VERIFYING] * 2


def test_who_had_to_clear_the_gpus_memory_does_not_win():
    records = [
        record(0, 500.0, BASELINE),
        record(1, 1000.0, ONE),
        record(2, 1300.0, TWO, allocation_retries=3),
    ]
    assert TWO not in question(records, BASELINE, YARDSTICK).line
    # AND where all had to, they may
    records[1] = record(1, 1000.0, ONE, allocation_retries=1)
    assert question(records, BASELINE, YARDSTICK).line == (TWO, ONE)


# --- what fails ------------------------------------------------------------------------------------------------


def test_a_finalist_that_fails_is_out():
    answer, steps = driven(asked(TRIO), {ONE: None, TWO: 1000.0, THREE: 990.0, BASELINE: 500.0}.get)
    assert answer.winner == TWO
    assert sum(ONE in step.configs for step in steps) == 1


def test_where_the_chosen_fails_beside_the_baseline_the_next_one_meets_it():
    rates = {BASELINE: 500.0, ONE: 1000.0, TWO: 900.0, THREE: 800.0}
    answer, steps = driven(asked(rates), (rates | {ONE: None}).get)
    assert answer.winner == TWO
    assert [set(step.configs) - {BASELINE} for step in steps] == [{ONE}, {TWO}, {TWO}]
    # The ceiling of the next is timed, too.
    assert [step.done for step in steps] == [0, 0, 1]


def test_only_a_few_are_tried_one_after_the_other():
    rates = {trial_config(count): 3000.0 - 500.0 * count for count in range(1, 6)}
    answer, steps = driven(asked({BASELINE: 100.0} | rates), {BASELINE: 100.0}.get)
    assert answer == Answer(winner=BASELINE)
    assert sum(len(step.configs) == 2 for step in steps) == MAX_TRIES


def test_where_all_fail_the_baseline_has_two_rounds_of_its_own():
    answer, steps = driven(asked({BASELINE: 500.0, ONE: 1000.0}), {BASELINE: 500.0}.get)
    assert answer == Answer(winner=BASELINE)
    assert [step.configs for step in steps] == [(ONE, BASELINE), (BASELINE,)]


def test_a_baseline_alone_is_measured_for_its_figures():
    answer, steps = driven(asked({BASELINE: 500.0}), {BASELINE: 500.0}.get)
    assert answer == Answer(winner=BASELINE)
    assert [step.configs for step in steps] == [(BASELINE,)] * LOOKS[0]


def test_where_the_baseline_fails_there_is_no_winner():
    answer, steps = driven(asked({BASELINE: 500.0, ONE: 1000.0}), {ONE: 1000.0}.get)
    assert answer == Answer(winner=None)
    assert len(steps) == 1


# --- who wins --------------------------------------------------------------------------------------------------


def test_a_large_gain_takes_two_rounds_of_two():
    answer, steps = driven(asked({BASELINE: 1000.0, ONE: 8000.0}), {BASELINE: 1000.0, ONE: 8000.0}.get)
    assert (answer.winner, answer.judgement.verdict) == (ONE, Verdict.GAIN)
    assert [len(step.configs) for step in steps] == [2, 2]


def test_the_baseline_wins_a_tie():
    answer, _ = driven(asked({BASELINE: 1000.0, ONE: 1015.0}), {BASELINE: 1000.0, ONE: 1015.0}.get)
    assert (answer.winner, answer.judgement.verdict) == (BASELINE, Verdict.NO_GAIN)


def test_a_gain_that_only_choosing_saw_is_none():
    rounds = [*choosing({ONE: 1500.0, TWO: 900.0}), *verifying(ONE, *[(1000.0, 1000.0)] * 4)]
    assert next_step(asked({ONE: 1500.0, TWO: 1400.0}), rounds, always).winner == BASELINE


def test_processes_that_differ_by_more_than_the_gain_take_more_rounds():
    rounds = verifying(ONE, (960.0, 1000.0), (1240.0, 1000.0))
    assert next_step(asked({BASELINE: 1000.0, ONE: 1100.0}, noise=PRIOR), rounds, always).done == 2
    assert next_step(asked({BASELINE: 1000.0, ONE: 1100.0}, noise=PRIOR), rounds, never).winner == BASELINE


def test_trials_that_agreed_in_one_process_prove_nothing_of_others():
    # GIVEN a search whose repeats agreed to the last digit, and two pairs of fresh processes with a gain of 10 %
    rounds = verifying(ONE, (1100.0, 1000.0), (1100.0, 1000.0))
    quiet = asked({BASELINE: 1000.0, ONE: 1100.0}, noise=Noise(sd=0.001, freedom=30.0))
    assert next_step(quiet, rounds, always).stage is Stage.VERIFYING


def test_what_is_not_decided_when_the_budget_ends_is_no_gain_and_says_how_far_it_was():
    answer = next_step(
        asked({BASELINE: 1000.0, ONE: 1100.0}, noise=NOISY), verifying(ONE, (1100.0, 1000.0), (1100.0, 1000.0)), never
    )
    assert (answer.winner, answer.candidate, answer.judgement.verdict) == (BASELINE, ONE, Verdict.OPEN)
    assert math.expm1(answer.judgement.gain) == pytest.approx(0.1)


def test_two_rounds_are_made_whatever_the_budget():
    _, steps = driven(asked({BASELINE: 1000.0, ONE: 1100.0}), {BASELINE: 1000.0, ONE: 1100.0}.get, allows=never)
    assert stages(steps) == [Stage.VERIFYING] * 2


def test_verifying_ends_at_its_limit():
    rng = random.Random(1)
    pairs = [(1060.0 * math.exp(rng.gauss(0, 0.2)), 1000.0) for _ in range(LOOKS[-1])]
    answer = next_step(asked({BASELINE: 1000.0, ONE: 1060.0}, noise=NOISY), verifying(ONE, *pairs), always)
    assert isinstance(answer, Answer)


def test_rounds_that_chose_are_no_part_of_the_proof():
    # GIVEN the same rounds with the baseline after choosing rounds that saw the winner at all speeds
    answers = [
        next_step(
            asked({ONE: 1500.0, TWO: 1400.0}),
            [*choosing(*[{ONE: rate, TWO: 0.5 * rate}] * 2), *verifying(ONE, (1300.0, 1000.0), (1310.0, 1000.0))],
            always,
        )
        for rate in (500.0, 5000.0)
    ]
    assert answers[0] == answers[1]
    assert answers[0].winner == ONE


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_a_certification_that_is_broken_off_goes_on_as_if_it_had_not_been(seed):
    # GIVEN the whole course of one on a noisy machine
    rates = {BASELINE: 1000.0} | {trial_config(count): 1100.0 for count in range(1, 6)}
    rng = random.Random(seed)
    open_ = asked(rates, noise=PRIOR)
    rounds, taken = [], []
    while isinstance(step := next_step(open_, rounds, always), Step):
        taken.append(step)
        outcomes = tuple(found(config, rates[config] * math.exp(rng.gauss(0, 0.08))) for config in step.configs)
        rounds.append(Round(stage=step.stage, outcomes=outcomes))
    # THEN after any of its rounds the next is what it was
    assert [next_step(open_, rounds[:count], always) for count in range(len(taken))] == taken


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.01, 100.0))
def test_units_decide_nothing(seed, scale):
    rates = {BASELINE: 1000.0} | {trial_config(count): 1100.0 for count in range(1, 4)}

    def course(factor):
        rng = random.Random(seed)
        open_ = asked({c: factor * rate for c, rate in rates.items()}, noise=PRIOR)
        answer, steps = driven(open_, lambda config: factor * rates[config] * math.exp(rng.gauss(0, 0.03)))
        return answer.winner, [step.configs for step in steps]

    # Rates are whole samples over seconds, so scaled ones agree to many digits.
    assert course(1.0)[0] == course(scale)[0]


# --- by weight -------------------------------------------------------------------------------------------------


def weighed(rates, *, objective=Objective.WEIGHTED):
    """The winner where each configuration has a rate and a utilisation."""
    yardstick = replace(YARDSTICK, objective=objective)

    def of(config):
        rate, gpu = rates[config]
        return found(config, rate, gpu=usage(gpu), gpu_reason=None)

    records = [TrialRecord(number=n, config=c, outcome=of(c), seconds=7.0) for n, c in enumerate(rates)]
    open_ = replace(question(records, BASELINE, yardstick), noise=QUIET)
    rounds = []
    while isinstance(step := next_step(open_, rounds, always), Step):
        rounds.append(Round(stage=step.stage, outcomes=tuple(of(config) for config in step.configs)))
    return step.winner


def test_by_weight_utilisation_may_win():
    assert weighed({BASELINE: (1000.0, 50.0), FOUR: (1010.0, 99.0)}) == FOUR


def test_by_weight_the_baseline_wins_a_tie():
    assert weighed({BASELINE: (1000.0, 50.0), FOUR: (1010.0, 51.0)}) == BASELINE


def test_by_weight_the_higher_score_is_chosen():
    assert weighed({BASELINE: (1000.0, 50.0), ONE: (1500.0, 20.0), FOUR: (1490.0, 95.0)}) == FOUR


def test_pareto_names_the_fastest():
    rates = {BASELINE: (1000.0, 50.0), FOUR: (1500.0, 30.0), TWO: (1300.0, 99.0)}
    assert weighed(rates, objective=Objective.PARETO) == FOUR
