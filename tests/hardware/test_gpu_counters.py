"""Chip counters, clock limits and other processes: what NVML tells beside the busy share."""

import math
import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from fake_nvml import CLOCK_OFFSET_S, FakeDevice, FakeNVML, NVMLError_NotSupported, run

from pipetune.core.interference import Cause
from pipetune.core.measurement import GpuUsage
from pipetune.hardware import gpu_counters
from pipetune.hardware.nvml import GpuSampler, list_tenants

HEAT_HW, HEAT_SW, BRAKE, CAP, IDLE = 64, 32, 128, 4, 1


class Clock:
    """A monotonic clock that tests move; the wall clock keeps its distance."""

    def __init__(self):
        self.now = time.monotonic()

    def __call__(self):
        return self.now

    def us(self):
        return round((self.now + CLOCK_OFFSET_S) * 1e6)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "time", lambda: clock.now + CLOCK_OFFSET_S)
    return clock


@pytest.fixture(params=[True, False], ids=["first namespace", "container"])
def in_first_namespace(request, monkeypatch):
    monkeypatch.setattr(gpu_counters, "in_first_pid_namespace", lambda: request.param)
    return request.param


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(gpu_counters, "in_first_pid_namespace", lambda: True)


@pytest.fixture
def in_container(monkeypatch):
    monkeypatch.setattr(gpu_counters, "in_first_pid_namespace", lambda: False)


def device(**facts):
    return FakeDevice("GPU-a", **facts)


def sampler_on(gpu, **how):
    fake = FakeNVML(gpu)
    return GpuSampler.open("GPU-a", nvml=fake, **how), fake


def usage_between_marks(clock, gpu, shares, *, step=1.0, windows=None):
    """Mark a border, let the chip run `step` seconds at each share in turn, and read the usage of these windows."""
    sampler, fake = sampler_on(gpu)
    begin = clock.now
    run(gpu, begin=begin, seconds=step * len(shares), values=[50])
    sampler.mark()
    for share in shares:
        gpu.chip = share
        clock.now += step
        sampler.mark()
    usage = sampler.usage(windows(begin) if windows else [(begin, clock.now)])
    return usage, sampler, fake


# --- chip counters ---


def test_chip_counters_are_the_mean_over_the_windows(clock):
    usage, _, _ = usage_between_marks(clock, device(chip=(0, 0, 0)), [(40, 20, 10), (60, 40, 20)])
    assert isinstance(usage, GpuUsage)
    assert (usage.mean_percent, usage.sm_percent, usage.tensor_percent, usage.memory_bandwidth_percent) == (
        pytest.approx(50),
        pytest.approx(50),
        pytest.approx(30),
        pytest.approx(15),
    )


def test_what_the_chip_did_between_windows_is_left_out(clock):
    shares = [(10, 0, 0), (10, 0, 0), (100, 0, 0), (40, 0, 0)]
    usage, _, _ = usage_between_marks(
        clock, device(chip=(0, 0, 0)), shares, windows=lambda begin: [(begin, begin + 2), (begin + 3, begin + 4)]
    )
    assert usage.sm_percent == pytest.approx(20)


def test_windows_that_follow_each_other_need_no_mark_in_between(clock):
    shares = [(10, 0, 0)]
    borders = [0, 0.5, 1.01, 2]
    usage, _, _ = usage_between_marks(
        clock,
        device(chip=(0, 0, 0)),
        shares,
        step=2.0,
        windows=lambda begin: [(begin + a, begin + b) for a, b in pairwise(borders)],
    )
    assert usage.sm_percent == pytest.approx(10)


def test_marks_far_from_the_borders_are_not_taken_for_them(clock):
    usage, _, _ = usage_between_marks(
        clock, device(chip=(0, 0, 0)), [(10, 0, 0)] * 2, step=2.0, windows=lambda begin: [(begin + 0.8, begin + 3.2)]
    )
    assert usage.mean_percent == 50
    assert usage.sm_percent is None


def test_a_mark_that_comes_a_little_late_is_fine(clock):
    usage, _, _ = usage_between_marks(
        clock, device(chip=(0, 0, 0)), [(30, 0, 0)], step=4.0, windows=lambda begin: [(begin - 0.1, begin + 3.9)]
    )
    assert usage.sm_percent == pytest.approx(30)


def test_a_chip_without_counters_has_none_and_is_never_asked(clock):
    usage, _, fake = usage_between_marks(clock, device(chip=None), [None])
    assert usage.mean_percent == 50
    assert (usage.sm_percent, usage.tensor_percent, usage.memory_bandwidth_percent) == (None, None, None)
    assert not fake.lent


def test_a_metric_that_fails_or_is_no_number_is_unknown_and_the_others_stay(clock):
    gpu = device(chip=(0, 0, 0), chip_refuses=frozenset({5}))
    usage, _, _ = usage_between_marks(clock, gpu, [(40, 20, math.nan)])
    assert usage.sm_percent == pytest.approx(40)
    assert usage.tensor_percent is None
    assert usage.memory_bandwidth_percent is None


def test_every_sample_is_given_back(clock):
    _, sampler, fake = usage_between_marks(clock, device(chip=(0, 0, 0)), [(1, 1, 1)] * 5)
    assert len(fake.lent) == 6
    sampler.close()
    sampler.mark()
    assert not fake.lent


def test_marks_are_bounded_and_the_newest_stay(clock):
    usage, _, fake = usage_between_marks(
        clock, device(chip=(0, 0, 0)), [(40, 0, 0)] * 400, step=0.5, windows=lambda begin: [(begin + 190, begin + 200)]
    )
    assert len(fake.lent) == 256
    assert usage.sm_percent == pytest.approx(40)


def test_a_mark_that_fails_leaves_no_sample_behind():
    gpu = device(chip=(1, 1, 1))
    sampler, fake = sampler_on(gpu)
    gpu.broken = True
    sampler.mark()
    assert not fake.lent


# --- clock limits ---


def throttling(clock, readings):
    gpu = device()
    sampler, _ = sampler_on(gpu)
    clock.now += 1
    begin = clock.now
    for reasons in readings:
        gpu.reasons = reasons
        sampler.mark()
        clock.now += 0.5
    gpu.reasons = HEAT_HW | BRAKE | CAP
    clock.now += 1
    sampler.collect()
    return sampler.throttling([(begin, clock.now - 1)])


@pytest.mark.parametrize(
    ("readings", "outside", "own"),
    [
        ([0, IDLE, 0], (), ()),
        ([HEAT_HW, 0, 0, 0], ("heat slowed the GPU's clocks in 1 of 4 readings",), ()),
        ([HEAT_SW, HEAT_HW | HEAT_SW], ("heat slowed the GPU's clocks in 2 of 2 readings",), ()),
        ([BRAKE], ("the machine's power brake slowed the GPU's clocks in 1 of 1 readings",), ()),
        ([CAP, CAP, CAP], (), ("the GPU's power limit slowed its clocks in 3 of 3 readings",)),
        ([HEAT_SW] + [0] * 19, (), ()),
        ([None, None], (), ()),
    ],
)
def test_heat_and_the_brake_are_outside_and_the_power_limit_is_own(clock, readings, outside, own):
    found = throttling(clock, readings)
    assert (found.outside, found.own) == (outside, own)


def test_without_readings_in_the_windows_nothing_is_said(clock):
    sampler, _ = sampler_on(device(reasons=HEAT_HW))
    assert sampler.throttling([(clock.now + 1, clock.now + 2)]).findings == ()


def test_the_older_name_of_the_reasons_is_asked_too(clock):
    fake = FakeNVML(device())

    def refuse(_):
        raise NVMLError_NotSupported

    fake.nvmlDeviceGetCurrentClocksEventReasons = refuse
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: BRAKE
    sampler = GpuSampler.open("GPU-a", nvml=fake)
    assert sampler.throttling([(clock.now - 1, clock.now + 1)]).findings[0].cause is Cause.GPU_POWER_BRAKE


# --- other processes ---

HOST = 4_000_001  # above any real number, so that no real process interferes


def foreign(clock, shares, *, seconds=4, own=(HOST,), before=frozenset()):
    """What is said of a trial in which these processes each had this SM share."""
    gpu = device()
    sampler, _ = sampler_on(gpu, before=before)
    begin = clock.now
    for _ in range(seconds):
        clock.now += 1
        gpu.processes += [(pid, clock.us(), share) for pid, share in shares.items()]
        sampler.collect()
    return sampler.foreign([(begin, clock.now)], own)


@pytest.mark.usefixtures("on_host")
def test_a_stranger_is_named_with_its_share(clock):
    found = foreign(clock, {HOST: 60, 4_001_234: 35})
    assert found.outside == ("process 4001234 used 35 % of the GPU (SM) during the windows",)
    assert found.own == ()


@pytest.mark.usefixtures("on_host")
def test_several_strangers_make_one_line(clock):
    found = foreign(clock, {HOST: 40, **{4_001_000 + n: 10 + n for n in range(4)}})
    assert found.outside == (
        "4 processes (4001003, 4001002, 4001001, ...) used 46 % of the GPU (SM) during the windows",
    )


@pytest.mark.usefixtures("in_first_namespace")
@pytest.mark.parametrize("shares", [{}, {HOST: 100}, {HOST: 90, 4_001_234: 2}])
def test_ourselves_and_trifles_are_no_interference(clock, shares):
    assert foreign(clock, shares).findings == ()


@pytest.mark.usefixtures("in_container")
def test_in_a_container_a_stranger_is_not_accused_for_it_may_be_us(clock):
    assert foreign(clock, {4_001_234: 100}).findings == ()
    assert foreign(clock, {4_001_234: 50, 4_005_678: 50}).findings == ()


@pytest.mark.usefixtures("in_first_namespace")
def test_who_was_there_before_us_is_named_in_a_container_too(clock):
    found = foreign(clock, {4_001_234: 40, 4_005_678: 60}, before=frozenset({4_001_234}), own=(4_005_678,))
    assert found.outside == ("process 4001234 used 40 % of the GPU (SM) during the windows",)


@pytest.mark.usefixtures("on_host")
def test_a_worker_in_the_hosts_session_is_ours(clock):
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert foreign(clock, {worker.pid: 50}, own=(worker.pid,)).findings == ()
        assert foreign(clock, {child.pid: 50}, own=(os.getsid(0),)).findings == ()
        assert foreign(clock, {worker.pid: 50}, own=(HOST,)).outside
    finally:
        for process in (worker, child):
            process.communicate(b"\n", timeout=20)


@pytest.mark.usefixtures("on_host")
def test_what_ran_outside_of_the_windows_does_not_count(clock):
    gpu = device()
    sampler, _ = sampler_on(gpu)
    for second in range(6):
        clock.now += 1
        if second < 3:
            gpu.processes.append((4_001_234, clock.us(), 80))
        sampler.collect()
    assert sampler.foreign([(clock.now - 2.5, clock.now)], (HOST,)).findings == ()
    assert sampler.foreign([(clock.now - 6, clock.now)], (HOST,)).findings[0].amount == pytest.approx(40)


@pytest.mark.usefixtures("on_host")
def test_glances_closer_than_the_drivers_samples_do_not_water_a_share_down(clock):
    gpu = device()
    sampler, _ = sampler_on(gpu)
    begin = clock.now
    for step in range(1, 41):
        clock.now += 0.1
        if step % 10 == 0:
            gpu.processes.append((4_001_234, clock.us(), 50))
        sampler.mark()
    assert sampler.foreign([(begin, clock.now)], (HOST,)).findings[0].amount == pytest.approx(50, rel=0.3)


@pytest.mark.usefixtures("on_host")
def test_garbage_shares_are_left_out(clock):
    assert foreign(clock, {4_001_234: 4_000_000}).findings == ()


@pytest.mark.usefixtures("in_container")
def test_more_others_can_be_learned_of_later(clock):
    gpu = device()
    sampler, _ = sampler_on(gpu)
    begin = clock.now
    clock.now += 2
    gpu.processes.append((7, clock.us(), 30))
    sampler.collect()
    assert sampler.foreign([(begin, clock.now)], (HOST,)).findings == ()
    sampler.add_others(frozenset({7}))
    assert sampler.foreign([(begin, clock.now)], (HOST,)).outside


def test_tenants_are_those_with_a_context_and_those_that_computed():
    fake = FakeNVML(
        FakeDevice("GPU-a", contexts=(11, 12), processes=[(13, 5, 90)]),
        FakeDevice("GPU-b", contexts=None, processes=[(14, 5, 0)]),
    )
    assert list_tenants(fake) == {11, 12, 13, 14}
    assert fake.users == 0


def test_without_nvml_there_are_no_tenants():
    assert list_tenants(FakeNVML(init_error=NVMLError_NotSupported())) == frozenset()


def test_without_a_gpu_everything_is_quiet():
    sampler = GpuSampler.open(None, nvml=FakeNVML())
    sampler.mark()
    sampler.add_others(frozenset({1}))
    assert sampler.throttling([(0, 1)]).findings == ()
    assert sampler.foreign([(0, 1)], ()).findings == ()
    sampler.close()


def test_the_real_binding_has_every_name_that_is_used():
    pynvml = pytest.importorskip("pynvml")
    names = [
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleGet",
        "nvmlGpmSampleFree",
        "nvmlGpmMetricsGet",
        "c_nvmlGpmMetricsGet_t",
        "NVML_GPM_METRICS_GET_VERSION",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
    ]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert (
        pynvml.NVML_GPM_METRIC_SM_UTIL,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    ) == (2, 5, 10)
    words = ("HwThermalSlowdown", "SwThermalSlowdown", "HwPowerBrakeSlowdown", "SwPowerCap")
    assert [getattr(pynvml, f"nvmlClocksThrottleReason{word}") for word in words] == [HEAT_HW, HEAT_SW, BRAKE, CAP]
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.metrics[2].metricId = 10
    assert request.metrics[2].metricId == 10


# --- on a real GPU ---

LOAD = """
import sys, time, torch
one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for _ in range(20):
        one @ one
    torch.cuda.synchronize()
"""


def start_load(seconds, **how):
    load = subprocess.Popen(
        [sys.executable, "-c", LOAD, str(seconds)], stdout=subprocess.PIPE, text=True, start_new_session=True, **how
    )
    assert load.stdout.readline() == "ready\n"
    return load


def watch(sampler, seconds):
    """Windows of half a second, with a mark at each border; also the longest time that a mark took."""
    windows, longest_s = [], 0.0
    sampler.mark()
    for _ in range(round(seconds / 0.5)):
        begin = time.monotonic()
        time.sleep(0.5)
        windows.append((begin, time.monotonic()))
        asked = time.monotonic()
        sampler.mark()
        longest_s = max(longest_s, time.monotonic() - asked)
    return windows, longest_s


def end(*loads):
    for load in loads:
        load.kill()
        load.wait()
        load.stdout.close()


@pytest.mark.gpu
def test_a_real_gpu_tells_its_counters_and_ours_is_not_foreign(visible_gpu_uuid):
    before = list_tenants()
    load = start_load(30)
    sampler = GpuSampler.open(visible_gpu_uuid, before=before)
    try:
        windows, longest_s = watch(sampler, 6)
        usage = sampler.usage(windows)
        print("usage", usage, "longest mark", longest_s, "first namespace", gpu_counters.in_first_pid_namespace())
        print(
            "before", before, "glances", list(sampler._tenants._glances)[:3], "throttling", sampler.throttling(windows)
        )
        assert isinstance(usage, GpuUsage), usage
        if sampler._chip._is_supported:
            assert 50 < usage.sm_percent <= 100
            assert 30 < usage.tensor_percent <= 100
            assert 0 < usage.memory_bandwidth_percent <= 100
        assert longest_s < 0.2
        assert sampler.foreign(windows, [load.pid]).findings == ()
        assert len(list(sampler._clocks._readings)) >= 10
    finally:
        end(load)
        sampler.close()


@pytest.mark.gpu
def test_on_a_real_gpu_who_was_there_before_is_foreign(visible_gpu_uuid):
    stranger = start_load(60)
    time.sleep(3)  # until the driver has seen it compute: inside a container only that list has the right number
    before = list_tenants()
    ours = start_load(30)
    sampler = GpuSampler.open(visible_gpu_uuid, before=before)
    try:
        windows, _ = watch(sampler, 6)
        found = sampler.foreign(windows, [ours.pid])
        print("before", before, "found", found, "pids", stranger.pid, ours.pid)
        assert len(found.outside) == 1
        assert 20 < found.findings[0].amount < 80
    finally:
        end(stranger, ours)
        sampler.close()
