import pytest
from builders import facts, trial_config
from lab import mismatched, study_config
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.core.measurement import FailureKind
from pipetune.core.record import TrialState
from pipetune.core.space import Amp, DeclaredSpace
from pipetune.errors import InputError, NothingWorksError, WorkloadError
from pipetune.search.sampler import SpaceSampler

TODAY = trial_config(6, prefetch_factor=3, batch_size=2, accumulation_steps=128, pin_memory=True)
"""Settings that no automatic space of 4 CPUs holds."""


def test_the_users_settings_are_trial_0(lab):
    # GIVEN settings that lie outside of the search space
    result = lab.run(study_config(trials=3, baseline=TODAY), ScriptedRunner())
    # THEN they are measured first, exactly as given
    assert (result.records[0].number, result.records[0].config) == (0, TODAY)
    assert result.tuned.baseline_config == TODAY
    assert lab.told.began[0] == ("baseline", TODAY)


def test_optuna_knows_the_same_parameters_as_were_measured(lab):
    lab.run(study_config(trials=8, baseline=TODAY), ScriptedRunner(rate=loader_bound))
    assert mismatched(lab.store()) == {}


def test_without_settings_of_the_user_torchs_defaults_are_trial_0(lab):
    result = lab.run(study_config(trials=2), ScriptedRunner())
    assert result.records[0].config == trial_config(0, batch_size=256, accumulation_steps=1)


def test_the_usual_rule_comes_next(lab):
    runner = ScriptedRunner(facts=facts(gpu=True))
    lab.run(study_config(trials=2), runner)
    assert runner.searched[1] == trial_config(
        3, batch_size=256, accumulation_steps=1, pin_memory=True, persistent_workers=True, amp=Amp.BF16
    )


def test_a_baseline_that_is_also_the_rule_is_measured_once(lab):
    rule = trial_config(3, batch_size=256, accumulation_steps=1, persistent_workers=True)
    runner = ScriptedRunner()
    lab.run(study_config(trials=4, baseline=rule), runner)
    assert runner.searched.count(rule) == 1


# --- a baseline of the user that cannot be measured ------------------------------------------------------------


@pytest.mark.parametrize("kind", FailureKind)
def test_a_baseline_of_the_user_that_fails_stops_the_study(lab, kind):
    runner = ScriptedRunner(fails=fails_with(kind))
    with pytest.raises(WorkloadError) as caught:
        lab.run(study_config(baseline=TODAY), runner)
    assert str(caught.value).startswith(
        f"baseline: your present settings ({TODAY.label()}) fail without any tuning: {kind} in warm_up: "
    )
    assert len(runner.calls) == 1
    assert not lab.best_file.exists()


def test_the_error_of_a_failing_baseline_carries_the_users_traceback(lab):
    with pytest.raises(WorkloadError) as caught:
        lab.run(study_config(baseline=TODAY), ScriptedRunner(fails=fails_with(FailureKind.ERROR)))
    assert caught.value.traceback_text == "Traceback of call 0\nRuntimeError: boom\n"


def test_the_error_of_a_crashed_baseline_carries_the_log(lab):
    with pytest.raises(WorkloadError) as caught:
        lab.run(study_config(baseline=TODAY), ScriptedRunner(fails=fails_with(FailureKind.CRASH)))
    assert caught.value.traceback_text == "log of call 0\n"


def test_a_baseline_in_a_precision_that_the_device_lacks_is_bad_input(lab):
    runner = ScriptedRunner()
    with pytest.raises(InputError) as caught:
        lab.run(study_config(baseline=trial_config(0, amp=Amp.BF16)), runner)
    assert str(caught.value) == "baseline.amp: this device has no bf16 of its own; it supports fp32"
    assert runner.calls == []


def test_a_baseline_of_another_batch_than_the_workloads_own_is_bad_input(lab):
    runner = ScriptedRunner(facts=facts(fixed_batch=32))
    with pytest.raises(
        InputError, match=r"^baseline\.batch_size: is 64, but the workload's own batch sampler gives 32"
    ):
        lab.run(study_config(baseline=trial_config(0, batch_size=64)), runner)
    assert runner.calls == []


def test_a_baseline_of_another_effective_batch_is_bad_input(lab, monkeypatch):
    # GIVEN a StudyConfig made in code, which no schema has checked
    half = trial_config(0, batch_size=64, accumulation_steps=2)
    ask, asked = SpaceSampler.ask, []

    def ask_a_few_times(sampler, study):
        asked.append(study)
        if len(asked) > 5:
            pytest.fail("it asks for ever")
        return ask(sampler, study)

    monkeypatch.setattr(SpaceSampler, "ask", ask_a_few_times)
    # THEN it is named, and not asked for without end
    with pytest.raises(InputError, match="effective"):
        lab.run(study_config(baseline=half), ScriptedRunner())
    assert asked == []


def test_a_workload_that_cannot_be_built_stops_before_anything_is_written(lab):
    with pytest.raises(WorkloadError, match="bad path"):
        lab.run(study_config(), ScriptedRunner(refuses="ValueError: bad path"))
    assert not lab.journal.exists()


# --- torch's defaults that cannot be measured ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FailureKind.GPU_OUT_OF_MEMORY, FailureKind.TIMEOUT])
def test_a_default_that_is_too_large_gives_way_to_the_next_smaller_batch(lab, kind):
    # GIVEN a device that takes no more than 64 samples
    runner = ScriptedRunner(facts=facts(gpu=True), fails=fails_with(kind, lambda config: config.batch_size > 64))
    result = lab.run(study_config(trials=4), runner)
    # THEN 256 and 128 are tried, and 64 is the baseline
    assert [config.batch_size for config in runner.searched[:3]] == [256, 128, 64]
    assert result.tuned.baseline_config == trial_config(0, batch_size=64)


def test_after_smaller_defaults_the_rule_is_tried_with_the_largest_batch_that_fits(lab):
    # GIVEN a device that holds 64 samples
    runner = ScriptedRunner(facts=facts(gpu=True, amps=(Amp.FP32,)), fails=gpu_holds(64), rate=loader_bound)
    lab.run(study_config(trials=8), runner)
    # THEN the rule is not lost with the batch that did not fit
    after_baseline = runner.searched[3]
    assert (after_baseline.num_workers, after_baseline.batch_size) == (3, 64)


def test_failed_defaults_are_trials_like_others(lab):
    result = lab.run(study_config(trials=5), ScriptedRunner(facts=facts(gpu=True), fails=gpu_holds(64)))
    assert [record.state for record in result.records[:3]] == [
        TrialState.INFEASIBLE,
        TrialState.INFEASIBLE,
        TrialState.MEASURED,
    ]
    assert len(result.records) == 5


def test_where_the_default_crashes_the_search_goes_on(lab):
    # GIVEN a dataset that cannot be read in the main process
    runner = ScriptedRunner(
        fails=fails_with(FailureKind.CRASH, lambda config: config.num_workers == 0), rate=loader_bound
    )
    result = lab.run(study_config(trials=6), runner)
    # THEN the winner is compared with what is nearest to torch's defaults, and the note says so
    ran = [record for record in result.records if record.measurement and not record.measurement.censored]
    nearest = min(ran, key=lambda one: (one.config.num_workers, one.config.amp != "fp32", one.number))
    assert result.tuned.baseline_config == nearest.config
    assert f"the baseline w=0 b=256 fp32 did not run; compared with trial {nearest.number}" in result.summary.notes


def test_one_configuration_that_never_fits_works_nowhere(lab):
    with pytest.raises(NothingWorksError, match=r"1 x gpu_out_of_memory in warm_up: CUDA out of memory"):
        lab.run(
            study_config(search=DeclaredSpace(num_workers=(0,), pin_memory=(False,), batch_size=(256,))),
            ScriptedRunner(facts=facts(gpu=True, amps=(Amp.FP32,)), fails=gpu_holds(0)),
        )
