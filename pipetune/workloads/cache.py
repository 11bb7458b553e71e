"""The folder where made-up data is kept between runs; each entry is made once, and is whole or absent."""

import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipetune.errors import InputError

_log = logging.getLogger(__name__)


def made_once(name: str, make: Callable[[Path], None], *, cache_dir: str | Path | None = None) -> Path:
    """Return the cache folder `name`, calling `make(empty_folder)` first where it is not there yet.

    The name must hold every parameter of the content and a version of its format. Raises InputError
    where the cache cannot be written.
    """
    root = cache_root(cache_dir)
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f".{name}.lock"):
            if not final.is_dir():
                _make_whole(root, final, make)
    except OSError as error:
        message = f"cannot write {final}: {error}; set workload.options.cache_dir to a folder with room"
        raise InputError(message) from error
    return final


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the given folder, or `pipetune/workloads` in XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return base / "pipetune" / "workloads"


def _make_whole(root: Path, final: Path, make: Callable[[Path], None]) -> None:
    """Make an entry beside its place, then rename it: a kill at any moment leaves nothing at `final`."""
    # The lock makes us the only maker on this host, so a part that is there already was left by a killed one.
    # The host's name keeps apart the machines of a shared file system whose locks are local.
    part = root / f".{final.name}.{socket.gethostname()}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    _log.info("making %s (once)", final)
    try:
        make(part)
        _rename_unless_there(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _rename_unless_there(part: Path, final: Path) -> None:
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():  # otherwise another machine was first with the same content
            raise


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold the lock file; the kernel lets go of it when its holder dies."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
