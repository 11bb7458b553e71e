"""A GPU as it is now: its link to the host, its limits, and who is on it."""

from typing import Any

from pipetune.core.machine import GpuState
from pipetune.hardware.gpu_counters import attempt

_HOLDING_DOWN = (
    # Bits of NVML's clock event reasons; nvml.h. An idle GPU and its power cap are no ill.
    (2, "a clock that somebody set (application clocks)"),
    (8, "a hardware slowdown"),
    (32 | 64, "heat"),
    (128, "the machine's power brake"),
)


def gpu_state(nvml: Any, handle: Any) -> GpuState:
    """Return what NVML tells; what it refuses is None."""
    name = attempt(nvml, "nvmlDeviceGetName", handle)
    limit, default = (
        attempt(nvml, question, handle)
        for question in ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit")
    )
    processes = attempt(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    memory = attempt(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return GpuState(
        name=name.decode(errors="replace") if isinstance(name, bytes) else name or "GPU",
        pcie_generation=attempt(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_generation_of_card=attempt(nvml, "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        pcie_width=attempt(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_of_card=attempt(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        power_limit_w=None if limit is None else limit / 1000,
        power_default_w=None if default is None else default / 1000,
        sm_clock_limits=_clock_limits(attempt(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)),
        other_processes=len({process.pid for process in processes}),
        other_memory_bytes=_sum([getattr(process, "usedGpuMemory", None) for process in processes]),
        memory_bytes=None if memory is None else int(memory.total),
    )


def _clock_limits(reasons: int | None) -> tuple[str, ...]:
    return tuple(words for bits, words in _HOLDING_DOWN if (reasons or 0) & bits)


def _sum(counts: list[int | None]) -> int | None:
    """None where one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
