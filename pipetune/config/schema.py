"""The schema of a config file: everything that it may say, checked completely, handed on as core values."""

import copy
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from pipetune.config import yaml
from pipetune.config.yaml import Document, KeyPath, shown, shown_path
from pipetune.core.objective import Objective
from pipetune.core.probes import ProbeKind
from pipetune.core.space import Amp, Auto, Bounds, DeclaredSpace, TrialConfig, divisors
from pipetune.core.study import (
    DEFAULT_HEADROOM,
    Budget,
    CachePolicy,
    Isolation,
    StudyConfig,
    WorkloadSpec,
)
from pipetune.errors import ConfigError

DEFAULT_SECONDS = 600.0
MAX_HEADROOM = 0.9
MAX_SECONDS = 365 * 24 * 3600.0
MAX_COUNT = 2**53
MAX_BATCH = 2**31 - 1
"""Up to here all divisors are found in milliseconds."""
MAX_LOADER_COUNT = 4096
"""Ranges of workers and prefetch factors are written out as values; beyond this they are typing errors."""
TORCH_PREFETCH = 2

_SPELLED_OFF = frozenset({"off", "no", "false"})
_DURATION = re.compile(
    r"(?=[0-9])(?:([0-9]+(?:\.[0-9]+)?)h ?)?(?:([0-9]+(?:\.[0-9]+)?)m ?)?(?:([0-9]+(?:\.[0-9]+)?)s)?"
)
_STUDY_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,100}")
_DEVICE = re.compile(r"auto|cpu|cuda(?::(?:0|[1-9][0-9]{0,3}))?")
_TARGET = re.compile(r"(?:.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")


def load(path: Path | str, overrides: Sequence[str] = ()) -> StudyConfig:
    """Read a config file; `overrides` are `key=value` with dotted keys and values in YAML.

    Raises one ConfigError that lists every problem of the file and of the overrides.
    """
    source = Path(path)
    return _checked(yaml.read(source), overrides, folder=source.absolute().parent, source=source)


def from_mapping(mapping: Mapping[str, Any], folder: Path | str, overrides: Sequence[str] = ()) -> StudyConfig:
    """Check a config given as values; relative files are looked up from `folder`.

    Raises ConfigError with every problem, or InputError for a value that YAML could not hold.
    """
    data = yaml.plain(mapping)
    if not isinstance(data, dict):
        raise ConfigError("config", [f"found {shown(data)}; expected keys with values"])
    document = Document(source="config", data=data, lines={})
    return _checked(document, overrides, folder=Path(folder).absolute(), source=None)


class _MismatchError(ValueError):
    """The value is of another kind than the key takes; `hint` follows what was expected."""

    def __init__(self, expected: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(expected)


def _whole(low: int, high: int = MAX_COUNT) -> BeforeValidator:
    """Whole numbers, also as text or as 1e3."""
    limits = f"from {low} to {high}" if high < MAX_COUNT else f"of {low} or more"

    def check(value: Any) -> int:
        number = _whole_number(value, low, high)
        if number is None:
            raise _MismatchError(f"a whole number {limits}")
        return number

    return BeforeValidator(check)


def _whole_number(value: Any, low: int, high: int) -> int | None:
    number = _number(value)
    if isinstance(number, float):
        number = int(number) if number.is_integer() else None
    return number if number is not None and low <= number <= high else None


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        return yaml.number(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _choice(kind: type[StrEnum]) -> BeforeValidator:
    """One member of an enumeration, by its name in files."""

    def check(value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            raise _MismatchError(_either(list(kind)), _did_you_mean(value, list(kind))) from None

    return BeforeValidator(check)


def _matching(pattern: re.Pattern[str], expected: str) -> BeforeValidator:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _MismatchError(expected)
        return value

    return BeforeValidator(check)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _MismatchError("true or false")
    return value


def _amp(value: Any) -> Amp:
    if value is True:
        raise ValueError("that does not say which precision; write bf16 or fp16")
    # YAML reads a bare off, no or false as the boolean, which spells itself "false" again.
    name = str(value).lower()
    if name in _SPELLED_OFF:
        return Amp.FP32
    if name in list(Amp):
        return Amp(name)
    raise _MismatchError(_either(list(Amp)), _did_you_mean(name, list(Amp)))


def _seconds(value: Any) -> float:
    seconds = _number(value)
    match = _DURATION.fullmatch(value) if seconds is None and isinstance(value, str) else None
    if match:
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise _MismatchError("a time over 0 and up to a year: 90s, 10m, 1h30m, 1.5h, or a number of seconds")
    return float(seconds)


def _headroom(value: Any) -> float:
    share = _number(value)
    if share is None or not 0 <= share <= MAX_HEADROOM:
        raise _MismatchError(f"a share of the GPU's memory, 0 to {MAX_HEADROOM}")
    return float(share)


def _probes(value: Any) -> tuple[ProbeKind, ...]:
    if value == "auto":
        return tuple(ProbeKind)
    given = value if isinstance(value, list | tuple) else [value]
    try:
        return tuple(dict.fromkeys(ProbeKind(one) for one in given))
    except ValueError:
        raise _MismatchError(f"auto, or a list of {_either(list(ProbeKind))}; [] for none") from None


def _epoch_samples(value: Any) -> int | None:
    number = _whole_number(value, 1, MAX_COUNT)
    if number is None and value != "auto":
        raise _MismatchError("auto or a whole number of 1 or more")
    return number


def _storage(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise _MismatchError("null or an Optuna storage URL")


def _options(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _MismatchError("argument names (text) with their values")
    return value


def _divides(value: int, info: ValidationInfo) -> int:
    allowed: Sequence[int] = (info.context or {})["divisors"]
    if allowed and value not in allowed:
        raise ValueError(f"it does not divide {_effective_and_nearest(allowed, value)}")
    return value


def _effective_and_nearest(allowed: Sequence[int], value: int) -> str:
    position = bisect(allowed, value)
    near = " and ".join(map(str, allowed[position - 1 : position + 1]))
    return f"training.effective_batch_size {allowed[-1]}; nearest that do: {near}"


T = TypeVar("T")
N = TypeVar("N", bound=int)

_Flag = Annotated[bool, BeforeValidator(_flag)]
_Precision = Annotated[Amp, BeforeValidator(_amp)]
_Positive = Annotated[int, _whole(1)]
_Workers = Annotated[int, _whole(0, MAX_LOADER_COUNT)]
_Prefetch = Annotated[int, _whole(1, MAX_LOADER_COUNT)]
_MicroBatch = Annotated[int, _whole(1), AfterValidator(_divides)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Range(_Section, Generic[N]):
    min: N = Field(description="the least value")
    max: N = Field(description="the greatest value")

    @field_validator("max")
    @classmethod
    def _ordered(cls, value: N, info: ValidationInfo) -> N:
        low = info.data.get("min", value)
        if value < low:
            raise ValueError(f"expected {low} or more, because min is {low}")
        return value


def _form(value: Any) -> str:
    if isinstance(value, dict):
        return "range"
    return _flat_form(value)


def _flat_form(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    return "auto" if value == "auto" else "one"


_Auto = Annotated[Literal["auto"], Tag("auto")]
_Several = Annotated[list[T], Tag("list"), Field(min_length=1)]
_One = Annotated[T, Tag("one")]
_Choices = Annotated[_Auto | _Several[T] | _One[T], Discriminator(_flat_form)]
_WorkersRange = Annotated[_Range[_Workers], Tag("range")]
_PrefetchRange = Annotated[_Range[_Prefetch], Tag("range")]
_BatchRange = Annotated[_Range[_Positive], Tag("range")]


class _Workload(_Section):
    target: Annotated[str, _matching(_TARGET, "file.py:function, package.module:function or builtin:name")] = Field(
        description="file.py:function, package.module:function or builtin:name"
    )
    options: Annotated[dict[str, Any], BeforeValidator(_options)] = {}


class _Training(_Section):
    effective_batch_size: Annotated[int, _whole(1, MAX_BATCH)] = Field(description="the samples of one optimizer step")
    epochs: _Positive = 1
    epoch_samples: Annotated[int | None, BeforeValidator(_epoch_samples)] = None


class _Baseline(_Section):
    num_workers: _Workers = 0
    prefetch_factor: _Prefetch | None = None
    pin_memory: _Flag = False
    persistent_workers: _Flag = False
    batch_size: _MicroBatch = Field(description="the samples of one step of one process")
    amp: _Precision = Amp.FP32

    @field_validator("prefetch_factor")
    @classmethod
    def _prefetch_needs_workers(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("num_workers") == 0:
            raise ValueError("expected null where num_workers is 0; leave it out, or give num_workers 1 or more")
        return value

    @field_validator("persistent_workers")
    @classmethod
    def _keeping_needs_workers(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("num_workers") == 0:
            raise ValueError("expected false where num_workers is 0; leave it out, or give num_workers 1 or more")
        return value


class _Search(_Section):
    num_workers: Annotated[_Auto | _Several[_Workers] | _One[_Workers] | _WorkersRange, Discriminator(_form)] = "auto"
    prefetch_factor: Annotated[_Auto | _Several[_Prefetch] | _One[_Prefetch] | _PrefetchRange, Discriminator(_form)] = (
        "auto"
    )
    pin_memory: _Choices[_Flag] = "auto"
    persistent_workers: _Choices[_Flag] = "auto"
    batch_size: Annotated[_Auto | _Several[_MicroBatch] | _One[_MicroBatch] | _BatchRange, Discriminator(_form)] = (
        "auto"
    )
    amp: _Choices[_Precision] = "auto"

    @field_validator("batch_size")
    @classmethod
    def _range_holds_a_divisor(cls, value: Any, info: ValidationInfo) -> Any:
        allowed: Sequence[int] = (info.context or {})["divisors"]
        if isinstance(value, _Range) and allowed and not any(value.min <= d <= value.max for d in allowed):
            raise ValueError(f"no number in it divides {_effective_and_nearest(allowed, value.min)}")
        return value


class _Budget(_Section):
    time: Annotated[float, BeforeValidator(_seconds)] | None = None
    trials: _Positive | None = None


class _Study(_Section):
    study: Annotated[
        str,
        _matching(
            _STUDY_NAME,
            "a name of up to 100 letters, digits, '.', '_' and '-', not beginning with a dot; a number needs quotes",
        ),
    ] = Field(description="a name for the study's folder")
    workload: _Workload
    training: _Training
    baseline: _Baseline | None = None
    search: _Search
    objective: Annotated[Objective, _choice(Objective)] = Objective.THROUGHPUT
    budget: _Budget
    device: Annotated[str, _matching(_DEVICE, "auto, cpu, cuda or cuda:N")] = "auto"
    seed: Annotated[int, _whole(0, 2**32 - 1)] = 0
    storage: Annotated[str | None, BeforeValidator(_storage)] = None
    cache: Annotated[CachePolicy, _choice(CachePolicy)] = CachePolicy.WARM
    isolation: Annotated[Isolation, _choice(Isolation)] = Isolation.WARM
    probes: Annotated[tuple[ProbeKind, ...], BeforeValidator(_probes)] = tuple(ProbeKind)
    gpu_memory_headroom: Annotated[float, BeforeValidator(_headroom)] = DEFAULT_HEADROOM


_SECTIONS: Mapping[KeyPath, type[_Section]] = {
    (): _Study,
    ("workload",): _Workload,
    ("training",): _Training,
    ("baseline",): _Baseline,
    ("search",): _Search,
    ("budget",): _Budget,
}
_RANGED = ("num_workers", "prefetch_factor", "batch_size")
_FORMS = {
    knob: " (or auto, a list, or {min, max})" if knob in _RANGED else " (or auto, or a list)"
    for knob in _Search.model_fields
}
_RANGES = frozenset(("search", knob) for knob in _RANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    path: KeyPath
    text: str
    from_override: bool = False


def _checked(document: Document, overrides: Sequence[str], *, folder: Path, source: Path | None) -> StudyConfig:
    data = copy.deepcopy(document.data)
    overridden, problems = _apply(overrides, data)
    for name in ("workload", "training", "search", "budget"):
        # An empty section is null in YAML; a section that is left out says the same.
        if data.get(name) is None:
            data[name] = {}
    try:
        study = _Study.model_validate(data, context={"divisors": _divisors(data)})
    except ValidationError as error:
        problems += _translated(error, data)
    if problems:
        raise ConfigError(document.source, _located(problems, document, overridden))
    return _study_config(study, folder, source)


def _apply(overrides: Sequence[str], data: dict[Any, Any]) -> tuple[set[KeyPath], list[_Problem]]:
    """Put each override into the data; return the paths that came from one, and what could not be put."""
    paths = set()
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        failures = _put(data, path, text) if equals and all(path) else [f"found {shown(override)}; expected key=value"]
        problems += [_Problem(path=path, text=failure, from_override=True) for failure in failures]
        if not failures:
            paths.add(path)
    return paths, problems


def _put(data: dict[Any, Any], path: KeyPath, text: str) -> Sequence[str]:
    """Set one key to a value in YAML; return what is in the way."""
    try:
        value = yaml.parse(text, shown_path(path)).data
    except ConfigError as error:
        return error.problems
    for depth, key in enumerate(path[:-1], 1):
        if data.get(key) is None:
            data[key] = {}
        if not isinstance(data[key], dict):
            return [f"{shown_path(path[:depth])} is {shown(data[key])} and has no keys"]
        data = data[key]
    data[path[-1]] = value
    return ()


def _divisors(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Divisors of the effective batch size; empty where that is a problem of its own."""
    training = data["training"]
    declared = training.get("effective_batch_size") if isinstance(training, dict) else None
    number = _whole_number(declared, 1, MAX_BATCH)
    return () if number is None else divisors(number)


def _translated(error: ValidationError, data: Mapping[str, Any]) -> list[_Problem]:
    details = error.errors(include_url=False)
    if isinstance(data["workload"], dict) and "script" in data["workload"]:
        # What has a script needs no word about its missing target.
        details = [d for d in details if (d["type"], d["loc"]) != ("missing", ("workload", "target"))]
    # Pydantic changes keys that are no text (true becomes 1), so that they could not be found again.
    known = [_problem(detail) for detail in details if detail["type"] != "invalid_key"]
    return [*known, *_odd_keys(data)]


def _odd_keys(data: Mapping[Any, Any], path: KeyPath = ()) -> Iterator[_Problem]:
    for key, value in data.items():
        inner = (*path, key)
        if not isinstance(key, str):
            yield _Problem(path=inner, text=_unknown(inner))
        elif isinstance(value, dict) and (inner in _SECTIONS or inner in _RANGES):
            yield from _odd_keys(value, inner)


def _problem(detail: ErrorDetails) -> _Problem:
    path, form = _path(detail["loc"])
    if detail["type"] == "missing":
        return _Problem(path=path, text=f"missing; expected {_description(path)}")
    if detail["type"] == "extra_forbidden":
        return _Problem(path=path, text=_unknown(path))
    return _Problem(path=path, text=f"found {shown(detail['input'])}; {_expectation(detail, path, form)}")


def _path(location: KeyPath) -> tuple[KeyPath, str]:
    """Pydantic's location without the name of the form that a knob was read as, and that form."""
    if location[0] == "search" and len(location) > 2:
        return (*location[:2], *location[3:]), str(location[2])
    return location, ""


def _expectation(detail: ErrorDetails, path: KeyPath, form: str) -> str:
    if detail["type"] == "too_short":
        return "expected at least one value"
    if detail["type"] != "value_error":
        return "expected a section: keys with values"
    error = detail["ctx"]["error"]
    if not isinstance(error, _MismatchError):
        return str(error)
    return f"expected {error}{_FORMS[path[1]] if form == 'one' else ''}{error.hint}"


def _description(path: KeyPath) -> str:
    return _SECTIONS.get(path[:-1], _Range).model_fields[path[-1]].description or "a value"


def _unknown(path: KeyPath) -> str:
    if path == ("workload", "script"):
        return (
            "scripts are not supported yet; give `target: file.py:function`, "
            "a function that returns a pipetune.Workload"
        )
    known = list(_SECTIONS.get(path[:-1], _Range).model_fields)
    elsewhere = [
        shown_path((*section, path[-1])) for section, model in _SECTIONS.items() if path[-1] in model.model_fields
    ]
    if elsewhere:
        return f"unknown key here; did you mean {' or '.join(elsewhere)}?"
    return f"unknown key{_did_you_mean(path[-1], known) or f'; known here: {_either(known)}'}"


def _did_you_mean(word: Any, known: Sequence[str]) -> str:
    close = get_close_matches(str(word).lower(), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _located(problems: Sequence[_Problem], document: Document, overridden: set[KeyPath]) -> list[str]:
    """Problems as lines of text: the file's from top to bottom, then those of the overrides."""
    rows = []
    for problem in problems:
        path = problem.path
        text = f"{shown_path(path)}: {problem.text}"
        line = document.line(path)
        if problem.from_override or any(path[:depth] in overridden for depth in range(1, len(path) + 1)):
            rows.append((MAX_COUNT, f"--set {text}"))
        else:
            rows.append((line or 0, f"line {line}: {text}" if line else text))
    return [text for _, text in sorted(rows, key=lambda row: row[0])]


def _study_config(study: _Study, folder: Path, source: Path | None) -> StudyConfig:
    effective = study.training.effective_batch_size
    return StudyConfig(
        study=study.study,
        workload=WorkloadSpec(target=study.workload.target, options=study.workload.options, folder=str(folder)),
        effective_batch_size=effective,
        epochs=study.training.epochs,
        epoch_samples=study.training.epoch_samples,
        baseline=None if study.baseline is None else _trial_config(study.baseline, effective),
        search=_declared_space(study.search),
        objective=study.objective,
        budget=_budget(study.budget),
        device=study.device,
        seed=study.seed,
        storage=study.storage,
        cache=study.cache,
        isolation=study.isolation,
        probes=study.probes,
        gpu_memory_headroom=study.gpu_memory_headroom,
        source=source,
    )


def _trial_config(baseline: _Baseline, effective_batch_size: int) -> TrialConfig:
    default_prefetch = TORCH_PREFETCH if baseline.num_workers else None
    return TrialConfig(
        num_workers=baseline.num_workers,
        prefetch_factor=baseline.prefetch_factor or default_prefetch,
        pin_memory=baseline.pin_memory,
        persistent_workers=baseline.persistent_workers,
        batch_size=baseline.batch_size,
        accumulation_steps=effective_batch_size // baseline.batch_size,
        amp=baseline.amp,
    )


def _budget(budget: _Budget) -> Budget:
    neither = budget.time is None and budget.trials is None
    return Budget(seconds=DEFAULT_SECONDS if neither else budget.time, trials=budget.trials)


def _declared_space(search: _Search) -> DeclaredSpace:
    return DeclaredSpace(
        num_workers=_numbers(search.num_workers),
        prefetch_factor=_numbers(search.prefetch_factor),
        pin_memory=_choices(search.pin_memory),
        persistent_workers=_choices(search.persistent_workers),
        batch_size=_numbers(search.batch_size),
        amp=_choices(search.amp),
    )


def _numbers(knob: Auto | list[int] | _Range[int] | int) -> Auto | Bounds | tuple[int, ...]:
    return Bounds(low=knob.min, high=knob.max) if isinstance(knob, _Range) else _choices(knob)


def _choices(knob: Auto | list[T] | T) -> Auto | tuple[T, ...]:
    if isinstance(knob, list):
        return tuple(knob)
    return "auto" if knob == "auto" else (knob,)
