"""The feed: batches from a loader, one after another, with an account of the time spent waiting for them."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from pipetune.trial.loader import close_iterator

DEATH_NOTICE_S = 0.5
"""How long the end of a worker is waited for, once something went wrong."""


class DataEndedError(RuntimeError):
    """The data ended where it should have gone on."""


class Feed:
    """Takes batches from the loader.

    `wait_s` are the seconds spent waiting for them, `work_s` CPU seconds of this process, all its threads, meanwhile.
    """

    def __init__(self, loader: DataLoader[Any], sign_of_life: Callable[[], None] = lambda: None) -> None:
        """`sign_of_life` is called with each batch: what takes long is not hung for that."""
        self.loader = loader
        self.wait_s = 0.0
        self.work_s = 0.0
        self._sign_of_life = sign_of_life
        self._iterator: Iterator[Any] | None = None

    def now(self) -> float:
        """Seconds on the clock by which the feed is timed."""
        return time.monotonic()

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
        self.wait_s += self.now() - asked_s
        self.work_s += time.process_time() - working_s
        self._sign_of_life()
        return batch

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
