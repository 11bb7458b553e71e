"""Storage behind a folder: what kind it is, and how fast it reads what is in no cache."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from pipetune.core.machine import FolderFacts
from pipetune.errors import InputError
from pipetune.hardware.cgroup import read_text

_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
        "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs",
        "virtiofs",
    }
)  # fmt: skip
_VIRTUAL = ("/virtio", "/vbd-", "/vmbus")
"""Buses of virtual disks, which all call themselves rotating."""
_READ_S = 1.5
_MOST_FILES = 4096
_LEAST_BYTES = 2**22
_CHUNK_BYTES = 2**20


def drop_cached(file: Path) -> None:
    """Ask the kernel to drop a file's cached pages; needs no root. Raises OSError."""
    with file.open("rb") as opened:
        # Pages that are not on disk yet cannot be dropped.
        os.fdatasync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def look_at_folder(folder: Path, *, is_read: bool, root: Path = Path("/")) -> FolderFacts:
    """What lies under a folder; `is_read` reads its files for a second or two, past the page cache.

    Raises InputError where it is no folder. `root` stands for `/`.
    """
    if not folder.is_dir():
        raise InputError(f"--data: there is no folder {folder}")
    device, filesystem = _mount_of(folder.resolve(), root)
    return FolderFacts(
        path=str(folder),
        filesystem=filesystem,
        is_network=filesystem in _NETWORK,
        is_rotating=None if device is None else _is_rotating(device, root),
        is_read=is_read,
        read_bytes_per_s=_read_rate(folder) if is_read else None,
    )


def _mount_of(folder: Path, root: Path) -> tuple[str | None, str | None]:
    """Device (`MAJOR:MINOR`) and type of the file system that a folder is on; None where /proc does not tell.

    A line of mountinfo: `ID PARENT MAJOR:MINOR TOP POINT OPTIONS [FIELDS] - TYPE SOURCE OPTIONS`; later mounts
    hide earlier ones.
    """
    best: tuple[int, str | None, str | None] = (-1, None, None)
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        if folder.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), fields[2], kinds[0])
    return best[1], best[2]


def _is_rotating(device: str, root: Path) -> bool | None:
    """What the kernel says of the disk, or of the disk that a partition is on; a virtual one says nothing of it."""
    block = root / "sys/dev/block" / device
    if any(bus in str(block.resolve()) for bus in _VIRTUAL):
        return None
    for queue in (block / "queue", block / "../queue"):
        if text := read_text(queue / "rotational").strip():
            return text == "1"
    return None


def _read_rate(folder: Path) -> float | None:
    """Bytes/s of reading files one after another that were dropped from the cache; None where too few lie there."""
    read, spent_s = 0, 0.0
    deadline = time.monotonic() + _READ_S
    for file in _some_files(folder):
        try:
            drop_cached(file)
            began = time.monotonic()
            read += _read(file, deadline)
        except OSError:
            continue
        spent_s += time.monotonic() - began
        if time.monotonic() >= deadline:
            break
    return read / spent_s if read >= _LEAST_BYTES and spent_s > 0 else None


def _read(file: Path, deadline: float) -> int:
    """Bytes read of it before the deadline."""
    read = 0
    with file.open("rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            read += len(chunk)
            if time.monotonic() >= deadline:
                break
    return read


def _some_files(folder: Path) -> Iterator[Path]:
    count = 0
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            if file.is_file() and not file.is_symlink():
                count += 1
                yield file
            if count == _MOST_FILES:
                return
