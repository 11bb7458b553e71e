"""The page cache: making a trial read from storage, without root."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipetune.errors import InputError


def evict(data_paths: Iterable[str | Path]) -> int:
    """Ask the kernel to drop the cached pages of these files (folders: all below them); return how many files.

    Raises InputError where nothing is named, or a path is not there.
    """
    count = 0
    for file in _files(data_paths):
        with file.open("rb") as opened:
            # Pages that are not on disk yet cannot be dropped.
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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
