"""What a trial host found out about the workload and its device: a value."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipetune.core.cache import ReadAhead
from pipetune.core.measurement import TrialFailure
from pipetune.core.samples import SampleComparison
from pipetune.core.space import Amp
from pipetune.core.tuned import WorkloadTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """Read once, in the serial host, before any trial.

    `dataset_samples` is None where the dataset has no length. `fixed_batch` is set where the workload's own
    batch sampler decides. `device_uuid` and `device_pci_bus_id` name the GPU to NVML; None on a CPU.
    `flags` are the switches that change speed and were found as the user left them.
    """

    dataset_samples: int | None
    is_iterable: bool
    fixed_batch: int | None
    start_method: str
    traits: WorkloadTraits
    has_data_paths: bool
    device: str
    device_name: str
    device_uuid: str | None
    device_pci_bus_id: str | None
    amps: tuple[Amp, ...]
    torch_version: str
    cuda_version: str | None
    flags: Mapping[str, str]

    @property
    def has_accelerator(self) -> bool:
        """Whether trials run on a GPU."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What came of reading samples in workers before the first trial; each None where it was not done.

    `failure` is what ended it; trials with workers will most likely meet the same.
    """

    comparison: SampleComparison | None = None
    read_ahead: ReadAhead | None = None
    failure: TrialFailure | None = None
