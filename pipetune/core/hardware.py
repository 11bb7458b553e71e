"""What a machine is, as far as it decides training speed: a value with a short stable fingerprint."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as NVML names it; None where it does not tell its memory."""

    name: str
    uuid: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """The machine as seen by this process: what it may use, not what is built in.

    `cpus_usable` is the least of affinity, container quota, scheduler share and CPUs per rank;
    `cpus_limit` says which of them it was. Memory is in bytes.
    """

    cpu_model: str
    cpus_usable: int
    cpus_present: int
    cpus_limit: str
    memory_bytes: int
    shared_memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    gpu_reason: str | None
    driver: str | None
    system: str
    python: str

    def fingerprint(self, device_name: str) -> str:
        """Eight hex digits of what decides speed: CPU model, usable CPUs, the device that trains.

        Memory is left out: a virtual machine's grows while it is used. So are driver and library
        versions, which are compared one by one where it matters.
        """
        facts = [self.cpu_model, str(self.cpus_usable), device_name]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
