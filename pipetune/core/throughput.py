"""Rates out of timed windows: the steady rate with its interval, and what it becomes over real epochs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS = 8
"""Fewest batch means from which an interval is believed."""
RACE_BLOCKS = 4
"""Fewest uncorrelated batch means, of MIN_BLOCKS windows or more, from which a trial is given up as too slow."""
MAX_LAG1 = 0.2
"""Lag-1 autocorrelation under which batch means count as independent."""
TARGET_HALF_WIDTH = 0.02
"""Measuring may stop when the 95 % half-width is within this share of the rate."""
TREND_SIGNIFICANCE = 0.01
"""Chance at which windows that vary each on its own are taken to have a trend."""
CLEAR_FALL = 0.9
"""Share of what ready batches vary by that a straight fall has to explain before it is taken off the rate."""
RELEVANT_FALL = 0.005
"""A queue that falls by less than this share of the batches consumed changes no rate."""
COLD_BYTES_PER_S = 2**20
"""Reading less than this from storage is logs and libraries, not a dataset."""
FRONTS = (0.0, 0.125, 0.25, 0.375, 0.5)
"""Shares of the windows that may be left out at the front, until those that remain have no trend."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds that the main thread spent on each part of training: what a GPU does meanwhile is not in them.

    `copy_s` is moving batches to the device, `forward_s` the model and the loss, `backward_s` the gradients,
    `optimizer_s` the update.
    """

    copy_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float

    def since(self, earlier: "Stages") -> "Stages":
        """What was spent after an earlier reading of the same clock."""
        return Stages(
            copy_s=self.copy_s - earlier.copy_s,
            forward_s=self.forward_s - earlier.forward_s,
            backward_s=self.backward_s - earlier.backward_s,
            optimizer_s=self.optimizer_s - earlier.optimizer_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One timed stretch inside an epoch: whole optimizer steps between two synchronisations.

    `began_s` is on the monotonic clock, which parent and child share; `data_wait_s` is the share of
    `seconds` that the main thread spent asking the loader for a batch, and `data_work_s` are CPU seconds that its
    process spent meanwhile: without workers the work of loading. `ready_batches` lay ready in the loader at its end;
    `read_bytes` came from storage meanwhile, not from the page cache, for any process of the trial. `stages` is what
    the main thread did in the rest of the time. Each of the last four is None where it is not known.
    """

    samples: int
    seconds: float
    data_wait_s: float
    began_s: float
    ready_batches: int | None = None
    read_bytes: int | None = None
    data_work_s: float | None = None
    stages: Stages | None = None

    @property
    def is_cold(self) -> bool | None:
        """Whether data came from storage rather than from memory; None where that is not known."""
        return None if self.read_bytes is None else self.read_bytes > COLD_BYTES_PER_S * self.seconds


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

    `refill_s` is None where workers were not kept, since that trial never measured it. `spread_s` is half of the range
    of several epoch starts; 0 where one was enough, since it costs next to nothing of an epoch.

    `whole_samples` tells that whole epochs of so many samples were timed: what those took does not depend on the steady
    rate, and they may be faster than it says (then seconds are negative): workers that have nothing left to load leave
    the CPUs to training. None where only the turn of an epoch was timed.
    """

    fresh_s: float
    refill_s: float | None
    spread_s: float = 0.0
    whole_samples: int | None = None


def steady_rate(windows: Sequence[Window], drained_samples: float = 0.0) -> Estimate:
    """Samples per second inside an epoch: total samples over total seconds, 95 % interval by batch means.

    `drained_samples` of them came out of a falling queue, and are taken off.

    Adjacent windows are merged until their rates are uncorrelated (Law and Carson, 1979: batch means), since
    batches arrive in bursts and neighbouring windows share a burst.
    """
    samples, seconds = _merged(windows)
    rate = float(samples.sum() / seconds.sum())
    half = _half_width(samples, seconds, rate) if len(samples) >= 2 else float("inf")
    consumed = Estimate(value=rate, low=max(0.0, rate - half), high=rate + half)
    return consumed.scaled(1 - drained_samples / float(samples.sum()))


def cannot_reach(windows: Sequence[Window], rate: float) -> bool:
    """Whether these windows rule out a rate: they are steady, and the 99 % bound of their mean lies below it.

    No window may have come up to it, or a slow start would be taken for a slow trial.
    """
    if len(windows) < MIN_BLOCKS or max(window.samples / window.seconds for window in windows) >= rate:
        return False
    if has_rate_trend(windows):
        return False
    samples, seconds = _merged(windows)
    mean = float(samples.sum() / seconds.sum())
    return len(samples) >= RACE_BLOCKS and mean + _half_width(samples, seconds, mean, sureness=0.99) < rate


def is_settled(windows: Sequence[Window]) -> bool:
    """Whether these windows give the rate to within TARGET_HALF_WIDTH from at least MIN_BLOCKS batch means."""
    if len(windows) < MIN_BLOCKS:
        return False
    samples, _ = _merged(windows)
    estimate = steady_rate(windows)
    return len(samples) >= MIN_BLOCKS and (estimate.high - estimate.value) <= TARGET_HALF_WIDTH * estimate.value


def steady_from(windows: Sequence[Window], batch_size: int) -> int | None:
    """Index of the first window from which on nothing has a trend; None where everything always has one.

    A queue that still falls flatters the rate, and so does a fast start; a slow start is as wrong. Trends are
    looked for by ranks (Kendall's tau), so that a single heavy batch is none.
    """
    count = len(windows)
    for start in sorted({int(share * count) for share in FRONTS}):
        part = windows[start:]
        if start and len(part) < MIN_BLOCKS:
            return None
        if not has_rate_trend(part) and not is_draining(part, batch_size):
            return start
    return None


def has_rate_trend(windows: Sequence[Window]) -> bool:
    """Whether the rate rises or falls from window to window, by an amount that matters."""
    if len(windows) < MIN_BLOCKS:
        return False
    rates = np.array([w.samples / w.seconds for w in windows])
    change = _line_change(rates)
    return abs(change) > TARGET_HALF_WIDTH * float(rates.mean()) and _is_monotone(rates)


def is_draining(windows: Sequence[Window], batch_size: int) -> bool:
    """Whether ready batches seem to become fewer from window to window: then more is consumed than is loaded."""
    ready = _ready(windows)
    return ready is not None and _fallen(windows, ready, batch_size) > 0 and _is_monotone(ready)


def drained_samples(windows: Sequence[Window], batch_size: int) -> float:
    """Samples of these windows that came out of a falling queue; 0 where it does not clearly fall.

    Along a fitted line, since single counts go up and down with each burst of batches. The line has to explain nearly
    all: where loader and step are equally fast the queue walks at random, and that too goes one way for a while.
    """
    ready = _ready(windows)
    if ready is None or not is_draining(windows, batch_size) or _explained_by_line(ready) < CLEAR_FALL:
        return 0.0
    return _fallen(windows, ready, batch_size)


def _ready(windows: Sequence[Window]) -> FloatArray | None:
    counts = [w.ready_batches for w in windows if w.ready_batches is not None]
    return np.array(counts, dtype=np.float64) if len(counts) == len(windows) >= MIN_BLOCKS else None


def _fallen(windows: Sequence[Window], ready: FloatArray, batch_size: int) -> float:
    """Samples by which the queue fell, if that is a share of what was consumed that matters."""
    # The line spans one window less than what was consumed.
    fallen = -_line_change(ready) * batch_size * len(windows) / (len(windows) - 1)
    return fallen if fallen > RELEVANT_FALL * sum(w.samples for w in windows) else 0.0


def data_wait_percent(windows: Sequence[Window]) -> float:
    """Share of the measured time that the main thread waited for the loader, 0-100."""
    return 100.0 * sum(w.data_wait_s for w in windows) / sum(w.seconds for w in windows)


def effective_rate(steady: Estimate, start: EpochStart, plan: TrainingPlan, *, persistent_workers: bool) -> Estimate:
    """Samples per second over the whole planned run, epoch starts included.

    T = E*N/X + c_fresh + (E-1) * (c_refill if persistent else c_fresh); the rate is E*N/T. Where whole epochs were
    timed, an error of X is in each c too and cancels out.
    """
    later = start.refill_s if persistent_workers and start.refill_s is not None else start.fresh_s
    lost = start.fresh_s + (plan.epochs - 1) * later
    # Starts vary together, as far as one trial can tell.
    doubt = plan.epochs * start.spread_s
    total = plan.epochs * plan.epoch_samples

    def over_epochs(rate: float, lost_s: float) -> float:
        if rate <= 0:
            return 0.0
        seconds = total / rate + lost_s
        # Only what is lost to noise can be a gain of all the time there is.
        return total / seconds if seconds > 0 else rate

    is_whole = start.whole_samples == plan.epoch_samples
    low, high = (steady.value, steady.value) if is_whole else (steady.low, steady.high)
    value = over_epochs(steady.value, lost)
    return Estimate(
        value=value,
        low=min(value, over_epochs(low, lost + doubt)),
        high=max(value, over_epochs(high, lost - doubt)),
    )


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


def _line_change(values: FloatArray) -> float:
    """Change along the fitted line, from the first value to the last."""
    slope = float(np.polynomial.Polynomial.fit(np.arange(len(values)), values, 1).convert().coef[-1])
    return slope * (len(values) - 1)


def _is_monotone(values: FloatArray) -> bool:
    """Whether the values go one way, by Kendall's rank correlation with their order.

    Values that hang together seem to more often than TREND_SIGNIFICANCE says: that costs time, since more windows are
    taken, and no truth.
    """
    from scipy.stats import kendalltau

    if float(np.ptp(values)) == 0:
        return False
    return bool(kendalltau(np.arange(len(values)), values).pvalue < TREND_SIGNIFICANCE)


def _explained_by_line(values: FloatArray) -> float:
    """Share of the variance that a straight line explains (R squared)."""
    variance = float(values.var())
    return _line_change(values) ** 2 / 12 * (len(values) + 1) / (len(values) - 1) / variance if variance > 0 else 0.0


def _lag1(values: FloatArray) -> float:
    deviations = values - values.mean()
    variance = float((deviations**2).sum())
    return float((deviations[1:] * deviations[:-1]).sum()) / variance if variance > 0 else 0.0


def _half_width(samples: FloatArray, seconds: FloatArray, rate: float, *, sureness: float = 0.95) -> float:
    """Half-width of a ratio estimate (Cochran, Sampling Techniques, 6.4)."""
    from scipy.special import stdtrit

    n = len(samples)
    residuals = samples - rate * seconds
    deviation = float(np.sqrt((residuals**2).sum() / (n - 1)))
    return float(stdtrit(n - 1, (1 + sureness) / 2)) * deviation / (float(seconds.mean()) * float(np.sqrt(n)))
