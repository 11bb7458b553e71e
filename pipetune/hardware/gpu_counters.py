"""What `hardware.nvml` keeps of one GPU beside its busy share: chip counters, clock limits, other processes.

Each class is given NVML and a device's handle, never imports it, and stays silent about what the driver refuses.
Times are on time.monotonic(); windows are (begin, end) pairs of it.
"""

import math
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pipetune.core.interference import Cause, Disturbance, Finding

Windows = Sequence[tuple[float, float]]

_REFUSED = object()

_KEPT_MARKS = 256  # a sample is some kilobytes of the driver's memory; a trial has a few dozen windows
_KEPT_READINGS = 2_000  # far above one trial
_JOIN_S = 0.05  # windows that follow each other this closely are one stretch
_GPM_MIN_S = 0.1  # NVML asks for at least this between two GPM samples
_BORDER_SHARE = 0.1  # a mark may miss a stretch's border by this share of its length
_MIN_COVERAGE = 0.5
_GLANCE_S = 1.0  # drivers sample processes once a second or faster; shorter glances would find nothing in between
_MIN_SHARE_PERCENT = 5.0  # a desktop's compositor takes a percent or two
_MIN_SLOWED = 0.1  # share of clock readings; a single flicker is no finding
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h

_REASONS = (
    # HW thermal slowdown (64) and SW thermal slowdown (32): what cools the card is not the trial's.
    (Cause.GPU_HEAT, 64 | 32, "heat slowed the GPU's clocks"),
    (Cause.GPU_POWER_BRAKE, 128, "the machine's power brake slowed the GPU's clocks"),
    (Cause.GPU_POWER_CAP, 4, "the GPU's power limit slowed its clocks"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipUsage:
    """GPM counters over the windows, percent: SMs at work, tensor cores at work, memory bandwidth in use."""

    sm_percent: float | None = None
    tensor_percent: float | None = None
    memory_bandwidth_percent: float | None = None


class ChipCounters:
    """GPM samples (Hopper and newer), taken at window borders; a metric is the difference between two of them."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        support = attempt(nvml, "nvmlGpmQueryDeviceSupport", handle)
        self._is_supported = bool(support is not None and support.isSupportedDevice)
        self._marks: deque[tuple[float, Any]] = deque()

    def mark(self) -> None:
        """Take a sample now; the oldest one makes room where there are too many."""
        if not self._is_supported:
            return
        if len(self._marks) >= _KEPT_MARKS:
            sample = self._marks.popleft()[1]
        else:
            sample = attempt(self._nvml, "nvmlGpmSampleAlloc")
        if sample is None:
            return
        if not succeeds(self._nvml, "nvmlGpmSampleGet", self._handle, sample):
            attempt(self._nvml, "nvmlGpmSampleFree", sample)
            return
        self._marks.append((time.monotonic(), sample))

    def usage(self, windows: Windows) -> ChipUsage:
        """Return the mean over the stretches that windows form, of those whose borders have a mark nearby."""
        stretches = _stretches(windows)
        pairs = [pair for stretch in stretches if (pair := self._enclosing(*stretch)) is not None]
        spans = [after[0] - before[0] for before, after in pairs]
        if not pairs or sum(spans) < _MIN_COVERAGE * sum(end - begin for begin, end in stretches):
            return ChipUsage()
        figures = [self._metrics(before[1], after[1]) for before, after in pairs]
        sm, tensor, bandwidth = (_weighted_mean(column, spans) for column in zip(*figures, strict=True))
        return ChipUsage(sm_percent=sm, tensor_percent=tensor, memory_bandwidth_percent=bandwidth)

    def close(self) -> None:
        """Give every sample back."""
        self._is_supported = False
        while self._marks:
            attempt(self._nvml, "nvmlGpmSampleFree", self._marks.popleft()[1])

    def _enclosing(self, begin: float, end: float) -> tuple[tuple[float, Any], tuple[float, Any]] | None:
        """The marks nearest to both borders; None where one is too far off, or they are too close together."""
        if not self._marks:
            return None
        first, last = (min(self._marks, key=lambda mark: abs(mark[0] - border)) for border in (begin, end))
        slack_s = _BORDER_SHARE * (end - begin)
        is_near = abs(first[0] - begin) <= slack_s and abs(last[0] - end) <= slack_s
        return (first, last) if is_near and last[0] - first[0] >= _GPM_MIN_S else None

    def _metrics(self, before: Any, after: Any) -> tuple[float | None, ...]:
        nvml = self._nvml
        wanted = (
            nvml.NVML_GPM_METRIC_SM_UTIL,
            nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        )
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics, request.sample1, request.sample2 = len(wanted), before, after
        for place, metric in enumerate(wanted):
            request.metrics[place].metricId = metric
        if not succeeds(nvml, "nvmlGpmMetricsGet", request):
            return (None,) * len(wanted)
        return tuple(_percent(request.metrics[place]) for place in range(len(wanted)))


class ClockLimits:
    """Why the clocks were lower than they could be, read again and again: NVML tells the present only."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._readings: deque[tuple[float, int]] = deque(maxlen=_KEPT_READINGS)

    def collect(self) -> None:
        """Read the reasons of this moment; older bindings and drivers call them throttle reasons."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            reasons = attempt(self._nvml, name, self._handle)
            if reasons is not None:
                self._readings.append((time.monotonic(), int(reasons)))
                return

    def disturbance(self, windows: Windows) -> Disturbance:
        """Return which limits held in at least a tenth of the readings that lie in the windows."""
        inside = [reasons for at_s, reasons in self._readings if any(begin <= at_s <= end for begin, end in windows)]
        findings = []
        for cause, bits, words in _REASONS:
            count = sum(1 for reasons in inside if reasons & bits)
            if count and count >= _MIN_SLOWED * len(inside):
                text = f"{words} in {count} of {len(inside)} readings"
                findings.append(Finding(cause=cause, amount=count / len(inside), text=text))
        return Disturbance(findings=tuple(findings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Glance:
    """SM share of each process, percent, in the time between two readings."""

    begin_s: float
    end_s: float
    shares: dict[int, float]


class GpuTenants:
    """Which processes computed on the GPU, and which of them are surely not ours.

    NVML numbers processes as the machine's first PID namespace does. Inside a container our own processes therefore
    have other numbers, and some drivers translate one list and not the other (HAMi-core issue 112). So a process is
    called foreign only where that cannot be wrong: it was on a GPU `before` any of ours was, or we are in the first
    namespace ourselves and it is neither one of ours nor in the session of one. In doubt nothing is said.
    """

    def __init__(self, nvml: Any, handle: Any, before: frozenset[int]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._before = before
        self._knows_numbers = in_first_pid_namespace()
        self._sessions: dict[int, int] = {}
        self._glances: deque[_Glance] = deque(maxlen=_KEPT_READINGS)
        self._last_us = int(time.time() * 1e6)
        self._last_s = time.monotonic()

    def add(self, others: frozenset[int]) -> None:
        """Learn of more processes that are not ours."""
        self._before |= others

    def collect(self) -> None:
        """Read what ran since the last reading, at most once a second."""
        now = time.monotonic()
        if now - self._last_s < _GLANCE_S:
            return
        samples = _process_samples(self._nvml, self._handle, self._last_us)
        if samples is None:
            return
        shares: dict[int, list[int]] = {}
        for sample in samples:
            self._last_us = max(self._last_us, int(sample.timeStamp))
            if sample.smUtil <= 100:  # some drivers leave garbage in entries of idle processes
                shares.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        for pid in shares.keys() - self._sessions.keys():
            self._sessions[pid] = _session_of(pid)
        means = {pid: fmean(values) for pid, values in shares.items()}
        self._glances.append(_Glance(begin_s=self._last_s, end_s=now, shares=means))
        self._last_s = now

    def disturbance(self, windows: Windows, own_pids: Collection[int]) -> Disturbance:
        """Return the processes that are not ours and took at least 5 % of the SM time in the windows, together."""
        shares = {pid: share for pid, share in self._shares(windows).items() if self._is_foreign(pid, own_pids)}
        total = min(100.0, sum(shares.values()))
        if total < _MIN_SHARE_PERCENT:
            return Disturbance()
        pids = sorted(shares, key=lambda pid: -shares[pid])
        some = ", ".join(map(str, pids[:3]))
        who = f"process {some}" if len(pids) == 1 else f"{len(pids)} processes ({some}{', ...' * (len(pids) > 3)})"
        text = f"{who} used {total:.0f} % of the GPU (SM) during the windows"
        return Disturbance(findings=(Finding(cause=Cause.GPU_PROCESSES, amount=total, text=text),))

    def _shares(self, windows: Windows) -> dict[int, float]:
        """Mean share of each process over the windows, from the glances that lie mostly inside."""
        weights = [(glance, _overlap_s(glance, windows)) for glance in self._glances]
        inside = [(glance, w) for glance, w in weights if w >= _MIN_COVERAGE * (glance.end_s - glance.begin_s)]
        total_s = sum(weight for _, weight in inside)
        shares: dict[int, float] = {}
        for glance, weight in inside:
            for pid, share in glance.shares.items():
                shares[pid] = shares.get(pid, 0.0) + share * weight / total_s
        return {pid: share for pid, share in shares.items() if share > 0}

    def _is_foreign(self, pid: int, own_pids: Collection[int]) -> bool:
        if pid in own_pids or self._sessions.get(pid, -1) in own_pids:
            return False
        return pid in self._before or self._knows_numbers


def tenants(nvml: Any, handles: Iterable[Any]) -> frozenset[int]:
    """Return the numbers of all processes that hold a context on these GPUs, or computed on them lately."""
    found: set[int] = set()
    for handle in handles:
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            found.update(int(process.pid) for process in attempt(nvml, name, handle) or ())
        # The two lists may use different numbers for the same process, so both are remembered.
        found.update(int(sample.pid) for sample in _process_samples(nvml, handle, 0) or ())
    return frozenset(found)


def attempt(nvml: Any, name: str, *about: Any) -> Any:
    """Return NVML's answer; None where it refuses, or where binding or driver are too old to know the question."""
    answer = _ask(nvml, name, about)
    return None if answer is _REFUSED else answer


def succeeds(nvml: Any, name: str, *about: Any) -> bool:
    """Whether NVML did it: not every version of the binding returns something from these calls."""
    return _ask(nvml, name, about) is not _REFUSED


def in_first_pid_namespace() -> bool:
    """Whether our process numbers are the machine's own, which are those that NVML tells."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _ask(nvml: Any, name: str, about: Sequence[Any]) -> Any:
    question = getattr(nvml, name, None)
    if question is None:
        return _REFUSED
    try:
        return question(*about)
    except (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)):
        return _REFUSED


def _process_samples(nvml: Any, handle: Any, since_us: int) -> Sequence[Any] | None:
    """SM shares newer than `since_us` (microseconds since the epoch); None where the driver does not tell."""
    try:
        return list(nvml.nvmlDeviceGetProcessUtilization(handle, since_us))
    except nvml.NVMLError_NotFound:  # nothing ran
        return []
    except (nvml.NVMLError, AttributeError):
        return None


def _session_of(pid: int) -> int:
    """The session's number, which is that of the process that began it; -1 where there is no such process."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _stretches(windows: Windows) -> list[tuple[float, float]]:
    """Join windows that follow each other without a gap."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if joined and begin - joined[-1][1] <= _JOIN_S:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _overlap_s(glance: _Glance, windows: Windows) -> float:
    return sum(max(0.0, min(end, glance.end_s) - max(begin, glance.begin_s)) for begin, end in windows)


def _weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The mean; None where one value is unknown, since the rest would stand for other windows."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * weight for value, weight in zip(known, weights, strict=True)) / sum(weights)


def _percent(metric: Any) -> float | None:
    value = float(metric.value)
    return min(100.0, max(0.0, value)) if metric.nvmlReturn == 0 and math.isfinite(value) else None
