import importlib
import time

import pytest
from fake_nvml import (
    FakeDevice,
    FakeNVML,
    NVMLError_GpuIsLost,
    NVMLError_LibraryNotFound,
    NVMLError_NotSupported,
    run,
)

from pipetune.core.measurement import GpuUsage
from pipetune.hardware import nvml as room
from pipetune.hardware.nvml import GpuSampler, list_gpus

SLACK_S = 0.02  # keeps samples off the windows' borders, where the clocks' offset would decide


@pytest.fixture
def now():
    return time.monotonic()


def sampler_on(device, **failures):
    fake = FakeNVML(device, **failures)
    return GpuSampler.open(device.uuid, nvml=fake)


def usage_of(device, *windows, **failures):
    return sampler_on(device, **failures).usage(windows)


def test_gpus_are_listed_with_name_uuid_memory_and_driver():
    fake = FakeNVML(FakeDevice("GPU-a"), FakeDevice("GPU-b"))
    gpus, driver, reason = list_gpus(fake)
    assert [(gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in gpus] == [
        ("Fake GPU-a", "GPU-a", 80 * 2**30),
        ("Fake GPU-b", "GPU-b", 80 * 2**30),
    ]
    assert (driver, reason, fake.users) == ("580.1", None, 0)


def test_bytes_from_older_bindings_become_text():
    gpus, driver, _ = list_gpus(FakeNVML(FakeDevice("GPU-a"), binary=True))
    assert (gpus[0].name, gpus[0].uuid, driver) == ("Fake GPU-a", "GPU-a", "580.1")


def test_a_lost_gpu_does_not_hide_the_others():
    gpus, _, reason = list_gpus(FakeNVML(FakeDevice("GPU-a", broken=True), FakeDevice("GPU-b")))
    assert [gpu.uuid for gpu in gpus] == ["GPU-b"]
    assert reason is None


def test_a_gpu_that_does_not_tell_its_memory_is_still_listed():
    gpus, _, _ = list_gpus(FakeNVML(FakeDevice("GPU-a", memory_bytes=None)))
    assert gpus[0].memory_bytes is None


@pytest.mark.parametrize(
    ("fake", "part"),
    [
        (FakeNVML(init_error=NVMLError_LibraryNotFound()), "NVML Shared Library Not Found"),
        (FakeNVML(init_error=NVMLError_NotSupported()), "Not Supported"),
        (FakeNVML(), "names no GPU"),
        (FakeNVML(FakeDevice("GPU-a", broken=True)), "names no GPU"),
    ],
)
def test_no_gpu_comes_with_a_reason(fake, part):
    gpus, _, reason = list_gpus(fake)
    assert gpus == ()
    assert part in reason


def test_a_missing_library_is_a_reason(monkeypatch):
    monkeypatch.setattr(room, "_pynvml", None)
    assert "nvidia-ml-py" in list_gpus()[2]
    assert "nvidia-ml-py" in GpuSampler.open("GPU-a").reason


def test_no_driver_is_a_reason_with_the_real_binding(monkeypatch):
    pynvml = importlib.import_module("pynvml")

    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert "NVML is not available" in list_gpus()[2]
    assert "NVML is not available" in GpuSampler.open("GPU-a").usage([(0, 5)])


@pytest.mark.parametrize("uuid", ["GPU-c", "c", b"GPU-c", b"c"])
def test_the_gpu_is_found_by_uuid_whatever_cudas_order(uuid, now):
    devices = [FakeDevice(f"GPU-{name}", bus=name) for name in "abcd"]
    for share, device in zip((10, 20, 30, 40), devices, strict=True):
        run(device, begin=now - 6, seconds=6, values=[share])
    usage = GpuSampler.open(uuid, nvml=FakeNVML(*devices)).usage([(now - 5, now)])
    assert usage.mean_percent == 30


def test_the_pci_bus_id_helps_where_the_uuid_is_unknown(now):
    device = FakeDevice("GPU-a", bus="00000000:07:00.0")
    run(device, begin=now - 6, seconds=6, values=[55])
    fake = FakeNVML(FakeDevice("GPU-z"), device)
    for uuid in ("other", None):
        usage = GpuSampler.open(uuid, "00000000:07:00.0", nvml=fake).usage([(now - 5, now)])
        assert usage.mean_percent == 55


def test_an_unknown_gpu_and_no_gpu_are_reasons():
    fake = FakeNVML(FakeDevice("GPU-a"))
    assert GpuSampler.open("GPU-z", nvml=fake).reason == "NVML does not know the GPU GPU-z: Not Found"
    assert "does not run on an NVIDIA GPU" in GpuSampler.open(None, nvml=fake).usage([(0, 9)])


@pytest.mark.parametrize(
    ("uuid", "bus"),
    [("MIG-1", None), (b"MIG-1", None), ("1", "00000000:01:00.0"), ("other", "00000000:01:00.0")],
)
def test_a_mig_slice_is_a_reason_and_never_the_whole_gpus_figure(uuid, bus, now):
    whole, part = FakeDevice("GPU-a", mig=1), FakeDevice("MIG-1", bus="")
    run(whole, begin=now - 6, seconds=6, values=[99])
    sampler = GpuSampler.open(uuid, bus, nvml=FakeNVML(whole, part))
    assert sampler.reason.startswith("MIG")
    assert sampler.usage([(now - 5, now)]) == sampler.reason


@pytest.mark.parametrize(
    ("period", "length", "samples"),
    [(0.2, 0.3, None), (0.2, 1.0, 5), (0.2, 5.0, 25), (1.0, 0.3, None), (1.0, 1.0, None), (1.0, 5.0, 5)],
)
def test_a_window_counts_whole_periods_and_a_short_one_is_unknown(period, length, samples, now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 10, seconds=10, values=[50], period=period)
    usage = usage_of(device, (now - length - SLACK_S, now + SLACK_S))
    if samples is None:
        assert "too short for NVML" in usage
    else:
        assert usage == GpuUsage(mean_percent=50, spread_percent=0, samples=samples)


def test_what_ran_before_or_between_windows_is_left_out(now):
    device = FakeDevice("GPU-a")
    for share, begin in ((100, 8), (20, 6), (100, 4), (40, 2)):
        run(device, begin=now - begin, seconds=2, values=[share])
    usage = usage_of(device, (now - 6 - SLACK_S, now - 4 + SLACK_S), (now - 2 - SLACK_S, now + SLACK_S))
    assert usage.mean_percent == pytest.approx(30)
    assert usage.samples == 20


def test_a_sample_that_is_partly_outside_is_left_out(now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 6, seconds=2, values=[100])
    run(device, begin=now - 4, seconds=4, values=[10])
    assert usage_of(device, (now - 4.1, now - 0.1)).mean_percent == 10
    assert usage_of(device, (now - 4.1, now - 0.1)).samples == 19


def test_short_windows_add_up(now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 8, seconds=8, values=[70])
    windows = [(now - start - SLACK_S, now - start + 0.6 + SLACK_S) for start in (7, 5, 3)]
    assert usage_of(device, *windows).samples == 9


def test_idle_is_a_figure_and_the_spread_is_told(now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 4, seconds=4, values=[0])
    assert usage_of(device, (now - 4, now)).mean_percent == 0
    device = FakeDevice("GPU-a")
    run(device, begin=now - 4, seconds=4, values=[0, 100])
    usage = usage_of(device, (now - 4.01, now + 0.01))
    assert usage.mean_percent == pytest.approx(50, abs=3)
    assert usage.spread_percent == pytest.approx(51, abs=1)


def test_no_samples_at_all_are_unknown(now):
    assert "0 of the about 24 samples" in usage_of(FakeDevice("GPU-a"), (now - 5.01, now))
    assert "too short" in usage_of(FakeDevice("GPU-a"))


def test_collecting_often_outlives_the_drivers_buffer_and_repeats_nothing(now):
    device = FakeDevice("GPU-a")
    sampler = sampler_on(device)
    for second in range(60, 0, -5):
        run(device, begin=now - second, seconds=5, values=[80])
        sampler.collect()
        sampler.collect()
    assert sampler.usage([(now - 60 - SLACK_S, now + SLACK_S)]).samples == 300


def test_a_window_that_the_buffer_mostly_lost_is_unknown(now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 60, seconds=60, values=[80])
    assert "NVML gave 70 of the about 299 samples" in usage_of(device, (now - 60.01, now + 0.01))


def test_blank_and_impossible_entries_are_left_out(now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 4, seconds=4, values=[60])
    last_us = device.samples[-1][0]
    device.samples += [(0, 0), (last_us + 1, 4_000_000)]
    assert usage_of(device, (now - 4, now)).mean_percent == 60


def test_samples_that_are_not_supported_are_a_reason_at_once(now):
    sampler = sampler_on(FakeDevice("GPU-a"), error=NVMLError_NotSupported(), fail_after=0)
    assert sampler.reason == "NVML does not report utilisation for this device: Not Supported"
    assert sampler.usage([(now - 5, now)]) == sampler.reason


def test_a_failure_midway_is_a_reason_and_what_was_read_stays(now):
    device = FakeDevice("GPU-a")
    run(device, begin=now - 9, seconds=4, values=[80])
    sampler = sampler_on(device, error=NVMLError_GpuIsLost(), fail_after=1)
    run(device, begin=now - 5, seconds=5, values=[80])
    assert sampler.reason is None
    assert "NVMLError_GpuIsLost" in sampler.usage([(now - 5, now)])
    assert sampler.usage([(now - 9, now - 5)]).mean_percent == 80


def test_reading_goes_on_after_a_passing_failure(now):
    device = FakeDevice("GPU-a")
    fake = FakeNVML(device, error=NVMLError_GpuIsLost(), fail_after=0)
    sampler = GpuSampler.open("GPU-a", nvml=fake)
    fake.error = None
    run(device, begin=now - 5, seconds=5, values=[80])
    assert sampler.usage([(now - 5, now)]).mean_percent == 80
    assert sampler.reason is None


def test_closing_lets_nvml_go_once_and_leaves_a_reason():
    fake = FakeNVML(FakeDevice("GPU-a"))
    sampler = GpuSampler.open("GPU-a", nvml=fake)
    assert fake.users == 1
    sampler.close()
    sampler.close()
    assert fake.users == 0
    assert "closed" in sampler.usage([(0, 5)])


@pytest.mark.gpu
def test_a_real_gpu_is_named_and_sampled():
    gpus, driver, reason = list_gpus()
    assert gpus, reason
    assert gpus[0].name
    assert gpus[0].memory_bytes > 2**30
    assert driver
    sampler = GpuSampler.open(gpus[0].uuid.removeprefix("GPU-"))
    begin = time.monotonic()
    time.sleep(4)
    usage = sampler.usage([(begin, time.monotonic())])
    sampler.close()
    assert isinstance(usage, GpuUsage), usage
    assert usage.samples > 10
    assert 0 <= usage.mean_percent <= 100
