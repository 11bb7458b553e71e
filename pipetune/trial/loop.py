"""The measuring loop: warm up, drain, time windows, meet real epoch ends, start the next epochs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Protocol

from pipetune.core.measurement import Phase
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import (
    MIN_BLOCKS,
    EpochStart,
    Window,
    cannot_reach,
    data_wait_percent,
    drained_samples,
    is_settled,
    steady_from,
    steady_rate,
)
from pipetune.trial.device import synchronize
from pipetune.trial.feed import DataEndedError
from pipetune.trial.loader import Endless
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.session import Training
from pipetune.trial.stream import Stream

MIN_OPTIMIZER_STEPS = 2
"""Optimizer steps before timing: the first allocates the optimizer's state and picks kernels."""
WARM_UP_PATIENCE = 4
"""A queue that still falls, or a loss scale that still settles, is waited for this many times the usual drain."""
MIN_WINDOWS = 2
"""Windows of even the slowest trial: one alone has no interval."""
DISTURBED_SHARE = 0.5
"""Windows that something disturbed from outside are measured again, for this share of the time limit at most."""
BACK_ON_LINE = 0.95
"""An epoch start is over when a stretch runs at this share of the steady rate."""
BURSTY_WAIT_PERCENT = 5.0
"""From this share of time waiting for data on, batches are taken to arrive in bursts."""
EPOCH_START_STRETCHES = 3
"""By then each worker has given several batches: a stream that is still slower is so for another reason."""
RELEVANT_EPOCH_START = 0.01
"""An epoch start that costs less than this share of an epoch is measured once; a dearer one several times."""
EPOCH_STARTS = 3
EPOCH_STARTS_LIMIT_S = 10.0
"""No further epoch start is measured after so many seconds of them."""
WHOLE_EPOCH_SHARE = 0.75
"""Epochs up to this share of the least measuring time are measured whole: no guess of where their start ends."""
WHOLE_EPOCHS_SHARE = 0.25
"""Whole epochs are measured for this share of it, at least."""

COMPUTE_STRETCHES = 4
"""Stretches in which the step is timed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen of the machine during a window: disturbances from outside, and bytes read from storage."""

    outside: tuple[str, ...] = ()
    read_bytes: int | None = None


class Watch(Protocol):
    """Looks at the machine while a trial runs."""

    def begin(self, worker_pids: Sequence[int]) -> None:
        """Timing starts now."""
        ...

    def look(self) -> Sight:
        """What happened since the last look."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """What the loop saw: windows that count, those that do not, and what the measurement derives from them."""

    windows: tuple[Window, ...]
    set_aside: tuple[Window, ...]
    drained_samples: float
    epoch_start: EpochStart
    settled: bool
    censored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steady:
    windows: tuple[Window, ...]
    set_aside: tuple[Window, ...]
    drained_samples: float
    settled: bool
    censored: bool = False

    @property
    def rate(self) -> float:
        return steady_rate(self.windows, self.drained_samples).value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """One epoch start: seconds lost by it, and until its first batch was there."""

    lost_s: float
    first_batch_s: float


class Loop:
    """Runs one trial's stream from its first epoch start to its last; the caller closes it."""

    def __init__(
        self,
        stream: Stream,
        endless: Endless,
        config: TrialConfig,
        limits: MeasureLimits,
        *,
        enter: Callable[[Phase], None],
        watch: Watch,
    ) -> None:
        """`enter` is told each phase, as a sign of life too; `watch` tells of windows to measure again."""
        self._stream = stream
        self._endless = endless
        self._config = config
        self._limits = limits
        self._enter = enter
        self._watch = watch
        self._queued = config.num_workers * (config.prefetch_factor or 0)

    def measure(self) -> LoopResult:
        """Everything in its order."""
        stream = self._stream
        self._enter(Phase.WORKER_START)
        stream.start_epoch()
        first = stream.fetch()
        first_batch_s = stream.wait_s
        self._enter(Phase.WARM_UP)
        if not stream.train_on(first):
            raise DataEndedError("the loader gave no batch")
        del first  # no loop holds its first batch to the end
        self._warm_up()
        self._enter(Phase.MEASURE)
        steady = self._steady()
        self._enter(Phase.EPOCH_END)
        epoch_start = self._epoch_start(steady, first_batch_s)
        stream.check(at_end=not steady.censored)
        return LoopResult(
            windows=steady.windows,
            set_aside=steady.set_aside,
            drained_samples=steady.drained_samples,
            epoch_start=epoch_start,
            settled=steady.settled,
            censored=steady.censored,
        )

    # --- warm-up -------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Two optimizer steps, then everything that was fetched meanwhile, then until nothing piled up is left."""
        stream = self._stream
        began = stream.now()
        stream.train_batches(self._config.accumulation_steps * MIN_OPTIMIZER_STEPS - 1)
        self._arrive(Phase.WARM_UP)
        chunk = group_batches(self._config, self._config.num_workers)
        patience = WARM_UP_PATIENCE * max(self._queued, WARM_UP_PATIENCE * chunk)
        drained, before = 0, stream.ready_batches()
        while True:
            stream.train_batches(chunk)
            self._arrive(Phase.WARM_UP)
            drained += chunk
            after = stream.ready_batches()
            is_falling = before is not None and after is not None and after < before - 1
            is_settling = stream.is_scale_settling()
            before = after
            is_long_enough = drained >= self._queued and stream.now() - began >= self._limits.warm_up_s
            if is_long_enough and (drained >= patience or not (is_falling or is_settling)):
                return

    # --- the steady state ----------------------------------------------------------------------------------

    def _steady(self) -> _Steady:
        """Timed windows until the rate is settled and has no trend, or until the limit."""
        stream, limits = self._stream, self._limits
        counted: list[Window] = []
        disturbed: list[Window] = []
        until = stream.now()
        self._watch.begin(stream.worker_pids())
        while _seconds(counted) < limits.max_s or len(counted) < MIN_WINDOWS:
            window = timed_window(stream, self._config, limits.window_s, until)
            until = _end_s(window)
            self._enter(Phase.MEASURE)
            stream.check()
            sight = self._watch.look()
            window = replace(window, read_bytes=sight.read_bytes)
            if sight.outside and _seconds(disturbed) < DISTURBED_SHARE * limits.max_s:
                disturbed.append(window)
                continue
            counted.append(window)
            if self._is_too_slow(counted):
                return self._state(counted, disturbed, settled=False, censored=True)
            if _seconds(counted) >= limits.min_s and self._is_done(counted):
                return self._state(counted, disturbed, settled=True)
        return self._state(counted, disturbed, settled=False)

    def _is_done(self, windows: Sequence[Window]) -> bool:
        # The interval first: it costs least, and mostly decides.
        if not any(is_settled(windows[int(share * len(windows)) :]) for share in (0.0, 0.5)):
            return False
        warm = windows[self._warm_from(windows) :]
        start = steady_from(warm, self._config.batch_size)
        return start is not None and is_settled(warm[start:])

    def _is_too_slow(self, windows: Sequence[Window]) -> bool:
        """Whether the rest of this trial could only show how far it is behind; cold windows say nothing of that."""
        least = self._limits.least_rate
        warm = windows[self._warm_from(windows) :]
        if least is None or not cannot_reach(warm, least):
            return False
        # Short epochs may be faster than their middle: while workers have nothing to do they are in nobody's way.
        return not self._is_short(sum(window.samples for window in warm) / _seconds(warm))

    def _warm_from(self, windows: Sequence[Window]) -> int:
        """Index after the last window that read from storage, where that is to end."""
        if not self._limits.until_warm:
            return 0
        return max((index + 1 for index, window in enumerate(windows) if window.is_cold), default=0)

    def _state(
        self, counted: Sequence[Window], disturbed: Sequence[Window], *, settled: bool, censored: bool = False
    ) -> _Steady:
        warm = self._warm_from(counted)
        if len(counted) - warm < MIN_BLOCKS:
            warm = 0  # it stayed cold, and is labelled so
        start = warm + (steady_from(counted[warm:], self._config.batch_size) or 0)
        windows = tuple(counted[start:])
        return _Steady(
            windows=windows,
            set_aside=tuple(sorted([*disturbed, *counted[:start]], key=lambda window: window.began_s)),
            drained_samples=drained_samples(windows, self._config.batch_size),
            settled=settled,
            censored=censored,
        )

    # --- epoch starts --------------------------------------------------------------------------------------

    def _epoch_start(self, steady: _Steady, first_batch_s: float) -> EpochStart:
        """What epoch starts cost; `first_batch_s` is how long new workers took to give their first batch."""
        is_kept = self._config.persistent_workers
        if steady.censored:
            # Not measured: nothing hangs on it, since a censored trial is no finalist.
            return EpochStart(fresh_s=0.0, refill_s=0.0 if is_kept else None)
        if self._is_short(steady.rate):
            lost = self._whole_epochs(steady.rate)
            fresh, again = (lost[0], lost[1:]) if is_kept else (fmean(lost), lost)
            return EpochStart(
                fresh_s=fresh,
                refill_s=fmean(again) if is_kept else None,
                spread_s=_half_range(again),
                # One epoch alone tells nothing of how much they differ: then the windows' interval has to.
                whole_samples=self._limits.epoch_samples if len(again) > 1 else None,
            )
        starts = self._epoch_turns(steady)
        lost = [start.lost_s for start in starts]
        # Below nothing it is noise, or a queue that the windows left behind and that no epoch of training begins with.
        lost_s, spread_s = max(0.0, fmean(lost)), _half_range(lost)
        if not is_kept:
            return EpochStart(fresh_s=lost_s, refill_s=None, spread_s=spread_s)
        # Kept workers refill; what new ones cost beside that is how much later their first batch came.
        later_s = first_batch_s - fmean(start.first_batch_s for start in starts)
        return EpochStart(fresh_s=lost_s + max(0.0, later_s), refill_s=lost_s, spread_s=spread_s)

    def _epoch_turns(self, steady: _Steady) -> list[_Start]:
        """One real epoch end and start, or several where they cost a relevant share of an epoch."""
        starts = [self._epoch_turn(steady, _end_s(steady.windows[-1]))]
        samples = self._limits.epoch_samples
        began = self._stream.now()
        while (
            samples is not None
            and starts[0].lost_s * steady.rate > RELEVANT_EPOCH_START * samples
            and len(starts) < EPOCH_STARTS
            and self._stream.now() - began + starts[0].lost_s < EPOCH_STARTS_LIMIT_S
        ):
            starts.append(self._epoch_turn(steady, self._stream.now()))
        return starts

    def _is_short(self, rate: float) -> bool:
        """Whether whole epochs can be measured, or must be, since they are over before anything is steady."""
        samples = self._limits.epoch_samples
        if samples is None:
            return False
        least = max(group_batches(self._config, self._config.num_workers), 2 * self._queued)
        must = samples <= least * self._config.batch_size and samples <= rate * EPOCH_STARTS_LIMIT_S
        return must or samples <= rate * WHOLE_EPOCH_SHARE * self._limits.min_s

    def _whole_epochs(self, rate: float) -> list[float]:
        """Seconds that each of several epochs lost against the steady rate, or gained where that is negative.

        They come in a row, each from its first request to its last batch, and the first has new workers. The device is
        waited for once, after the last: training too starts an epoch while it still works on the one before. Where an
        epoch here has other samples than planned (a part of the dataset, batches shared among workers), its time is
        taken in proportion.
        """
        stream, planned = self._stream, self._limits.epoch_samples
        assert planned is not None
        self._endless.stop()
        stream.drain()
        stream.close()
        stream.synchronize()
        self._endless.bound(-(-planned // self._config.batch_size))
        samples, ends_s = stream.samples, [stream.now()]
        while not self._has_enough_epochs(ends_s):
            self._whole_epoch()
            ends_s.append(stream.now())
        stream.synchronize()
        count = len(ends_s) - 1
        device_s = (stream.now() - ends_s[-1]) / count
        share = planned * count / (stream.samples - samples)
        return [(end_s - began_s + device_s) * share - planned / rate for began_s, end_s in pairwise(ends_s)]

    def _has_enough_epochs(self, ends_s: Sequence[float]) -> bool:
        count, seconds = len(ends_s) - 1, ends_s[-1] - ends_s[0]
        first = 1 if self._config.persistent_workers else 0  # its workers are new, which others are not
        is_enough = count >= EPOCH_STARTS + first and seconds >= WHOLE_EPOCHS_SHARE * self._limits.min_s
        return is_enough or (count > first and seconds >= EPOCH_STARTS_LIMIT_S)

    def _whole_epoch(self) -> None:
        samples = self._stream.samples
        self._stream.start_epoch()
        self._stream.drain()
        if self._stream.samples == samples:
            raise DataEndedError(
                "the loader gave no batch in a second epoch; a dataset or sampler that can be iterated only once "
                "cannot be measured"
            )

    def _epoch_turn(self, steady: _Steady, began: float) -> _Start:
        """From the last batch dispatched until the stream is back on its steady line."""
        stream, rate = self._stream, steady.rate
        # Batches arrive in bursts of num_workers where the loader limits; where it waits, fewer show the rate.
        is_bursty = data_wait_percent(steady.windows) >= BURSTY_WAIT_PERCENT
        workers = self._config.num_workers
        chunk = group_batches(self._config, workers if is_bursty else workers // 4)
        samples = stream.samples
        self._endless.stop()
        stream.drain()
        self._endless.restart()
        first_batch_s = self._first_batch_s()
        stream.train_batches(chunk - 1)  # the burst that the first batch came with
        for _ in range(EPOCH_START_STRETCHES - 1):
            chunk_began, chunk_samples = stream.now(), stream.samples
            stream.train_batches(chunk)
            self._arrive(Phase.EPOCH_END)
            now = stream.now()
            if stream.samples - chunk_samples >= BACK_ON_LINE * rate * (now - chunk_began):
                break
        return _Start(lost_s=now - began - (stream.samples - samples) / rate, first_batch_s=first_batch_s)

    def _first_batch_s(self) -> float:
        """Start an epoch and train on its first batch, if there is one; how long it took to come."""
        before = self._stream.wait_s
        self._stream.start_epoch()
        first = self._stream.fetch()
        waited_s = self._stream.wait_s - before
        self._stream.train_on(first)
        return waited_s

    def _arrive(self, phase: Phase) -> None:
        """Wait for the device, and give a sign of life."""
        self._stream.synchronize()
        self._enter(phase)


def compute_only_rate(training: Training, batch: Any, samples: int, seconds: float) -> float:
    """Samples/s of whole optimizer steps on one batch that lies on the device.

    It serves as a ceiling, and what other programs take away in between is not the step's.
    """
    learn_steps(training, batch, 1)  # whatever the loader's last batch left unfinished
    return samples / step_seconds(training, batch, seconds)


def step_seconds(
    training: Training, batch: Any, seconds: float, sign_of_life: Callable[[], None] = lambda: None
) -> float:
    """Seconds of one micro-batch in whole optimizer steps on it: in the fastest of several stretches.

    Takes about `seconds`, or one optimizer step where that takes longer.
    """
    deadline = time.monotonic() + seconds
    # Long enough that one synchronisation does not count; found by doubling, since one step may be an exception.
    steps = 1
    while (fastest_s := learn_steps(training, batch, steps, sign_of_life)) < seconds / COMPUTE_STRETCHES / 2:
        steps *= 2
    while time.monotonic() < deadline:
        fastest_s = min(fastest_s, learn_steps(training, batch, steps, sign_of_life))
    return fastest_s / (steps * training.step.accumulation_steps)


def learn_steps(training: Training, batch: Any, steps: int, sign_of_life: Callable[[], None] = lambda: None) -> float:
    """Learn whole optimizer steps from one batch, and wait for the device; how many seconds that took."""
    weight = 1.0 if training.workload.loss_weight is not None else None
    began = time.monotonic()
    for _ in range(steps * training.step.accumulation_steps):
        training.learn(batch, weight)
        sign_of_life()
    synchronize(training.device)
    return time.monotonic() - began


def group_batches(config: TrialConfig, at_least: int) -> int:
    """The least whole number of optimizer steps, in batches, that is at least so many."""
    steps = -(-at_least // config.accumulation_steps)
    return max(1, steps) * config.accumulation_steps


def timed_window(stream: Stream, config: TrialConfig, seconds: float, began: float) -> Window:
    """Whole optimizer steps, at least as many batches as workers, at least so many seconds.

    It begins where the last one ended: what workers fetch while we reckon is not given away.
    """
    samples, wait_s, work_s, stages = stream.samples, stream.wait_s, stream.work_s, stream.training.clock.read()
    stream.train_batches(group_batches(config, config.num_workers))
    while stream.now() - began < seconds:
        stream.train_batches(config.accumulation_steps)
    stream.synchronize()
    return Window(
        samples=stream.samples - samples,
        seconds=stream.now() - began,
        data_wait_s=stream.wait_s - wait_s,
        data_work_s=stream.work_s - work_s,
        began_s=began,
        ready_batches=stream.ready_batches(),
        stages=stream.training.clock.read().since(stages),
    )


def _seconds(windows: Sequence[Window]) -> float:
    return sum(window.seconds for window in windows)


def _half_range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


def _end_s(window: Window) -> float:
    return window.began_s + window.seconds
