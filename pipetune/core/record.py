"""What a study has seen and said: its trials and its result, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pipetune.core.alternatives import Alternative
from pipetune.core.ceilings import LoaderDemand
from pipetune.core.diagnosis import Bottleneck
from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import Measurement, TrialFailure, TrialOutcome
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.core.study import Budget
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import Status, TunedConfig


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
        """The measurement of a trial that gave one, ended early or not."""
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


class Stage(StrEnum):
    """What a round of a certification is for: to choose a winner, or to compare it with the baseline."""

    CHOOSING = "choosing"
    VERIFYING = "verifying"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Several configurations, measured right after each other, each in a fresh process; in that order."""

    stage: Stage
    outcomes: tuple[TrialOutcome, ...]

    def measured(self) -> dict[TrialConfig, Measurement]:
        """The measurements of those that ran to their end."""
        return {one.config: one for one in self.outcomes if isinstance(one, Measurement)}

    def failed(self) -> set[TrialConfig]:
        """Those that did not."""
        return {one.config for one in self.outcomes if isinstance(one, TrialFailure)}


class CertificationState(StrEnum):
    """Whether a certification has an answer, or was broken off and can go on."""

    UNFINISHED = "unfinished"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """What was measured again to name a winner, kept after every round.

    `winner` is the baseline where there is no gain; None while unfinished. `trials` is how many trials the study
    had when it began: more of them ask for another one. `budget` is what the study was allowed: one that is allowed
    more goes on.
    """

    baseline: TrialConfig
    state: CertificationState
    winner: TrialConfig | None
    rounds: tuple[Round, ...]
    trials: int
    seconds: float
    budget: Budget

    def arm(self, config: TrialConfig) -> Arm:
        """A configuration's measurements beside the baseline; those that chose it are not among them."""
        rounds = (one.measured().get(config) for one in self.rounds if one.stage is Stage.VERIFYING)
        return Arm(config=config, rounds=tuple(one for one in rounds if one is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """What the storage keeps of a study beside its trials, for whoever reads it later.

    `most_workers` is how far the worker range was widened; `alternatives` stand around the chosen configuration.
    `importances` are Optuna's of the knobs, and sum to 1; empty where too few trials ran to say.
    `demand` is what loading would have to do to keep up with its step; None where that does not limit. `probes_s` are
    seconds that probes cost.
    """

    study: str
    plan: TrainingPlan
    space_size: int
    workers_limit: str
    notes: tuple[str, ...]
    seconds: float
    most_workers: int = 0
    alternatives: tuple[Alternative, ...] = ()
    importances: Mapping[str, float] = field(default_factory=dict)
    demand: LoaderDemand | None = None
    probes_s: float = 0.0


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

    @property
    def pays_off_s(self) -> float | None:
        """Seconds of training with the result after which the study's own time is made up; None without a gain."""
        if self.tuned.status is not Status.CERTIFIED or self.tuned.speedup <= 1:
            return None
        return self.summary.seconds / (self.tuned.speedup - 1)
