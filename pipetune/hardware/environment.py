"""Joins host and GPUs into one profile, and names the versions that a result depends on."""

import platform
from importlib import metadata

from pipetune import __version__
from pipetune.core.hardware import HardwareProfile
from pipetune.hardware.host import cpu_model, memory_limit_bytes, shared_memory_bytes, usable_cpus
from pipetune.hardware.nvml import list_gpus

_PACKAGES = ("torch", "optuna", "numpy", "pillow")


def profile() -> HardwareProfile:
    """Return what this process may use of this machine, now; it starts nothing and needs no torch."""
    cpus = usable_cpus()
    gpus, driver, gpu_reason = list_gpus()
    return HardwareProfile(
        cpu_model=cpu_model(),
        cpus_usable=cpus.count,
        cpus_present=cpus.present,
        cpus_limit=cpus.limit,
        memory_bytes=memory_limit_bytes(),
        shared_memory_bytes=shared_memory_bytes(),
        gpus=gpus,
        gpu_reason=gpu_reason,
        driver=driver,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
    )


def versions() -> dict[str, str]:
    """Return the versions of pipetune, Python and the packages that decide speed, by name."""
    own = {"pipetune": __version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
