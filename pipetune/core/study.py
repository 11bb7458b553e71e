"""What a user asks for: one study, as checked values."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipetune.core.objective import Objective
from pipetune.core.probes import ProbeKind
from pipetune.core.space import DeclaredSpace, TrialConfig

DEFAULT_HEADROOM = 0.1
"""Share of the GPU's memory that trials leave free: training meets longer samples and other kernels than they do."""


class CachePolicy(StrEnum):
    """Whether trials read from a warm page cache or from storage."""

    WARM = "warm"
    COLD = "cold"


class Isolation(StrEnum):
    """Whether one host process serves many trials, or each trial has its own."""

    WARM = "warm"
    PROCESS = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Where the user's build function is, and what it is called with.

    `target` is `file.py:function`, `package.module:function` or `builtin:name`; a relative file is looked up
    from `folder`, the folder of the config file.
    """

    target: str
    options: Mapping[str, Any]
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a study may cost over all its runs; at least one of the two is set."""

    seconds: float | None
    trials: int | None

    def exceeds(self, other: "Budget") -> bool:
        """Whether it allows more of something."""
        pairs = ((self.seconds, other.seconds), (self.trials, other.trials))
        return any(
            ours != theirs and (ours is None or (theirs is not None and ours > theirs)) for ours, theirs in pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """A whole config file, checked. `epoch_samples` None means the length of the dataset.

    `gpu_memory_headroom` is the share of the GPU's memory that trials leave free.
    `storage` None means a journal file in the study folder. `source` is the file it was read from.
    """

    study: str
    workload: WorkloadSpec
    effective_batch_size: int
    epochs: int
    epoch_samples: int | None
    baseline: TrialConfig | None
    search: DeclaredSpace
    objective: Objective
    budget: Budget
    device: str
    seed: int
    storage: str | None
    cache: CachePolicy
    isolation: Isolation
    probes: tuple[ProbeKind, ...]
    gpu_memory_headroom: float
    source: Path | None
