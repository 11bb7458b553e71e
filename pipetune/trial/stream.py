"""The stream of a trial: batches from the loader, trained on one after another, with an account of both."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from pipetune.trial.device import synchronize
from pipetune.trial.loader import close_iterator
from pipetune.trial.overflow import Overflows
from pipetune.trial.session import Training

DEATH_NOTICE_S = 0.5
"""How long the end of a worker is waited for, once something went wrong."""
SIGN_OF_LIFE_S = 1.0
"""How often a stream tells that it goes on: a step may take long, and is not hung for that."""


class DataEndedError(RuntimeError):
    """The stream ended where it should have gone on."""


class NoStepError(RuntimeError):
    """Batches go by, and the optimizer does nothing."""


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite, or gradients kept overflowing."""


class Stream:
    """Takes batches from the loader and trains on them, keeping account of samples and waiting time.

    `work_s` are CPU seconds of this process, all its threads, that passed while it waited.
    """

    def __init__(
        self, loader: DataLoader[Any], training: Training, sign_of_life: Callable[[], None] = lambda: None
    ) -> None:
        """`sign_of_life` is called about once a second while batches go through."""
        self.loader = loader
        self.training = training
        self._sign_of_life = sign_of_life
        self._signed_s = self.now()
        self.samples = 0
        self.batches = 0
        self.wait_s = 0.0
        self.work_s = 0.0
        self.last_batch: Any = None
        self.last_samples = 0
        self._iterator: Iterator[Any] | None = None
        self._overflows = Overflows()

    def now(self) -> float:
        """Seconds on the clock by which the stream is timed."""
        return time.monotonic()

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        synchronize(self.training.device)

    def start_epoch(self) -> None:
        """Make the next iterator; the old one is dropped first, as a for loop does."""
        asked = self.now()
        self._iterator = None
        self._iterator = iter(self.loader)
        self.wait_s += self.now() - asked

    def fetch(self) -> Any:
        """The next batch, or this very object at the end of the epoch."""
        assert self._iterator is not None
        asked_s, working_s = self.now(), time.process_time()
        batch = next(self._iterator, self)
        got_s = self.now()
        self.wait_s += got_s - asked_s
        self.work_s += time.process_time() - working_s
        if got_s - self._signed_s >= SIGN_OF_LIFE_S:
            self._signed_s = got_s
            self._sign_of_life()
        return batch

    def train_on(self, batch: Any) -> bool:
        """One micro-batch; False for the end of the epoch."""
        if batch is self:
            return False
        training = self.training
        samples, weight = training.count(batch), training.weight(batch)
        batch = training.on_device(batch)
        # Before it is learnt from: the one before it must not hold memory meanwhile, which it does in no other loop.
        self.last_batch, self.last_samples = batch, samples
        training.learn(batch, weight)
        self.samples += samples
        self.batches += 1
        return True

    def train_batches(self, count: int) -> None:
        """`count` micro-batches; raises DataEndedError where the data ends first."""
        for _ in range(count):
            if not self.train_on(self.fetch()):
                raise DataEndedError(
                    f"the loader ended after {self.batches} batches of this trial; a dataset or sampler that "
                    "can be iterated only once cannot be measured"
                )

    def is_scale_settling(self) -> bool:
        """Whether fp16 still looks for its loss scale; waits for the device."""
        self._overflows.look(self.training.step.optimizer_steps, self.training.skipped_steps())
        return self._overflows.is_settling

    def check(self, *, at_end: bool = False) -> None:
        """Raise NonFiniteLossError or NoStepError where this does not train; for window borders, since it waits."""
        step = self.training.step
        if step.optimizer_steps == 0:
            raise NoStepError(
                f"{self.batches} batches went by without an optimizer step: train_step must call "
                "step.backward(loss) and step.update() for each micro-batch"
            )
        if not step.losses_are_finite():
            raise NonFiniteLossError(
                f"the loss became NaN or infinite within {step.optimizer_steps} optimizer steps; "
                "a faster configuration that does not train is not a result"
            )
        self._overflows.look(step.optimizer_steps, self.training.skipped_steps())
        if (problem := self._overflows.problem(at_end=at_end)) is not None:
            raise NonFiniteLossError(
                f"gradients overflowed: {problem}; a faster configuration that does not train is not a result"
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

    def worker_pids(self) -> tuple[int, ...]:
        """Processes that load the batches."""
        return tuple(worker.pid for worker in getattr(self._iterator, "_workers", ()) if worker.pid is not None)

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
        close_iterator(iterator)
