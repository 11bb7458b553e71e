"""Rates out of timed windows: the steady rate with its interval, and what it becomes over real epochs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS = 8
"""Fewest batch means from which an interval is believed."""
MAX_LAG1 = 0.2
"""Lag-1 autocorrelation under which batch means count as independent."""
TARGET_HALF_WIDTH = 0.02
"""Measuring may stop when the 95 % half-width is within this share of the rate."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One timed stretch inside an epoch: whole optimizer steps between two synchronisations.

    `began_s` is on the monotonic clock, which parent and child share; `data_wait_s` is the share of
    `seconds` that the main thread spent asking the loader for a batch.
    """

    samples: int
    seconds: float
    data_wait_s: float
    began_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """The same estimate in another unit."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What the user is going to run: samples per optimizer step, epochs, samples per epoch."""

    effective_batch_size: int
    epochs: int
    epoch_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """Seconds lost at the start of an epoch: with new workers, and with workers that were kept.

    `refill_s` is None where workers were not kept, since that trial never measured it.
    """

    fresh_s: float
    refill_s: float | None


def steady_rate(windows: Sequence[Window]) -> Estimate:
    """Samples per second inside an epoch: total samples over total seconds, 95 % interval by batch means.

    Adjacent windows are merged until their rates are uncorrelated (Law and Carson, 1979: batch means), since
    batches arrive in bursts and neighbouring windows share a burst.
    """
    samples, seconds = _merged(windows)
    rate = float(samples.sum() / seconds.sum())
    if len(samples) < 2:
        return Estimate(value=rate, low=0.0, high=float("inf"))
    half = _half_width(samples, seconds, rate)
    return Estimate(value=rate, low=max(0.0, rate - half), high=rate + half)


def is_settled(windows: Sequence[Window]) -> bool:
    """Whether these windows give the rate to within TARGET_HALF_WIDTH from at least MIN_BLOCKS batch means."""
    if len(windows) < MIN_BLOCKS:
        return False
    samples, _ = _merged(windows)
    estimate = steady_rate(windows)
    return len(samples) >= MIN_BLOCKS and (estimate.high - estimate.value) <= TARGET_HALF_WIDTH * estimate.value


def data_wait_percent(windows: Sequence[Window]) -> float:
    """Share of the measured time that the main thread waited for the loader, 0-100."""
    return 100.0 * sum(w.data_wait_s for w in windows) / sum(w.seconds for w in windows)


def effective_rate(steady: Estimate, start: EpochStart, plan: TrainingPlan, *, persistent_workers: bool) -> Estimate:
    """Samples per second over the whole planned run, epoch starts included.

    T = E*N/X + c_fresh + (E-1) * (c_refill if persistent else c_fresh); the rate is E*N/T.
    """
    later = start.refill_s if persistent_workers and start.refill_s is not None else start.fresh_s
    lost = start.fresh_s + (plan.epochs - 1) * later
    total = plan.epochs * plan.epoch_samples

    def over_epochs(rate: float) -> float:
        if rate == float("inf"):
            return total / lost if lost > 0 else rate
        return total / (total / rate + lost) if rate > 0 else 0.0

    return Estimate(value=over_epochs(steady.value), low=over_epochs(steady.low), high=over_epochs(steady.high))


def _merged(windows: Sequence[Window]) -> tuple[FloatArray, FloatArray]:
    """Pair neighbours until their rates are uncorrelated, or until further pairing leaves too few."""
    samples = np.array([w.samples for w in windows], dtype=np.float64)
    seconds = np.array([w.seconds for w in windows], dtype=np.float64)
    while len(samples) >= MIN_BLOCKS and _lag1(samples / seconds) > MAX_LAG1:
        even = len(samples) // 2 * 2
        # An odd window joins the last pair, so that no measured time is dropped.
        starts = np.arange(0, even, 2)
        samples = np.add.reduceat(samples, starts)
        seconds = np.add.reduceat(seconds, starts)
    return samples, seconds


def _lag1(values: FloatArray) -> float:
    deviations = values - values.mean()
    variance = float((deviations**2).sum())
    return float((deviations[1:] * deviations[:-1]).sum()) / variance if variance > 0 else 0.0


def _half_width(samples: FloatArray, seconds: FloatArray, rate: float) -> float:
    """95 % half-width of a ratio estimate (Cochran, Sampling Techniques, 6.4)."""
    from scipy.special import stdtrit

    n = len(samples)
    residuals = samples - rate * seconds
    deviation = float(np.sqrt((residuals**2).sum() / (n - 1)))
    return float(stdtrit(n - 1, 0.975)) * deviation / (float(seconds.mean()) * float(np.sqrt(n)))
