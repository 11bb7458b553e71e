"""What a trial says: a measurement, or a failure with its kind, phase and log tail."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipetune.core.space import TrialConfig
from pipetune.core.throughput import (
    COLD_BYTES_PER_S,
    EpochStart,
    Estimate,
    TrainingPlan,
    Window,
    data_wait_percent,
    effective_rate,
    steady_rate,
)


class Phase(StrEnum):
    """Where in its life a trial is, or was when it failed."""

    START = "start"
    BUILD = "build"
    FIRST_SAMPLE = "first_sample"
    COMPARE_SAMPLES = "compare_samples"
    READ_AHEAD = "read_ahead"
    PROBE = "probe"
    PREPARE = "prepare"
    WORKER_START = "worker_start"
    WARM_UP = "warm_up"
    MEASURE = "measure"
    EPOCH_END = "epoch_end"
    COMPUTE_ONLY = "compute_only"
    CLOSE = "close"


class CacheState(StrEnum):
    """Where a trial's data came from."""

    WARM = "warm"
    COLD = "cold"


class FailureKind(StrEnum):
    """Why a trial gave no measurement; members are added, never renamed."""

    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    SHARED_MEMORY = "shared_memory"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    INVALID_DATA = "invalid_data"
    NON_FINITE = "non_finite"

    @property
    def is_memory(self) -> bool:
        """Whether the configuration was too large rather than broken: told to Optuna as infeasible."""
        return self in _MEMORY_KINDS


_MEMORY_KINDS = frozenset({FailureKind.GPU_OUT_OF_MEMORY, FailureKind.HOST_OUT_OF_MEMORY, FailureKind.SHARED_MEMORY})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """NVML's busy share inside the measured windows, percent: mean, standard deviation, sample count.

    The other counters are the chip's own (GPM), over the same time, percent; None where it has none: SMs at work,
    tensor cores at work, memory bandwidth in use.
    """

    mean_percent: float
    spread_percent: float
    samples: int
    sm_percent: float | None = None
    tensor_percent: float | None = None
    memory_bandwidth_percent: float | None = None

    def estimate(self) -> Estimate:
        """The mean with its 95 % interval, the samples taken as independent and kept inside 0-100."""
        half = 1.96 * self.spread_percent / max(1, self.samples) ** 0.5
        return Estimate(
            value=self.mean_percent,
            low=max(0.0, self.mean_percent - half),
            high=min(100.0, self.mean_percent + half),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One finished trial: raw windows and what was seen beside them; rates derive from it.

    `gpu` is None exactly where `gpu_reason` says why. Memory is in bytes. `compute_only_samples_per_sec`
    is the rate of the same step on one batch already on the device; None where it was not measured.
    `settled` tells whether the interval reached its target before the limit. `drained_samples` of the windows
    came out of a queue that was still falling, and training will not have them. `set_aside` are windows that
    count in no rate: before the steady state, or disturbed from outside; `interference` names what was seen of that.
    A `censored` trial was ended early, since it could not come near the best: it says only that it is not among them.
    """

    config: TrialConfig
    windows: tuple[Window, ...]
    epoch_start: EpochStart
    settled: bool
    gpu: GpuUsage | None
    gpu_reason: str | None
    peak_gpu_memory_bytes: int | None
    host_memory_bytes: int | None
    compute_only_samples_per_sec: float | None
    seconds: float
    phase_seconds: Mapping[str, float]
    drained_samples: float = 0.0
    set_aside: tuple[Window, ...] = ()
    interference: tuple[str, ...] = ()
    allocation_retries: int | None = None
    censored: bool = False

    @property
    def cache(self) -> CacheState | None:
        """Whether its windows read from storage or from memory, all in all; None where that is not known."""
        read = [window.read_bytes for window in self.windows if window.read_bytes is not None]
        if not read:
            return None
        seconds = sum(window.seconds for window in self.windows if window.read_bytes is not None)
        return CacheState.COLD if sum(read) > COLD_BYTES_PER_S * seconds else CacheState.WARM

    def steady(self) -> Estimate:
        """Samples per second inside an epoch: what was consumed, less the fall in ready batches."""
        return steady_rate(self.windows, self.drained_samples)

    def effective(self, plan: TrainingPlan) -> Estimate:
        """Samples per second over the planned run, epoch starts included."""
        return effective_rate(self.steady(), self.epoch_start, plan, persistent_workers=self.config.persistent_workers)

    def remarks(self) -> tuple[str, ...]:
        """What a reader of its rate should know, in a few words each; empty where all was well."""
        found = []
        if self.censored:
            found.append("ended early: it could not come near the best")
        elif not self.settled:
            found.append("unstable: the rate did not settle in the time for it")
        if self.drained_samples > 0:
            share = self.drained_samples / sum(window.samples for window in self.windows)
            found.append(f"ready batches were still falling, which would have flattered the rate by {share:.1%}")
        if self.cache is CacheState.COLD:
            found.append("cold: its data came from storage")
        if self.allocation_retries:
            found.append(f"the GPU's memory was so full that it had to be cleared {self.allocation_retries} times")
        return (*found, *self.interference)

    def data_work_share(self) -> float | None:
        """Share of the wait for data that this process spent working, 0-1; None where that was not measured."""
        known = [window for window in self.windows if window.data_work_s is not None]
        wait_s = sum(window.data_wait_s for window in known)
        return min(1.0, sum(window.data_work_s or 0.0 for window in known) / wait_s) if wait_s > 0 else None

    def data_wait_percent(self) -> float:
        """Share of the measured time that the main thread waited for data, 0-100."""
        return data_wait_percent(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailure:
    """Why a trial gave no measurement, where it was, and the end of what it printed."""

    config: TrialConfig
    kind: FailureKind
    phase: Phase
    message: str
    traceback_text: str = ""
    log_tail: str = ""
    seconds: float = 0.0

    def headline(self) -> str:
        """One line: `gpu_out_of_memory in warm_up: CUDA out of memory ...`."""
        # A worker's exception arrives with its whole traceback as the message: the error follows the last of them.
        _, _, after = self.message.rpartition("Traceback (most recent call last):\n")
        lines = [line for line in after.strip("\n").splitlines() if line and not line.startswith(" ")]
        return f"{self.kind} in {self.phase}: {lines[0] if lines else 'no message'}"


TrialOutcome = Measurement | TrialFailure
