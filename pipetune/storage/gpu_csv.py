"""Utilisation curves out of what `nvidia-smi --query-gpu=... --format=csv -l 1` wrote."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCsv:
    """One curve a GPU, by its name in the file, and what is wrong with each line that was left out."""

    curves: Mapping[str, Curve]
    skipped: tuple[str, ...]


def read_gpu_csv(path: Path, *, interval_s: float = 1.0) -> GpuCsv:
    """Read it all; `interval_s` lies between samples where the file has no timestamps.

    What the GPU did not report (`[N/A]`) is left out, and so are lines that something else wrote there. Raises
    InputError where the file is none of that kind, or most of its lines are not.
    """
    rows = _rows(path)
    header = [_plain(name) for name in rows[0]] if rows else []
    if UTILIZATION not in header:
        raise InputError(
            f"{path}: its first line names no column {UTILIZATION}; write it with "
            f"`nvidia-smi --query-gpu=timestamp,index,{UTILIZATION} --format=csv -l 1` (with its header)"
        )
    points: dict[str, list[tuple[float, float]]] = {}
    skipped = []
    for number, row in enumerate(rows[1:], start=2):
        if not row or [_plain(name) for name in row] == header:  # a file that was appended to
            continue
        try:
            name, time_s, percent = _sample(header, row)
        except ValueError as error:
            if number < len(rows):  # the last line of a file that is still being written is no ill
                skipped.append(f"line {number}: {error}")
            continue
        if percent is not None:
            found = points.setdefault(name, [])
            found.append((time_s if time_s is not None else len(found) * interval_s, percent))
    if not points or len(skipped) > sum(map(len, points.values())):
        reason = f": {skipped[0]}" if skipped else ""
        raise InputError(f"{path}: too little in it tells {UTILIZATION}{reason}")
    curves = {
        name: Curve(times_s=[at - own[0][0] for at, _ in own], percents=[percent for _, percent in own])
        for name, own in points.items()
    }
    return GpuCsv(curves=curves, skipped=tuple(skipped))


def _rows(path: Path) -> list[list[str]]:
    if not path.is_file():
        raise InputError(f"--read: there is no file {path}")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: more than {MOST_BYTES // 2**20} MiB; read a part of it")
        return list(csv.reader(path.read_text(encoding="utf-8").splitlines(), skipinitialspace=True))
    except UnicodeDecodeError:
        raise InputError(f"{path}: binary data or UTF-16; expected text in UTF-8") from None
    except (OSError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _sample(header: list[str], row: list[str]) -> tuple[str, float | None, float | None]:
    """GPU, seconds (None without timestamps) and percent (None where it was not reported). Raises ValueError."""
    if len(row) != len(header):
        raise ValueError(f"{_columns(len(row))} where the first line has {len(header)}")
    told = row[header.index(UTILIZATION)]
    percent = _number(told)
    if percent is not None and not 0 <= percent <= 100:
        raise ValueError(f"{UTILIZATION} is {told!r}")
    name_at = next((header.index(name) for name in _NAMES if name in header), None)
    time_s = _seconds(row[header.index(_TIMESTAMP)]) if _TIMESTAMP in header else None
    return "0" if name_at is None else row[name_at], time_s, percent


def _columns(count: int) -> str:
    return "1 column" if count == 1 else f"{count} columns"


def _plain(name: str) -> str:
    """A column's name without its unit: `utilization.gpu [%]`."""
    return name.partition("[")[0].strip()


def _number(text: str) -> float | None:
    """`97 %` or `97`; None for what is no number, such as `[N/A]`."""
    try:
        return float(text.removesuffix("%").strip())
    except ValueError:
        return None


def _seconds(text: str) -> float:
    for form in _TIME_FORMATS:
        try:
            return datetime.strptime(text, form).timestamp()  # noqa: DTZ007 - only differences count
        except ValueError:
            continue
    raise ValueError(f"{text!r} is no timestamp of nvidia-smi")
