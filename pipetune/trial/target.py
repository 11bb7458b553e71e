"""From a target's name to the user's Workload, in the process that measures it."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipetune.core.study import WorkloadSpec
from pipetune.errors import InputError
from pipetune.training.workload import Workload
from pipetune.workloads import BUILTIN


def build_workload(spec: WorkloadSpec) -> Workload:
    """Call the user's function. Raises InputError where it cannot be found or returns something else."""
    function = find_function(spec)
    workload = function(**spec.options)
    if not isinstance(workload, Workload):
        raise InputError(
            f"workload.target: {spec.target} returned a {type(workload).__name__}; it must return a pipetune.Workload"
        )
    return workload


def find_function(spec: WorkloadSpec) -> Callable[..., Any]:
    """Import what the target names; whatever the user's module raises goes through."""
    place, _, name = spec.target.rpartition(":")
    if place == "builtin":
        if name not in BUILTIN:
            raise InputError(f"workload.target: there is no builtin:{name}; there are {', '.join(sorted(BUILTIN))}")
        place, _, name = BUILTIN[name].rpartition(":")
    module = _import_file(spec, place) if place.endswith(".py") else _import_module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"workload.target: {place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _import_file(spec: WorkloadSpec, place: str) -> Any:
    path = Path(spec.folder, place).resolve()
    if not path.is_file():
        raise InputError(f"workload.target: there is no file {path}")
    # Imported by its own name, so that workers started by spawn find its classes too.
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    found = Path(getattr(module, "__file__", None) or "").resolve()
    if found != path:
        raise InputError(
            f"workload.target: a module named {path.stem!r} is there already ({found}); rename {path.name}"
        )
    return module


def _import_module(spec: WorkloadSpec, place: str) -> Any:
    sys.path.insert(0, str(Path(spec.folder).resolve()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise InputError(f"workload.target: there is no module {place!r}: {error}") from error
        raise
