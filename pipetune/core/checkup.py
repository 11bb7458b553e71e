"""Is a machine fit to train, and what limits it: evidence in, findings out."""

from collections.abc import Callable, Iterator

from pipetune.core.findings import Finding, Severity
from pipetune.core.machine import GpuState, MachineFacts
from pipetune.core.text import size

BATCH_BYTES = 64 * 3 * 224 * 224 * 4
"""A batch to reckon with where nothing is known: 64 images of 224 x 224 in fp32, 38.5 MB."""
PREFETCH = 2
"""Batches that a worker holds, as torch sets it."""
WORKER_BYTES = 300 * 2**20
"""Of a loader worker that has imported torch and does something with it."""
LEAST_MEMORY_BYTES = 2**30
"""torch with CUDA needs about so much before it has trained anything."""
FILES_OF_WORKER = 16
"""Pipes of a worker, and a descriptor for each tensor on its way."""
OWN_FILES = 128
FEW_FILES = 256
HDD_BYTES_PER_S = 200e6
SLOW_BYTES_PER_S = 50e6
LOW_POWER = 0.9
"""A power limit below this share of the card's own costs speed."""
BUSY_SHARE = 0.25
"""Of the usable CPUs, taken by others."""
SWAPPING_BYTES_PER_S = 2**20
TF32_SINCE, BF16_SINCE, FP16_SINCE = (8, 0), (8, 0), (7, 0)
"""Compute capabilities from which a GPU computes a format itself: NVIDIA's CUDA programming guide."""
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel, so nothing overlaps",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is allocated by the driver, which waits for the GPU",
    "CUDA_CACHE_DISABLE": "kernels are compiled again in each process",
}
"""Variables for debugging that make training slow while they are set (to anything but 0)."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Rule = Callable[[MachineFacts], Iterator[Finding]]


def checkup(facts: MachineFacts) -> tuple[Finding, ...]:
    """All that was looked at, in the order in which a person would look."""
    return tuple(finding for rule in RULES for finding in rule(facts))


# --- the GPU and its software ----------------------------------------------------------------------------------------


def _torch(facts: MachineFacts) -> Iterator[Finding]:
    torch = facts.torch
    why = "everything else runs in it"
    if torch.error is not None:
        yield _stop("torch", torch.error, why, "install torch into this environment: pip install torch")
        return
    built = f"built for CUDA {torch.cuda_version}" if torch.cuda_version else "built without CUDA"
    figure = f"torch {torch.version}, {built}"
    if torch.cuda_version is None and _has_card(facts):
        remedy = "install torch's CUDA build: pytorch.org/get-started has the command"
        yield _stop("torch", figure, "this build cannot use the GPU that is here", remedy)
    else:
        yield _ok("torch", figure, why)


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    why = "the driver decides which GPUs and which CUDA versions can be used"
    profile, driver = facts.profile, facts.driver
    if profile.driver is not None:
        serves = f", serves CUDA up to {_dotted(driver.cuda_version)}" if driver.cuda_version else ""
        figure = f"NVIDIA driver {profile.driver}{serves}"
        if driver.cuda_version and _is_driver_too_old(facts):
            remedy = f"update the driver, or install a torch built for CUDA {driver.cuda_version[0]}"
            yield _stop(
                "driver", figure, f"torch was built for CUDA {facts.torch.cuda_version}, which it lacks", remedy
            )
        else:
            yield _ok("driver", figure, why)
        return
    figure = "no working NVIDIA driver" if profile.gpu_reason is None else profile.gpu_reason
    if facts.container is not None:
        yield _finding("driver", _severity_without(facts), figure, why, _flag_of(facts.container))
    elif driver.cards_on_bus:
        remedy = "install NVIDIA's driver; `nvidia-smi` has to work first"
        yield _stop("driver", f"{driver.cards_on_bus} NVIDIA card(s), {figure}", why, remedy)
    else:
        yield _finding("driver", _severity_without(facts), figure, "without one training runs on CPUs", "")


def _device(facts: MachineFacts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.error is not None or torch.cuda_version is None:
        return
    why = "torch trains on what it can see"
    if torch.devices:
        names = ", ".join(f"{one.name} (capability {_dotted(one.capability)})" for one in torch.devices)
        yield _ok("device", names, why)
        for one in torch.devices:
            if not one.is_compiled_for:
                remedy = "install a torch that supports it: newer for a new card, older for an old one"
                figure = f"{one.name}: no code for capability {_dotted(one.capability)}"
                yield _stop("device", figure, "this build of torch cannot run on it", remedy)
        return
    if facts.profile.driver is None or _is_driver_too_old(facts):
        return  # said already, with its remedy
    visible = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and facts.profile.gpus:
        remedy = "unset CUDA_VISIBLE_DEVICES, or name a GPU that is there"
        yield _stop("device", f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", why, remedy)
        return
    missing = _missing_device_files(facts)
    if missing:
        remedy = "load the module (modprobe nvidia-uvm); in a container pass the file in: --device /dev/nvidia-uvm"
        yield _stop("device", f"{missing} is missing", "CUDA needs it, NVML does not", remedy)
        return
    figure = f"torch sees no GPU: {torch.cuda_error or 'CUDA names none'}"
    yield _stop("device", figure, why, "the message says what CUDA lacks; nvidia-smi and dmesg may say more")


def _precision(facts: MachineFacts) -> Iterator[Finding]:
    for one in facts.torch.devices:
        native = [
            name
            for name, since in (("TF32", TF32_SINCE), ("bf16", BF16_SINCE), ("fp16", FP16_SINCE))
            if one.capability >= since
        ]
        lacking = [name for name in ("TF32", "bf16", "fp16") if name not in native]
        figure = f"{one.name}: tensor cores compute {', '.join(native)}" if native else f"{one.name}: no tensor cores"
        if lacking:
            figure += f"; {', '.join(lacking)} would be emulated or run without them"
        yield _finding(
            "precision",
            Severity.OK if native else Severity.NOTE,
            figure,
            "reduced precision pays where tensor cores compute it",
            "" if native else "train in fp32",
        )


def _cudnn(facts: MachineFacts) -> Iterator[Finding]:
    torch = facts.torch
    if not torch.devices:
        return
    why = "convolutions and recurrent layers are several times slower without cuDNN"
    if torch.cudnn_version is None:
        yield _warning("cudnn", "no cuDNN", why, "install torch from its own wheels, which bring cuDNN")
    else:
        yield _ok("cudnn", f"cuDNN {_cudnn_dotted(torch.cudnn_version)}", why)


def _links(facts: MachineFacts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.pcie_width is None or gpu.pcie_generation is None:
            continue
        figure = f"{gpu.name}: PCIe generation {gpu.pcie_generation}, {gpu.pcie_width} lanes"
        why = "batches are copied to the GPU over this link"
        best_generation = gpu.pcie_generation_of_card or gpu.pcie_generation
        best_width = gpu.pcie_width_of_card or gpu.pcie_width
        if gpu.pcie_width < best_width or gpu.pcie_generation < best_generation:
            figure += f" of generation {best_generation}, {best_width} lanes that the card can do"
            remedy = "use a slot with more lanes, or look for a riser or a BIOS setting that limits it"
            yield _warning("pcie", figure, why, remedy)
        else:
            yield _ok("pcie", figure, why)


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.power_limit_w is not None:
            figure = f"{gpu.name}: {gpu.power_limit_w:.0f} W allowed"
            why = "a GPU at its power limit lowers its clocks"
            if gpu.power_default_w and gpu.power_limit_w < LOW_POWER * gpu.power_default_w:
                figure += f" of {gpu.power_default_w:.0f} W by default"
                remedy = f"if nobody wants that limit: nvidia-smi -pl {gpu.power_default_w:.0f} (needs root)"
                yield _warning("power", figure, why, remedy)
            else:
                yield _ok("power", figure, why)
        if gpu.sm_clock_limits:
            figure = f"{gpu.name}: clocks are held down now by {', '.join(gpu.sm_clock_limits)}"
            remedy = "look after cooling and power supply; applied clocks are reset by nvidia-smi -rac"
            yield _warning("clocks", figure, "every kernel takes longer", remedy)


def _company(facts: MachineFacts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.other_processes:
            yield _warning(
                "gpu_shared",
                f"{gpu.name}: {gpu.other_processes} other process(es){_memory_of_others(gpu)}",
                "they take memory and time that a measurement would count as yours",
                "wait for them, or use another GPU: CUDA_VISIBLE_DEVICES",
            )
        else:
            yield _ok("gpu_shared", f"{gpu.name}: no other process", "others would take memory and time")


def _kernel_cache(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.torch.devices:
        return
    cache = facts.kernel_cache
    why = "kernels that the driver compiles are kept there; without it each process compiles them again"
    if cache.why_not is not None:
        remedy = "set CUDA_CACHE_PATH to a folder that is there, stays there and can be written to"
        yield _warning("kernel_cache", f"{cache.path}: {cache.why_not}", why, remedy)
    else:
        yield _ok("kernel_cache", cache.path, why)


# --- the host --------------------------------------------------------------------------------------------------------


def _cpus(facts: MachineFacts) -> Iterator[Finding]:
    profile = facts.profile
    figure = f"{profile.cpus_usable} of {profile.cpus_present} CPUs usable ({profile.cpus_limit}); {profile.cpu_model}"
    why = "workers decode and augment on them"
    if facts.cpus_busy > BUSY_SHARE * profile.cpus_usable:
        remedy = "wait for the other programs, or measure when they are done"
        yield _warning("cpus_shared", f"other programs use {facts.cpus_busy:.1f} CPUs now", why, remedy)
    per_gpu = profile.cpus_usable / max(1, len(facts.torch.devices))
    if facts.torch.devices and per_gpu < 4:
        remedy = "ask for more CPUs for each GPU (Slurm: --cpus-per-task, Docker: --cpus, Kubernetes: limits.cpu)"
        yield _warning("cpus", f"{figure}: {per_gpu:.3g} for each GPU", why, remedy)
    elif profile.cpus_usable < profile.cpus_present:
        yield _finding("cpus", Severity.NOTE, figure, f"{why}; more than the usable ones only take turns", "")
    else:
        yield _ok("cpus", figure, why)


def _threads(facts: MachineFacts) -> Iterator[Finding]:
    cpus = facts.profile.cpus_usable
    set_to = {name: facts.environ[name] for name in THREADS if name in facts.environ}
    own = facts.torch.threads
    figure = ", ".join(
        [*(f"{name}={value}" for name, value in set_to.items())]
        + ([f"torch uses {own} threads"] if own else [])
        + ([f"OpenCV {facts.torch.opencv_threads}"] if facts.torch.opencv_threads else [])
    )
    if not figure:
        return
    why = "each worker has one thread of torch, but as many of OpenCV as CPUs, so workers get in each other's way"
    if own is not None and own > cpus:
        remedy = f"export OMP_NUM_THREADS={cpus}: more threads than CPUs wait for each other"
        yield _warning("threads", figure, f"only {cpus} CPUs are usable", remedy)
    elif facts.torch.opencv_threads is not None and facts.torch.opencv_threads > 1:
        yield _finding("threads", Severity.NOTE, figure, why, "cv2.setNumThreads(0) in worker_init_fn")
    else:
        yield _ok("threads", figure, "threads of the main process and of workers share the CPUs")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    limit, present = facts.profile.memory_bytes, facts.memory_present_bytes
    limited = f", limited to {size(limit)}" if limit < present else ""
    figure = f"{size(present)} of memory{limited}, {size(facts.memory_available_bytes)} available"
    why = "a process that goes beyond is killed without a word"
    remedy = (
        "allow more (Docker: --memory, Kubernetes: limits.memory, Slurm: --mem), or use few workers and small batches"
    )
    wanted = LEAST_MEMORY_BYTES + facts.profile.cpus_usable * (WORKER_BYTES + PREFETCH * BATCH_BYTES)
    if min(limit, facts.memory_available_bytes) < LEAST_MEMORY_BYTES:
        yield _stop("memory", figure, "torch alone needs about 1 GiB", remedy)
    elif facts.memory_available_bytes < wanted:
        yield _warning("memory", f"{figure}; a worker a CPU wants {size(wanted)}", why, remedy)
    else:
        yield _ok("memory", figure, why)


def _shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    free, total = facts.profile.shared_memory_bytes, facts.shared_memory_total_bytes
    why = "workers hand batches over in shared memory; without room they die with a bus error"
    if free is None or total is None:
        yield _finding("shared_memory", Severity.NOTE, "no /dev/shm", why, "")
        return
    worker = PREFETCH * BATCH_BYTES
    wanted = facts.profile.cpus_usable * worker
    figure = f"{size(free)} free of {size(total)} in /dev/shm"
    reckoned = f"{PREFETCH} batches of 64 images (224 x 224) a worker"
    remedy = _more_shared_memory(facts.container)
    if free < worker:
        yield _stop("shared_memory", f"{figure}: not enough for {reckoned}, {size(worker)}", why, remedy)
    elif free < wanted:
        yield _warning("shared_memory", f"{figure}: enough for {free // worker} workers with {reckoned}", why, remedy)
    else:
        yield _ok("shared_memory", figure, why)


def _open_files(facts: MachineFacts) -> Iterator[Finding]:
    limit = facts.open_files_limit
    if limit is None:
        return
    why = "every worker and every tensor on its way takes some; beyond it torch fails with `Too many open files`"
    wanted = OWN_FILES + facts.profile.cpus_usable * FILES_OF_WORKER
    figure = f"{limit:,} open files allowed"
    remedy = "ulimit -n 65536 (Docker: --ulimit nofile=65536)"
    if limit < FEW_FILES:
        yield _stop("open_files", figure, why, remedy)
    elif limit < wanted:
        yield _warning("open_files", f"{figure}, {wanted:,} wanted for a worker a CPU", why, remedy)
    else:
        yield _ok("open_files", figure, why)


def _swap(facts: MachineFacts) -> Iterator[Finding]:
    why = "memory that was swapped out is thousands of times slower"
    if facts.swap_rate_bytes_per_s > SWAPPING_BYTES_PER_S:
        figure = f"swapping {size(facts.swap_rate_bytes_per_s)}/s now"
        yield _warning("swap", figure, why, "free memory first: the machine is out of it")
    elif facts.swap_used_bytes > 0:
        yield _finding("swap", Severity.NOTE, f"{size(facts.swap_used_bytes)} in swap, none moving now", why, "")
    else:
        yield _ok("swap", "nothing in swap", why)


def _storage(facts: MachineFacts) -> Iterator[Finding]:
    folder = facts.folder
    kind = folder.filesystem or "unknown file system"
    if folder.is_network:
        kind += ", over the network"
    elif folder.is_rotating:
        kind += ", rotating disk"
    rate = folder.read_bytes_per_s
    figure = f"{folder.path}: {kind}"
    if rate is not None:
        figure += f", reads {size(rate)}/s past the page cache"
    elif folder.is_read:
        figure += ", too little in it to time reading"
    why = "samples that are not in the page cache come from there"
    remedy = "copy the dataset to a local SSD or to memory, or pack small files into few large ones"
    if rate is not None and rate < SLOW_BYTES_PER_S:
        yield _warning("storage", figure, why, remedy)
    elif folder.is_network or folder.is_rotating or (rate is not None and rate < HDD_BYTES_PER_S):
        yield _finding("storage", Severity.NOTE, figure, f"{why}; each file costs a wait", remedy)
    else:
        yield _ok("storage", figure, why)


def _workers_start(facts: MachineFacts) -> Iterator[Finding]:
    method = facts.torch.start_method
    if method is None:
        return
    figure = f"workers start by {method}"
    why = "only fork hands the dataset over as it is; others import the script anew and pickle the dataset"
    remedy = 'put the script\'s work under `if __name__ == "__main__":`'
    if method == "fork":
        if facts.is_guarded is not None:
            figure += f"; the script has {'a' if facts.is_guarded else 'no'} main guard, which fork does not need"
        yield _ok(
            "start_method", figure, "each worker is a copy of the main process; Python 3.14 starts them otherwise"
        )
    elif facts.is_guarded is False:
        yield _stop("start_method", f"{figure}, and the script has no main guard", why, remedy)
    elif facts.is_guarded is None:
        yield _finding("start_method", Severity.NOTE, figure, why, f"{remedy}; --script FILE checks it")
    else:
        yield _ok("start_method", f"{figure}; the script has a main guard", why)


def _variables(facts: MachineFacts) -> Iterator[Finding]:
    for name, why in SLOWING.items():
        value = facts.environ.get(name, "")
        if value not in {"", "0"}:
            yield _warning("debugging_variable", f"{name}={value}", why, f"unset {name}")


def _packages(facts: MachineFacts) -> Iterator[Finding]:
    for name in facts.dead_packages:
        yield _finding(
            "dead_package",
            Severity.NOTE,
            f"the distribution {name} is installed",
            "it is abandoned and makes every import of torch warn; the module pynvml comes from nvidia-ml-py",
            f"pip uninstall {name} && pip install --force-reinstall nvidia-ml-py",
        )


RULES: tuple[Rule, ...] = (
    _torch,
    _driver,
    _device,
    _precision,
    _cudnn,
    _links,
    _limits,
    _company,
    _kernel_cache,
    _cpus,
    _threads,
    _memory,
    _shared_memory,
    _open_files,
    _swap,
    _storage,
    _workers_start,
    _variables,
    _packages,
)


# --- words -----------------------------------------------------------------------------------------------------------


def _ok(code: str, figure: str, why: str) -> Finding:
    return _finding(code, Severity.OK, figure, why, "")


def _warning(code: str, figure: str, why: str, remedy: str) -> Finding:
    return _finding(code, Severity.WARNING, figure, why, remedy)


def _stop(code: str, figure: str, why: str, remedy: str) -> Finding:
    return _finding(code, Severity.STOP, figure, why, remedy)


def _finding(code: str, severity: Severity, figure: str, why: str, remedy: str) -> Finding:
    return Finding(code=code, severity=severity, figure=figure, why=why, remedy=remedy)


def _has_card(facts: MachineFacts) -> bool:
    return bool(facts.profile.gpus) or bool(facts.driver.cards_on_bus)


def _is_driver_too_old(facts: MachineFacts) -> bool:
    """A driver serves all minor versions of its CUDA's major version (CUDA's minor version compatibility)."""
    built, served = _version(facts.torch.cuda_version), facts.driver.cuda_version
    return built is not None and served is not None and built[0] > served[0]


def _severity_without(facts: MachineFacts) -> Severity:
    """Of having no GPU: it stops only who counts on one, by a CUDA build in sight of a card or by asking for it."""
    asked_for = facts.environ.get("NVIDIA_VISIBLE_DEVICES", "void") not in {"", "void", "none"}
    return Severity.STOP if asked_for or (facts.torch.cuda_version and facts.driver.cards_on_bus) else Severity.NOTE


def _flag_of(container: str) -> str:
    flags = {
        "docker": "start it with `docker run --gpus all` (the host needs the NVIDIA Container Toolkit)",
        "podman": "start it with `podman run --device nvidia.com/gpu=all` (the host needs a CDI specification)",
        "kubernetes": "ask for one: `resources: {limits: {nvidia.com/gpu: 1}}`",
        "apptainer": "start it with `apptainer run --nv`",
    }
    return flags.get(container, "pass the host's GPU into the container: Docker has `--gpus all`")


def _more_shared_memory(container: str | None) -> str:
    flags = {
        None: "mount more: mount -o remount,size=50% /dev/shm (needs root)",
        "docker": "start it with `docker run --ipc=host`, or `--shm-size=16g`",
        "podman": "start it with `podman run --ipc=host`, or `--shm-size=16g`",
        "kubernetes": "mount an emptyDir with `medium: Memory` at /dev/shm",
    }
    return flags.get(container, "give the container more: Docker has `--shm-size=16g`")


def _missing_device_files(facts: MachineFacts) -> str:
    wanted = ("nvidiactl", "nvidia-uvm")
    missing = [f"/dev/{name}" for name in wanted if name not in facts.driver.device_files]
    return ", ".join(missing) if facts.driver.device_files else ""


def _memory_of_others(gpu: GpuState) -> str:
    if gpu.other_memory_bytes is None or not gpu.memory_bytes:
        return ""
    return f", {size(gpu.other_memory_bytes)} of {size(gpu.memory_bytes)} taken"


def _version(text: str | None) -> tuple[int, int] | None:
    """`12.8` as numbers; None for anything else."""
    parts = (text or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(part.isdigit() for part in parts[:2]) else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _cudnn_dotted(number: int) -> str:
    """90701 is 9.7.1 and 8902 was 8.9.2: cudnn_version.h."""
    base = 10_000 if number >= 90_000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"
