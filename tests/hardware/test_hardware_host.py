import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from pipetune.core.space import Amp
from pipetune.hardware import host
from pipetune.hardware.host import (
    cpu_amps,
    cpu_model,
    memory_limit_bytes,
    own_memory_bytes,
    shared_memory_bytes,
    tree_memory_bytes,
    usable_cpus,
)

MIB = 2**20
GIB = 2**30
V1_UNLIMITED = "9223372036854771712"


@pytest.fixture
def machine(tmp_path):
    """A machine of 64 CPUs and 256 GiB; called with {path: text}, it writes files and gives its root."""

    def write(files=()):
        base = {
            "sys/devices/system/cpu/online": "0-31,32-63\n",
            "proc/meminfo": f"MemTotal:       {256 * GIB // 1024} kB\nMemFree: 1 kB\n",
        }
        for path, text in (base | dict(files)).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def cpus(root, environ=None, affinity=64):
    found = usable_cpus(root, environ or {}, affinity)
    return found.count, found.limit


V2 = {"proc/self/cgroup": "0::/\n"}
MOUNTS_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_without_limits_all_cpus_count(machine):
    found = usable_cpus(machine(), {}, 64)
    assert (found.count, found.present, found.limit) == (64, 64, "all CPUs present")


def test_affinity_limits(machine):
    assert cpus(machine(), affinity=16) == (16, "CPU affinity (16 of 64)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200000 100000\n", (2, "cgroup v2 quota (2 CPUs)")),
        ("250000 100000\n", (3, "cgroup v2 quota (2.5 CPUs)")),
        ("50000 100000\n", (1, "cgroup v2 quota (0.5 CPUs)")),
        ("100000\n", (1, "cgroup v2 quota (1 CPU)")),
        ("max 100000\n", (64, "all CPUs present")),
        ("max\n", (64, "all CPUs present")),
        ("", (64, "all CPUs present")),
        ("many 100000\n", (64, "all CPUs present")),
        ("200000 0\n", (64, "all CPUs present")),
        ("200000 often\n", (64, "all CPUs present")),
        ("-5 100000\n", (64, "all CPUs present")),
    ],
)
def test_v2_quota(machine, text, expected):
    assert cpus(machine(V2 | {"sys/fs/cgroup/cpu.max": text})) == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [
        ("400000", "100000", (4, "cgroup v1 quota (4 CPUs)")),
        ("50000", "100000", (1, "cgroup v1 quota (0.5 CPUs)")),
        ("-1", "100000", (64, "all CPUs present")),
        ("400000", "0", (64, "all CPUs present")),
        ("lots", "100000", (64, "all CPUs present")),
    ],
)
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_v1_quota(machine, folder, quota, period, expected):
    files = {
        "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": quota,
        f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": period,
    }
    assert cpus(machine(files)) == expected


@pytest.mark.parametrize("mountinfo", ["", MOUNTS_V2])
def test_a_tighter_parent_limits_and_a_sibling_does_not(machine, mountinfo):
    files = {
        "proc/self/mountinfo": mountinfo,
        "proc/self/cgroup": "0::/slice/job/step\n",
        "sys/fs/cgroup/slice/cpu.max": "300000 100000",
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000",
        "sys/fs/cgroup/slice/job/step/cpu.max": "800000 100000",
        "sys/fs/cgroup/slice/other/cpu.max": "100000 100000",
    }
    assert cpus(machine(files)) == (3, "cgroup v2 quota (3 CPUs)")


def test_v1_nested_with_a_tighter_parent(machine):
    files = {"proc/self/cgroup": "2:cpu,cpuacct:/docker/abc\n"}
    for group, quota in (("docker", "600000"), ("docker/abc", "900000")):
        files[f"sys/fs/cgroup/cpu/{group}/cpu.cfs_quota_us"] = quota
        files[f"sys/fs/cgroup/cpu/{group}/cpu.cfs_period_us"] = "100000"
    assert cpus(machine(files)) == (6, "cgroup v1 quota (6 CPUs)")


@pytest.mark.parametrize(("quota_v1", "expected"), [("800000", "v2"), ("300000", "v1")])
def test_hybrid_machine_takes_the_tighter_version(machine, quota_v1, expected):
    files = {
        "proc/self/mountinfo": (
            "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n"
            "garbage\n"
        ),
        "proc/self/cgroup": "9:name=systemd:/\n1:cpu,cpuacct:/a\n0::/b\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": quota_v1,
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/unified/b/cpu.max": "500000 100000",
    }
    assert f"cgroup {expected} quota" in cpus(machine(files))[1]


def test_a_container_whose_mount_shows_a_group_of_the_host(machine):
    files = {
        "proc/self/mountinfo": "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
        "proc/self/cgroup": "2:cpu:/docker/abc/inner\n",
        "sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us": "700000",
        "sys/fs/cgroup/cpu/inner/cpu.cfs_period_us": "100000",
    }
    assert cpus(machine(files))[0] == 7


def test_a_group_outside_the_namespace_reads_what_is_visible(machine):
    files = {"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/cpu.max": "500000 100000"}
    assert cpus(machine(files))[0] == 5


def test_the_tighter_of_affinity_and_quota_binds(machine):
    root = machine(V2 | {"sys/fs/cgroup/cpu.max": "800000 100000"})
    assert cpus(root, affinity=2) == (2, "CPU affinity (2 of 64)")
    assert cpus(root, affinity=16) == (8, "cgroup v2 quota (8 CPUs)")


@pytest.mark.parametrize(
    "name", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "PBS_NCPUS", "NCPUS", "LSB_DJOB_NUMPROC", "NSLOTS"]
)
def test_scheduler_share_limits(machine, name):
    root = machine()
    assert cpus(root, {name: "8"}) == (8, f"{name}=8")
    assert cpus(root, {name: "128"}) == (64, "all CPUs present")
    for malformed in ("", "eight", "-3", "0", "8(x2)"):
        assert cpus(root, {name: malformed})[0] == 64


def test_openmp_threads_are_no_limit(machine):
    assert cpus(machine(), {"OMP_NUM_THREADS": "1"})[0] == 64


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, (8, "8 ranks share 64 CPUs (LOCAL_WORLD_SIZE=8)")),
        ({"LOCAL_WORLD_SIZE": "1"}, (64, "all CPUs present")),
        ({"LOCAL_WORLD_SIZE": "none"}, (64, "all CPUs present")),
        ({"LOCAL_WORLD_SIZE": "100"}, (1, "100 ranks share 64 CPUs (LOCAL_WORLD_SIZE=100)")),
        (
            {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "32"},
            (4, "8 ranks share 32 CPUs (LOCAL_WORLD_SIZE=8), SLURM_CPUS_ON_NODE=32"),
        ),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "8"}, (8, "SLURM_CPUS_PER_TASK=8")),
        (
            {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "8", "SLURM_TASKS_PER_NODE": "8(x2),4"},
            (8, "SLURM_CPUS_PER_TASK=8"),
        ),
        (
            {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "32", "SLURM_TASKS_PER_NODE": "1(x2)"},
            (4, "8 ranks share 32 CPUs (LOCAL_WORLD_SIZE=8), SLURM_CPUS_PER_TASK=32"),
        ),
    ],
)
def test_ranks_of_one_node_share_its_cpus(machine, environ, expected):
    assert cpus(machine(), environ) == expected


def test_an_empty_root_gives_what_python_knows(tmp_path):
    assert usable_cpus(tmp_path, {}).count == len(os.sched_getaffinity(0))
    assert memory_limit_bytes(tmp_path) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 256 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 256 * GIB),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED}, 256 * GIB),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 * GIB),
            },
            8 * GIB,
        ),
        ({"sys/fs/cgroup/memory.max": "much"}, 256 * GIB),
    ],
)
def test_memory_is_the_least_of_machine_and_groups(machine, files, expected):
    assert memory_limit_bytes(machine(files)) == expected


def test_shared_memory_is_free_space_or_unknown(tmp_path):
    assert shared_memory_bytes(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert shared_memory_bytes(tmp_path) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\n\nmodel name\t: other\n",
            "AMD EPYC 9654",
        ),
        ("processor: 0\nCPU implementer : 0x41\nCPU part : 0xd40\n", "ARM Neoverse-V1"),
        ("CPU implementer\t: 0x61\nCPU part\t: 0x022\n", "ARM implementer 0x61 part 0x022"),
        ("processor : 0\ncpu : POWER9, altivec supported\n", "POWER9, altivec supported"),
    ],
)
def test_cpu_model(machine, text, expected):
    assert cpu_model(machine({"proc/cpuinfo": text})) == expected


def test_cpu_model_falls_back_to_python(tmp_path, monkeypatch):
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    monkeypatch.setattr(host.platform, "machine", lambda: "riscv64")
    assert cpu_model(tmp_path) == "riscv64"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags : fpu sse2 avx2 f16c avx512f", (Amp.FP32,)),
        ("flags : avx512f avx512_bf16", (Amp.FP32, Amp.BF16)),
        ("flags : amx_bf16 amx_tile avx512_fp16", (Amp.FP32, Amp.BF16, Amp.FP16)),
        ("flags : amx_fp16", (Amp.FP32, Amp.FP16)),
        ("Features : fp asimd fphp asimdhp", (Amp.FP32, Amp.FP16)),
        ("Features : fp asimd asimdhp sve bf16", (Amp.FP32, Amp.BF16, Amp.FP16)),
        ("", (Amp.FP32,)),
    ],
)
def test_only_native_formats_count(machine, line, expected):
    assert cpu_amps(machine({"proc/cpuinfo": f"processor : 0\n{line}\n"})) == expected


@contextmanager
def family(*, hold_before_fork):
    """A process with one forked child; 64 MiB are held before the fork by both, or after it by the child."""
    hold = "held = b'x' * (64 << 20)"
    before, after = (hold, "pass") if hold_before_fork else ("pass", hold)
    script = f"""
import os, time
{before}
if os.fork() == 0:
    {after}
    print(1, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            parent.stdout.read(1)
            yield parent.pid
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_the_memory_of_a_tree_holds_its_children():
    with family(hold_before_fork=False) as pid:
        assert psutil.Process(pid).memory_info().rss < 64 * MIB
        assert 64 * MIB < tree_memory_bytes(pid) < 128 * MIB


def test_pages_shared_by_a_fork_count_once():
    with family(hold_before_fork=True) as pid:
        assert 64 * MIB < tree_memory_bytes(pid) < 128 * MIB


@pytest.mark.parametrize(("hold_before_fork", "is_own"), [(False, True), (True, False)])
def test_what_a_fork_shares_is_not_its_own(hold_before_fork, is_own):
    with family(hold_before_fork=hold_before_fork) as pid:
        (child,) = psutil.Process(pid).children()
        assert (64 * MIB < own_memory_bytes(child.pid) < 128 * MIB) == is_own


def test_memory_falls_back_to_resident_size(monkeypatch):
    def refuse(_self):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    assert tree_memory_bytes(os.getpid()) >= MIB
    # A resident size holds what a fork shares: of what a process has to itself it tells nothing.
    assert own_memory_bytes(os.getpid()) is None


def test_processes_that_vanish_are_tolerated(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    ghost = psutil.Process(gone.pid)
    gone.wait()
    assert tree_memory_bytes(gone.pid) is None
    assert own_memory_bytes(gone.pid) is None
    monkeypatch.setattr(psutil.Process, "children", lambda _self, recursive: [ghost] if recursive else [])
    assert tree_memory_bytes(os.getpid()) > 0
