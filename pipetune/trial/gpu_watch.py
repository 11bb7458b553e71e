"""The parent's look at the GPU while a host measures: how busy it was, who else used it, what slowed its clocks."""

from collections.abc import Collection
from dataclasses import replace

from pipetune.core.facts import WorkloadFacts
from pipetune.core.interference import Disturbance
from pipetune.core.measurement import GpuUsage, Measurement
from pipetune.hardware.nvml import GpuSampler, list_tenants

COLLECT_S = 3.0
"""NVML's buffer holds about 14 s of samples; it is read well before they are overwritten."""


class GpuWatch:
    """Watches the GPU that the hosts use, once it is known which; without one it says so.

    In the parent: a sampling thread beside a fork is unsafe, and steals the interpreter that is being timed.
    """

    def __init__(self) -> None:
        self._sampler: GpuSampler | None = None
        self._reason = "no GPU: trials ran on the CPU"
        self._others: frozenset[int] = frozenset()
        self._collected_s = 0.0

    def before_any_host(self) -> None:
        """Called while no host of ours lives: whatever is on a GPU now is somebody else's."""
        self._others = list_tenants()
        if self._sampler is not None:
            self._sampler.add_others(self._others)

    def found(self, facts: WorkloadFacts) -> None:
        """A host has told which device it uses."""
        if facts.has_accelerator and self._sampler is None:
            self._sampler = GpuSampler.open(facts.device_uuid, facts.device_pci_bus_id, before=self._others)

    def window_ended(self) -> None:
        """Called at each border of a measured window."""
        if self._sampler is not None:
            self._sampler.mark()

    def collect(self, now_s: float) -> None:
        """Called often; reads what the driver keeps, every few seconds."""
        if self._sampler is not None and now_s - self._collected_s >= COLLECT_S:
            self._sampler.collect()
            self._collected_s = now_s

    def completed(self, measurement: Measurement, own_pids: Collection[int]) -> tuple[Measurement, bool]:
        """The measurement with the GPU's side of it, and whether something from outside disturbed that."""
        if self._sampler is None:
            return replace(measurement, gpu=None, gpu_reason=self._reason), False
        self._sampler.collect()
        windows = [(w.began_s, w.began_s + w.seconds) for w in measurement.windows]
        usage = self._sampler.usage(windows)
        foreign, throttling = self._sampler.foreign(windows, own_pids), self._sampler.throttling(windows)
        seen = Disturbance(findings=(*foreign.findings, *throttling.findings))
        measurement = replace(
            measurement,
            gpu=usage if isinstance(usage, GpuUsage) else None,
            gpu_reason=None if isinstance(usage, GpuUsage) else usage,
            interference=(*measurement.interference, *seen.outside, *seen.own),
        )
        return measurement, bool(seen.outside)

    def close(self) -> None:
        """Leave NVML."""
        if self._sampler is not None:
            self._sampler.close()
