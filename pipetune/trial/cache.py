"""The page cache: filled before the first trial, or emptied before each, without root."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipetune.core.cache import ReadAhead, ReadAheadEnd
from pipetune.core.interference import storage_read_bytes
from pipetune.core.throughput import COLD_BYTES_PER_S
from pipetune.errors import InputError
from pipetune.hardware.counters import TreeCounters
from pipetune.hardware.storage import drop_cached
from pipetune.training.batch import count_samples
from pipetune.training.workload import Workload
from pipetune.trial.loader import build_loader, close_iterator
from pipetune.trial.protocol import ReadAheadRequest, ReadPart

LOOK_S = 0.25
"""How often the counters are read while reading ahead."""
IN_MEMORY_S = 1.0
"""Where nothing came from storage for so long, nothing will."""


def read_ahead(workload: Workload, request: ReadAheadRequest, sign_of_life: Callable[[], None]) -> ReadAhead:
    """Load what trials will read, in workers and without training, until it is in memory or the limits are met."""
    part = ReadPart(first=0, count=None, seed=request.seed)
    loader, _ = build_loader(workload, request.config, part)
    count = workload.count_samples or count_samples
    with TreeCounters() as counters:
        began_s = looked_s = rose_s = time.monotonic()
        is_first = True
        before, read = counters.read(), 0
        iterator: Any = iter(loader)
        pids = [worker.pid for worker in getattr(iterator, "_workers", ())]
        samples, end = 0, ReadAheadEnd.WHOLE_EPOCH
        try:
            for batch in iterator:
                samples += int(count(batch))
                if is_first:
                    # Until then workers were starting, which reads nothing of the dataset.
                    looked_s = rose_s = time.monotonic()
                    is_first = False
                if request.dataset_samples is not None and samples >= request.dataset_samples:
                    break
                now_s = time.monotonic()
                if now_s - looked_s < min(LOOK_S, request.seconds / 8):
                    continue
                sign_of_life()
                so_far = storage_read_bytes(before, counters.read(pids))
                if so_far is None:
                    end = ReadAheadEnd.UNKNOWN
                    break
                if so_far - read > COLD_BYTES_PER_S * (now_s - looked_s):
                    rose_s = now_s
                read, looked_s = so_far, now_s
                if (reason := _end(request, read, now_s - began_s, quiet_s=now_s - rose_s)) is not None:
                    end = reason
                    break
        finally:
            close_iterator(iterator)
    return ReadAhead(samples=samples, read_bytes=read, seconds=time.monotonic() - began_s, end=end)


def _end(request: ReadAheadRequest, read: int, seconds: float, *, quiet_s: float) -> ReadAheadEnd | None:
    """Why reading ahead ends now, if it does."""
    if quiet_s >= min(IN_MEMORY_S, request.seconds / 4):
        return ReadAheadEnd.IN_MEMORY
    if read >= request.memory_bytes:
        return ReadAheadEnd.MEMORY
    return ReadAheadEnd.TIME if seconds >= request.seconds else None


def evict(data_paths: Iterable[str | Path]) -> int:
    """Ask the kernel to drop the cached pages of these files (folders: all below them); return how many files.

    Raises InputError where nothing is named, or a path is not there.
    """
    count = 0
    for file in _files(data_paths):
        drop_cached(file)
        count += 1
    if count == 0:
        raise InputError("cache: cold needs the files behind the dataset; give the Workload its data_paths")
    return count


def _files(data_paths: Iterable[str | Path]) -> Iterator[Path]:
    for named in data_paths:
        path = Path(named)
        if path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path
        else:
            raise InputError(f"data_paths: there is no {path}")
