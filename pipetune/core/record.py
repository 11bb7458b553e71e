"""What a study has seen and said: its trials and its result, as values."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pipetune.core.diagnosis import Bottleneck
from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import Measurement, TrialFailure, TrialOutcome
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.core.study import Budget
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import TunedConfig


class TrialState(StrEnum):
    """What became of a trial."""

    MEASURED = "measured"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One finished trial as the study keeps it; an interrupted one leaves no record."""

    number: int
    config: TrialConfig
    outcome: TrialOutcome
    seconds: float

    @property
    def state(self) -> TrialState:
        """Derived from the outcome."""
        if isinstance(self.outcome, Measurement):
            return TrialState.MEASURED
        return TrialState.INFEASIBLE if self.outcome.kind.is_memory else TrialState.FAILED

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of a trial that ran to its end."""
        return self.outcome if isinstance(self.outcome, Measurement) else None

    @property
    def failure(self) -> TrialFailure | None:
        """Why a trial gave none."""
        return self.outcome if isinstance(self.outcome, TrialFailure) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One configuration measured again: a measurement a round, each from a fresh process."""

    config: TrialConfig
    rounds: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """The finalists and the baseline, interleaved; the baseline is the last arm.

    `budget` is what the study was allowed when it was certified: one that is allowed more goes on.
    """

    arms: tuple[Arm, ...]
    seconds: float
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """What the storage keeps of a study beside its trials, for whoever reads it later.

    `most_workers` is how far the worker range was widened.
    """

    study: str
    plan: TrainingPlan
    space_size: int
    workers_limit: str
    notes: tuple[str, ...]
    seconds: float
    most_workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What a config describes on this machine, found out without measuring."""

    facts: WorkloadFacts
    plan: TrainingPlan
    space: SearchSpace
    workers_limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What a study says when it ends. `summary.seconds` is what it has cost over all its runs."""

    folder: Path
    tuned: TunedConfig
    bottleneck: Bottleneck
    records: tuple[TrialRecord, ...]
    summary: StudySummary
