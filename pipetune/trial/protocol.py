"""The messages between the parent and a trial host: one JSON object a line, checked on arrival."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from pipetune.config import yaml
from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import Measurement, Phase, TrialFailure
from pipetune.core.space import TrialConfig
from pipetune.core.study import WorkloadSpec


def _pack(spec: WorkloadSpec) -> str:
    return yaml.rendered({"target": spec.target, "folder": spec.folder, "options": dict(spec.options)})


def _unpack(given: Any) -> Any:
    return yaml.parse(given, "request").data if isinstance(given, str) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLimits:
    """How long a trial measures: at least `min_s` and until settled, at most `max_s` seconds of windows.

    `epoch_samples` is the planned length of an epoch, by which the cost of its start is judged; None where it
    is not known. `until_warm` tells that reading from storage will end, and is to be waited for.
    """

    min_s: float = 4.0
    max_s: float = 20.0
    window_s: float = 0.5
    warm_up_s: float = 1.0
    epoch_samples: int | None = None
    until_warm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpRequest:
    """Build the workload. A serial host also reads a first sample and never starts a worker."""

    # As YAML: JSON knows neither an infinity nor a key that is a number, and options may hold both.
    spec: Annotated[WorkloadSpec, BeforeValidator(_unpack), PlainSerializer(_pack)]
    device: str
    seed: int
    serial: bool
    kind: Literal["set_up"] = "set_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Measure one configuration; `cold` drops the page cache of the workload's data_paths first."""

    config: TrialConfig
    limits: MeasureLimits
    compute_only: bool
    cold: bool
    kind: Literal["trial"] = "trial"


Request = SetUpRequest | TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    """The host entered a phase; also sent while a long one goes on, as a sign of life."""

    phase: Phase
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyEvent:
    """The workload is built."""

    facts: WorkloadFacts
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEvent:
    """The trial is done; GPU usage is still to be filled in by the parent."""

    measurement: Measurement
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent:
    """The trial failed in a way that the host survived."""

    failure: TrialFailure
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEvent:
    """The workload cannot be built or gives no first sample: the user's own error, as text."""

    message: str
    traceback_text: str
    kind: Literal["refused"] = "refused"


Event = PhaseEvent | ReadyEvent | MeasuredEvent | FailedEvent | RefusedEvent

_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def encode(message: Request | Event) -> bytes:
    """One line, newline included. NaN and infinities keep their meaning."""
    adapter: TypeAdapter[Request] | TypeAdapter[Event]
    adapter = _REQUESTS if isinstance(message, SetUpRequest | TrialRequest) else _EVENTS
    # Not by pydantic's own JSON: it turns infinities into null, and stops at names that are no UTF-8.
    plain = adapter.dump_python(message, mode="json")  # type: ignore[arg-type]
    return json.dumps(plain, ensure_ascii=False).encode(errors="replace") + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises ValueError for anything that is no request."""
    return _REQUESTS.validate_json(line)


def decode_event(line: bytes) -> Event | None:
    """None for a line that is no event: the user's code may have written into the pipe."""
    try:
        return _EVENTS.validate_json(line)
    except ValidationError:
        return None
