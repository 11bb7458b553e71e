"""One study in Optuna's storage: opened under its key, trials written before they are told, read back as values."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from pydantic import TypeAdapter, ValidationError

from pipetune.core.measurement import Measurement, TrialFailure, TrialOutcome
from pipetune.core.probes import Probe
from pipetune.core.record import Certification, StudySummary, TrialRecord
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import Measured
from pipetune.errors import InputError, StudyConflictError

SCHEMA_VERSION = 1
LEAST_IMPORTANCE_TRIALS = 10
"""Importances set the best tenth of the trials apart from the others: of fewer that would be no trial at all."""

_CONFIG: TypeAdapter[TrialConfig] = TypeAdapter(TrialConfig)
_OUTCOME: TypeAdapter[TrialOutcome] = TypeAdapter(TrialOutcome)
_SUMMARY: TypeAdapter[StudySummary] = TypeAdapter(StudySummary)
_PROBES: TypeAdapter[tuple[Probe | TrialFailure, ...]] = TypeAdapter(tuple[Probe | TrialFailure, ...])
_CERTIFICATION: TypeAdapter[Certification] = TypeAdapter(Certification)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyKey:
    """What a study is of; trials of different keys are never mixed. All parts are plain text."""

    parts: Mapping[str, str]

    def digest(self) -> str:
        """Eight hex digits, the end of the study's name in the storage."""
        text = json.dumps(dict(self.parts), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


class StudyStore:
    """The trials of one study; the only reader and writer of its Optuna record."""

    def __init__(self, study: optuna.Study, *, is_shared: bool = False) -> None:
        self.study = study
        self._is_shared = is_shared
        # A finished trial does not change any more, and reading its windows back takes milliseconds.
        self._finished: dict[int, TrialRecord | None] = {}

    @classmethod
    def open(
        cls, url: str | None, journal: Path, *, study: str, key: StudyKey, directions: int, fresh: bool = False
    ) -> "StudyStore":
        """Open or create the study; `fresh` forgets what is there.

        Raises StudyConflictError where the journal holds a study with another key.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        name = f"{study}-{key.digest()}"
        if url is None:
            if fresh:
                journal.unlink(missing_ok=True)
            _drop_torn_line(journal)
        with _readable(url, journal):
            return cls._opened(url, journal, name=name, key=key, directions=directions, fresh=fresh)

    @classmethod
    def _opened(
        cls, url: str | None, journal: Path, *, name: str, key: StudyKey, directions: int, fresh: bool
    ) -> "StudyStore":
        storage = _storage(url, journal)
        if url is None:
            _refuse_other_key(storage, name, key, journal)
        elif fresh and name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=name, storage=storage)
        opened = optuna.create_study(
            storage=storage, study_name=name, directions=["maximize"] * directions, load_if_exists=True
        )
        if "key" not in opened.user_attrs:
            opened.set_user_attr("schema_version", SCHEMA_VERSION)
            opened.set_user_attr("key", dict(key.parts))
        return cls(opened, is_shared=url is not None)

    @classmethod
    def read(cls, journal: Path, *, url: str | None = None, name: str | None = None) -> "StudyStore":
        """Open a study that is there, by its name or the last one. Raises InputError where it is not."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if url is None and not journal.is_file():
            raise InputError(f"{journal.parent} holds no study: there is no {journal.name}")
        with _readable(url, journal):
            storage = _storage(url, journal)
            names = optuna.get_all_study_names(storage)
        if not names or (name is not None and name not in names):
            raise InputError(f"{'the given storage' if url else journal} holds no study{f' {name}' if name else ''}")
        study = optuna.load_study(study_name=name or names[-1], storage=storage)
        return cls(study, is_shared=url is not None)

    def records(self) -> tuple[TrialRecord, ...]:
        """Every finished trial, in order."""
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state.is_finished() and trial.number not in self._finished:
                self._finished[trial.number] = _record(trial)
        kept = (self._finished[number] for number in sorted(self._finished))
        return tuple(record for record in kept if record is not None)

    @property
    def name(self) -> str:
        """The study's name in the storage."""
        return self.study.study_name

    def trial_count(self) -> int:
        """Trials of any state; the next one gets this number."""
        return len(self.study.get_trials(deepcopy=False))

    def importances(self) -> dict[str, float]:
        """Each parameter's share of what set the best trials apart, as Optuna reckons it; empty for too few trials.

        PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023), Optuna's default: its dashboard shows the same.
        """
        complete = self.study.get_trials(deepcopy=False, states=(OptunaState.COMPLETE,))
        if len(complete) < LEAST_IMPORTANCE_TRIALS:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that trials are few: the report says so
            return dict(optuna.importance.get_param_importances(self.study))

    def fail_stale_trials(self) -> None:
        """Tell trials that a killed run left running as failed; the caller holds the study's lock.

        In a shared storage they may be another host's, at work.
        """
        if self._is_shared:
            return
        for trial in self.study.get_trials(deepcopy=False, states=(OptunaState.RUNNING,)):
            self.study.tell(trial.number, state=OptunaState.FAIL)

    def tell(
        self,
        trial: optuna.Trial,
        config: TrialConfig,
        outcome: TrialOutcome,
        plan: TrainingPlan,
        values: Sequence[float],
    ) -> None:
        """Write all that was measured into the trial's attributes, then tell its values.

        A configuration that did not fit is told as worthless and infeasible: Optuna's tools leave failed trials out.
        """
        trial.set_user_attr("config", _CONFIG.dump_python(config, mode="json"))
        trial.set_user_attr("outcome", _OUTCOME.dump_python(outcome, mode="json"))
        trial.set_user_attr("seconds", outcome.seconds)
        if isinstance(outcome, Measurement):
            for name, value in _headline(outcome, plan).items():
                trial.set_user_attr(name, value)
            trial.set_constraint("memory", -1.0)
            self.study.tell(trial, list(values))
        elif outcome.kind.is_memory:
            trial.set_user_attr("failure", outcome.headline())
            trial.set_constraint("memory", 1.0)
            self.study.tell(trial, [0.0] * len(self.study.directions))
        else:
            trial.set_user_attr("failure", outcome.headline())
            self.study.tell(trial, state=OptunaState.FAIL)

    def abandon(self, trial: optuna.Trial) -> None:
        """Tell a trial that was interrupted."""
        self.study.tell(trial, state=OptunaState.FAIL, skip_if_finished=True)

    def keep_summary(self, summary: StudySummary) -> None:
        """Keep what a reader needs beside the trials."""
        self.study.set_user_attr("summary", _SUMMARY.dump_python(summary, mode="json"))

    def summary(self) -> StudySummary | None:
        """What `keep_summary` kept last."""
        kept = self.study.user_attrs.get("summary")
        with _of_this_version("the summary"):
            return None if kept is None else _SUMMARY.validate_python(kept)

    def keep_probes(self, probes: Sequence[Probe | TrialFailure]) -> None:
        """Keep what was probed before the search, and what did not fit then."""
        self.study.set_user_attr("probes", _PROBES.dump_python(tuple(probes), mode="json"))

    def probes(self) -> tuple[Probe | TrialFailure, ...]:
        """What `keep_probes` kept; empty where nothing was, or by another version: it is probed anew."""
        try:
            return _PROBES.validate_python(self.study.user_attrs.get("probes", ()))
        except ValidationError:
            return ()

    def keep_certification(self, certification: Certification | None) -> None:
        """Keep the repeated measurements with the study, finished or not; None forgets them."""
        kept = None if certification is None else _CERTIFICATION.dump_python(certification, mode="json")
        self.study.set_user_attr("certification", kept)

    def certification(self) -> Certification | None:
        """The repeated measurements, where there are any; `state` tells whether more were to come.

        What another version kept is of no use, and is measured anew.
        """
        kept = self.study.user_attrs.get("certification")
        try:
            return None if kept is None else _CERTIFICATION.validate_python(kept)
        except ValidationError:
            return None


def _storage(url: str | None, journal: Path) -> BaseStorage:
    if url is None:
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal))))
    try:
        return optuna.storages.get_storage(url)
    except Exception as error:  # whatever the database driver raises
        # The URL may hold a password: it is not repeated.
        missing = f" (no module {error.name!r}: install it)" if isinstance(error, ImportError) else ""
        raise InputError(f"storage: the given URL cannot be opened: {type(error).__name__}{missing}") from error


@contextmanager
def _readable(url: str | None, journal: Path) -> Iterator[None]:
    """Name the journal file where Optuna stumbles over what is in it; a database's errors are its own."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AssertionError, OSError) as error:
        if url is not None:
            raise
        raise InputError(
            f"{journal} is no Optuna journal, or a damaged one ({type(error).__name__}); "
            "start over with --fresh, or choose another folder with --study-dir"
        ) from error


@contextmanager
def _of_this_version(name: str) -> Iterator[None]:
    try:
        yield
    except (ValidationError, KeyError, ValueError) as error:
        raise InputError(f"{name} of the study cannot be read (written by another version?): {error}") from error


def _drop_torn_line(journal: Path) -> None:
    """Cut off what a killed process wrote of its last line; the caller holds the study's lock."""
    if not journal.is_file():
        return
    with journal.open("r+b") as file:
        data = file.read()
        if data.startswith(b"{") and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def _refuse_other_key(storage: BaseStorage, name: str, key: StudyKey, journal: Path) -> None:
    """A study of which nothing was ever measured is in nobody's way: a config that was put right may go on here."""
    measured = {
        frozen.study_name: frozen
        for frozen in storage.get_all_studies()
        if storage.get_all_trials(frozen._study_id, deepcopy=False, states=(OptunaState.COMPLETE,))  # noqa: SLF001
    }
    if name in measured:
        return
    for frozen in measured.values():
        theirs = {"study": frozen.study_name.rpartition("-")[0], **frozen.user_attrs.get("key", {})}
        ours = {"study": name.rpartition("-")[0], **key.parts}
        differing = sorted(part for part in {*theirs, *ours} if theirs.get(part) != ours.get(part))
        told = "; ".join(
            f"{part}: {theirs.get(part, 'unknown')} there, {ours.get(part, 'unknown')} now" for part in differing
        )
        raise StudyConflictError(
            f"{journal.parent} holds a study of something else ({told}); "
            "start over with --fresh, or choose another folder with --study-dir"
        )


def _headline(measurement: Measurement, plan: TrainingPlan) -> dict[str, float | None]:
    """Flat figures, so that Optuna's own tools can show and plot them."""
    measured = Measured.of(measurement, plan)
    utilization = measured.gpu_utilization_percent
    return {
        "effective_samples_per_sec": measured.effective_samples_per_sec.value,
        "steady_samples_per_sec": measured.steady_samples_per_sec.value,
        "gpu_utilization_percent": utilization.value if utilization else None,
        "data_wait_percent": measured.data_wait_percent,
    }


def _record(trial: FrozenTrial) -> TrialRecord | None:
    if "outcome" not in trial.user_attrs:
        return None
    with _of_this_version(f"trial {trial.number}"):
        return TrialRecord(
            number=trial.number,
            config=_CONFIG.validate_python(trial.user_attrs["config"]),
            outcome=_OUTCOME.validate_python(trial.user_attrs["outcome"]),
            seconds=float(trial.user_attrs["seconds"]),
        )
