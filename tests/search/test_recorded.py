"""Recorded grids: what is written is read again, and a surface of it tells what the trials told."""

import math
import random
from dataclasses import replace

import pytest
import recorded
from builders import PLAN, failure, measurement, space
from recorded import RecordedSurface, RecordedTrial, Recording

from pipetune.core.measurement import FailureKind
from pipetune.core.space import Amp
from pipetune.trial.protocol import MeasureLimits

SPACE = space(
    num_workers=(0, 2), prefetch_factor=(2,), pin_memory=(False,), persistent_workers=(True,), amp=(Amp.FP32,)
)
CONFIGS = tuple(SPACE.configs())
TOO_LARGE = CONFIGS[-1]


def outcome(config, rate):
    if config == TOO_LARGE:
        return failure(config, FailureKind.HOST_OUT_OF_MEMORY)
    return measurement(config, rate=rate, wait_share=0.4, work_share=0.25)


def rate_of(config):
    return 100.0 * (1 + config.num_workers) + config.batch_size


def recording(factors=(1.0,)):
    """Each configuration once for each factor on its rate; the last has no room."""
    made = Recording(
        date="2026-01-01",
        machine={"cpu": "A CPU", "cpus_usable": 2},
        busy_cpus=0.0,
        workload="images",
        options={"image_size": [320, 240]},
        device="cpu",
        seed=0,
        plan=PLAN,
        limits=MeasureLimits(),
        space=SPACE,
    )
    for factor in factors:
        for number, config in enumerate(random.Random(factor).sample(CONFIGS, len(CONFIGS)), start=1):
            trial = outcome(config, factor * rate_of(config))
            made = made.with_trial(RecordedTrial.of(trial, PLAN, seconds=10.0, ended_s=10.0 * number))
    return made


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "a.json"
    recorded.write(path, recording())
    found = recorded.read(path)
    assert replace(found, trials=()) == replace(recording(), trials=())
    for theirs, ours in zip(found.trials, recording().trials, strict=True):
        assert (theirs.config, theirs.failure) == (ours.config, ours.failure)
        assert theirs.rate == (None if ours.rate is None else pytest.approx(ours.rate, rel=1e-4))


def test_a_grid_that_was_broken_off_is_refused(tmp_path):
    path = tmp_path / "a.json"
    whole = recording()
    recorded.write(path, replace(whole, trials=whole.trials[:-2]))
    with pytest.raises(ValueError, match=r"a\.json lacks 2 of the 6 points"):
        recorded.read(path)


def test_a_surface_has_the_mean_of_its_trials_and_their_noise():
    surface = RecordedSurface("a", recording((1.0, 1.1)))
    config = CONFIGS[0]
    alone = [RecordedSurface("a", recording((factor,))).rate(config) for factor in (1.0, 1.1)]
    assert surface.rate(config) == pytest.approx(math.sqrt(alone[0] * alone[1]))
    # Two rates have a standard deviation of their difference over the square root of two.
    assert surface.noise_sd == pytest.approx(math.log(1.1) / math.sqrt(2), rel=0.05)


def test_what_did_not_fit_has_no_rate_and_is_not_the_best():
    surface = RecordedSurface("a", recording())
    assert surface.rate(TOO_LARGE) is None
    best, rate = surface.best()
    assert best == max(set(CONFIGS) - {TOO_LARGE}, key=rate_of)
    assert rate == surface.rate(best)


def test_a_trial_of_it_splits_its_time_as_the_recorded_one_did():
    surface = RecordedSurface("a", recording())
    config = CONFIGS[0]
    trial = surface.trial(config, 2 * surface.rate(config))
    assert trial.data_wait_percent() == pytest.approx(40)
    assert trial.data_work_share() == pytest.approx(0.25)
    assert trial.effective(PLAN).value == pytest.approx(2 * surface.rate(config), rel=0.01)
