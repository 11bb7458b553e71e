"""Stands in for pynvml: devices by UUID and PCI id, a sample buffer as the driver's, failures on demand."""

# ruff: noqa: N801, N802, N815, N818  the names are pynvml's
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

CLOCK_OFFSET_S = time.time() - time.monotonic()


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    def __str__(self):
        return "Not Supported"


class NVMLError_NotFound(NVMLError):
    def __str__(self):
        return "Not Found"


class NVMLLibraryMismatchError(Exception):
    """Not an NVMLError, as in pynvml."""


class NVMLError_LibraryNotFound(NVMLError):
    def __str__(self):
        return "NVML Shared Library Not Found"


class NVMLError_GpuIsLost(NVMLError):
    """Keeps no text of its own, as some versions of pynvml."""


@dataclass(eq=False)
class FakeDevice:
    uuid: str
    bus: str = "00000000:01:00.0"
    mig: int | None = None
    memory_bytes: int | None = 80 * 2**30
    samples: list[tuple[int, int]] = field(default_factory=list)
    broken: bool = False
    chip: tuple[float, ...] | None = None  # SM, tensor, memory bandwidth now; None without GPM
    chip_totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # percent x seconds
    chip_at_s: float = field(default_factory=time.monotonic)
    chip_refuses: frozenset[int] = frozenset()  # metrics that answer with an error
    reasons: int | None = 0
    processes: list[tuple[int, int, int]] = field(default_factory=list)  # pid, time stamp, SM share
    contexts: tuple[int, ...] | None = ()
    context_bytes: int | None = 2**30
    link: tuple[int, int, int, int] | None = (5, 5, 16, 16)  # generation and lanes: of the link, of the card
    power_mw: tuple[int, int] | None = (700_000, 700_000)  # allowed, by default


@dataclass(eq=False)
class _ChipSample:
    at_s: float | None = None
    totals: tuple[float, ...] = ()


class c_nvmlGpmMetricsGet_t:
    def __init__(self):
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]


class FakeNVML:
    """`fail_after` successful reads of samples, each one raises `error`."""

    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    NVML_GPM_METRICS_GET_VERSION = 1
    BUFFER = 70
    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    c_nvmlGpmMetricsGet_t = c_nvmlGpmMetricsGet_t
    NVMLError_NotFound = NVMLError_NotFound

    def __init__(self, *devices, init_error=None, error=None, fail_after=10**9, binary=False):
        self.devices = devices
        self.init_error, self.error, self.left = init_error, error, fail_after
        self.binary = binary
        self.users = 0
        self.lent = set()  # GPM samples that were not freed

    def nvmlInit(self):
        if self.init_error:
            raise self.init_error
        self.users += 1

    def nvmlShutdown(self):
        self.users -= 1

    def nvmlSystemGetDriverVersion(self):
        return self._text("580.1")

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._only(device for device in self.devices if device.uuid == uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        return self._only(device for device in self.devices if device.bus == bus)

    def nvmlDeviceGetName(self, device):
        if device.broken:
            raise NVMLError_GpuIsLost
        return self._text(f"Fake {device.uuid}")

    def nvmlDeviceGetUUID(self, device):
        return self._text(device.uuid)

    def nvmlDeviceGetMemoryInfo(self, device):
        if device.memory_bytes is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(total=device.memory_bytes)

    def nvmlDeviceGetMigMode(self, device):
        if device.mig is None:
            raise NVMLError_NotSupported
        return [device.mig, device.mig]

    def nvmlDeviceGetSamples(self, device, kind, last_us):
        assert kind == self.NVML_GPU_UTILIZATION_SAMPLES
        self.left -= 1
        if self.error and self.left < 0:
            raise self.error
        new = [sample for sample in device.samples[-self.BUFFER :] if sample[0] > last_us]
        if not new:
            raise NVMLError_NotFound
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=value)) for at, value in new]

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice=int(device.chip is not None))

    def nvmlGpmSampleAlloc(self):
        sample = _ChipSample()
        self.lent.add(sample)
        return sample

    def nvmlGpmSampleFree(self, sample):
        self.lent.remove(sample)

    def nvmlGpmSampleGet(self, device, sample):
        assert sample in self.lent
        if device.broken:
            raise NVMLError_GpuIsLost
        now = time.monotonic()
        gone_s = now - device.chip_at_s
        for place, share in enumerate(device.chip):
            device.chip_totals[place] += share * gone_s
        device.chip_at_s = now
        sample.at_s, sample.totals = now, tuple(device.chip_totals)

    def nvmlGpmMetricsGet(self, request):
        first, last = request.sample1, request.sample2
        assert {first, last} <= self.lent
        assert request.version == 1
        for metric in request.metrics[: request.numMetrics]:
            place = (2, 5, 10).index(metric.metricId)
            metric.value = (last.totals[place] - first.totals[place]) / (last.at_s - first.at_s)
            metric.nvmlReturn = 3 if any(metric.metricId in device.chip_refuses for device in self.devices) else 0
        return request

    def nvmlDeviceGetCurrentClocksEventReasons(self, device):
        if device.reasons is None:
            raise NVMLError_NotSupported
        return device.reasons

    def nvmlDeviceGetProcessUtilization(self, device, last_us):
        new = [sample for sample in device.processes if sample[1] > last_us]
        if not new:
            raise NVMLError_NotFound
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=share) for pid, at, share in new]

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        if device.contexts is None:
            raise NVMLLibraryMismatchError
        return [SimpleNamespace(pid=pid, usedGpuMemory=device.context_bytes) for pid in device.contexts]

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12080

    def nvmlDeviceGetMaxPcieLinkGeneration(self, device):
        return self._known(device.link)[0]

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, device):
        return self._known(device.link)[1]

    def nvmlDeviceGetCurrPcieLinkWidth(self, device):
        return self._known(device.link)[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, device):
        return self._known(device.link)[3]

    def nvmlDeviceGetEnforcedPowerLimit(self, device):
        return self._known(device.power_mw)[0]

    def nvmlDeviceGetPowerManagementDefaultLimit(self, device):
        return self._known(device.power_mw)[1]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _device):
        raise NVMLError_NotSupported

    def _text(self, text):
        return text.encode() if self.binary else text

    @staticmethod
    def _known(figures):
        if figures is None:
            raise NVMLError_NotSupported
        return figures

    @staticmethod
    def _only(found):
        for device in found:
            return device
        raise NVMLError_NotFound


def run(device, *, begin, seconds, values, period=0.2):
    """Let `device` be sampled from `begin` (monotonic) on, the values in turn; each ends its period."""
    for step in range(1, round(seconds / period) + 1):
        at = begin + step * period + CLOCK_OFFSET_S
        device.samples.append((round(at * 1e6), values[(step - 1) % len(values)]))
