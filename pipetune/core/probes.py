"""What a probe says: one cost of the pipeline, measured apart and cheaply, before the trials."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipetune.core.space import TrialConfig


class ProbeKind(StrEnum):
    """What is probed before the search: a sample without workers, the loader with workers, the step alone."""

    SAMPLE = "sample"
    LOADER = "loader"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe:
    """The training step alone, over and over on one batch; of `config` only amp, batch_size, accumulation_steps count.

    `batch_s` are seconds of one micro-batch that lies on the device, its share of the optimizer's step included.
    `copy_s` are seconds of moving the batch to the device from pageable memory, `pinned_copy_s` from pinned memory;
    both None on a CPU, and so is `peak_gpu_memory_bytes`. `batch_bytes` are those of all tensors in the batch.
    `seconds` is what the probe cost in all.
    """

    config: TrialConfig
    batch_s: float
    copy_s: float | None
    pinned_copy_s: float | None
    peak_gpu_memory_bytes: int | None
    batch_bytes: int
    seconds: float

    @property
    def kind(self) -> ProbeKind:
        """What it is a probe of."""
        return ProbeKind.STEP

    @property
    def samples_per_sec(self) -> float:
        """What it alone would make."""
        return self.config.batch_size / self.batch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProbe:
    """The loader alone: batches taken and dropped as fast as they come.

    `first_batch_s` are seconds from asking for an iterator to its first batch, the start of the workers included.
    `batch_s` are seconds between two batches, once what was made while the first was awaited is used up. `batches`
    came after the first.
    `receive_s` are CPU seconds of the main process, all its threads, for each batch that a worker made: unpickling,
    pinning; 0 without workers.
    `work_share` is the share of the workers' time (without workers: of this process's) that was CPU work, 0-1; the
    rest was waiting: for a disk, a network, a CPU where others want it too, or for the main process where receiving
    takes longer than making. None where it cannot be read.
    `spread` is the standard deviation of the time to make a batch over its mean; None where that is not seen: with
    workers, or with one such time only.
    `batch_bytes` are those of all tensors in the first batch. `worker_memory_bytes` is what a worker adds in the
    mean: pages that no other process has; None without workers, or where it cannot be read. `seconds` is what the
    probe cost in all.
    """

    config: TrialConfig
    first_batch_s: float
    batch_s: float
    receive_s: float
    work_share: float | None
    spread: float | None
    batches: int
    batch_bytes: int
    worker_memory_bytes: int | None
    seconds: float

    @property
    def kind(self) -> ProbeKind:
        """What it is a probe of."""
        return ProbeKind.LOADER if self.config.num_workers else ProbeKind.SAMPLE

    @property
    def samples_per_sec(self) -> float:
        """What it alone would make."""
        return self.config.batch_size / self.batch_s


Probe = StepProbe | LoaderProbe


def knows_both_sides(probes: Sequence[Probe]) -> bool:
    """Whether the step was probed, and workers too: then what both make together can be foretold."""
    return {ProbeKind.STEP, ProbeKind.LOADER} <= {one.kind for one in probes}
