"""Utilisation curves out of what `nvidia-smi --query-gpu=... --format=csv -l 1` wrote."""

import csv
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from pipetune.core.curve import Curve
from pipetune.errors import InputError

UTILIZATION = "utilization.gpu"
_TIMESTAMP = "timestamp"
_NAMES = ("index", "uuid", "pci.bus_id", "name")
"""What tells GPUs apart, the best first."""
_TIME_FORMATS = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S")
MOST_BYTES = 200 * 2**20


def read_gpu_csv(path: Path, *, interval_s: float = 1.0) -> Mapping[str, Curve]:
    """One curve a GPU, by its name in the file; `interval_s` lies between samples where the file has no timestamps.

    What the GPU did not report (`[N/A]`) is left out. Raises InputError where the file is none of that kind.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: more than {MOST_BYTES // 2**20} MiB; read a part of it")
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines(), skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    header = [_plain(name) for name in rows[0]] if rows else []
    if UTILIZATION not in header:
        raise InputError(
            f"{path}: its first line names no column {UTILIZATION}; write it with "
            f"`nvidia-smi --query-gpu=timestamp,index,{UTILIZATION} --format=csv -l 1` (with its header)"
        )
    points: dict[str, list[tuple[float, float]]] = {}
    for name, time_s, percent in _samples(path, header, rows[1:]):
        found = points.setdefault(name, [])
        found.append((time_s if time_s is not None else len(found) * interval_s, percent))
    if not points:
        raise InputError(f"{path}: no sample in it tells {UTILIZATION}")
    return {
        name: Curve(times_s=[at - own[0][0] for at, _ in own], percents=[percent for _, percent in own])
        for name, own in points.items()
    }


def _samples(path: Path, header: list[str], rows: list[list[str]]) -> Iterator[tuple[str, float | None, float]]:
    """GPU, seconds (None without timestamps) and percent of each row that has them."""
    name_at = next((header.index(name) for name in _NAMES if name in header), None)
    time_at = header.index(_TIMESTAMP) if _TIMESTAMP in header else None
    utilization_at = header.index(UTILIZATION)
    for number, row in enumerate(rows, start=2):
        if not row or [_plain(name) for name in row] == header:  # a file that was appended to
            continue
        if len(row) != len(header):
            if number == len(rows) + 1:  # the last line of a file that is still being written
                return
            raise InputError(f"{path}, line {number}: {len(row)} columns where the first line has {len(header)}")
        percent = _number(row[utilization_at])
        if percent is None:
            continue
        if not 0 <= percent <= 100:
            raise InputError(f"{path}, line {number}: {UTILIZATION} is {row[utilization_at]!r}")
        time_s = None if time_at is None else _seconds(path, number, row[time_at])
        yield "0" if name_at is None else row[name_at], time_s, percent


def _plain(name: str) -> str:
    """A column's name without its unit: `utilization.gpu [%]`."""
    return name.partition("[")[0].strip()


def _number(text: str) -> float | None:
    """`97 %` or `97`; None for what is no number, such as `[N/A]`."""
    try:
        return float(text.removesuffix("%").strip())
    except ValueError:
        return None


def _seconds(path: Path, number: int, text: str) -> float:
    for form in _TIME_FORMATS:
        try:
            return datetime.strptime(text, form).timestamp()  # noqa: DTZ007 - only differences count
        except ValueError:
            continue
    raise InputError(f"{path}, line {number}: {text!r} is no timestamp of nvidia-smi")
