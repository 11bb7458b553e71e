"""A place to run whole studies in: a folder, the real storage and the real best.yaml, a scripted runner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from builders import hardware
from scripted import ScriptedRunner

from pipetune.config import tuned_file
from pipetune.core.hardware import HardwareProfile
from pipetune.core.objective import Objective
from pipetune.core.record import StudyResult, TrialRecord
from pipetune.core.space import DeclaredSpace, TrialConfig
from pipetune.core.study import Budget, CachePolicy, Isolation, StudyConfig, WorkloadSpec
from pipetune.core.tuned import TunedConfig
from pipetune.search.progress import Silent
from pipetune.search.sampler import params_of
from pipetune.search.signals import Signals
from pipetune.search.study import StudyRun
from pipetune.storage.study_store import StudyStore


def study_config(*, trials=6, seconds=None, objective=Objective.THROUGHPUT, baseline=None, **changes) -> StudyConfig:
    """A config that asks for `trials` trials of an effective batch of 256."""
    values = {
        "study": "lab",
        "workload": WorkloadSpec(target="job.py:build", options={}, folder="/"),
        "effective_batch_size": 256,
        "epochs": 10,
        "epoch_samples": None,
        "search": DeclaredSpace(),
        "device": "auto",
        "seed": 0,
        "storage": None,
        "cache": CachePolicy.WARM,
        "isolation": Isolation.WARM,
        "probes": (),
        "gpu_memory_headroom": 0.1,
        "source": None,
    }
    budget = Budget(seconds=seconds, trials=trials)
    return StudyConfig(objective=objective, budget=budget, baseline=baseline, **values | changes)


class Told(Silent):
    """Keeps what a study told while it went on."""

    def __init__(self) -> None:
        self.began: list[tuple[str, TrialConfig]] = []
        self.ended: list[tuple[TrialRecord, TrialRecord | None]] = []
        self.notes: list[str] = []
        self.probes: list[str] = []

    def trial_began(self, config: TrialConfig, purpose: str, seconds_left: float | None) -> None:  # noqa: ARG002
        self.began.append((purpose, config))

    def trial_ended(self, record: TrialRecord, best: TrialRecord | None, seconds_left: float | None) -> None:  # noqa: ARG002
        self.ended.append((record, best))

    def probed(self, text: str, seconds: float) -> None:  # noqa: ARG002
        self.probes.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Lab:
    """Runs studies in one folder; each run has a runner of its own, as each command has."""

    folder: Path
    written: list[TunedConfig] = field(default_factory=list)
    told: Told = field(default_factory=Told)
    machine: HardwareProfile = field(default_factory=hardware)

    @property
    def best_file(self) -> Path:
        return self.folder / "best.yaml"

    @property
    def journal(self) -> Path:
        return self.folder / "study.journal"

    def run(
        self,
        config: StudyConfig,
        runner: ScriptedRunner,
        *,
        start_from: TrialConfig | None = None,
        busy_cpus: float = 0.0,
    ) -> StudyResult:
        self.told = Told()
        return StudyRun(
            config,
            runner=runner,
            hardware=self.machine,
            versions={"pipetune": "0.1.0"},
            open_store=lambda key: StudyStore.open(
                None, self.journal, study=config.study, key=key, directions=config.objective.directions
            ),
            write=self._write,
            folder=self.folder,
            progress=self.told,
            signals=Signals(),
            start_from=start_from,
            busy_cpus=lambda: busy_cpus,
        ).run()

    def store(self) -> StudyStore:
        return StudyStore.read(self.journal)

    def records(self) -> tuple[TrialRecord, ...]:
        return self.store().records()

    def _write(self, tuned: TunedConfig) -> None:
        self.written.append(tuned)
        tuned_file.write(self.best_file, tuned)


def mismatched(store: StudyStore) -> Mapping[int, tuple[object, object]]:
    """Trials of which Optuna has other parameters than were measured: number -> (params, measured)."""
    params = {trial.number: trial.params for trial in store.study.trials}
    measured = {record.number: params_of(record.config) for record in store.records()}
    return {number: (params[number], measured[number]) for number in measured if params[number] != measured[number]}


def with_trials(config: StudyConfig, trials: int) -> StudyConfig:
    """The same study, allowed so many trials."""
    return replace(config, budget=Budget(seconds=None, trials=trials))
