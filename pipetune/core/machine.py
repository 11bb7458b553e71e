"""The evidence that a check of a machine rests on: what was seen of it, without judgement. None is "not known"."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipetune.core.hardware import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One GPU as torch sees it; `is_compiled_for` tells whether this torch holds code that it can run."""

    name: str
    capability: tuple[int, int]
    is_compiled_for: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """torch as a process of its own found it; with `error` nothing else is known, `cuda_error` says why CUDA fails.

    `cuda_version` is what torch was built for; None in a build without CUDA. `opencv_threads` is None without OpenCV.
    """

    error: str | None = None
    version: str | None = None
    cuda_version: str | None = None
    cuda_error: str | None = None
    cudnn_version: int | None = None
    devices: tuple[CudaDevice, ...] = ()
    start_method: str | None = None
    threads: int | None = None
    opencv_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU as NVML sees it: its link to the host, its limits, and who else is on it.

    A link's generation is the best that card and slot agree on, since an idle link saves power by slowing down.
    """

    name: str
    pcie_generation: int | None = None
    pcie_generation_of_card: int | None = None
    pcie_width: int | None = None
    pcie_width_of_card: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    sm_clock_limits: tuple[str, ...] = ()
    other_processes: int = 0
    other_memory_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """What of the NVIDIA driver is there: the newest CUDA that it serves, its device files, cards on the bus.

    `cards_on_bus` counts NVIDIA's display devices, also those that no driver serves.
    """

    cuda_version: tuple[int, int] | None = None
    device_files: tuple[str, ...] = ()
    cards_on_bus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that data is read from; where it `is_read`, `read_bytes_per_s` from storage, if enough lies there."""

    path: str
    filesystem: str | None = None
    is_network: bool = False
    is_rotating: bool | None = None
    is_read: bool = False
    read_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder:
    """Where CUDA keeps compiled kernels; `why_not` says what keeps it from that, None where it works."""

    path: str
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Everything that was seen. Memory is in bytes, `environ` the variables that decide speed and were set.

    `is_guarded` tells whether a script's work is behind `if __name__ == "__main__"`; None where there is no script.
    """

    profile: HardwareProfile
    torch: TorchFacts
    driver: DriverFacts
    gpus: tuple[GpuState, ...]
    container: str | None
    memory_present_bytes: int
    memory_available_bytes: int
    shared_memory_total_bytes: int | None
    open_files_limit: int | None
    swap_used_bytes: int
    swap_rate_bytes_per_s: float
    cpus_busy: float
    environ: Mapping[str, str]
    kernel_cache: CacheFolder
    folder: FolderFacts
    dead_packages: tuple[str, ...]
    is_guarded: bool | None = None
