"""The measuring loop: warm up, drain, time windows, meet a real epoch end, start the next epoch."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from pipetune.core.measurement import Phase
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import EpochStart, Window, data_wait_percent, is_settled, steady_rate
from pipetune.trial.device import synchronize
from pipetune.trial.loader import Endless
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.session import Training

MIN_OPTIMIZER_STEPS = 2
"""Optimizer steps before timing: the first allocates the optimizer's state and picks kernels."""
DEATH_NOTICE_S = 0.5
"""How long the end of a worker is waited for, once something went wrong."""
SIGN_OF_LIFE_S = 1.0
"""How often a stream tells that it goes on: a step may take long, and is not hung for that."""
MIN_WINDOWS = 2
"""Windows of even the slowest trial: one alone has no interval."""
BACK_ON_LINE = 0.95
"""An epoch start is over when a stretch runs at this share of the steady rate."""
BURSTY_WAIT_PERCENT = 5.0
"""From this share of time waiting for data on, batches are taken to arrive in bursts."""
EPOCH_START_LIMIT_S = 10.0
"""A stream that has not come back to its steady rate by then is taken as it is."""

COMPUTE_STRETCHES = 4
"""Stretches in which the step is timed alone."""


class DataEndedError(RuntimeError):
    """The stream ended where it should have gone on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """What the loop saw."""

    windows: tuple[Window, ...]
    epoch_start: EpochStart
    settled: bool


class Stream:
    """Takes batches from the loader and trains on them, keeping account of samples and waiting time."""

    def __init__(
        self, loader: DataLoader[Any], training: Training, sign_of_life: Callable[[], None] = lambda: None
    ) -> None:
        """`sign_of_life` is called about once a second while batches go through."""
        self.loader = loader
        self.training = training
        self._sign_of_life = sign_of_life
        self._signed_s = time.monotonic()
        self.samples = 0
        self.batches = 0
        self.wait_s = 0.0
        self.last_batch: Any = None
        self.last_samples = 0
        self._iterator: Iterator[Any] | None = None

    def start_epoch(self) -> None:
        """Make the next iterator; the old one is dropped first, as a for loop does."""
        asked = time.monotonic()
        self._iterator = None
        self._iterator = iter(self.loader)
        self.wait_s += time.monotonic() - asked

    def fetch(self) -> Any:
        """The next batch, or this very object at the end of the epoch."""
        assert self._iterator is not None
        asked = time.monotonic()
        batch = next(self._iterator, self)
        self.wait_s += time.monotonic() - asked
        return batch

    def train_on(self, batch: Any) -> bool:
        """One micro-batch; False for the end of the epoch."""
        if batch is self:
            return False
        training = self.training
        samples, weight = training.count(batch), training.weight(batch)
        batch = training.on_device(batch)
        training.learn(batch, weight)
        self.last_batch, self.last_samples = batch, samples
        self.samples += samples
        self.batches += 1
        now = time.monotonic()
        if now - self._signed_s >= SIGN_OF_LIFE_S:
            self._signed_s = now
            self._sign_of_life()
        return True

    def train_batches(self, count: int) -> None:
        """`count` micro-batches; raises DataEndedError where the data ends first."""
        for _ in range(count):
            if not self.train_on(self.fetch()):
                raise DataEndedError(
                    f"the loader ended after {self.batches} batches of this trial; a dataset or sampler that "
                    "can be iterated only once cannot be measured"
                )

    def drain(self) -> None:
        """Train on what is left of the epoch."""
        while self.train_on(self.fetch()):
            pass

    def ready_batches(self) -> int | None:
        """Batches that lie ready; None where the iterator does not tell."""
        waiting = getattr(self._iterator, "_task_info", None)
        if waiting is None:
            return None
        # A task holds its worker, and its batch too once that has arrived out of order.
        arrived = sum(1 for task in list(waiting.values()) if len(task) == 2)
        queues = [getattr(self._iterator, name, None) for name in ("_data_queue", "_worker_result_queue")]
        try:
            sizes = {id(queue): int(queue.qsize()) for queue in queues if queue is not None}
            return arrived + sum(sizes.values())
        except NotImplementedError:  # macOS counts no queues
            return None

    def dead_worker_code(self) -> int | None:
        """Exit code of a worker that ended before its time; SIGTERM aside, for that is how torch ends them."""
        deadline = time.monotonic() + DEATH_NOTICE_S
        for worker in getattr(self._iterator, "_workers", ()):
            worker.join(max(0.0, deadline - time.monotonic()))
            code: int | None = worker.exitcode
            if code not in {None, 0, -signal.SIGTERM}:
                return code
        return None

    def close(self) -> None:
        """Stop the workers, kept ones included, and wait for them."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            iterator = getattr(self.loader, "_iterator", None)
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = None  # noqa: SLF001 - torch offers no way to close a loader
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def measure(
    stream: Stream,
    endless: Endless,
    config: TrialConfig,
    limits: MeasureLimits,
    enter: Callable[[Phase], None],
) -> LoopResult:
    """Run one trial's stream from its first epoch start to its second; the caller closes it."""
    enter(Phase.WORKER_START)
    stream.start_epoch()
    first = stream.fetch()
    first_batch_s = stream.wait_s
    enter(Phase.WARM_UP)
    if not stream.train_on(first):
        raise DataEndedError("the loader gave no batch")
    _warm_up(stream, config, limits, enter)
    enter(Phase.MEASURE)
    windows, settled = _windows(stream, config, limits, enter)
    enter(Phase.EPOCH_END)
    turn_s = _epoch_turn(stream, endless, config, windows)
    start = (
        EpochStart(fresh_s=first_batch_s, refill_s=turn_s)
        if config.persistent_workers
        else EpochStart(fresh_s=turn_s, refill_s=None)
    )
    return LoopResult(windows=tuple(windows), epoch_start=start, settled=settled)


def compute_only_rate(training: Training, batch: Any, samples: int, seconds: float) -> float:
    """Samples/s of whole optimizer steps on one batch that lies on the device: the fastest of several stretches.

    It serves as a ceiling, and what other programs take away in between is not the step's.
    """
    weight = 1.0 if training.workload.loss_weight is not None else None
    group = training.step.accumulation_steps

    def timed(steps: int) -> float:
        began = time.monotonic()
        for _ in range(steps * group):
            training.learn(batch, weight)
        synchronize(training.device)
        return time.monotonic() - began

    timed(1)  # whatever the loader's last batch left unfinished
    deadline = time.monotonic() + seconds
    # Long enough that one synchronisation does not count; found by doubling, since one step may be an exception.
    steps = 1
    while (fastest_s := timed(steps)) < seconds / COMPUTE_STRETCHES / 2:
        steps *= 2
    while time.monotonic() < deadline:
        fastest_s = min(fastest_s, timed(steps))
    return steps * group * samples / fastest_s


def _group_batches(config: TrialConfig, at_least: int) -> int:
    """The least whole number of optimizer steps, in batches, that is at least so many."""
    steps = -(-at_least // config.accumulation_steps)
    return max(1, steps) * config.accumulation_steps


def _warm_up(stream: Stream, config: TrialConfig, limits: MeasureLimits, enter: Callable[[Phase], None]) -> None:
    """Two optimizer steps, then everything that was fetched meanwhile, then until nothing piled up is left."""
    began = time.monotonic()
    stream.train_batches(config.accumulation_steps * MIN_OPTIMIZER_STEPS - 1)
    synchronize(stream.training.device)
    enter(Phase.WARM_UP)
    queued = config.num_workers * (config.prefetch_factor or 0)
    chunk = _group_batches(config, max(1, config.num_workers))
    drained, before = 0, stream.ready_batches()
    while True:
        stream.train_batches(chunk)
        synchronize(stream.training.device)
        enter(Phase.WARM_UP)
        drained += chunk
        after = stream.ready_batches()
        is_falling = before is not None and after is not None and after < before - 1
        before = after
        is_long_enough = drained >= queued and time.monotonic() - began >= limits.warm_up_s
        if is_long_enough and (not is_falling or drained >= 4 * queued):
            return


def _windows(
    stream: Stream, config: TrialConfig, limits: MeasureLimits, enter: Callable[[Phase], None]
) -> tuple[list[Window], bool]:
    """Timed windows until the rate is settled, or until the limit."""
    windows: list[Window] = []
    began = until = time.monotonic()
    while until - began < limits.max_s or len(windows) < MIN_WINDOWS:
        windows.append(_window(stream, config, limits.window_s, until))
        until = _end_s(windows[-1])
        enter(Phase.MEASURE)
        if until - began >= limits.min_s and is_settled(windows):
            return windows, True
    return windows, False


def _end_s(window: Window) -> float:
    return window.began_s + window.seconds


def _window(stream: Stream, config: TrialConfig, seconds: float, began: float) -> Window:
    """Whole optimizer steps, at least as many batches as workers, at least so many seconds.

    It begins where the last one ended: what workers fetch while we reckon is not given away.
    """
    samples, wait_s = stream.samples, stream.wait_s
    stream.train_batches(_group_batches(config, config.num_workers))
    while time.monotonic() - began < seconds:
        stream.train_batches(config.accumulation_steps)
    synchronize(stream.training.device)
    return Window(
        samples=stream.samples - samples,
        seconds=time.monotonic() - began,
        data_wait_s=stream.wait_s - wait_s,
        began_s=began,
    )


def _epoch_turn(stream: Stream, endless: Endless, config: TrialConfig, windows: Sequence[Window]) -> float:
    """Seconds lost from the last batch dispatched until the stream is back on its steady line."""
    rate = steady_rate(windows).value
    # Batches arrive in bursts of num_workers where the loader limits; where it waits, fewer show the rate.
    burst = config.num_workers if data_wait_percent(windows) >= BURSTY_WAIT_PERCENT else config.num_workers // 4
    began, samples = _end_s(windows[-1]), stream.samples
    endless.stop()
    stream.drain()
    endless.restart()
    stream.start_epoch()
    chunk = _group_batches(config, burst)
    restarted = time.monotonic()
    while True:
        chunk_began, chunk_samples = time.monotonic(), stream.samples
        stream.train_batches(chunk)
        synchronize(stream.training.device)
        now = time.monotonic()
        is_back = stream.samples - chunk_samples >= BACK_ON_LINE * rate * (now - chunk_began)
        if is_back or now - restarted > EPOCH_START_LIMIT_S:
            return max(0.0, now - began - (stream.samples - samples) / rate)
