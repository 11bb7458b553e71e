"""What this process may use of the host: CPUs, memory, shared memory, and number formats."""

import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipetune.core.space import Amp
from pipetune.hardware.cgroup import cpu_quotas, memory_limits, positive_int, read_text

_ROOT = Path("/")
_PER_TASK = "SLURM_CPUS_PER_TASK"
_SCHEDULER_VARIABLES = (
    _PER_TASK,
    "SLURM_CPUS_ON_NODE",
    "PBS_NCPUS",
    "NCPUS",
    "LSB_DJOB_NUMPROC",
    "NSLOTS",
)
# What Linux calls native arithmetic; formats that are only stored, or emulated, are not faster.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})
# Linux names ARM cores by number only: (implementer, part), from util-linux's lscpu-arm.c.
_ARM_CORES = {
    ("0x41", "0xd0c"): "ARM Neoverse-N1",
    ("0x41", "0xd40"): "ARM Neoverse-V1",
    ("0x41", "0xd49"): "ARM Neoverse-N2",
    ("0x41", "0xd4f"): "ARM Neoverse-V2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """CPUs that this process may use, those the machine has, and what binds: `cgroup v2 quota (2.5 CPUs)`."""

    count: int
    present: int
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the whole machine did while it was watched: CPUs' worth of work, and swap."""

    cpus_busy: float
    swap_used_bytes: int
    swap_rate_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Bound:
    count: int
    reason: str


def usable_cpus(root: Path = _ROOT, environ: Mapping[str, str] = os.environ, affinity: int | None = None) -> CpuLimit:
    """Return the least of affinity, container quota and scheduler share, divided among the node's ranks.

    `root` stands for `/`; `affinity` is the number of CPUs in this process's mask, read where it is None.
    A quota counts in whole CPUs, rounded up: it is the default top of a search, not a ban.
    """
    affinity = affinity if affinity is not None else _affinity()
    present = max(_cpus_online(root), affinity)
    bounds = [
        _Bound(present, "all CPUs present"),
        _Bound(affinity, f"CPU affinity ({affinity} of {present})"),
        *_quota_bounds(root),
        *_scheduler_bounds(environ),
    ]
    tightest = _among_ranks(min(bounds, key=lambda bound: bound.count), environ, present)
    return CpuLimit(count=tightest.count, present=present, limit=tightest.reason)


def present_memory_bytes(root: Path = _ROOT) -> int:
    """Return the machine's memory, whatever this process may use of it: `MemTotal: N kB`, where kB is 1,024 bytes."""
    for line in read_text(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "MemTotal:" and (kibibytes := positive_int(words[1])):
            return kibibytes * 1024
    return psutil.virtual_memory().total


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Return the least of the machine's memory and the limits of this process's control groups."""
    return min([present_memory_bytes(root), *memory_limits(root)])


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be used without swapping, page cache included, as far as the limits go."""
    return min(psutil.virtual_memory().available, memory_limit_bytes(root))


def shared_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes free in /dev/shm, where workers pass batches; None where there is no such folder."""
    try:
        return shutil.disk_usage(root / "dev/shm").free
    except OSError:
        return None


def shared_memory_total_bytes(root: Path = _ROOT) -> int | None:
    """Return the size of /dev/shm; None where there is no such folder."""
    try:
        return shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return None


def cpu_model(root: Path = _ROOT) -> str:
    """Return the processor's name: x86 and POWER name it, ARM numbers its cores; else what Python knows."""
    facts = _cpu_facts(root)
    implementer, part = facts.get("CPU implementer", ""), facts.get("CPU part", "")
    if name := facts.get("model name") or facts.get("cpu"):
        return name
    if implementer and part:
        return _ARM_CORES.get((implementer, part), f"ARM implementer {implementer} part {part}")
    return platform.processor() or platform.machine() or "unknown"


def cpu_amps(root: Path = _ROOT) -> tuple[Amp, ...]:
    """Return the precisions that the CPU computes itself; an emulated one gains nothing and is left out."""
    facts = _cpu_facts(root)
    flags = frozenset(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())
    reduced = ((Amp.BF16, _BF16_FLAGS), (Amp.FP16, _FP16_FLAGS))
    return (Amp.FP32, *(amp for amp, native in reduced if flags & native))


def busy_cpus(seconds: float) -> float:
    """Return how many CPUs' worth of work the whole machine did while this call waited for `seconds`."""
    return psutil.cpu_percent(interval=seconds) / 100 * (psutil.cpu_count() or 1)


def activity(seconds: float) -> Activity:
    """Return what the whole machine did while this call waited for `seconds`."""
    before = psutil.swap_memory()
    cpus = busy_cpus(seconds)
    after = psutil.swap_memory()
    moved = after.sin + after.sout - before.sin - before.sout
    return Activity(cpus_busy=cpus, swap_used_bytes=after.used, swap_rate_bytes_per_s=max(0, moved) / seconds)


def tree_memory_bytes(pid: int) -> int | None:
    """Return the memory of a process and its descendants; pages that several share are counted once.

    The sum of proportional sizes (PSS), or of resident sizes where the kernel does not tell those.
    Processes that end meanwhile count nothing; None where none could be read.
    """
    return sum(_process_memory_bytes(process) for process in _family(pid)) or None


def own_memory_bytes(pid: int) -> int | None:
    """Return the memory that a process and its descendants each have to themselves: what a fork shares is left out.

    The sum of unique sizes (USS); None where the kernel does not tell those, for a resident size holds all that is
    shared.
    """
    try:
        return sum(int(process.memory_full_info().uss) for process in _family(pid)) or None
    except (psutil.Error, AttributeError, OSError):
        return None


def _family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; none where it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpus_online(root: Path) -> int:
    """CPUs in `/sys/devices/system/cpu/online`, a list such as `0-3,8-11`."""
    try:
        ranges = [part.split("-") for part in read_text(root / "sys/devices/system/cpu/online").split(",")]
        count = sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
    except ValueError:
        count = 0
    return count if count > 0 else os.cpu_count() or 1


def _quota_bounds(root: Path) -> Iterator[_Bound]:
    for quota in cpu_quotas(root):
        unit = "CPU" if quota.cpus == 1 else "CPUs"
        yield _Bound(max(1, math.ceil(quota.cpus)), f"cgroup {quota.version} quota ({round(quota.cpus, 2):g} {unit})")


def _scheduler_bounds(environ: Mapping[str, str]) -> Iterator[_Bound]:
    for name in _SCHEDULER_VARIABLES:
        if (count := positive_int(environ.get(name, ""))) is not None:
            yield _Bound(count, f"{name}={count}")


def _among_ranks(bound: _Bound, environ: Mapping[str, str], present: int) -> _Bound:
    """Divide what the ranks of this node share: a loader of each rank starts workers of its own."""
    ranks = positive_int(environ.get("LOCAL_WORLD_SIZE", "")) or 1
    sharing = ranks // _tasks_per_node(environ, ranks)
    if sharing <= 1:
        return bound
    cause = "" if bound.count == present else f", {bound.reason}"
    reason = f"{sharing} ranks share {bound.count} CPUs (LOCAL_WORLD_SIZE={ranks}){cause}"
    return _Bound(max(1, bound.count // sharing), reason)


def _tasks_per_node(environ: Mapping[str, str], ranks: int) -> int:
    """Tasks that have CPUs of their own, so that only the ranks inside one of them share.

    Slurm's figure per task is one rank's where each rank is a task, and is shared where one task runs
    torchrun; the tasks per node (`8`, `8(x2)`, `4,2`) tell which. Without them each rank is a task.
    """
    if positive_int(environ.get(_PER_TASK, "")) is None:
        return 1
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    return positive_int(tasks.split(",")[0].split("(")[0]) or ranks


def _cpu_facts(root: Path) -> dict[str, str]:
    """Return the first processor's `key : value` lines of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def _process_memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0
    except (psutil.Error, AttributeError, OSError):
        # Another user's process, or a kernel without /proc/PID/smaps: the resident size is open to all.
        return _resident_bytes(process)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.Error, OSError):
        return 0
