import re
import time

import pytest
from builders import facts, trial_config
from lab import study_config
from scripted import ScriptedRunner, fails_with, loader_bound

from pipetune.config import tuned_file
from pipetune.core.diagnosis import Bottleneck
from pipetune.core.measurement import FailureKind
from pipetune.core.objective import Objective
from pipetune.core.record import CertificationState, Stage
from pipetune.core.space import Amp, DeclaredSpace
from pipetune.core.tuned import Status
from pipetune.errors import InputError
from pipetune.search import budget
from pipetune.search.budget import Spending

BASELINE = trial_config(0)


def third_faster(config):
    """Anything with 3 workers or more is 30 % faster."""
    return 1300.0 if config.num_workers >= 3 else 1000.0


# --- certified, or no gain -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_where_all_is_equal_there_is_no_gain(lab, seed):
    result = lab.run(study_config(trials=8, baseline=BASELINE, seed=seed), ScriptedRunner(seed=seed))
    assert (result.tuned.status, result.tuned.config) == (Status.NO_GAIN, BASELINE)
    assert result.tuned.speedup == 1.0
    assert result.tuned.changes_training == ()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_30_percent_faster_is_certified(lab, seed):
    runner = ScriptedRunner(rate=third_faster, seed=seed)
    result = lab.run(study_config(trials=8, baseline=BASELINE, seed=seed), runner)
    assert result.tuned.status is Status.CERTIFIED
    assert result.tuned.config.num_workers >= 3
    assert result.tuned.speedup == pytest.approx(1.3, rel=0.03)
    measured = result.tuned.measured.steady_samples_per_sec
    assert measured.low <= 1300.0 * 1.005
    assert measured.high >= 1300.0 * 0.995


def test_what_only_looked_fast_in_its_trial_is_not_certified(lab):
    # GIVEN a trial that was 50 % faster than the configuration really is
    runner = ScriptedRunner(scale=lambda call: 1.5 if call.index == 3 else 1.0)
    result = lab.run(study_config(trials=6, baseline=BASELINE), runner)
    assert result.tuned.status is Status.NO_GAIN


def test_among_equals_the_fewest_workers_are_named(lab):
    runner = ScriptedRunner(rate=lambda config: 1300.0 if config.num_workers else 1000.0)
    declared = DeclaredSpace(
        num_workers=(0, 2, 3), prefetch_factor=(2,), persistent_workers=(True,), batch_size=(256,), amp=(Amp.FP32,)
    )
    result = lab.run(study_config(trials=4, baseline=BASELINE, search=declared), runner)
    assert {config.num_workers for config in runner.searched} == {0, 2, 3}
    assert result.tuned.config.num_workers == 2


# --- how it is certified ---------------------------------------------------------------------------------------


def certified(lab, **changes):
    runner = ScriptedRunner(rate=third_faster, **changes)
    return runner, lab.run(study_config(trials=8, baseline=BASELINE), runner)


def kept_rounds(lab, stage):
    """Which configurations were measured together, round after round."""
    return [[one.config for one in r.outcomes] for r in lab.store().certification().rounds if r.stage is stage]


def test_finalists_take_turns_and_then_the_chosen_one_and_the_baseline(lab):
    _, result = certified(lab)
    choosing, verifying = (kept_rounds(lab, stage) for stage in Stage)
    # THEN equals are compared in turns, without the baseline
    assert len(choosing) >= 2
    assert len(choosing[0]) >= 2
    assert choosing[1] == choosing[0][::-1]
    assert BASELINE not in choosing[0]
    # AND the chosen one meets the baseline in turns
    assert len(verifying) >= 2
    assert verifying[:2] == [[result.tuned.config, BASELINE], [BASELINE, result.tuned.config]]


def test_certification_follows_the_search_in_fresh_processes(lab):
    runner, _ = certified(lab)
    assert [call.fresh for call in runner.calls] == [False] * 8 + [True] * (len(runner.calls) - 8)


def test_every_certified_process_is_told_of(lab):
    runner, _ = certified(lab)
    assert [config for purpose, config in lab.told.began if purpose == "certify"] == [
        call.config for call in runner.certified
    ]


def test_the_ceiling_is_measured_where_the_chosen_one_first_meets_the_baseline(lab):
    runner, result = certified(lab, facts=facts(gpu=True))
    timed = [call.config for call in runner.calls if call.compute_only]
    assert timed == [result.tuned.config, BASELINE]
    assert result.tuned.ceiling.limit == "compute"
    assert result.tuned.ceiling.samples_per_sec == pytest.approx(1.1 * 1300.0, rel=0.02)


def test_the_ceiling_without_a_gpu_is_the_cpus(lab):
    _, result = certified(lab)
    assert result.tuned.ceiling.limit == "cpu_compute"


def test_figures_come_from_the_rounds_that_did_not_choose(lab):
    # GIVEN a machine that ran everything twice as fast until the chosen one met the baseline
    met = []

    def scale(call):
        met.append(call.compute_only)
        return 1.0 if any(met) else 2.0

    _, result = certified(lab, scale=scale)
    assert result.tuned.measured.steady_samples_per_sec.value == pytest.approx(1300.0, rel=0.02)
    assert result.tuned.baseline_measured.steady_samples_per_sec.value == pytest.approx(1000.0, rel=0.02)


def test_before_certification_every_host_is_ended(lab):
    runner, _ = certified(lab)
    assert runner.closed_after == [8]


def test_certification_is_kept_with_the_study(lab):
    _, result = certified(lab)
    kept = lab.store().certification()
    assert (kept.state, kept.winner, kept.baseline) == (CertificationState.FINISHED, result.tuned.config, BASELINE)
    assert kept.trials == 8
    assert len(kept.arm(kept.winner).rounds) == len(kept.arm(BASELINE).rounds) >= 2
    assert kept.seconds > 0


def test_a_large_lead_takes_two_rounds_of_two(lab):
    runner = ScriptedRunner(rate=lambda config: 8000.0 if config.num_workers == 4 else 1000.0)
    one = DeclaredSpace(
        num_workers=(0, 4), prefetch_factor=(2,), persistent_workers=(True,), pin_memory=(False,), batch_size=(64,)
    )
    result = lab.run(study_config(trials=4, baseline=BASELINE, search=one), runner)
    assert result.tuned.status is Status.CERTIFIED
    assert len(runner.certified) == 4


def test_what_is_not_decided_is_told_in_figures(lab, monkeypatch):
    # GIVEN a machine of 15 % noise, and no more than two rounds
    monkeypatch.setattr(budget, "ROUNDS", 2)
    runner = ScriptedRunner(rate=third_faster, drift=0.15, seed=5)
    result = lab.run(study_config(trials=8, baseline=BASELINE), runner)
    assert (result.tuned.status, result.tuned.config) == (Status.NO_GAIN, BASELINE)
    (note,) = [note for note in result.summary.notes if note.startswith("not decided: ")]
    assert re.search(r"made \+\d+\.\d % \([-+]\d+\.\d to \+\d+\.\d %\) in 2 rounds beside the baseline", note)


@pytest.fixture
def ten_seconds(monkeypatch):
    """A clock that goes on by 10 s in every process, as a runner's scale."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Spending.__init__, "__kwdefaults__", {"clock": lambda: now[0]})

    def scale(_):
        now[0] += 10.0
        return 1.0

    return scale


@pytest.mark.parametrize("seconds", [125.0, 200.0, 400.0, 1000.0])
def test_the_budget_of_time_holds_with_the_certification(lab, ten_seconds, seconds):
    runner = ScriptedRunner(rate=third_faster, scale=ten_seconds)
    result = lab.run(study_config(trials=None, seconds=seconds, baseline=BASELINE), runner)
    assert result.summary.seconds <= seconds
    assert result.tuned.status is Status.CERTIFIED
    assert len(kept_rounds(lab, Stage.VERIFYING)) >= 2


def test_where_time_is_short_the_leader_meets_the_baseline_unchosen(lab, ten_seconds):
    # GIVEN equals to choose among, and time for little more than two rounds of two
    runner = ScriptedRunner(rate=third_faster, scale=ten_seconds)
    lab.run(study_config(trials=8, seconds=100.0, baseline=BASELINE), runner)
    assert kept_rounds(lab, Stage.CHOOSING) == []
    # AND with more of it they are compared
    lab.run(
        study_config(trials=8, seconds=1000.0, baseline=BASELINE), ScriptedRunner(rate=third_faster, scale=ten_seconds)
    )
    assert len(kept_rounds(lab, Stage.CHOOSING)) >= 2


@pytest.mark.usefixtures("whole_budget")
def test_where_time_is_short_fewer_are_compared(lab, ten_seconds):
    # GIVEN 90 s after the search: two rounds of two and of the pair take 80, of three 100
    runner = ScriptedRunner(rate=third_faster, scale=ten_seconds)
    lab.run(study_config(trials=8, seconds=170.0, baseline=BASELINE), runner)
    assert [len(arms) for arms in kept_rounds(lab, Stage.CHOOSING)] == [2, 2]


def test_a_finalist_that_fails_is_out(lab):
    runner = ScriptedRunner(
        rate=third_faster, fails=lambda call: FailureKind.CRASH if call.fresh and call.config != BASELINE else None
    )
    result = lab.run(study_config(trials=4, baseline=BASELINE), runner)
    assert (result.tuned.status, result.tuned.config) == (Status.NO_GAIN, BASELINE)
    assert any("failed when it was measured again: crash" in note for note in result.summary.notes)


def test_without_a_baseline_to_compare_with_the_result_stays_provisional(lab):
    runner = ScriptedRunner(
        rate=third_faster, fails=lambda call: FailureKind.CRASH if call.fresh and call.config == BASELINE else None
    )
    result = lab.run(study_config(trials=4, baseline=BASELINE), runner)
    assert result.tuned.status is Status.PROVISIONAL
    assert result.tuned.config.num_workers >= 3
    assert lab.store().certification() is None


# --- the file --------------------------------------------------------------------------------------------------


def test_the_file_holds_the_result(lab):
    _, result = certified(lab)
    written = tuned_file.read(lab.best_file)
    assert (written.status, written.config) == (result.tuned.status, result.tuned.config)
    assert written.baseline_config == BASELINE
    assert written.provenance["trials"] == 8
    assert written.hardware["cpus_usable"] == 4


def test_what_changes_in_training_is_told(lab):
    runner = ScriptedRunner(facts=facts(gpu=True), rate=lambda config: 1500.0 if config.amp is Amp.BF16 else 1000.0)
    result = lab.run(study_config(trials=5, baseline=trial_config(0)), runner)
    assert result.tuned.config.amp is Amp.BF16
    assert result.tuned.changes_training[0].startswith("the forward pass runs in bf16 instead of fp32")


@pytest.mark.parametrize(
    ("waits", "limit"), [(40.0, Bottleneck.INPUT), (5.0, Bottleneck.BALANCED), (1.0, Bottleneck.COMPUTE)]
)
def test_what_limits_the_winner_is_told(lab, waits, limit):
    _, result = certified(lab, waits=lambda _: waits)
    assert result.bottleneck is limit


# --- weighted and pareto ---------------------------------------------------------------------------------------


def half_busy(config):
    return 50.0 + 10.0 * min(4, config.num_workers)


@pytest.mark.parametrize("objective", [Objective.WEIGHTED, Objective.PARETO])
def test_without_a_gpu_other_objectives_are_bad_input(lab, objective):
    runner = ScriptedRunner()
    with pytest.raises(InputError) as caught:
        lab.run(study_config(objective=objective), runner)
    assert str(caught.value) == (
        f"objective: {objective} needs GPU utilisation, and there is no GPU here; use `objective: throughput`"
    )
    assert runner.calls == []
    assert not lab.journal.exists()


@pytest.mark.parametrize("objective", [Objective.WEIGHTED, Objective.PARETO])
def test_where_nvml_gives_no_utilisation_other_objectives_are_bad_input(lab, objective):
    with pytest.raises(InputError, match=r"which is not known: NVML gave no samples; use `objective: throughput`$"):
        lab.run(study_config(objective=objective), ScriptedRunner(facts=facts(gpu=True)))


def test_weighted_scores_speed_and_utilisation(lab):
    runner = ScriptedRunner(facts=facts(gpu=True), rate=loader_bound, gpu=half_busy)
    result = lab.run(study_config(objective=Objective.WEIGHTED, baseline=BASELINE), runner)
    baseline_rate = result.records[0].measurement.effective(result.summary.plan).value
    trials = lab.store().study.trials
    assert len(result.records) == 6
    for record in result.records:
        rate = record.measurement.effective(result.summary.plan).value
        assert trials[record.number].value == pytest.approx(
            0.8 * rate / baseline_rate + 0.2 * record.measurement.gpu.mean_percent / 100
        )


def test_weighted_names_the_busier_of_two_that_are_as_fast(lab):
    runner = ScriptedRunner(facts=facts(gpu=True), gpu=lambda config: 95.0 if config.num_workers >= 3 else 20.0)
    result = lab.run(study_config(objective=Objective.WEIGHTED, baseline=BASELINE), runner)
    assert result.tuned.status is Status.CERTIFIED
    assert result.tuned.config.num_workers >= 3


def test_pareto_is_a_study_of_two_objectives_with_the_fastest_in_the_file(lab):
    # GIVEN a GPU that is the busier the slower it is fed
    runner = ScriptedRunner(
        facts=facts(gpu=True), rate=third_faster, gpu=lambda config: 60.0 if config.num_workers >= 3 else 90.0
    )
    result = lab.run(study_config(trials=8, objective=Objective.PARETO, baseline=BASELINE), runner)
    # THEN the front has both ends, and the file the faster one
    study = lab.store().study
    assert len(study.directions) == 2
    front = [trial.params["num_workers"] for trial in study.best_trials]
    assert min(front) < 3 <= max(front)
    assert result.tuned.status is Status.CERTIFIED
    assert result.tuned.config.num_workers >= 3


@pytest.mark.parametrize("objective", Objective)
def test_out_of_memory_is_on_no_front(lab, objective):
    runner = ScriptedRunner(
        facts=facts(gpu=True),
        gpu=half_busy,
        fails=fails_with(FailureKind.GPU_OUT_OF_MEMORY, lambda config: config.batch_size > 64),
    )
    lab.run(study_config(trials=10, objective=objective, baseline=BASELINE), runner)
    assert all(trial.params["batch_size"] <= 64 for trial in lab.store().study.best_trials)
