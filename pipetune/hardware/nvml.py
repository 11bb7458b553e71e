"""The one door to NVML: names the GPUs, and reads how busy one of them was inside given windows.

Nothing here raises for what NVML refuses. A machine without a driver, a MIG slice or a card that reports
nothing gives a reason in words, and tuning goes on without utilisation.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any, Self

from pipetune.core.hardware import Gpu
from pipetune.core.interference import Disturbance
from pipetune.core.machine import GpuState
from pipetune.core.measurement import GpuUsage
from pipetune.hardware.gpu_counters import ChipCounters, ChipUsage, ClockLimits, GpuTenants, attempt, tenants
from pipetune.hardware.gpu_state import gpu_state

try:
    import pynvml as _pynvml
except ImportError:
    _pynvml = None

_MIN_SAMPLES = 3
_MIN_COVERAGE = 0.5
_DEFAULT_PERIOD_S = 0.2
_KEPT_SAMPLES = 36_000  # two hours at 5 a second: a bound on memory, far above one trial

_NO_LIBRARY = "the package nvidia-ml-py is not installed, so NVML cannot be asked"
_NO_DEVICE = "the trial does not run on an NVIDIA GPU"
_MIG = "MIG: NVML reports no utilisation for a slice of a GPU"
_CLOSED = "the sampler is closed"


@dataclass(frozen=True, slots=True)
class _Sample:
    """Busy share of the period that ended at `end_s` on the monotonic clock."""

    end_s: float
    percent: float


def list_gpus(nvml: Any = None) -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """Return the GPUs that NVML lists, the driver's version, and why there are none (None where there are).

    A card that does not tell its memory (Jetson, unified memory) has None there. `nvml` stands in for pynvml.
    """
    nvml = nvml or _pynvml
    if nvml is None:
        return (), None, _NO_LIBRARY
    try:
        with _session(nvml):
            driver = _text(attempt(nvml, "nvmlSystemGetDriverVersion")) or None
            gpus = tuple(gpu for index in range(nvml.nvmlDeviceGetCount()) if (gpu := _gpu(nvml, index)) is not None)
    except nvml.NVMLError as error:
        return (), None, _unavailable(error)
    return gpus, driver, None if gpus else "NVML is running and names no GPU"


def list_tenants(nvml: Any = None) -> frozenset[int]:
    """Return the numbers of the processes that are on any GPU now, as NVML numbers them; nothing without NVML.

    Called while no process of ours is on a GPU, this names processes that are surely others': for
    `GpuSampler.open(before=...)`, and later for `GpuSampler.add_others`.
    """
    nvml = nvml or _pynvml
    if nvml is None:
        return frozenset()
    try:
        with _session(nvml):
            return tenants(nvml, _handles(nvml))
    except nvml.NVMLError:
        return frozenset()


def driver_cuda_version(nvml: Any = None) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver serves, as (major, minor); None without NVML."""
    nvml = nvml or _pynvml
    if nvml is None:
        return None
    try:
        with _session(nvml):
            number = attempt(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    except nvml.NVMLError:
        return None
    return None if not number else (number // 1000, number % 1000 // 10)


def gpu_states(nvml: Any = None) -> tuple[GpuState, ...]:
    """Return link, limits and other processes of each GPU; nothing without NVML.

    Called while no process of ours is on a GPU, so that all that are there are others'.
    """
    nvml = nvml or _pynvml
    if nvml is None:
        return ()
    try:
        with _session(nvml):
            return tuple(gpu_state(nvml, handle) for handle in _handles(nvml))
    except nvml.NVMLError:
        return ()


class GpuSampler:
    """What NVML tells of one GPU: busy share, chip counters, clock limits, other processes.

    The busy share comes from the time-stamped samples that the driver itself keeps. No thread: the driver holds
    about 14 s, so whoever owns the sampler calls `collect` every few seconds, and `mark` at each window's border.
    What NVML cannot tell is a reason: `reason` after `open`, or what `usage` returns.
    """

    def __init__(self, nvml: Any, handle: Any, reason: str | None, before: frozenset[int] = frozenset()) -> None:
        self._nvml = nvml
        self._handle = handle
        self._reason = reason
        self._last_us = 0
        self._samples: deque[_Sample] = deque(maxlen=_KEPT_SAMPLES)
        self._chip: ChipCounters | None = None
        self._clocks: ClockLimits | None = None
        self._tenants: GpuTenants | None = None
        if handle is not None:
            self._chip = ChipCounters(nvml, handle)
            self._clocks = ClockLimits(nvml, handle)
            self._tenants = GpuTenants(nvml, handle, before)
        self.collect()

    @classmethod
    def open(
        cls,
        uuid: str | bytes | None,
        pci_bus_id: str | bytes | None = None,
        nvml: Any = None,
        *,
        before: frozenset[int] = frozenset(),
    ) -> Self:
        """Find the GPU that CUDA uses by its UUID (torch's form, or NVML's with `GPU-`), else by PCI bus id.

        Never by index: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER give CUDA's numbers another meaning. `before` are
        the processes that `list_tenants` named before the first process of ours used a GPU.
        """
        nvml = nvml or _pynvml
        name, bus = _text(uuid), _text(pci_bus_id)
        if name.startswith("MIG-"):
            return cls(None, None, _MIG)
        if not name and not bus:
            return cls(None, None, _NO_DEVICE)
        if nvml is None:
            return cls(None, None, _NO_LIBRARY)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return cls(None, None, _unavailable(error))
        handle, reason = _find(nvml, name, bus)
        return cls(nvml, handle, reason, before)

    @property
    def reason(self) -> str | None:
        """Why the last attempt to read utilisation failed; None where it worked."""
        return self._reason

    def collect(self) -> None:
        """Add what the driver noted since the last call; cheap, to be called every few seconds."""
        if self._handle is None or self._clocks is None or self._tenants is None:
            return
        self._clocks.collect()
        self._tenants.collect()
        try:
            samples = self._new_samples()
        except self._nvml.NVMLError as error:
            self._reason = f"NVML does not report utilisation for this device: {_words(error)}"
            return
        self._reason = None
        offset_s = time.time() - time.monotonic()
        for timestamp_us, percent in samples:
            self._samples.append(_Sample(timestamp_us / 1e6 - offset_s, percent))
            self._last_us = timestamp_us

    def mark(self) -> None:
        """Note a window's border, as soon as it is known: the chip's counters are differences between two marks."""
        if self._chip is not None:
            self._chip.mark()
        self.collect()

    def usage(self, windows: Sequence[tuple[float, float]]) -> GpuUsage | str:
        """Return the busy share inside windows, each (begin, end) on time.monotonic(), or why it is unknown.

        A sample counts where its whole period lies inside one window. Fewer than 3, or a driver that
        lost most of what the windows hold, is unknown: never 0.
        """
        self.collect()
        period_s = self._period_s()
        inside = [sample.percent for sample in self._samples if _covers(windows, sample.end_s, period_s)]
        expected = sum(max(0, int((end - begin) / period_s) - 1) for begin, end in windows)
        if len(inside) >= max(_MIN_SAMPLES, _MIN_COVERAGE * expected):
            return self._full_usage(inside, windows)
        if self._reason is not None:
            return self._reason
        return _too_few(windows, period_s, len(inside), expected)

    def throttling(self, windows: Sequence[tuple[float, float]]) -> Disturbance:
        """Return what slowed the clocks in the windows: heat and power brake are outside, the power limit is own."""
        return Disturbance() if self._clocks is None else self._clocks.disturbance(windows)

    def foreign(self, windows: Sequence[tuple[float, float]], own_pids: Collection[int]) -> Disturbance:
        """Return which other processes computed on the GPU in the windows; `GpuTenants` has the rule.

        `own_pids` are all hosts that live: what is in the session of one of them is ours too.
        """
        return Disturbance() if self._tenants is None else self._tenants.disturbance(windows, own_pids)

    def add_others(self, others: frozenset[int]) -> None:
        """Learn of more processes that are not ours: `list_tenants()` at a time when none of ours is on a GPU."""
        if self._tenants is not None:
            self._tenants.add(others)

    def close(self) -> None:
        """Give the chip's samples back and let NVML go; safe to call twice."""
        nvml, self._nvml, self._handle = self._nvml, None, None
        self._reason = self._reason or _CLOSED
        if self._chip is not None:
            self._chip.close()
        if nvml is not None:
            attempt(nvml, "nvmlShutdown")

    def _full_usage(self, inside: Sequence[float], windows: Sequence[tuple[float, float]]) -> GpuUsage:
        chip = ChipUsage() if self._chip is None else self._chip.usage(windows)
        return GpuUsage(
            mean_percent=fmean(inside),
            spread_percent=stdev(inside),
            samples=len(inside),
            sm_percent=chip.sm_percent,
            tensor_percent=chip.tensor_percent,
            memory_bandwidth_percent=chip.memory_bandwidth_percent,
        )

    def _new_samples(self) -> list[tuple[int, float]]:
        """Time stamp (microseconds since the epoch) and percent of each sample not seen yet, oldest first."""
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        try:
            _, raw = self._nvml.nvmlDeviceGetSamples(self._handle, kind, self._last_us)
        except self._nvml.NVMLError_NotFound:  # nothing new is not a failure
            return []
        values = {int(sample.timeStamp): float(sample.sampleValue.uiVal) for sample in raw}
        # A driver may fill its buffer up with blank entries; a busy share above 100 is not one either.
        return sorted((at, share) for at, share in values.items() if at > self._last_us and share <= 100)

    def _period_s(self) -> float:
        """How long each sample looks back: the median distance of samples; it differs by product."""
        ends = [sample.end_s for sample in self._samples]
        gaps = [after - before for before, after in pairwise(ends) if after > before]
        return median(gaps) if gaps else _DEFAULT_PERIOD_S


def _handles(nvml: Any) -> list[Any]:
    """Of all GPUs that answer."""
    found = (attempt(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(nvml.nvmlDeviceGetCount()))
    return [handle for handle in found if handle is not None]


def _find(nvml: Any, uuid: str, bus: str) -> tuple[Any, str | None]:
    """Return the device's handle, or None and the reason."""
    error: Exception | None = None
    plain = uuid.removeprefix("GPU-")
    ways: list[tuple[Callable[[str], Any], str]] = []
    if uuid:
        # torch gives a MIG slice's UUID without its prefix; its PCI id would lead to the whole GPU.
        if attempt(nvml, "nvmlDeviceGetHandleByUUID", f"MIG-{plain}") is not None:
            return None, _MIG
        ways.append((nvml.nvmlDeviceGetHandleByUUID, f"GPU-{plain}"))
    if bus:
        ways.append((nvml.nvmlDeviceGetHandleByPciBusId, bus))
    for look_up, name in ways:
        try:
            handle = look_up(name)
        except nvml.NVMLError as failure:
            error = error or failure
        else:
            return (None, _MIG) if _is_sliced(nvml, handle) else (handle, None)
    return None, f"NVML does not know the GPU {uuid or bus}: {_words(error)}"


def _is_sliced(nvml: Any, handle: Any) -> bool:
    """Whether MIG is on; a GPU without MIG refuses the question."""
    mode = attempt(nvml, "nvmlDeviceGetMigMode", handle)
    return mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE


def _gpu(nvml: Any, index: int) -> Gpu | None:
    """Return what a GPU says of itself; None for a broken one, which must not hide the others."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return None
    memory = attempt(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return Gpu(name=name, uuid=uuid, memory_bytes=None if memory is None else int(memory.total))


def _covers(windows: Sequence[tuple[float, float]], end_s: float, period_s: float) -> bool:
    return any(begin + period_s <= end_s <= end for begin, end in windows)


def _too_few(windows: Sequence[tuple[float, float]], period_s: float, found: int, expected: int) -> str:
    longest_s = max((end - begin for begin, end in windows), default=0.0)
    if expected < _MIN_SAMPLES:
        return (
            f"the measured windows (the longest {longest_s:.1f} s) are too short for NVML, "
            f"which gives one figure every {period_s:.2g} s; at least {_MIN_SAMPLES} are needed"
        )
    return f"NVML gave {found} of the about {expected} samples that the measured windows should hold"


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    """NVML counts its users: each nvmlInit needs its own nvmlShutdown."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        attempt(nvml, "nvmlShutdown")


def _text(value: str | bytes | None) -> str:
    """NVML's bindings returned bytes once, and strings now."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _words(error: Exception | None) -> str:
    return str(error) or type(error).__name__


def _unavailable(error: Exception) -> str:
    return f"NVML is not available (is an NVIDIA driver installed?): {_words(error)}"
