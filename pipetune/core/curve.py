"""The shape of a utilisation curve: what people look at first, put into words by rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

HIGH_PERCENT = 80.0
"""A GPU that is busy at least so much of the time is used."""
IDLE_PERCENT = 5.0
STEADY_POINTS = 20.0
"""Nine tenths of a steady curve lie within so many points."""
DIP_SHARE = 0.3
"""Lows that take less of the time are dips in a curve that is high."""
PERIODIC = 0.4
"""From this autocorrelation on a curve repeats itself."""
EPOCH_TOLERANCE = 0.2
"""A period is the epoch's where it differs by no more."""
LEAST_SAMPLES = 8
LEAST_PERIODS = 2
"""A period has to be seen so often."""
LEAST_PERIOD_SAMPLES = 3
"""What repeats itself faster than that is noise of the counter."""

FloatArray = NDArray[np.float64]


class Shape(StrEnum):
    """What a curve looks like; members are added, never renamed."""

    TOO_SHORT = "too_short"
    IDLE = "idle"
    STEADY_HIGH = "steady_high"
    STEADY_LOW = "steady_low"
    SAW_TOOTH = "saw_tooth"
    DIPS = "dips"
    UNEVEN = "uneven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Percent busy at points in time, seconds; evenly spaced, as far as a sampler can."""

    times_s: Sequence[float]
    percents: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveVerdict:
    """A curve's shape with its figures; `period_s` is None where nothing repeats, `is_epoch` where nobody can tell.

    `low_share` is the share of the time, 0-1, that lies in the lower half of what the curve ranges over; 0 where it is
    steady.
    """

    shape: Shape
    mean_percent: float
    low_share: float = 0.0
    period_s: float | None = None
    is_epoch: bool | None = None


def read_curve(curve: Curve, *, epoch_s: float | None = None) -> CurveVerdict:
    """Name the shape. `epoch_s` is how long an epoch takes, where that is known.

    The period is the first great peak of the autocorrelation.
    """
    percents = np.array(curve.percents, dtype=np.float64)
    if len(percents) < LEAST_SAMPLES:
        mean = float(percents.mean()) if len(percents) else 0.0
        return CurveVerdict(shape=Shape.TOO_SHORT, mean_percent=mean)
    mean = float(percents.mean())
    low, high = (float(value) for value in np.percentile(percents, (5, 95)))
    if high <= IDLE_PERCENT:
        return CurveVerdict(shape=Shape.IDLE, mean_percent=mean)
    # Rare lows are in no percentile, and are what an epoch's start looks like.
    lows = percents < (float(percents.min()) + high) / 2
    reaches_down = high - float(percents.min()) > STEADY_POINTS and float(lows.mean()) > 0
    if high - low <= STEADY_POINTS and not (reaches_down and _returns(lows)):
        return CurveVerdict(shape=Shape.STEADY_HIGH if mean >= HIGH_PERCENT else Shape.STEADY_LOW, mean_percent=mean)
    low_share = float(lows.mean())
    period_s = _period_s(np.array(curve.times_s, dtype=np.float64), percents)
    is_dipping = low_share <= DIP_SHARE and high >= HIGH_PERCENT and _returns(lows)
    shape = Shape.DIPS if is_dipping else Shape.SAW_TOOTH if period_s is not None else Shape.UNEVEN
    is_epoch = None if period_s is None or epoch_s is None else abs(period_s / epoch_s - 1) <= EPOCH_TOLERANCE
    return CurveVerdict(shape=shape, mean_percent=mean, low_share=low_share, period_s=period_s, is_epoch=is_epoch)


def _returns(lows: NDArray[np.bool_]) -> bool:
    """Whether there are several lows with something else between them."""
    begins = np.flatnonzero(np.diff(lows.astype(np.int8)) == 1)
    return len(begins) >= LEAST_PERIODS


def _period_s(times_s: FloatArray, percents: FloatArray) -> float | None:
    """Seconds after which the curve repeats itself; None where it does not, or was not seen to often enough."""
    centred = percents - percents.mean()
    count = len(centred)
    power = float((centred**2).sum())
    if power <= 0:
        return None
    longest = count // LEAST_PERIODS
    lags = np.arange(1, longest + 1)
    # Each lag has fewer pairs than the one before.
    correlations = np.array([(centred[:-lag] * centred[lag:]).sum() / power * count / (count - lag) for lag in lags])
    below = np.flatnonzero(correlations < 0)
    if len(below) == 0:
        return None
    after = correlations[below[0] :]
    best = float(after.max())
    if best < PERIODIC:
        return None
    # The first lag that is nearly as good: later peaks are its multiples.
    peaks = [
        index
        for index in range(len(after))
        if after[index] >= 0.8 * best
        and (index == 0 or after[index] >= after[index - 1])
        and (index + 1 == len(after) or after[index] >= after[index + 1])
    ]
    lag = int(lags[below[0]]) + peaks[0]
    if lag < LEAST_PERIOD_SAMPLES:
        return None
    return lag * float(times_s[-1] - times_s[0]) / (count - 1)
