import pytest
from builders import facts, trial_config
from runner_contract import RunnerContract
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.core.measurement import FailureKind, Phase, TrialFailure
from pipetune.trial.protocol import MeasureLimits


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def runner(request):
    if request.param == "gpu":
        return ScriptedRunner(rate=loader_bound, gpu=lambda _: 80.0, facts=facts(gpu=True), fails=gpu_holds(128))
    return ScriptedRunner(rate=loader_bound, fails=fails_with(FailureKind.CRASH, lambda one: one.batch_size == 256))


@pytest.fixture(scope="module")
def limits():
    return MeasureLimits()


@pytest.fixture(scope="module")
def working():
    return trial_config(0), trial_config(4, persistent_workers=True)


@pytest.fixture(scope="module")
def failing():
    return trial_config(4, batch_size=256, accumulation_steps=1)


class TestScriptedRunner(RunnerContract):
    pass


def test_the_surface_is_what_is_measured():
    scripted = ScriptedRunner(rate=lambda config: 100.0 * config.batch_size, sigma=0.0, drift=0.0)
    assert scripted.run(trial_config(batch_size=64), MeasureLimits()).steady().value == pytest.approx(6400.0)


def test_noise_is_inside_the_interval_and_repeatable():
    one, other = (ScriptedRunner(seed=7).run(trial_config(), MeasureLimits()).steady() for _ in range(2))
    assert one == other
    assert one.low < one.value < one.high


def test_probes_are_parts_of_what_is_measured():
    scripted = ScriptedRunner(rate=lambda config: 100.0 * config.batch_size, waits=lambda _: 20.0)
    step, loader = (
        scripted.probe_step(trial_config(0), seconds=1.0),
        scripted.probe_loader(trial_config(0), seconds=1.0),
    )
    assert (step.batch_s, loader.batch_s) == pytest.approx((0.008, 0.002))
    assert scripted.calls == []


def test_probes_fail_where_trials_do():
    scripted = ScriptedRunner(facts=facts(gpu=True), fails=gpu_holds(64))
    outcome = scripted.probe_step(trial_config(batch_size=128), seconds=1.0)
    assert isinstance(outcome, TrialFailure)
    assert (outcome.kind, outcome.phase) == (FailureKind.GPU_OUT_OF_MEMORY, Phase.PROBE)
