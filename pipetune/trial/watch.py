"""The host's own look at the machine between windows: what disturbed it, and what came from storage."""

from collections.abc import Sequence

import torch

from pipetune.core.interference import Disturbance, Reading, judge, storage_read_bytes, summary
from pipetune.hardware.counters import TreeCounters
from pipetune.trial.device import allocation_retries
from pipetune.trial.loop import Sight


class MachineWatch:
    """Judges each window by the kernel's counters before and after it."""

    def __init__(self, device: torch.device, *, cpus: float) -> None:
        """`cpus` is what the trial may use, a quota included."""
        self._device = device
        self._cpus = cpus
        self._retries_before: int | None = None
        self._counters = TreeCounters()
        self._worker_pids: Sequence[int] = ()
        self._before: Reading = self._counters.read()
        self._disturbances: list[Disturbance] = []

    def begin(self, worker_pids: Sequence[int]) -> None:
        """Timing starts now."""
        self._worker_pids = worker_pids
        self._retries_before = allocation_retries(self._device)
        self._before = self._counters.read(worker_pids)

    def look(self) -> Sight:
        """What happened since the last look."""
        before, after = self._before, self._counters.read(self._worker_pids)
        self._before = after
        disturbance = judge(before, after, cpus=self._cpus)
        self._disturbances.append(disturbance)
        return Sight(outside=disturbance.outside, read_bytes=storage_read_bytes(before, after))

    def summary(self) -> tuple[str, ...]:
        """What was seen over all windows, in a few lines."""
        return summary(self._disturbances)

    def allocation_retries(self) -> int | None:
        """How often since the beginning the GPU's allocator had to empty its cache first; None on a CPU."""
        now, before = allocation_retries(self._device), self._retries_before
        return None if now is None or before is None else now - before

    def close(self) -> None:
        """Close the files."""
        self._counters.close()
