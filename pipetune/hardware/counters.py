"""Reads the kernel's counters at window borders: who used the CPUs, what came from storage, what was held back.

Made for the process that is being measured: files stay open, nothing scans /proc, and one reading costs a fraction
of a millisecond. Linux only; what a system does not tell is None.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pipetune.core.interference import Reading
from pipetune.hardware.cgroup import cpu_statistics, memory_pressure, quota_statistics

_ROOT = Path("/")
_SMALL, _LARGE = 2**12, 2**18
"""Bytes asked for at once. /proc/stat has a number for each interrupt line: tens of kilobytes on a large machine."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NANO, _MICRO = 1e-9, 1e-6
_STEAL = 8  # the column of a CPU's line


class TreeCounters:
    """Counters of this process, the workers it names and all that these start, beside those of the machine.

    Not for several threads. `root` stands for `/`, `pid` for this process, `cpus` for its affinity mask.
    """

    def __init__(self, *, root: Path = _ROOT, pid: int | None = None, cpus: Iterable[int] | None = None) -> None:
        mask = frozenset(cpus if cpus is not None else _affinity())
        self._proc = root / "proc"
        self._machine = _CpuLines(_Kept(self._proc / "stat", _LARGE), mask)
        self._vmstat = _Kept(self._proc / "vmstat")
        own_pressure = memory_pressure(root)
        self._pressure = _Kept(own_pressure or self._proc / "pressure/memory")
        self._has_own_pressure = own_pressure is not None
        self._throttles = [_Kept(path) for path in cpu_statistics(root)]
        quota = quota_statistics(root)
        self._quota = None if quota is None else _Kept(quota)
        self._mask_cpus = max(1, len(mask))
        self._own = os.getpid() if pid is None else pid
        self._tree: dict[int, _Process] = {}
        self._read_s = time.monotonic()
        self._cpu_s, self._storage, self._faults = _Rising(), _Rising(), _Rising()

    def read(self, pids: Iterable[int] = ()) -> Reading:
        """Read everything now; `pids` are the workers, who are followed until they end (also where left out later).

        What an ended process used stays counted, through its parent's account of children it waited for.
        """
        before_s, self._read_s = self._read_s, time.monotonic()
        busy_s, steal_s = self._machine.read()
        tree = self._read_tree(pids)
        cpu_s = [process.cpu_s for process in tree]
        storage = [process.storage_bytes for process in tree]
        capacity_s = self._mask_cpus * (self._read_s - before_s + 2 * _TICK_S)
        return Reading(
            at_s=self._read_s,
            mask_cpus=self._mask_cpus,
            busy_s=busy_s,
            steal_s=steal_s,
            # More than the CPUs can give is an old worker that was not known until now.
            own_cpu_s=self._cpu_s.add(sum(cpu_s), at_most=capacity_s) if tree else None,
            group_cpu_s=None if self._quota is None else _scaled(self._quota.field(b"usage_usec"), _MICRO),
            throttled_s=self._throttled_s(),
            storage_read_bytes=_whole(self._storage.add(_total(storage))) if tree else None,
            faulted_bytes=_whole(self._faults.add(sum(process.faulted_bytes for process in tree))) if tree else None,
            resident_bytes=sum(process.resident_bytes for process in tree) if tree else None,
            swapped_bytes=self._swapped_bytes(),
            memory_stall_s=self._memory_stall_s(),
            stall_is_own_group=self._has_own_pressure,
        )

    def close(self) -> None:
        """Close the files; a later reading holds None throughout."""
        for process in self._tree.values():
            process.close()
        self._tree.clear()
        kept = [self._machine.file, self._vmstat, self._pressure, *self._throttles]
        for file in [*kept, self._quota] if self._quota is not None else kept:
            file.close()
        self._own = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_tree(self, pids: Iterable[int]) -> list["_Process"]:
        """Read every process of the tree that lives: those named, those known, and what they started."""
        waiting = [self._own, *self._tree, *pids] if self._own else []
        seen = {0, -1}
        while waiting:
            pid = waiting.pop()
            # One that has ended is not opened anew: its number may have another owner by now.
            if pid in seen:
                continue
            seen.add(pid)
            process = self._tree.get(pid) or _Process(self._proc / str(pid))
            if process.read():
                self._tree[pid] = process
                waiting += process.children
            else:
                process.close()
                self._tree.pop(pid, None)
        return list(self._tree.values())

    def _throttled_s(self) -> float | None:
        """Time that quotas of the group and its parents held work back; v2 counts in micro-, v1 in nanoseconds."""
        times = []
        for text in (file.text() for file in self._throttles):
            times.append(_scaled(_field(text, b"throttled_usec"), _MICRO))
            times.append(_scaled(_field(text, b"throttled_time"), _NANO))
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if known else None

    def _swapped_bytes(self) -> int | None:
        # The kernel gives this file a page at a time, and these two lines need not be on the first.
        text = self._vmstat.text(until=b"\npswpout ")
        pages = [_field(text, name) for name in (b"pswpin", b"pswpout")]
        total = _total(pages)
        return None if total is None else int(total) * _PAGE_BYTES

    def _memory_stall_s(self) -> float | None:
        """The line `full avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS` (Documentation/accounting/psi.rst)."""
        _, found, line = self._pressure.text().rpartition(b"full ")
        _, found_total, total = line.partition(b"total=")
        return _scaled(_integer(total), _MICRO) if found and found_total else None


class _Kept:
    """A small file that stays open: reading it again from its start costs a third of opening it.

    An open file of a process in /proc stays with that process: once it ended, reading fails, even where the
    number has a new owner.
    """

    def __init__(self, path: Path, size: int = _SMALL) -> None:
        self._size = size
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def text(self, until: bytes = b"") -> bytes:
        """What one read gives, or several until these bytes have come; nothing where it cannot be read."""
        text = b""
        try:
            while self._descriptor >= 0 and (part := os.pread(self._descriptor, self._size, len(text))):
                text += part
                if until in text:
                    break
        except OSError:
            return b""
        return text

    def field(self, name: bytes) -> int | None:
        """The whole number after `name ` at the start of a line."""
        return _field(self.text(), name)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _CpuLines:
    """CPU seconds of some CPUs: `cpuN user nice system idle iowait irq softirq steal ...` in ticks (proc(5), stat)."""

    def __init__(self, file: _Kept, mask: frozenset[int]) -> None:
        self.file = file
        lines = [line.split() for line in file.text().splitlines() if line.startswith(b"cpu")]
        present = {words[0] for words in lines if len(words) > _STEAL} - {b"cpu"}
        wanted = {b"cpu%d" % cpu for cpu in mask}
        # A container's view may number its CPUs anew (lxcfs): then nobody knows which lines are ours.
        self._is_known = bool(wanted) and wanted <= present
        # The first line adds all up, which saves parsing a hundred others.
        self._names = {b"cpu"} if wanted == present else wanted

    def read(self) -> tuple[float | None, float | None]:
        """Busy and stolen seconds."""
        text = self.file.text() if self._is_known else b""
        if not text:
            return None, None
        busy = stolen = 0
        end = b"\n" if b"cpu" in self._names else b"\nintr"
        for line in text.partition(end)[0].splitlines():
            words = line.split()
            if words[0] in self._names:
                user, nice, system, _, _, irq, softirq, steal = map(int, words[1 : _STEAL + 1])
                busy += user + nice + system + irq + softirq
                stolen += steal
        return busy * _TICK_S, stolen * _TICK_S


class _Process:
    """One process with all its threads; its counts include the children that it waited for."""

    def __init__(self, folder: Path) -> None:
        self._stat = _Kept(folder / "stat")
        self._io = _Kept(folder / "io")
        # Children of the main thread only, which is the one that starts programs.
        self._children = _Kept(folder / "task" / folder.name / "children")
        self.cpu_s = 0.0
        self.faulted_bytes = 0
        self.resident_bytes = 0
        self.storage_bytes: int | None = None
        self.children: list[int] = []

    def read(self) -> bool:
        """Read again; False where the process has ended and its parent knows of it."""
        # `PID (NAME) STATE ...`: the name may hold blanks and brackets. Fields are counted in proc(5).
        words = self._stat.text().rpartition(b")")[2].split()
        if len(words) < 22:
            return False
        major, children_major, *ticks = map(int, words[9:15])
        self.cpu_s = sum(ticks) * _TICK_S
        self.faulted_bytes = (major + children_major) * _PAGE_BYTES
        self.resident_bytes = max(0, int(words[21])) * _PAGE_BYTES
        read_bytes = self._io.field(b"read_bytes:")
        # It may end between two files: then the last figure stands.
        self.storage_bytes = self.storage_bytes if read_bytes is None else read_bytes
        self.children = [int(pid) for pid in self._children.text().split()]
        return True

    def close(self) -> None:
        for file in (self._stat, self._io, self._children):
            file.close()


class _Rising:
    """A sum over processes that come and go, kept from going back."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._last: float | None = None

    def add(self, now: float | None, at_most: float = float("inf")) -> float | None:
        """Take the present sum; what is gone from it without trace stays counted."""
        if now is None:
            return None
        if self._last is not None:
            self._sum += min(at_most, max(0.0, now - self._last))
        self._last = now
        return self._sum


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _field(text: bytes, name: bytes) -> int | None:
    _, found, rest = (b"\n" + text).partition(b"\n" + name + b" ")
    return _integer(rest) if found else None


def _integer(text: bytes) -> int | None:
    words = text.split(maxsplit=1)
    return int(words[0]) if words and words[0].isdigit() else None


def _scaled(count: int | None, unit: float) -> float | None:
    return None if count is None else count * unit


def _total(counts: Iterable[int | None]) -> float | None:
    """The sum, or None where one of them is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)
