"""What a configuration needs of three kinds of memory, from what probes saw, and whether the machine has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipetune.core.measurement import FailureKind
from pipetune.core.probes import LoaderProbe, Probe, StepProbe
from pipetune.core.space import Amp, TrialConfig

DOUBT = 1.05
"""A need counts as too large from this multiple of the room on: what is near it is found out by a trial."""


class Memory(StrEnum):
    """A kind of memory that a configuration may need more of than there is."""

    GPU = "GPU memory"
    SHARED = "shared memory"
    HOST = "memory"


def memory_of(kind: FailureKind) -> Memory:
    """The kind of memory that a failure ran out of; for the others main memory."""
    return {FailureKind.GPU_OUT_OF_MEMORY: Memory.GPU, FailureKind.SHARED_MEMORY: Memory.SHARED}.get(kind, Memory.HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that trials may use of each kind; None where that is not known."""

    gpu_bytes: int | None
    shared_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What was seen: the GPU's peak at a few micro-batches (the smallest first), bytes of a sample, bytes of a worker.

    None and empty where no probe told.
    """

    gpu_peaks: Mapping[Amp, tuple[tuple[int, int], ...]]
    sample_bytes: float | None = None
    worker_bytes: int | None = None

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> "Needs":
        """What these probes saw."""
        peaks: dict[Amp, dict[int, int]] = {}
        for one in probes:
            if isinstance(one, StepProbe) and one.peak_gpu_memory_bytes is not None:
                peaks.setdefault(one.config.amp, {})[one.config.batch_size] = one.peak_gpu_memory_bytes
        workers = [
            one.worker_memory_bytes
            for one in probes
            if isinstance(one, LoaderProbe) and one.worker_memory_bytes is not None
        ]
        # Of the largest batch, in which what each batch has but once counts least.
        largest = max(probes, key=lambda one: one.config.batch_size, default=None)
        return cls(
            gpu_peaks={amp: tuple(sorted(own.items())) for amp, own in peaks.items()},
            sample_bytes=None if largest is None else largest.batch_bytes / largest.config.batch_size,
            worker_bytes=max(workers, default=None),
        )

    def missing(self, config: TrialConfig, room: Room) -> Memory | None:
        """The first kind of memory that the configuration needs clearly more of than there is; None where it fits."""
        for kind, needed, there in (
            (Memory.GPU, self.gpu_bytes(config), room.gpu_bytes),
            (Memory.SHARED, self.shared_bytes(config), room.shared_bytes),
            (Memory.HOST, self.host_bytes(config), room.host_bytes),
        ):
            if needed is not None and there is not None and needed > DOUBT * there:
                return kind
        return None

    def gpu_bytes(self, config: TrialConfig) -> float | None:
        """Peak on the GPU: a line through what was seen; None where its precision was seen at fewer than two sizes."""
        peaks = self.gpu_peaks.get(config.amp, ())
        if len(peaks) < 2:
            return None
        (small, low), (large, high) = peaks[0], peaks[-1]
        return low + (high - low) * (config.batch_size - small) / (large - small)

    def shared_bytes(self, config: TrialConfig) -> float | None:
        """Batches of workers, in shared memory until the main process has done with them.

        Each worker has prefetch_factor of them ready or in the making, and one is trained on. Where memory is pinned
        they are copied out of it as they come, and one a worker is left.
        """
        if self.sample_bytes is None:
            return None
        batches = config.num_workers if config.pin_memory else _loaded_batches(config)
        return batches * config.batch_size * self.sample_bytes

    def host_bytes(self, config: TrialConfig) -> float | None:
        """What the workers add, and all batches that are ready, in the making or trained on."""
        if self.sample_bytes is None or self.worker_bytes is None:
            return None
        loaded = _loaded_batches(config) * config.batch_size * self.sample_bytes
        return config.num_workers * self.worker_bytes + loaded


def _loaded_batches(config: TrialConfig) -> int:
    """What workers have under way, and the one that is trained on."""
    return config.num_workers * (config.prefetch_factor or 0) + 1 if config.num_workers else 0
