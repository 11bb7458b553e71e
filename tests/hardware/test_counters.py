"""Kernel counters: made-up files under a root of their own, and real processes inside and outside of the tree."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.interference import judge, storage_read_bytes
from pipetune.hardware import counters
from pipetune.hardware.cgroup import cpu_statistics, memory_pressure, quota_statistics
from pipetune.hardware.counters import TreeCounters

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20
OWN = 77


def cpu_line(name, busy=0, steal=0, idle=1000):
    """Ticks: busy is spread over its five columns."""
    user, rest = busy - 4 * (busy // 5), busy // 5
    return f"{name} {user} {rest} {rest} {idle} 50 {rest} {rest} {steal} 5 0\n"


def stat_of(pid, *, cpu=0, children_cpu=0, faults=0, rss=10, name="python"):
    fields = [pid, f"({name})", "S", 1, 1, 1, 0, -1, 0, 0, 0, faults, 0, cpu, 0, children_cpu, 0]
    return " ".join(map(str, [*fields, 20, 0, 1, 0, 12345, 99999, rss, 0, 0])) + "\n"


class Machine:
    """Files that look like the kernel's, rewritten in place as the kernel's change in place."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpus(self, *busy, steal=(0, 0, 0, 0)):
        lines = [cpu_line(f"cpu{n}", busy=ticks, steal=steal[n]) for n, ticks in enumerate(busy)]
        total = cpu_line("cpu ", busy=sum(busy), steal=sum(steal[: len(busy)]))
        self.write("proc/stat", "".join([total, *lines, "intr 1 2 3\n", "ctxt 9\n"]))

    def process(self, pid=OWN, *, read_bytes=0, children="", **figures):
        self.write(f"proc/{pid}/stat", stat_of(pid, **figures))
        self.write(f"proc/{pid}/io", f"rchar: 999\nread_bytes: {read_bytes}\nwrite_bytes: 5\n")
        self.write(f"proc/{pid}/task/{pid}/children", children)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.cpus(0, 0, 0, 0)
    machine.process()
    return machine


@pytest.fixture
def counters_of(machine):
    opened = []

    def open_counters(cpus=range(4)):
        opened.append(TreeCounters(root=machine.root, pid=OWN, cpus=cpus))
        return opened[-1]

    yield open_counters
    for reader in opened:
        reader.close()


# --- made-up files ---


def test_all_cpus_add_up_and_steal_stands_apart(machine, counters_of):
    reader = counters_of()
    machine.cpus(100, 50, 25, 25, steal=(7, 0, 0, 3))
    reading = reader.read()
    assert (reading.busy_s, reading.steal_s) == (pytest.approx(200 * TICK_S), pytest.approx(10 * TICK_S))
    assert reading.mask_cpus == 4


def test_only_the_cpus_of_the_mask_count(machine, counters_of):
    reader = counters_of(cpus=[1, 3])
    machine.cpus(100, 50, 25, 5, steal=(7, 1, 0, 3))
    reading = reader.read()
    assert (reading.busy_s, reading.steal_s) == (pytest.approx(55 * TICK_S), pytest.approx(4 * TICK_S))
    assert reading.mask_cpus == 2


@pytest.mark.parametrize("cpus", [[8, 9], []])
def test_cpus_that_are_numbered_anew_are_unknown(counters_of, cpus):
    reading = counters_of(cpus).read()
    assert (reading.busy_s, reading.steal_s) == (None, None)


def test_the_tree_is_the_process_its_workers_and_what_those_started(machine, counters_of):
    reader = counters_of()
    machine.process(1, cpu=10_000)  # somebody else
    machine.process(OWN, cpu=10, children_cpu=3, faults=2, rss=100, read_bytes=1000, children="100 ")
    machine.process(100, cpu=20, rss=10, read_bytes=200, children="")
    machine.process(200, cpu=30, rss=1, faults=1, read_bytes=30, children="300 301 ", name="a b) (c")
    machine.process(300, cpu=40, rss=0, read_bytes=4)
    machine.process(301, cpu=0, rss=0)
    first = reader.read([200])
    machine.process(OWN, cpu=15, children_cpu=5, faults=4, rss=100, read_bytes=1500, children="100 ")
    machine.process(300, cpu=41, rss=7, read_bytes=104)
    second = reader.read([200])
    assert second.own_cpu_s - first.own_cpu_s == pytest.approx(8 * TICK_S)
    assert storage_read_bytes(first, second) == 600
    assert second.faulted_bytes - first.faulted_bytes == 2 * PAGE
    assert (first.resident_bytes, second.resident_bytes) == (111 * PAGE, 118 * PAGE)


def test_a_worker_that_is_no_longer_named_stays_in_the_tree(machine, counters_of):
    reader = counters_of()
    machine.process(100, cpu=20)
    first = reader.read([100])
    machine.process(100, cpu=21)
    assert reader.read().own_cpu_s - first.own_cpu_s == pytest.approx(TICK_S)


def test_bytes_are_unknown_where_one_of_the_tree_hides_them(machine, counters_of):
    reader = counters_of()
    machine.write("proc/100/stat", stat_of(100, cpu=1))
    assert reader.read([]).storage_read_bytes == 0
    assert reader.read([100]).storage_read_bytes is None


def test_numbers_that_name_nobody_are_passed_over(counters_of):
    assert counters_of().read([5, 0, -1]).own_cpu_s == 0


def test_an_empty_machine_tells_nothing(tmp_path):
    with TreeCounters(root=tmp_path, pid=OWN, cpus=range(2)) as reader:
        first, second = reader.read([1, 2]), reader.read([1, 2])
    known = {name for name in first.__slots__ if getattr(first, name) is not None}
    assert known == {"at_s", "mask_cpus", "stall_is_own_group"}
    assert judge(first, second, cpus=2).findings == ()


def test_swap_is_found_behind_the_first_page_of_the_file(machine, counters_of, monkeypatch):
    monkeypatch.setattr(counters, "_SMALL", 64)
    filler = "".join(f"nr_thing_{n} {n}\n" for n in range(500))
    machine.write("proc/vmstat", f"{filler}pswpin 3\npswpout 4\nxpswpin 900\n")
    assert counters_of().read().swapped_bytes == 7 * PAGE


def test_swap_that_is_told_by_half_is_unknown(machine, counters_of):
    machine.write("proc/vmstat", "pswpin 3\n")
    assert counters_of().read().swapped_bytes is None


PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total=900\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def in_group(machine, path="/job/one"):
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write("proc/self/mountinfo", V2)
    return f"sys/fs/cgroup{path}"


def test_pressure_of_the_machine(machine, counters_of):
    machine.write("proc/pressure/memory", PRESSURE)
    reading = counters_of().read()
    assert (reading.memory_stall_s, reading.stall_is_own_group) == (2.5, False)


def test_pressure_of_our_own_group_comes_first(machine, counters_of):
    machine.write("proc/pressure/memory", PRESSURE)
    group = in_group(machine)
    machine.write(f"{group}/cgroup.events", "populated 1\n")
    machine.write(f"{group}/memory.pressure", PRESSURE.replace("2500000", "125000"))
    reading = counters_of().read()
    assert (reading.memory_stall_s, reading.stall_is_own_group) == (0.125, True)


def test_the_top_groups_pressure_is_the_machines(machine):
    group = in_group(machine, "/")
    machine.write(f"{group}/memory.pressure", PRESSURE)
    assert memory_pressure(machine.root) is None


def test_a_kernel_without_the_full_line_tells_no_stall(machine, counters_of):
    machine.write("proc/pressure/memory", PRESSURE.splitlines()[0])
    assert counters_of().read().memory_stall_s is None


def test_throttling_of_the_group_and_its_parents_adds_up(machine, counters_of):
    group = in_group(machine)
    machine.write(f"{group}/cpu.stat", "usage_usec 8000000\nnr_throttled 3\nthrottled_usec 1500000\n")
    machine.write("sys/fs/cgroup/job/cpu.stat", "usage_usec 9000000\nthrottled_usec 250000\n")
    machine.write("sys/fs/cgroup/job/cpu.max", "200000 100000\n")
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 99000000\n")
    reading = counters_of().read()
    assert reading.throttled_s == pytest.approx(1.75)
    assert reading.group_cpu_s == pytest.approx(9.0)  # of the group that has the quota
    assert quota_statistics(machine.root) == machine.root / "sys/fs/cgroup/job/cpu.stat"


def test_v1_counts_nanoseconds_and_a_link_to_the_same_folder_once(machine, counters_of):
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.stat", "nr_periods 5\nnr_throttled 2\nthrottled_time 1500000000\n")
    (machine.root / "sys/fs/cgroup/cpu").symlink_to("cpu,cpuacct")
    assert len(cpu_statistics(machine.root)) == 1
    reading = counters_of().read()
    assert (reading.throttled_s, reading.group_cpu_s) == (pytest.approx(1.5), None)


def test_a_group_that_was_never_held_back_is_a_zero(machine, counters_of):
    group = in_group(machine)
    machine.write(f"{group}/cpu.stat", "usage_usec 8\nthrottled_usec 0\n")
    assert counters_of().read().throttled_s == 0
    assert judge(counters_of().read(), counters_of().read(), cpus=4).findings == ()


figures = st.fixed_dictionaries(
    {name: st.integers(0, 50_000) for name in ("cpu", "children_cpu", "faults", "rss", "read_bytes")}
)
moments = st.lists(st.dictionaries(st.sampled_from([OWN, 100, 200]), figures, min_size=1), min_size=2, max_size=6)


@given(moments)
def test_sums_never_go_back_whatever_the_files_say(tmp_path_factory, story):
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.cpus(0, 0)
    machine.process()
    with TreeCounters(root=machine.root, pid=OWN, cpus=range(2)) as reader:
        readings = []
        for moment in story:
            for pid, figures_now in moment.items():
                machine.process(pid, **figures_now)
            readings.append(reader.read([100, 200]))
    for name in ("at_s", "own_cpu_s", "storage_read_bytes", "faulted_bytes"):
        values = [getattr(reading, name) for reading in readings]
        assert values == sorted(values), name
        assert min(values) >= 0


# --- real processes ---

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
BURN = "import time\nprint(1, flush=True)\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
NEST = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])"


@contextmanager
def running(*code, wait_for_line=True):
    process = subprocess.Popen(
        [sys.executable, "-c", *code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if wait_for_line:
            process.stdout.readline()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.fixture
def one_cpu():
    """This process and its children on one CPU alone, so that one burner uses it up."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def over(reader, pids, seconds=0.6):
    before = reader.read(pids)
    time.sleep(seconds)
    return before, reader.read(pids)


@linux
@pytest.mark.usefixtures("one_cpu")
def test_a_real_process_outside_of_the_tree_is_interference():
    # GIVEN a process that burns the only CPU and was started by somebody else
    starter = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}]).wait()"
    with running(starter, wait_for_line=False), running("input()", wait_for_line=False) as host:
        time.sleep(0.3)
        # WHEN the tree is another one
        reader = TreeCounters(pid=host.pid)
        before, after = over(reader, [])
        reader.close()
    # THEN it is named, and the tree used nothing
    assert after.own_cpu_s - before.own_cpu_s < 0.3
    found = judge(before, after, cpus=1)
    assert any(line.startswith("other processes used") for line in found.outside), found


@linux
@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("code", [BURN, NEST], ids=["worker", "child of a worker"])
def test_a_real_process_inside_of_the_tree_is_our_own(code):
    with running(code) as worker, TreeCounters() as reader:
        before, after = over(reader, [worker.pid], seconds=1.0)
    own, busy = after.own_cpu_s - before.own_cpu_s, after.busy_s - before.busy_s
    # Other work of this machine shares the CPU: what matters is that the burner's time is taken for ours.
    assert own > 0.1
    assert own <= busy + 0.1 * (after.at_s - before.at_s) + 4 * TICK_S


@linux
def test_the_time_of_workers_that_ended_stays_counted():
    code = "import time\nprint(1, flush=True)\nwhile time.process_time() < 0.3: pass"
    with TreeCounters() as reader:
        sums = [reader.read()]
        for _ in range(2):
            worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            worker.stdout.readline()
            sums.append(reader.read([worker.pid]))
            worker.wait()
            worker.stdout.close()
            sums.append(reader.read([worker.pid]))
    times = [reading.own_cpu_s for reading in sums]
    assert times == sorted(times)
    assert times[2] - times[0] >= 0.25
    assert times[4] - times[2] >= 0.25
    assert times[4] - times[0] < 3


@linux
@pytest.mark.parametrize("is_evicted", [True, False], ids=["evicted", "cached"])
def test_bytes_from_storage_are_those_that_were_not_in_memory(tmp_path, is_evicted):
    file = tmp_path / "data"
    file.write_bytes(os.urandom(8 * MIB))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        opened.read()
        if is_evicted:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = (
        "import sys\nprint(1, flush=True)\nsys.stdin.readline()\nprint(len(open(sys.argv[1], 'rb').read()), flush=True)"
    )
    with running(code, str(file)) as worker, TreeCounters() as reader:
        before = reader.read([worker.pid])
        worker.stdin.write("\n")
        worker.stdin.flush()
        worker.stdout.readline()
        found = storage_read_bytes(before, reader.read([worker.pid]))
    if found is None or (is_evicted and found == 0):
        pytest.skip("this kernel or file system does not tell what came from storage")
    assert (found >= 7 * MIB) is is_evicted


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@linux
def test_closing_leaves_no_open_file():
    with running("input()", wait_for_line=False) as worker:
        before = open_files()
        reader = TreeCounters()
        reader.read([worker.pid])
        assert open_files() > before
        reader.close()
        assert open_files() == before
        assert reader.read([worker.pid]).own_cpu_s is None
        assert open_files() == before


@linux
def test_files_of_ended_workers_are_closed():
    with TreeCounters() as reader:
        reader.read()
        before = open_files()
        with running("input()", wait_for_line=False) as worker:
            reader.read([worker.pid])
        reader.read()
        assert open_files() <= before


@linux
def test_a_reading_with_16_workers_is_cheap():
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(16)]
    try:
        with TreeCounters() as reader:
            pids = [sleeper.pid for sleeper in sleepers]
            reader.read(pids)
            times = []
            for _ in range(50):
                began = time.perf_counter()
                reader.read(pids)
                times.append(time.perf_counter() - began)
        # About 0.2 ms here; the median of a busy machine may be several times that.
        assert sorted(times)[10] < 0.001
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
