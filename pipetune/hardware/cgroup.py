"""Limits that a container or scheduler sets through Linux control groups, v1, v2 or both at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_DEFAULT_PERIOD_US = 100_000
_USUAL_MOUNTS = {
    ("v2", ""): ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
    ("v1", "cpu"): ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"),
    ("v1", "memory"): ("/sys/fs/cgroup/memory",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """CPU time that a group may use: `cpus` seconds of it a second, fractions included."""

    version: str
    cpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """One mounted hierarchy: where it is mounted, and which of its groups shows there."""

    point: PurePosixPath
    group: PurePosixPath


def cpu_quotas(root: Path = Path("/")) -> tuple[CpuQuota, ...]:
    """Return each CPU quota on this process's groups and their parents, both versions; malformed ones not."""
    v2 = (_v2_quota(folder / "cpu.max") for folder in _folders(root, "v2"))
    v1 = (_v1_quota(folder) for folder in _folders(root, "v1", "cpu"))
    return tuple(
        CpuQuota(version=version, cpus=cpus)
        for version, found in (("v2", v2), ("v1", v1))
        for cpus in found
        if cpus is not None
    )


def memory_limits(root: Path = Path("/")) -> tuple[int, ...]:
    """Return each memory limit on these groups and their parents, bytes; v1's "unlimited" is a huge one."""
    files = [folder / "memory.max" for folder in _folders(root, "v2")]
    files += [folder / "memory.limit_in_bytes" for folder in _folders(root, "v1", "memory")]
    return tuple(limit for limit in map(positive_int, map(read_text, files)) if limit is not None)


def cpu_statistics(root: Path = Path("/")) -> tuple[Path, ...]:
    """Return the `cpu.stat` of this process's groups and their parents that count what a quota held back.

    A group adds up its own quota only, so the figures of a group and its parents are added.
    """
    folders = [*_folders(root, "v2"), *_folders(root, "v1", "cpu")]
    # Without mountinfo both usual names of v1's folder are tried, and one is a link to the other.
    files = dict.fromkeys((folder / "cpu.stat").resolve() for folder in folders)
    return tuple(file for file in files if "throttled_" in read_text(file))


def quota_statistics(root: Path = Path("/")) -> Path | None:
    """Return the `cpu.stat` of the innermost group with a quota (v2 only: v1 counts use elsewhere), or None."""
    for folder in _folders(root, "v2"):
        if _v2_quota(folder / "cpu.max") is not None:
            return folder / "cpu.stat"
    return None


def memory_pressure(root: Path = Path("/")) -> Path | None:
    """Return this process's own group's `memory.pressure`; None where it has none, or is the machine's top group."""
    folder = next(_folders(root, "v2"))
    # The top group's figure is the whole machine's; `cgroup.events` is in every group but that one.
    is_own = (folder / "cgroup.events").exists() and (folder / "memory.pressure").exists()
    return folder / "memory.pressure" if is_own else None


def read_text(path: Path) -> str:
    """Return what the file holds, or nothing where it is missing or closed to us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def positive_int(text: str) -> int | None:
    """Return the whole number above 0 that the text holds; None for anything else."""
    try:
        value = int(text)
    except ValueError:
        return None
    return value if value > 0 else None


def _v2_quota(path: Path) -> float | None:
    """`cpu.max` holds `QUOTA PERIOD` in microseconds, or `max PERIOD`."""
    words = read_text(path).split()
    quota = positive_int(words[0]) if words else None
    period = positive_int(words[1]) if len(words) > 1 else _DEFAULT_PERIOD_US
    return None if quota is None or period is None else quota / period


def _v1_quota(folder: Path) -> float | None:
    """Quota and period are two files in microseconds; a quota of -1 is none."""
    quota = positive_int(read_text(folder / "cpu.cfs_quota_us"))
    period = positive_int(read_text(folder / "cpu.cfs_period_us"))
    return None if quota is None or period is None else quota / period


def _folders(root: Path, version: str, controller: str = "") -> Iterator[Path]:
    """Yield the folder of this process's group and of each parent, once: a parent may be tighter."""
    seen = set()
    group = _own_group(root, controller)
    for mount in _mounts(root, version, controller):
        # A container's mount may show one group of the host as its top: strip what lies above it.
        inside = group.relative_to(mount.group) if group.is_relative_to(mount.group) else group.relative_to("/")
        for path in (mount.point / inside, *(mount.point / parent for parent in inside.parents)):
            if path not in seen:
                seen.add(path)
                yield root / path.relative_to("/")


def _own_group(root: Path, controller: str) -> PurePosixPath:
    """Path of this process's group: lines are `ID:CONTROLLERS:PATH`; v2 has no controllers."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and path.startswith("/"):
            # Outside a namespace's top the kernel writes `/..`: nothing of that is visible here.
            return PurePosixPath("/", *(part for part in path.split("/") if part not in {"", ".."}))
    return PurePosixPath("/")


def _mounts(root: Path, version: str, controller: str) -> list[_Mount]:
    """Where the hierarchy is mounted; the usual places where /proc does not tell."""
    lines = read_text(root / "proc/self/mountinfo").splitlines()
    found = [mount for line in lines if (mount := _mount(line, version, controller)) is not None]
    usual = _USUAL_MOUNTS[version, controller]
    return found or [_Mount(point=PurePosixPath(point), group=PurePosixPath("/")) for point in usual]


def _mount(line: str, version: str, controller: str) -> _Mount | None:
    """Read `ID PARENT DEV GROUP POINT OPTIONS [TAGS] - TYPE SOURCE SUPER_OPTIONS` (proc(5), mountinfo)."""
    before, _, after = line.partition(" - ")
    fields, kind = before.split(), after.split()
    if len(fields) < 5 or len(kind) < 3 or kind[0] != {"v1": "cgroup", "v2": "cgroup2"}[version]:
        return None
    if version == "v1" and controller not in kind[2].split(","):
        return None
    group, point = PurePosixPath(fields[3]), PurePosixPath(fields[4])
    return _Mount(point=point, group=group) if group.is_absolute() and point.is_absolute() else None
