"""Everything about a machine that a check of it looks at, apart from torch, which has a process of its own."""

import ast
import os
import re
import resource
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pipetune.core.checkup import SLOWING, THREADS
from pipetune.core.machine import CacheFolder, DriverFacts, MachineFacts, TorchFacts
from pipetune.errors import InputError
from pipetune.hardware.cgroup import read_text
from pipetune.hardware.environment import profile
from pipetune.hardware.host import (
    activity,
    available_memory_bytes,
    present_memory_bytes,
    shared_memory_total_bytes,
)
from pipetune.hardware.nvml import driver_cuda_version, gpu_states
from pipetune.hardware.storage import look_at_folder

_ROOT = Path("/")
_WATCH_S = 0.5
_VARIABLES = (*THREADS, *SLOWING, "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
_DEAD = ("pynvml",)


def look_at_machine(
    data: Path | None, script: Path | None, environ: Mapping[str, str] = os.environ, root: Path = _ROOT
) -> MachineFacts:
    """What is seen now, within about a second and two more for `data`; `torch` is left to be filled in.

    Raises InputError for a folder or script that is not there. `root` stands for `/`.
    """
    folder = look_at_folder(data or Path.cwd(), is_read=data is not None, root=root)
    is_guarded = None if script is None else _is_guarded(script)
    seen = activity(_WATCH_S)
    return MachineFacts(
        profile=profile(),
        torch=TorchFacts(),
        driver=_driver(root),
        gpus=gpu_states(),
        container=_container(environ, root),
        memory_present_bytes=present_memory_bytes(root),
        memory_available_bytes=available_memory_bytes(root),
        shared_memory_total_bytes=shared_memory_total_bytes(root),
        open_files_limit=_open_files_limit(),
        swap_used_bytes=seen.swap_used_bytes,
        swap_rate_bytes_per_s=seen.swap_rate_bytes_per_s,
        cpus_busy=seen.cpus_busy,
        environ={name: environ[name] for name in _VARIABLES if name in environ},
        kernel_cache=_kernel_cache(environ),
        folder=folder,
        dead_packages=tuple(name for name in _DEAD if _is_installed(name)),
        is_guarded=is_guarded,
    )


def _driver(root: Path) -> DriverFacts:
    devices = root / "dev"
    files = tuple(sorted(file.name for file in devices.glob("nvidia*"))) if devices.is_dir() else ()
    return DriverFacts(
        cuda_version=driver_cuda_version(),
        device_files=files,
        cards_on_bus=_cards_on_bus(root),
    )


def _cards_on_bus(root: Path) -> int | None:
    """NVIDIA's display devices, whether a driver serves them or not; None where the kernel does not list any."""
    devices = root / "sys/bus/pci/devices"
    if not devices.is_dir():
        return None
    return sum(
        1
        for device in devices.iterdir()
        if read_text(device / "vendor").strip() == _NVIDIA and read_text(device / "class").startswith(_DISPLAY)
    )


def _container(environ: Mapping[str, str], root: Path) -> str | None:
    """What holds this process: docker, podman, kubernetes, apptainer, or "container"; None for nothing."""
    groups = read_text(root / "proc/1/cgroup")
    signs = (
        ("kubernetes", "KUBERNETES_SERVICE_HOST" in environ or "kubepods" in groups),
        ("apptainer", "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ),
        ("podman", (root / "run/.containerenv").exists()),
        ("docker", (root / ".dockerenv").exists() or "docker" in groups),
        ("container", re.search(r"containerd|lxc|libpod|garden", groups) is not None),
    )
    return next((name for name, is_seen in signs if is_seen), None)


def _open_files_limit() -> int | None:
    """The soft limit; None where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _kernel_cache(environ: Mapping[str, str]) -> CacheFolder:
    """CUDA's own rule: CUDA_CACHE_PATH, else ~/.nv/ComputeCache; it makes the last folder only where it can."""
    home = environ.get("HOME", "")
    path = Path(environ.get("CUDA_CACHE_PATH") or Path(home or "/", ".nv/ComputeCache"))
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    if "CUDA_CACHE_PATH" in environ and not path.exists() and nearest != path.parent:
        return CacheFolder(path=str(path), why_not=f"there is no {path.parent}")
    if not nearest.is_dir():
        return CacheFolder(path=str(path), why_not=f"{nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return CacheFolder(path=str(path), why_not=f"{nearest} cannot be written to")
    return CacheFolder(path=str(path))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _source(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--script: {script} cannot be read: {error}") from None


def _is_guarded(script: Path) -> bool:
    """Whether a script can be imported without doing its work: it has a main guard, or nothing to do at its top.

    Raises InputError where it is no Python.
    """
    try:
        tree = ast.parse(_source(script))
    except SyntaxError as error:
        raise InputError(f"--script: {script}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise InputError(f"--script: {script} is not Python: {error}") from None
    working = (ast.For, ast.While, ast.With, ast.Try)
    has_guard = any(isinstance(node, ast.If) and _names_main(node.test) for node in tree.body)
    works = any(
        isinstance(node, working) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        for node in tree.body
    )
    return has_guard or not works


def _names_main(test: ast.expr) -> bool:
    words = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    texts = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
    return "__name__" in words and "__main__" in texts
