"""What a check of a machine sees: containers, the bus, files, caches, storage, scripts; and NVML's part of it."""

import os
import resource

import pytest
from fake_nvml import FakeDevice, FakeNVML, NVMLError_LibraryNotFound

from pipetune.core.machine import GpuState
from pipetune.errors import InputError
from pipetune.hardware import machine, storage
from pipetune.hardware.machine import look_at_machine
from pipetune.hardware.nvml import driver_cuda_version, gpu_states
from pipetune.hardware.storage import look_at_folder

MIB = 2**20


@pytest.fixture(autouse=True)
def short_watch(monkeypatch):
    monkeypatch.setattr(machine, "_WATCH_S", 0.01)


@pytest.fixture
def root(tmp_path):
    """A machine as files; called with {path: text}, it writes them and gives its root."""

    def write(files=()):
        for path, text in dict(files).items():
            file = tmp_path / "root" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "root"

    return write


def seen(root, environ=None, **given):
    return look_at_machine(given.get("data"), given.get("script"), environ or {}, root)


@pytest.mark.parametrize(("files", "environ", "container"), [
    ({}, {}, None),
    ({".dockerenv": ""}, {}, "docker"),
    ({"proc/1/cgroup": "0::/system.slice/docker-1a2b.scope\n"}, {}, "docker"),
    ({"run/.containerenv": ""}, {}, "podman"),
    ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ({"proc/1/cgroup": "1:cpu:/kubepods/burstable/pod1\n"}, {}, "kubernetes"),
    ({}, {"APPTAINER_CONTAINER": "/images/a.sif"}, "apptainer"),
    ({"proc/1/cgroup": "1:name=systemd:/lxc/one\n"}, {}, "container"),
    ({"proc/1/cgroup": "0::/init.scope\n"}, {}, None),
])  # fmt: skip
def test_what_holds_this_process(root, files, environ, container):
    assert seen(root(files), environ).container == container


def test_cards_that_no_driver_serves_are_seen_on_the_bus(root):
    bus = "sys/bus/pci/devices/0000:0"
    files = {
        f"{bus}1:00.0/vendor": "0x10de\n", f"{bus}1:00.0/class": "0x030200\n",
        f"{bus}1:00.1/vendor": "0x10de\n", f"{bus}1:00.1/class": "0x040300\n",  # its sound
        f"{bus}2:00.0/vendor": "0x8086\n", f"{bus}2:00.0/class": "0x030000\n",
    }  # fmt: skip
    assert seen(root(files)).driver.cards_on_bus == 1
    assert seen(root() / "elsewhere").driver.cards_on_bus is None


def test_device_files_are_named(root):
    files = seen(root({"dev/nvidia0": "", "dev/nvidiactl": "", "dev/null": ""})).driver.device_files
    assert files == ("nvidia0", "nvidiactl")


def test_this_machine_is_seen():
    found = look_at_machine(None, None)
    assert found.memory_present_bytes >= found.profile.memory_bytes >= 0
    assert 0 < found.memory_available_bytes <= found.memory_present_bytes
    assert found.open_files_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.cpus_busy >= 0
    assert found.folder.filesystem
    assert found.folder.read_bytes_per_s is None
    assert found.dead_packages == ()


def test_only_variables_that_decide_speed_are_kept(root):
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "SECRET_TOKEN": "x"}
    assert seen(root(), environ).environ == {"CUDA_LAUNCH_BLOCKING": "1"}


# --- the kernel cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("environ", "why_not"), [
    ({"HOME": "{tmp}"}, None),
    ({"CUDA_CACHE_PATH": "{tmp}/cache"}, None),
    ({"CUDA_CACHE_PATH": "{tmp}/gone/cache"}, "there is no {tmp}/gone"),
    ({"CUDA_CACHE_PATH": "{tmp}/file"}, "{tmp}/file is no folder"),
])  # fmt: skip
def test_the_kernel_cache_is_a_folder_that_can_be_written_to(root, tmp_path, environ, why_not):
    (tmp_path / "file").write_text("")
    cache = seen(root(), {name: value.format(tmp=tmp_path) for name, value in environ.items()}).kernel_cache
    assert cache.why_not == (None if why_not is None else why_not.format(tmp=tmp_path))


def test_a_kernel_cache_that_is_closed_to_us_is_named(root, tmp_path, monkeypatch):
    # GIVEN no rights to it, which root could not be denied
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)  # noqa: ARG005
    cache = seen(root(), {"CUDA_CACHE_PATH": str(tmp_path)}).kernel_cache
    assert cache.why_not == f"{tmp_path} cannot be written to"


# --- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "is_guarded"), [
    ("import torch\nfor batch in loader:\n    train(batch)\n", False),
    ("import torch\ndef main(): pass\nmain()\n", False),
    ('def main(): pass\nif __name__ == "__main__":\n    main()\n', True),
    ("def main(): pass\nif '__main__' == __name__: main()\n", True),
    ('"""Only a library."""\nimport torch\nLIMIT = 3\n', True),
])  # fmt: skip
def test_a_script_is_looked_at_for_a_main_guard(root, tmp_path, source, is_guarded):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert seen(root(), script=script).is_guarded is is_guarded


@pytest.mark.parametrize("content", [None, b"def (", b"\xff\xfe"])
def test_what_is_no_script_is_bad_input(root, tmp_path, content):
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    with pytest.raises(InputError, match="--script"):
        seen(root(), script=script)


# --- storage ---------------------------------------------------------------------------------------------------------


def mounts(point):
    return {
        "proc/self/mountinfo": f"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"21 20 0:40 / {point} rw shared:1 - nfs4 server:/data rw\n"
        f"22 20 8:16 / {point}/local rw - xfs /dev/sdb rw\nbroken\n",
        "sys/dev/block/8:1/../queue/rotational": "1\n",
        "sys/dev/block/8:16/queue/rotational": "0\n",
    }


@pytest.mark.parametrize(
    ("below", "expected"),
    [("", ("nfs4", True, None)), ("/local", ("xfs", False, False)), ("/../beside", ("ext4", False, True))],
)
def test_a_folder_is_on_the_innermost_mount(root, tmp_path, below, expected):
    point = tmp_path / "data"
    for folder in ("data/local", "beside", "root/sys/dev/block/8:1"):
        (tmp_path / folder).mkdir(parents=True)
    found = look_at_folder(tmp_path / f"data{below}", is_read=False, root=root(mounts(point)))
    assert (found.filesystem, found.is_network, found.is_rotating) == expected


def test_a_virtual_disk_does_not_say_whether_it_rotates(root, tmp_path):
    disk = tmp_path / "root/sys/devices/pci0000:00/virtio1/block/vda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/rotational").write_text("1\n")
    (tmp_path / "root/sys/dev/block").mkdir(parents=True)
    (tmp_path / "root/sys/dev/block/253:0").symlink_to(disk)
    files = {"proc/self/mountinfo": "20 1 253:0 / / rw - ext4 /dev/vda rw\n"}
    assert look_at_folder(tmp_path, is_read=False, root=root(files)).is_rotating is None


def test_files_are_read_past_the_cache(tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(storage, "drop_cached", dropped.append)
    for number in range(4):
        (tmp_path / f"{number}.bin").write_bytes(os.urandom(2 * MIB))
    (tmp_path / "link").symlink_to(tmp_path / "0.bin")
    found = look_at_folder(tmp_path, is_read=True)
    assert found.read_bytes_per_s > 0
    assert sorted(dropped) == sorted(tmp_path.glob("*.bin"))


def test_too_little_to_read_is_no_rate(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 1000)
    assert look_at_folder(tmp_path, is_read=True).read_bytes_per_s is None


def test_a_folder_that_is_not_there_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        look_at_folder(tmp_path / "gone", is_read=True)


# --- NVML ------------------------------------------------------------------------------------------------------------


def test_nvml_tells_link_limits_and_company():
    device = FakeDevice("GPU-1", link=(4, 5, 8, 16), power_mw=(400_000, 700_000), contexts=(11, 12), reasons=64 | 4 | 1)
    state = gpu_states(FakeNVML(device, binary=True))[0]
    assert (state.pcie_generation, state.pcie_generation_of_card) == (4, 5)
    assert (state.pcie_width, state.pcie_width_of_card) == (8, 16)
    assert (state.power_limit_w, state.power_default_w) == (400, 700)
    assert (state.other_processes, state.other_memory_bytes) == (2, 2 * 2**30)
    assert state.sm_clock_limits == ("heat",)
    assert state.memory_bytes == device.memory_bytes
    assert driver_cuda_version(FakeNVML(device)) == (12, 8)


def test_what_nvml_refuses_is_not_known():
    device = FakeDevice("GPU-1", link=None, power_mw=None, contexts=(11,), context_bytes=None, reasons=None)
    state = gpu_states(FakeNVML(device))[0]
    assert state == GpuState(name=state.name, other_processes=1, memory_bytes=device.memory_bytes)


def test_without_nvml_nothing_is_known():
    nvml = FakeNVML(init_error=NVMLError_LibraryNotFound())
    assert (gpu_states(nvml), driver_cuda_version(nvml)) == ((), None)
