"""Checks of the options that a config gives to a built-in workload; a refusal names option, value, remedy."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipetune.errors import InputError


def refuse(option: str, value: object, remedy: str) -> InputError:
    """Return the error for one option, to be raised: `workload.options.depth: 17 ...; <remedy>`."""
    return InputError(f"workload.options.{option}: {value!r} cannot be used; {remedy}")


def whole(option: str, value: Any, *, low: int = 1, high: int | None = None) -> int:
    """Return a whole number from low to high, or raise InputError. `true` is not a number here."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not fits or (high is not None and value > high):
        limits = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise refuse(option, value, f"give a whole number {limits}")
    return int(value)


def number(option: str, value: Any, *, low: float = 0.0, high: float = math.inf) -> float:
    """Return a finite number from low to high, or raise InputError."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high:
        limits = f"of {low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise refuse(option, value, f"give a number {limits}")
    return float(value)


def one_of(option: str, value: Any, allowed: Collection[Any]) -> Any:
    """Return the value where it is among those allowed, or raise InputError."""
    if isinstance(value, bool) or value not in tuple(allowed):
        raise refuse(option, value, f"use one of {', '.join(map(str, allowed))}")
    return value


def size(option: str, value: Any, *, low: int) -> tuple[int, int]:
    """Return a `[width, height]` pair in pixels, each of low or more, or raise InputError."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise refuse(option, value, "give [width, height] in pixels, as in [500, 375]")
    width, height = (whole(option, side, low=low) for side in value)
    return width, height


def flag(option: str, value: Any) -> bool:
    """Return true or false as given, or raise InputError."""
    if not isinstance(value, bool):
        raise refuse(option, value, "use true or false")
    return value


def existing_file(option: str, value: Any) -> Path:
    """Return the absolute path of a file that is there, or raise InputError."""
    path = _path(option, value)
    if not path.is_file():
        raise refuse(option, value, f"there is no file {path}")
    return path


def existing_folder(option: str, value: Any) -> Path:
    """Return the absolute path of a folder that is there, or raise InputError."""
    path = _path(option, value)
    if not path.is_dir():
        raise refuse(option, value, f"there is no folder {path}")
    return path


def _path(option: str, value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise refuse(option, value, "give a path")
    return Path(value).expanduser().absolute()
