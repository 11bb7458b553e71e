"""Curves of known shape are named, with their period."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.curve import Curve, Shape, read_curve

STEP_S = 0.5


def curve(percents):
    return Curve(times_s=[STEP_S * index for index in range(len(percents))], percents=list(percents))


def noise(count, spread, seed=0):
    return np.random.default_rng(seed).normal(0, spread, count)


def waves(period_s, low_s, *, high=95.0, low=5.0, seconds=120.0, spread=3.0):
    """Lows of `low_s` each `period_s`, the first after a part of a period."""
    times_s = np.arange(0, seconds, STEP_S)
    is_low = (times_s + 0.4 * period_s) % period_s < low_s
    return curve(np.clip(np.where(is_low, low, high) + noise(len(times_s), spread), 0, 100))


def ramp(period_s, *, seconds=120.0):
    """Rises from 10 to 90 and falls at once."""
    times_s = np.arange(0, seconds, STEP_S)
    return curve(10 + 80 * (times_s % period_s) / period_s)


SHAPES = {
    "busy all the time": (curve(np.clip(98 + noise(200, 1), 0, 100)), Shape.STEADY_HIGH, None),
    "busy, with noise": (curve(np.clip(90 + noise(200, 4), 0, 100)), Shape.STEADY_HIGH, None),
    "half busy all the time": (curve(45 + noise(200, 4)), Shape.STEADY_LOW, None),
    "hardly busy": (curve(15 + noise(200, 3)), Shape.STEADY_LOW, None),
    "not busy": (curve(np.zeros(100)), Shape.IDLE, None),
    "waiting for data half the time": (waves(6.0, 3.0), Shape.SAW_TOOTH, 6.0),
    "waiting for data most of the time": (waves(10.0, 8.0), Shape.SAW_TOOTH, 10.0),
    "fast waves": (waves(2.5, 1.0), Shape.SAW_TOOTH, 2.5),
    "slow waves": (waves(40.0, 20.0), Shape.SAW_TOOTH, 40.0),
    "teeth": (ramp(8.0), Shape.SAW_TOOTH, 8.0),
    "dips at epoch starts": (waves(30.0, 3.0), Shape.DIPS, 30.0),
    "rare short dips": (waves(25.0, 1.0, low=0.0), Shape.DIPS, 25.0),
    "no rhythm": (curve(np.clip(50 + np.cumsum(noise(200, 6)), 0, 100)), Shape.UNEVEN, None),
    "four samples": (curve([1, 2, 3, 4]), Shape.TOO_SHORT, None),
    "nothing": (curve([]), Shape.TOO_SHORT, None),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_a_shape_is_named_with_its_period(case):
    given_curve, shape, period_s = case
    found = read_curve(given_curve)
    assert found.shape is shape
    assert found.period_s == (None if period_s is None else pytest.approx(period_s, rel=0.1))


@pytest.mark.parametrize(("epoch_s", "is_epoch"), [(30.0, True), (28.0, True), (7.0, False), (None, None)])
def test_a_period_is_the_epochs_or_not(epoch_s, is_epoch):
    assert read_curve(waves(30.0, 3.0), epoch_s=epoch_s).is_epoch is is_epoch


def test_the_share_of_lows_is_told():
    assert read_curve(waves(10.0, 4.0)).low_share == pytest.approx(0.4, abs=0.03)


@given(st.lists(st.floats(0, 100), max_size=200))
def test_any_curve_has_a_shape(percents):
    found = read_curve(curve(percents))
    assert 0 <= found.mean_percent <= 100 + 1e-9
    assert found.period_s is None or 0 < found.period_s <= STEP_S * len(percents)


@given(st.floats(6.0, 30.0), st.floats(0.35, 0.7))
def test_waves_of_any_period_are_teeth(period_s, share):
    found = read_curve(waves(period_s, share * period_s))
    assert found.shape is Shape.SAW_TOOTH
    assert found.period_s == pytest.approx(period_s, rel=0.15)
