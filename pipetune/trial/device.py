"""The device that trials run on: which one, what it supports, and its memory."""

import gc
from typing import Any

import torch

from pipetune.core.space import Amp
from pipetune.errors import InputError
from pipetune.hardware.host import cpu_amps, cpu_model


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU. Raises InputError where it is not there."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return _made_current(0) if has_cuda else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not has_cuda:
            raise InputError(f"device: {name} was asked for, but torch {torch.__version__} sees no CUDA device")
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise InputError(f"device: {name} was asked for; torch sees {torch.cuda.device_count()} device(s)")
        return _made_current(index)
    return device


def _made_current(index: int) -> torch.device:
    """The GPU of that index, also for code of the user's that names none."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's model name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def device_ids(device: torch.device) -> tuple[str | None, str | None]:
    """UUID and PCI bus id by which NVML knows the device; a CUDA index means nothing to it."""
    if device.type != "cuda":
        return None, None
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    bus = (
        f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        if hasattr(properties, "pci_bus_id")
        else None
    )
    return (str(uuid) if uuid is not None else None), bus


def supported_amps(device: torch.device) -> tuple[Amp, ...]:
    """Precisions that the device computes itself; emulated bf16 does not count."""
    if device.type != "cuda":
        return cpu_amps()
    amps = [Amp.FP32]
    if torch.cuda.is_bf16_supported(including_emulation=False):
        amps.append(Amp.BF16)
    # Tensor cores for half precision came with Volta.
    if torch.cuda.get_device_capability(device) >= (7, 0):
        amps.append(Amp.FP16)
    return tuple(amps)


def speed_flags(device: torch.device) -> dict[str, str]:
    """Switches that change speed, as the user's code left them."""
    flags = {
        "torch_num_threads": str(torch.get_num_threads()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        flags["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        flags["cudnn_version"] = str(torch.backends.cudnn.version())
    return flags


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give back what the caching allocators hold, pinned host memory included, and reset the peaks."""
    gc.collect()
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return
    torch.cuda.empty_cache()
    empty_pinned = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - there is no public name yet
    if empty_pinned is not None:
        empty_pinned()
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory that the allocator reserved since the last release; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def keep_free(device: torch.device, share: float) -> None:
    """Let this process have no more than the rest of the GPU's memory; asking for more is out of memory."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0 - share, device)


def allocation_retries(device: torch.device) -> int | None:
    """How often the allocator had to empty its cache to serve a request; None on a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
