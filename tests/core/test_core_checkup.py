"""Each ill of a machine is named with its remedy, and a healthy machine has none."""

from dataclasses import replace

import pytest

from pipetune.core.checkup import checkup
from pipetune.core.findings import Finding, Severity, worst
from pipetune.core.hardware import Gpu, HardwareProfile
from pipetune.core.machine import (
    CacheFolder,
    CudaDevice,
    DriverFacts,
    FolderFacts,
    GpuState,
    MachineFacts,
    TorchFacts,
)

MIB, GIB = 2**20, 2**30
PROFILE = HardwareProfile(
    cpu_model="Some CPU",
    cpus_usable=16,
    cpus_present=16,
    cpus_limit="all CPUs present",
    memory_bytes=128 * GIB,
    shared_memory_bytes=64 * GIB,
    gpus=(Gpu(name="Some GPU", uuid="GPU-1", memory_bytes=80 * GIB),),
    gpu_reason=None,
    driver="580.10",
    system="Linux",
    python="3.12.3",
)
DEVICE = CudaDevice(name="Some GPU", capability=(9, 0), is_compiled_for=True)
TORCH = TorchFacts(
    version="2.11.0", cuda_version="13.0", cudnn_version=91002, devices=(DEVICE,), start_method="fork", threads=16
)
STATE = GpuState(
    name="Some GPU",
    pcie_generation=5,
    pcie_generation_of_card=5,
    pcie_width=16,
    pcie_width_of_card=16,
    power_limit_w=700.0,
    power_default_w=700.0,
    memory_bytes=80 * GIB,
)
HEALTHY = MachineFacts(
    profile=PROFILE,
    torch=TORCH,
    driver=DriverFacts(cuda_version=(13, 0), device_files=("nvidia0", "nvidia-uvm", "nvidiactl"), cards_on_bus=1),
    gpus=(STATE,),
    container=None,
    memory_present_bytes=128 * GIB,
    memory_available_bytes=120 * GIB,
    shared_memory_total_bytes=64 * GIB,
    open_files_limit=65536,
    swap_used_bytes=0,
    swap_rate_bytes_per_s=0.0,
    cpus_busy=0.2,
    environ={},
    kernel_cache=CacheFolder(path="/home/me/.nv/ComputeCache"),
    folder=FolderFacts(path="/data", filesystem="ext4", is_rotating=False, read_bytes_per_s=2e9),
    dead_packages=(),
)
NO_GPU = replace(PROFILE, gpus=(), driver=None, gpu_reason="NVML is not available")
BLIND = replace(TORCH, devices=(), cuda_error="CUDA driver initialization failed")
CPU_ONLY = replace(
    HEALTHY,
    profile=NO_GPU,
    gpus=(),
    torch=replace(TORCH, cuda_version=None, devices=(), cudnn_version=None),
    driver=DriverFacts(cards_on_bus=0),
)


def test_a_healthy_machine_has_no_ill():
    findings = checkup(HEALTHY)
    assert worst(findings) is Severity.OK
    assert {finding.code for finding in findings} >= {
        "torch", "driver", "device", "precision", "cudnn", "pcie", "power", "gpu_shared", "kernel_cache", "cpus",
        "threads", "memory", "shared_memory", "open_files", "swap", "storage", "start_method",
    }  # fmt: skip
    assert not any(finding.remedy for finding in findings)


# What is ill, how grave it is, and words of the figure and of the remedy.
ILLS: dict[str, tuple[MachineFacts, str, Severity, str, str]] = {
    "no torch": (
        replace(HEALTHY, torch=TorchFacts(error="torch is not installed")),
        "torch", Severity.STOP, "not installed", "pip install torch",
    ),
    "a CPU build beside a GPU": (
        replace(HEALTHY, torch=replace(TORCH, cuda_version=None, devices=())),
        "torch", Severity.STOP, "without CUDA", "CUDA build",
    ),
    "a driver older than torch's CUDA": (
        replace(HEALTHY, torch=BLIND, driver=replace(HEALTHY.driver, cuda_version=(12, 8))),
        "driver", Severity.STOP, "CUDA up to 12.8", "update the driver, or install a torch built for CUDA 12",
    ),
    "a card without a driver": (
        replace(HEALTHY, torch=BLIND, profile=NO_GPU, gpus=()),
        "driver", Severity.STOP, "1 NVIDIA card(s)", "install NVIDIA's driver",
    ),
    "Docker without --gpus": (
        replace(HEALTHY, torch=BLIND, profile=NO_GPU, gpus=(), container="docker"),
        "driver", Severity.STOP, "NVML is not available", "--gpus all",
    ),
    "Docker on a machine without a GPU": (
        replace(CPU_ONLY, container="docker"), "driver", Severity.NOTE, "NVML is not available", "--gpus all",
    ),
    "a pod without a GPU that asked for one": (
        replace(CPU_ONLY, container="kubernetes", environ={"NVIDIA_VISIBLE_DEVICES": "all"}),
        "driver", Severity.STOP, "NVML is not available", "nvidia.com/gpu: 1",
    ),
    "no GPU at all": (CPU_ONLY, "driver", Severity.NOTE, "NVML is not available", ""),
    "a hidden GPU": (
        replace(HEALTHY, torch=BLIND, environ={"CUDA_VISIBLE_DEVICES": ""}),
        "device", Severity.STOP, "CUDA_VISIBLE_DEVICES='' hides", "unset",
    ),
    "a device file that is missing": (
        replace(HEALTHY, torch=BLIND, driver=replace(HEALTHY.driver, device_files=("nvidia0", "nvidiactl"))),
        "device", Severity.STOP, "/dev/nvidia-uvm is missing", "--device /dev/nvidia-uvm",
    ),
    "a GPU that torch cannot open": (
        replace(HEALTHY, torch=BLIND), "device", Severity.STOP, "CUDA driver initialization failed", "dmesg",
    ),
    "a card too new for torch": (
        replace(HEALTHY, torch=replace(TORCH, devices=(replace(DEVICE, is_compiled_for=False),))),
        "device", Severity.STOP, "no code for capability 9.0", "newer",
    ),
    "a card without tensor cores": (
        replace(HEALTHY, torch=replace(TORCH, devices=(replace(DEVICE, capability=(6, 1)),))),
        "precision", Severity.NOTE, "no tensor cores", "fp32",
    ),
    "no cuDNN": (
        replace(HEALTHY, torch=replace(TORCH, cudnn_version=None)), "cudnn", Severity.WARNING, "no cuDNN", "wheels",
    ),
    "half of the lanes": (
        replace(HEALTHY, gpus=(replace(STATE, pcie_width=8),)), "pcie", Severity.WARNING, "8 lanes of generation 5, 16",
        "slot",
    ),
    "an old slot": (
        replace(HEALTHY, gpus=(replace(STATE, pcie_generation=3),)), "pcie", Severity.WARNING, "generation 3", "slot",
    ),
    "a lowered power limit": (
        replace(HEALTHY, gpus=(replace(STATE, power_limit_w=400.0),)),
        "power", Severity.WARNING, "400 W allowed of 700 W", "nvidia-smi -pl 700",
    ),
    "heat": (
        replace(HEALTHY, gpus=(replace(STATE, sm_clock_limits=("heat",)),)), "clocks", Severity.WARNING, "heat", "cool",
    ),
    "somebody else's process": (
        replace(HEALTHY, gpus=(replace(STATE, other_processes=2, other_memory_bytes=40 * GIB),)),
        "gpu_shared", Severity.WARNING, "2 other process(es), 40 GiB of 80 GiB", "CUDA_VISIBLE_DEVICES",
    ),
    "a deleted kernel cache": (
        replace(HEALTHY, kernel_cache=CacheFolder(path="/gone/cache", why_not="there is no /gone")),
        "kernel_cache", Severity.WARNING, "there is no /gone", "CUDA_CACHE_PATH",
    ),
    "few CPUs for a GPU": (
        replace(
            HEALTHY,
            profile=replace(PROFILE, cpus_usable=2, cpus_limit="cgroup v2 quota (2 CPUs)"),
            torch=replace(TORCH, threads=2),
        ),
        "cpus", Severity.WARNING, "cgroup v2 quota", "--cpus",
    ),
    "busy neighbours": (
        replace(HEALTHY, cpus_busy=8.0), "cpus_shared", Severity.WARNING, "8.0 CPUs now", "wait",
    ),
    "more threads than CPUs": (
        replace(HEALTHY, torch=replace(TORCH, threads=64), environ={"OMP_NUM_THREADS": "64"}),
        "threads", Severity.WARNING, "OMP_NUM_THREADS=64", "OMP_NUM_THREADS=16",
    ),
    "OpenCV's threads": (
        replace(HEALTHY, torch=replace(TORCH, opencv_threads=16)),
        "threads", Severity.NOTE, "OpenCV 16", "cv2.setNumThreads(0)",
    ),
    "memory limited by a container": (
        replace(HEALTHY, profile=replace(PROFILE, memory_bytes=GIB // 2), memory_available_bytes=GIB // 2),
        "memory", Severity.STOP, "limited to 512 MiB", "--memory",
    ),
    "little memory for many workers": (
        replace(HEALTHY, memory_available_bytes=4 * GIB),
        "memory", Severity.WARNING, "a worker a CPU wants", "few workers",
    ),
    "Docker's 64 MiB of shared memory": (
        replace(
            HEALTHY,
            container="docker",
            profile=replace(PROFILE, shared_memory_bytes=64 * MIB),
            shared_memory_total_bytes=64 * MIB,
        ),
        "shared_memory", Severity.STOP, "64 MiB free of 64 MiB", "--shm-size",
    ),
    "shared memory for a few workers": (
        replace(HEALTHY, profile=replace(PROFILE, shared_memory_bytes=512 * MIB)),
        "shared_memory", Severity.WARNING, "enough for 6 workers", "remount",
    ),
    "few open files": (
        replace(HEALTHY, open_files_limit=300), "open_files", Severity.WARNING, "300 open files", "ulimit -n",
    ),
    "hardly any open files": (
        replace(HEALTHY, open_files_limit=64), "open_files", Severity.STOP, "64 open files", "ulimit -n",
    ),
    "swapping": (
        replace(HEALTHY, swap_used_bytes=GIB, swap_rate_bytes_per_s=50e6),
        "swap", Severity.WARNING, "MiB/s now", "free",
    ),
    "old pages in swap": (
        replace(HEALTHY, swap_used_bytes=GIB), "swap", Severity.NOTE, "1 GiB in swap", "",
    ),
    "a network mount": (
        replace(HEALTHY, folder=FolderFacts(path="/nfs", filesystem="nfs4", is_network=True)),
        "storage", Severity.NOTE, "nfs4, over the network", "local SSD",
    ),
    "a rotating disk": (
        replace(HEALTHY, folder=FolderFacts(path="/data", filesystem="ext4", is_rotating=True)),
        "storage", Severity.NOTE, "rotating disk", "local SSD",
    ),
    "a slow store": (
        replace(HEALTHY, folder=FolderFacts(path="/data", filesystem="ext4", read_bytes_per_s=10e6)),
        "storage", Severity.WARNING, "reads 9.54 MiB/s", "local SSD",
    ),
    "spawn without a main guard": (
        replace(HEALTHY, torch=replace(TORCH, start_method="spawn"), is_guarded=False),
        "start_method", Severity.STOP, "no main guard", "__main__",
    ),
    "spawn and a script that nobody showed": (
        replace(HEALTHY, torch=replace(TORCH, start_method="forkserver")),
        "start_method", Severity.NOTE, "forkserver", "--script",
    ),
    "a debugging variable": (
        replace(HEALTHY, environ={"CUDA_LAUNCH_BLOCKING": "1"}),
        "debugging_variable", Severity.WARNING, "CUDA_LAUNCH_BLOCKING=1", "unset",
    ),
    "the dead pynvml": (
        replace(HEALTHY, dead_packages=("pynvml",)), "dead_package", Severity.NOTE, "pynvml", "pip uninstall pynvml",
    ),
}  # fmt: skip


@pytest.mark.parametrize("ill", ILLS.values(), ids=ILLS)
def test_an_ill_is_named_with_its_figure_and_remedy(ill):
    facts, code, severity, figure, remedy = ill
    found = [finding for finding in checkup(facts) if finding.code == code and finding.severity is severity]
    assert len(found) == 1
    assert figure in found[0].figure
    assert remedy in found[0].remedy
    assert bool(remedy) == bool(found[0].remedy)


@pytest.mark.parametrize("ill", ILLS.values(), ids=ILLS)
def test_one_ill_is_told_once_and_hides_no_other_line(ill):
    facts, code, severity, *_ = ill
    ills = [finding for finding in checkup(facts) if finding.severity in {Severity.WARNING, Severity.STOP}]
    assert [finding.code for finding in ills] == ([code] if severity in {Severity.WARNING, Severity.STOP} else [])


def test_two_ills_are_both_told():
    facts = replace(HEALTHY, open_files_limit=64, environ={"CUDA_LAUNCH_BLOCKING": "1"})
    codes = [finding.code for finding in checkup(facts) if finding.severity is not Severity.OK]
    assert codes == ["open_files", "debugging_variable"]


def test_a_spawning_script_with_a_guard_is_in_order():
    facts = replace(HEALTHY, torch=replace(TORCH, start_method="spawn"), is_guarded=True)
    assert worst(checkup(facts)) is Severity.OK


@pytest.mark.parametrize(("number", "words"), [(91002, "cuDNN 9.10.2"), (90701, "cuDNN 9.7.1"), (8902, "cuDNN 8.9.2")])
def test_cudnn_counts_its_versions_in_two_ways(number, words):
    facts = replace(HEALTHY, torch=replace(TORCH, cudnn_version=number))
    assert words in [finding.figure for finding in checkup(facts)]


def test_the_worst_of_nothing_is_nothing():
    assert worst([]) is Severity.OK
    note = Finding(code="a", severity=Severity.NOTE, figure="", why="")
    assert worst([note, replace(note, severity=Severity.STOP), note]) is Severity.STOP
