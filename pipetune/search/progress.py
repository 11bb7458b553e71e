"""What a study tells while it goes on; the console draws it, programs may ignore it."""

from typing import Protocol

from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import Phase
from pipetune.core.record import TrialRecord
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.core.throughput import TrainingPlan


class Progress(Protocol):
    """Called in the parent, in this order; none may raise."""

    def ready(self, facts: WorkloadFacts, space: SearchSpace, workers_limit: str, plan: TrainingPlan) -> None:
        """The workload is built and the space known."""
        ...

    def trial_began(self, config: TrialConfig, purpose: str, seconds_left: float | None) -> None:
        """A trial is about to run; `purpose` is baseline, probe, search, reference or certify."""
        ...

    def phase(self, phase: Phase) -> None:
        """The running trial entered a phase."""
        ...

    def trial_ended(self, record: TrialRecord, best: TrialRecord | None, seconds_left: float | None) -> None:
        """A trial was told."""
        ...

    def probed(self, text: str, seconds: float) -> None:
        """A probe ended; `text` says what it found, `seconds` what it cost."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...


class Silent:
    """Tells nothing."""

    def ready(self, facts: WorkloadFacts, space: SearchSpace, workers_limit: str, plan: TrainingPlan) -> None:
        """Do nothing."""

    def trial_began(self, config: TrialConfig, purpose: str, seconds_left: float | None) -> None:
        """Do nothing."""

    def phase(self, phase: Phase) -> None:
        """Do nothing."""

    def trial_ended(self, record: TrialRecord, best: TrialRecord | None, seconds_left: float | None) -> None:
        """Do nothing."""

    def probed(self, text: str, seconds: float) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""
