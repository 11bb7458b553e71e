"""What one run of a study works with once its workload is known: values, and the doors to the world."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import HardwareProfile
from pipetune.core.study import StudyConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import TunedConfig
from pipetune.search.budget import Spending
from pipetune.search.progress import Progress
from pipetune.search.signals import Signals
from pipetune.storage.study_store import StudyStore
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import TrialRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Handed to every part of a run; `write` writes best.yaml, `busy_cpus` tells how much the machine works now."""

    config: StudyConfig
    runner: TrialRunner
    hardware: HardwareProfile
    facts: WorkloadFacts
    plan: TrainingPlan
    limits: MeasureLimits
    store: StudyStore
    spending: Spending
    progress: Progress
    signals: Signals
    versions: Mapping[str, str]
    write: Callable[[TunedConfig], None]
    folder: Path
    busy_cpus: Callable[[], float]
