"""The messages between the parent and a trial host: one JSON object a line, checked on arrival."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from pipetune.config import yaml
from pipetune.core.cache import ReadAhead
from pipetune.core.facts import WorkloadFacts
from pipetune.core.machine import TorchFacts
from pipetune.core.measurement import Measurement, Phase, TrialFailure
from pipetune.core.probes import Probe
from pipetune.core.samples import SampleDigests
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
    is not known. `until_warm` tells that reading from storage will end, and is to be waited for. A trial that cannot
    reach `least_rate` (samples/s) ends early; None lets every trial run to its end.
    """

    min_s: float = 4.0
    max_s: float = 20.0
    window_s: float = 0.5
    warm_up_s: float = 1.0
    epoch_samples: int | None = None
    until_warm: bool = True
    least_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """The samples that a trial reads, over and over: `count` of them from the `first` on, in an order by `seed`.

    `count` None means all that follow.
    """

    first: int
    count: int | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpRequest:
    """Build the workload. A serial host also reads a first sample and never starts a worker.

    `gpu_memory_headroom` is the share of the GPU's memory that trials leave free.
    """

    # As YAML: JSON knows neither an infinity nor a key that is a number, and options may hold both.
    spec: Annotated[WorkloadSpec, BeforeValidator(_unpack), PlainSerializer(_pack)]
    device: str
    seed: int
    serial: bool
    gpu_memory_headroom: float = 0.0
    kind: Literal["set_up"] = "set_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Measure one configuration; `cold` drops the page cache of the workload's data_paths first.

    `part` are the samples to read; None leaves the choice to the workload's own sampler.
    """

    config: TrialConfig
    limits: MeasureLimits
    compute_only: bool
    cold: bool
    part: ReadPart | None = None
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSamplesRequest:
    """Read these samples, for `limit_s` at most, and answer with digests; a serial host chooses where None is given.

    A forking host reads them in workers. With `one_thread` a serial host reads as a worker does, after which it is
    of no use for trials. `config` names what reads, should it fail.
    """

    config: TrialConfig
    indices: tuple[int, ...] | None
    limit_s: float
    one_thread: bool = False
    kind: Literal["read_samples"] = "read_samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadRequest:
    """Read samples into the page cache, until all are in memory, `seconds` are over or `memory_bytes` were read."""

    config: TrialConfig
    dataset_samples: int | None
    seed: int
    seconds: float
    memory_bytes: int
    kind: Literal["read_ahead"] = "read_ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbeRequest:
    """Time the step alone, for about `seconds`, on a batch of the configuration's size, made of samples of `part`."""

    config: TrialConfig
    seconds: float
    part: ReadPart | None = None
    kind: Literal["step_probe"] = "step_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProbeRequest:
    """Take batches of samples of `part` for at least `seconds`, without training; `cold` as in a trial."""

    config: TrialConfig
    seconds: float
    cold: bool
    part: ReadPart | None = None
    kind: Literal["loader_probe"] = "loader_probe"


ProbeRequest = StepProbeRequest | LoaderProbeRequest
Task = ReadSamplesRequest | ReadAheadRequest | ProbeRequest | TrialRequest
"""What a host is asked to do once it is set up."""
Request = SetUpRequest | Task


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
class SamplesEvent:
    """The samples are read."""

    digests: SampleDigests
    kind: Literal["samples"] = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadEvent:
    """Reading ahead has ended."""

    read_ahead: ReadAhead
    kind: Literal["read_ahead"] = "read_ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedEvent:
    """The probe is done. `samples` of its part were read for it, at most."""

    probe: Probe
    samples: int
    kind: Literal["probed"] = "probed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEvent:
    """The trial is done; GPU usage is still to be filled in by the parent. `samples` were read in all."""

    measurement: Measurement
    samples: int
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


Answer = SamplesEvent | ReadAheadEvent | ProbedEvent | MeasuredEvent
"""What a host says to a task that it could do."""
Event = PhaseEvent | ReadyEvent | Answer | FailedEvent | RefusedEvent

_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
_TORCH_FACTS = TypeAdapter(TorchFacts)


def encode(message: Request | Event) -> bytes:
    """One line, newline included. NaN and infinities keep their meaning."""
    adapter: TypeAdapter[Request] | TypeAdapter[Event]
    adapter = _REQUESTS if isinstance(message, Request) else _EVENTS
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


def encode_torch_facts(facts: TorchFacts) -> bytes:
    """One line, newline included."""
    return _TORCH_FACTS.dump_json(facts) + b"\n"


def decode_torch_facts(line: bytes) -> TorchFacts | None:
    """None for a line that is none."""
    try:
        return _TORCH_FACTS.validate_json(line)
    except ValidationError:
        return None
