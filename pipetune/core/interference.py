"""What disturbed a measured window, told apart: what came from outside, and what the trial brought about itself.

Pure: `hardware.counters` and `hardware.nvml` read the figures, this room decides what they mean. Only *outside*
causes are a reason to measure a window again. What a configuration does to itself (its workers use up a CPU quota,
its memory does not fit, its load meets the GPU's power limit) is part of its rate, and is only reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

OTHERS_SHARE = 0.10
"""From this share of the usable CPUs on, other processes count: below, a 2 % measurement hardly sees them."""
CONTENDED = 0.85
"""CPUs busier than this are contended: a busy CPU beside idle ones costs nobody anything."""
SATURATED = 0.95
"""A whole shared machine is called full from here on; its other tenants are no news before that."""
STEAL_SHARE = 0.05
"""Share of the wanted CPU time that a hypervisor may keep: taken time always costs, so it counts earlier."""
THROTTLED_SHARE = 0.02
"""CPU seconds that a quota held back, a second."""
STALL_SHARE = 0.01
"""Share of the time in which all processes waited for memory (PSI, `full`)."""
SWAP_BYTES_PER_SEC = float(2**20)
"""Swap traffic below this is the kernel's housekeeping."""
OWN_PART_BYTES = float(2**20)
"""A tree that grew, faulted or read less than this in a window had no part in a shortage of memory."""
RESOLUTION_S = 0.05
"""CPU seconds below this are noise: the kernel counts in ticks of 10 ms, CPU by CPU."""


class Cause(StrEnum):
    """What can disturb a window; members are added, never renamed."""

    OTHER_PROCESSES = "other_processes"
    HYPERVISOR = "hypervisor"
    OTHERS_MEMORY = "others_memory"
    OTHERS_SWAP = "others_swap"
    GPU_PROCESSES = "gpu_processes"
    GPU_HEAT = "gpu_heat"
    GPU_POWER_BRAKE = "gpu_power_brake"
    CPU_QUOTA = "cpu_quota"
    OWN_MEMORY = "own_memory"
    OWN_SWAP = "own_swap"
    GPU_POWER_CAP = "gpu_power_cap"

    @property
    def is_own(self) -> bool:
        """Whether the trial itself brings it about."""
        return self in _OWN


_OWN = frozenset({Cause.CPU_QUOTA, Cause.OWN_MEMORY, Cause.OWN_SWAP, Cause.GPU_POWER_CAP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters at one moment; differences between two of one reader mean something. None where unknown.

    `at_s` is on the monotonic clock. `busy_s` and `steal_s` are CPU seconds of the `mask_cpus` CPUs that the process
    may run on: busy is user, nice, system, irq and softirq; steal is what a hypervisor gave to other guests.
    `own_cpu_s` is what the trial's process tree used, ended processes included. `group_cpu_s` is what everything in
    the control group with the CPU quota used, this tree included; `throttled_s` is the time for which quotas held
    runnable work back, summed over CPUs. `storage_read_bytes` were truly fetched from storage by the tree.
    `faulted_bytes` were read in by its major page faults, `resident_bytes` is its memory now (shared pages count
    once a process). `swapped_bytes` went in or out of swap, on the whole machine. `memory_stall_s` is the time in
    which all tasks waited for memory (PSI `full`): of our own control group where `stall_is_own_group`, else of
    the machine.
    """

    at_s: float
    mask_cpus: int
    busy_s: float | None = None
    steal_s: float | None = None
    own_cpu_s: float | None = None
    group_cpu_s: float | None = None
    throttled_s: float | None = None
    storage_read_bytes: int | None = None
    faulted_bytes: int | None = None
    resident_bytes: int | None = None
    swapped_bytes: int | None = None
    memory_stall_s: float | None = None
    stall_is_own_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause seen in one stretch of time: how strong (to find the worst of several), and in words with figures."""

    cause: Cause
    amount: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """All that was seen in one stretch of time; empty where it was quiet."""

    findings: tuple[Finding, ...] = ()

    @property
    def outside(self) -> tuple[str, ...]:
        """What came from elsewhere, a line each: a reason to measure again."""
        return tuple(finding.text for finding in self.findings if not finding.cause.is_own)

    @property
    def own(self) -> tuple[str, ...]:
        """What the trial did to itself, a line each: it counts, and is reported."""
        return tuple(finding.text for finding in self.findings if finding.cause.is_own)


def judge(before: Reading, after: Reading, *, cpus: float) -> Disturbance:
    """Say what disturbed the time between two readings; `cpus` are those that the trial may use (fractions too).

    Fewer `cpus` than the affinity mask has means a quota, a scheduler's share or several ranks: the mask's other
    CPU time then belongs to other tenants by right, and their load alone is not interference. What cannot be
    read is not judged.
    """
    change = _Change(before=before, after=after)
    if change.seconds <= 0:
        return Disturbance()
    is_shared = cpus < after.mask_cpus
    judgements = (
        _other_tenants(change, cpus) if is_shared else _other_processes(change),
        _neighbours_in_group(change, cpus) if is_shared else None,
        _hypervisor(change),
        _quota(change),
        _memory_stall(change),
        _swap(change),
    )
    return Disturbance(findings=tuple(finding for finding in judgements if finding is not None))


def storage_read_bytes(before: Reading, after: Reading) -> int | None:
    """Return the bytes that the tree fetched from storage between two readings; None where the kernel hides it."""
    grown = _grown(before.storage_read_bytes, after.storage_read_bytes)
    return None if grown is None else int(grown)


def summary(disturbances: Sequence[Disturbance]) -> tuple[str, ...]:
    """Return one line a cause, outside ones first: its worst figure, and in how many of the windows it was seen."""
    seen: dict[Cause, list[Finding]] = {}
    for disturbance in disturbances:
        for finding in disturbance.findings:
            seen.setdefault(finding.cause, []).append(finding)
    return tuple(_summed_up(seen[cause], len(disturbances)) for cause in Cause if cause in seen)


def _summed_up(findings: Sequence[Finding], windows: int) -> str:
    worst = max(findings, key=lambda finding: finding.amount)
    if windows == 1:
        return worst.text
    where = f"in {len(findings)} of {windows} windows"
    return f"{worst.text} ({where}{', at the worst' if len(findings) > 1 else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Two readings and what lies between them; a counter that went back counts as one that stood still."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    @property
    def busy_s(self) -> float | None:
        return _grown(self.before.busy_s, self.after.busy_s)

    @property
    def steal_s(self) -> float:
        return _grown(self.before.steal_s, self.after.steal_s) or 0.0

    @property
    def own_s(self) -> float | None:
        return _grown(self.before.own_cpu_s, self.after.own_cpu_s)

    @property
    def group_s(self) -> float | None:
        return _grown(self.before.group_cpu_s, self.after.group_cpu_s)

    @property
    def own_part_bytes(self) -> float:
        """What the tree may have had to do with a shortage of memory: it grew, it faulted, it filled the cache."""
        before, after = self.before, self.after
        pairs = (
            (before.resident_bytes, after.resident_bytes),
            (before.faulted_bytes, after.faulted_bytes),
            (before.storage_read_bytes, after.storage_read_bytes),
        )
        return max(_grown(*pair) or 0.0 for pair in pairs)


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _other_processes(change: _Change) -> Finding | None:
    """Others' load on CPUs that are all ours to use: it costs only where hardly any of them is left idle.

    Time that a hypervisor took was wanted too, so it counts as busy, but not as other processes' use.
    """
    busy_s, own_s, cpus = change.busy_s, change.own_s, change.after.mask_cpus
    if busy_s is None or own_s is None:
        return None
    others_s, capacity_s = max(0.0, busy_s - own_s), cpus * change.seconds
    if busy_s + change.steal_s < CONTENDED * capacity_s or not _counts(others_s, capacity_s):
        return None
    share, unit = others_s / change.seconds, "CPU" if cpus == 1 else "CPUs"
    return _others(share, f"other processes used {share:.1f} of {cpus} {unit}")


def _other_tenants(change: _Change, cpus: float) -> Finding | None:
    """Others' load where we may use a part of the CPUs only.

    The rest is other tenants' by right. Their load hurts only when the machine is full and we did not get our part:
    a trial that used its whole part cannot have been kept from it. (It may have wanted less; a full machine
    shares caches, memory and clocks, so the window is doubtful all the same.)
    """
    busy_s, own_s, mask = change.busy_s, change.own_s, change.after.mask_cpus
    if busy_s is None or own_s is None:
        return None
    others_s, capacity_s = max(0.0, busy_s - own_s), mask * change.seconds
    is_full = busy_s + change.steal_s >= SATURATED * capacity_s
    if not is_full or own_s >= CONTENDED * cpus * change.seconds or not _counts(others_s, capacity_s):
        return None
    share = others_s / change.seconds
    return _others(share, f"other processes used {share:.1f} of the machine's {mask} CPUs and left none idle")


def _neighbours_in_group(change: _Change, cpus: float) -> Finding | None:
    """Others inside the control group that has the quota (the same container): they use up what is ours."""
    group_s, own_s, capacity_s = change.group_s, change.own_s, cpus * change.seconds
    if group_s is None or own_s is None:
        return None
    others_s = max(0.0, group_s - own_s)
    if group_s < CONTENDED * capacity_s or not _counts(others_s, capacity_s):
        return None
    share, unit = others_s / change.seconds, "CPU" if cpus == 1 else "CPUs"
    return _others(share, f"other processes used {share:.1f} of the quota's {cpus:g} {unit}")


def _counts(others_s: float, capacity_s: float) -> bool:
    return others_s >= max(RESOLUTION_S, OTHERS_SHARE * capacity_s)


def _others(share: float, text: str) -> Finding:
    return Finding(cause=Cause.OTHER_PROCESSES, amount=share, text=text)


def _hypervisor(change: _Change) -> Finding | None:
    """Steal is time in which a CPU was wanted and another guest had it, so it is a share of the wanted time.

    Of the capacity it would vanish on a large machine whose few busy CPUs are the ones that suffer.
    """
    if change.busy_s is None or change.steal_s < RESOLUTION_S:
        return None
    share = change.steal_s / (change.busy_s + change.steal_s)
    if share < STEAL_SHARE:
        return None
    text = f"the hypervisor took {100 * share:.0f} % of the CPU time"
    return Finding(cause=Cause.HYPERVISOR, amount=share, text=text)


def _quota(change: _Change) -> Finding | None:
    """A quota that holds work back, whatever the average use: it acts on bursts of 100 ms, so this is ours."""
    held_s = _grown(change.before.throttled_s, change.after.throttled_s)
    if held_s is None or held_s < THROTTLED_SHARE * change.seconds:
        return None
    share = held_s / change.seconds
    text = f"the CPU quota held work back for {share:.2f} CPU seconds a second"
    return Finding(cause=Cause.CPU_QUOTA, amount=share, text=text)


def _memory_stall(change: _Change) -> Finding | None:
    """Waiting for memory: ours in our own control group, and in doubt.

    The machine's figure is others' only where the tree had no part in it: a window that is thrown away for what the
    configuration needs itself would flatter it, while one kept wrongly is still reported.
    """
    stalled_s = _grown(change.before.memory_stall_s, change.after.memory_stall_s)
    if stalled_s is None or stalled_s < STALL_SHARE * change.seconds:
        return None
    share = min(1.0, stalled_s / change.seconds)
    figure = f"for {100 * share:.0f} % of the time"
    if change.after.stall_is_own_group or _has_part(change):
        return Finding(cause=Cause.OWN_MEMORY, amount=share, text=f"everything waited for memory {figure}")
    text = f"the machine was short of memory {figure}, which this trial did not bring about"
    return Finding(cause=Cause.OTHERS_MEMORY, amount=share, text=text)


def _swap(change: _Change) -> Finding | None:
    """Swap is counted for the whole machine: others' where the tree neither grew nor faulted nor read, else ours."""
    swapped = _grown(change.before.swapped_bytes, change.after.swapped_bytes)
    if swapped is None or swapped < SWAP_BYTES_PER_SEC * change.seconds:
        return None
    speed = swapped / change.seconds
    figure = f"{speed / 2**20:.0f} MiB/s"
    if _has_part(change):
        return Finding(cause=Cause.OWN_SWAP, amount=speed, text=f"the machine swapped {figure}, this trial among it")
    text = f"the machine swapped {figure} for other processes"
    return Finding(cause=Cause.OTHERS_SWAP, amount=speed, text=text)


def _has_part(change: _Change) -> bool:
    return change.own_part_bytes >= OWN_PART_BYTES
