"""Probes: the step alone on one batch, and the loader alone without training."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory  # what a loader pins with; there is no public name

from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import TrialConfig
from pipetune.hardware.counters import TreeCounters
from pipetune.hardware.host import own_memory_bytes
from pipetune.training.batch import batch_bytes, to_device
from pipetune.training.workload import Workload
from pipetune.trial.device import peak_memory_bytes, synchronize
from pipetune.trial.feed import DataEndedError, Feed
from pipetune.trial.loader import build_loader
from pipetune.trial.loop import learn_steps, step_seconds
from pipetune.trial.overflow import MAX_HALVINGS
from pipetune.trial.protocol import ReadPart
from pipetune.trial.session import Session, Training

PATIENCE = 4
"""A loader that is too slow for what is wanted of it is probed for this many times the asked seconds, no more."""
COPIES = 20
COPY_SHARE = 0.1
"""A batch is copied so many times from either kind of memory, in this share of the asked seconds at most."""


def probe_step(
    session: Session, config: TrialConfig, batch: Any, seconds: float, sign_of_life: Callable[[], None], *, began: float
) -> StepProbe:
    """Time the step on this batch, which lies on the host, for about `seconds`; the probe `began` on that clock.

    The session is left at rest.
    """
    training = session.begin(config)
    on_device = training.on_device(batch)
    _take_a_step(training, on_device, sign_of_life)
    batch_s = step_seconds(training, on_device, seconds, sign_of_life)
    # Before the copies, which take memory too.
    peak = peak_memory_bytes(session.device)
    del on_device
    copy_s, pinned_copy_s = _copies(batch, session.device, COPY_SHARE * seconds)
    session.rest()
    return StepProbe(
        config=config,
        batch_s=batch_s,
        copy_s=copy_s,
        pinned_copy_s=pinned_copy_s,
        peak_gpu_memory_bytes=peak,
        batch_bytes=batch_bytes(batch),
        seconds=time.monotonic() - began,
    )


def one_batch_loader(workload: Workload, config: TrialConfig, part: ReadPart | None) -> DataLoader[Any]:
    """A loader that gives one batch, out of one worker where the configuration has any."""
    if config.num_workers:
        config = replace(config, num_workers=1, prefetch_factor=1, persistent_workers=False)
    loader, endless = build_loader(workload, replace(config, pin_memory=False), part)
    endless.bound(1)
    return loader


def only_batch(feed: Feed) -> Any:
    """The batch of such a loader; its worker has ended on return. Raises DataEndedError where there is none."""
    feed.start_epoch()
    batch = _first(feed)
    feed.close()
    return batch


def probe_loader(feed: Feed, config: TrialConfig, seconds: float, *, began: float) -> LoaderProbe:
    """Take batches, which have to come without an end, for at least `seconds`; then the workers have ended.

    The probe `began` on the feed's clock. Raises DataEndedError where the data ends.
    """
    with one_thread() if config.num_workers == 0 else contextlib.nullcontext():
        feed.start_epoch()
        first = _first(feed)
        size, first_batch_s = batch_bytes(first), feed.wait_s
        del first  # no more than one batch is alive, as in a loop
        course = _Course.of(feed, config.num_workers, seconds)
    memory = _mean(own_memory_bytes(pid) for pid in feed.worker_pids())
    feed.close()
    return LoaderProbe(
        config=config,
        first_batch_s=first_batch_s,
        batch_s=course.batch_s(),
        receive_s=course.own_work_s / course.batches if config.num_workers else 0.0,
        work_share=course.work_share(),
        spread=course.spread(),
        batches=course.batches,
        batch_bytes=size,
        worker_memory_bytes=memory,
        seconds=feed.now() - began,
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Leave torch the one thread that it has in a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """How the batches came: when the first one was there, and each that followed.

    `own_work_s` are CPU seconds of this process from the first to the last, `workers_work_s` those of the workers;
    None where there are none, or where it is not known.
    """

    arrivals_s: Sequence[float]
    num_workers: int
    own_work_s: float
    workers_work_s: float | None

    @classmethod
    def of(cls, feed: Feed, num_workers: int, seconds: float) -> "_Course":
        """Follow a feed whose first batch has come."""
        with TreeCounters() as counters:
            pids = feed.worker_pids()
            before, worked_s = counters.read(pids).own_cpu_s, _work_s()
            arrivals_s = _arrivals(feed, num_workers, seconds)
            own_s = _work_s() - worked_s
            after = counters.read(pids).own_cpu_s
        return cls(
            arrivals_s=arrivals_s,
            num_workers=num_workers,
            own_work_s=own_s,
            workers_work_s=None if not pids or before is None or after is None else after - before - own_s,
        )

    @property
    def batches(self) -> int:
        """How many came after the first."""
        return len(self.arrivals_s) - 1

    def batch_s(self) -> float:
        """Seconds a batch: how much later each came than the last one of the same worker, shared among the workers.

        Batches come in bursts, one of each worker, whose beginning and end mean nothing; and what other workers made
        while the first was awaited comes no earlier than its turn. The first burst holds what the start of the
        workers took, and is left out where there is more.
        """
        workers = max(1, self.num_workers)
        counted = self.arrivals_s[min(workers - 1, self.batches - workers) :]
        return fmean(later - earlier for earlier, later in zip(counted, counted[workers:], strict=False)) / workers

    def spread(self) -> float | None:
        """Of the time to make a batch, where nobody else makes one meanwhile."""
        if self.num_workers or self.batches < 2:
            return None
        times_s = [later - earlier for earlier, later in pairwise(self.arrivals_s)]
        return stdev(times_s) / fmean(times_s)

    def work_share(self) -> float | None:
        """Of the workers' time, or of this process's without them."""
        work_s = self.workers_work_s if self.num_workers else self.own_work_s
        if work_s is None:
            return None
        available_s = max(1, self.num_workers) * (self.arrivals_s[-1] - self.arrivals_s[0])
        return min(1.0, max(0.0, work_s / available_s))


def _arrivals(feed: Feed, num_workers: int, seconds: float) -> list[float]:
    """When batches came, from now on: two of each worker and for so long; or, after four times that, two of one."""
    arrivals_s = [feed.now()]
    wanted, least = max(2, 2 * num_workers), max(1, num_workers)
    while True:
        passed_s, batches = arrivals_s[-1] - arrivals_s[0], len(arrivals_s) - 1
        is_enough = batches >= wanted and passed_s >= seconds
        if is_enough or (batches >= least and passed_s >= PATIENCE * seconds):
            return arrivals_s
        if feed.fetch() is feed:
            raise DataEndedError(
                f"the loader ended after {batches + 1} batches of this probe; a dataset or sampler that can be "
                "iterated only once cannot be measured"
            )
        arrivals_s.append(feed.now())


def _work_s() -> float:
    """CPU seconds of this process so far, and of programs that it started and that have ended: decoders, say."""
    times = os.times()  # whose own two are too coarse
    return time.process_time() + times.children_user + times.children_system


def _first(feed: Feed) -> Any:
    batch = feed.fetch()
    if batch is feed:
        raise DataEndedError("the loader gave no batch")
    return batch


def _take_a_step(training: Training, batch: Any, sign_of_life: Callable[[], None]) -> None:
    """The first optimizer step, which picks kernels and allocates the optimizer's state; fp16 may skip some before."""
    for _ in range(MAX_HALVINGS):
        learn_steps(training, batch, 1, sign_of_life)
        if training.skipped_steps() < max(1, training.step.optimizer_steps):
            return


def _copies(batch: Any, device: torch.device, seconds: float) -> tuple[float | None, float | None]:
    """Seconds of moving a batch to the device, from pageable and from pinned memory; None where it is there already."""
    if device.type == "cpu":
        return None, None
    return _copy_seconds(batch, device, seconds), _copy_seconds(pin_memory(batch), device, seconds)


def _copy_seconds(batch: Any, device: torch.device, seconds: float) -> float:
    deadline = time.monotonic() + seconds
    times_s: list[float] = []
    while len(times_s) < 2 or (len(times_s) < COPIES and time.monotonic() < deadline):
        began = time.monotonic()
        to_device(batch, device, non_blocking=True)
        synchronize(device)
        times_s.append(time.monotonic() - began)
    return median(times_s[1:])  # the first finds its memory


def _mean(counts: Iterator[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return round(fmean(known)) if known else None
