import pytest
from builders import facts, trial_config
from lab import study_config
from scripted import ScriptedRunner, fails_with, loader_bound

from pipetune.config import tuned_file
from pipetune.core.diagnosis import Bottleneck
from pipetune.core.measurement import FailureKind
from pipetune.core.objective import Objective
from pipetune.core.space import Amp
from pipetune.core.tuned import Status
from pipetune.errors import InputError
from pipetune.search.certify import ROUNDS

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
    result = lab.run(study_config(trials=4, baseline=BASELINE), runner)
    assert [config.num_workers for config in runner.searched] == [0, 3, 0, 2]
    assert result.tuned.config.num_workers == 2


# --- how it is certified ---------------------------------------------------------------------------------------


def certified(lab, **changes):
    runner = ScriptedRunner(rate=third_faster, **changes)
    return runner, lab.run(study_config(trials=8, baseline=BASELINE), runner)


def test_finalists_and_baseline_take_turns_every_other_round_backwards(lab):
    runner, _ = certified(lab)
    order = [call.config for call in runner.certified]
    arms = len(order) // ROUNDS
    rounds = [order[i * arms : (i + 1) * arms] for i in range(ROUNDS)]
    assert arms >= 3
    assert rounds[0][-1] == BASELINE
    assert rounds == [rounds[0], rounds[0][::-1], rounds[0]]
    assert len(set(rounds[0])) == arms


def test_certification_follows_the_search_in_fresh_processes(lab):
    runner, _ = certified(lab)
    assert [call.fresh for call in runner.calls] == [False] * 8 + [True] * (len(runner.calls) - 8)


def test_the_ceiling_is_measured_in_the_first_round_alone(lab):
    runner, result = certified(lab, facts=facts(gpu=True))
    arms = len(runner.certified) // ROUNDS
    assert [call.compute_only for call in runner.certified] == [True] * arms + [False] * arms * (ROUNDS - 1)
    assert not any(call.compute_only for call in runner.calls if not call.fresh)
    assert result.tuned.ceiling.limit == "compute"
    assert result.tuned.ceiling.samples_per_sec == pytest.approx(1.1 * 1300.0, rel=0.02)


def test_the_ceiling_without_a_gpu_is_the_cpus(lab):
    _, result = certified(lab)
    assert result.tuned.ceiling.limit == "cpu_compute"


def test_figures_come_from_the_rounds_after_the_first(lab):
    # GIVEN a machine that ran everything twice as fast in the first round
    _, result = certified(lab, scale=lambda call: 2.0 if call.compute_only else 1.0)
    assert result.tuned.measured.steady_samples_per_sec.value == pytest.approx(1300.0, rel=0.02)
    assert result.tuned.baseline_measured.steady_samples_per_sec.value == pytest.approx(1000.0, rel=0.02)


def test_before_certification_every_host_is_ended(lab):
    runner, _ = certified(lab)
    assert runner.closed_after == [8]


def test_certification_is_kept_with_the_study(lab):
    _, result = certified(lab)
    kept = lab.store().certification()
    assert kept.arms[-1].config == BASELINE
    assert result.tuned.config in [arm.config for arm in kept.arms]
    assert all(len(arm.rounds) == ROUNDS for arm in kept.arms)


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


@pytest.mark.parametrize(("waits", "limit"), [(40.0, Bottleneck.INPUT), (1.0, Bottleneck.BALANCED)])
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
