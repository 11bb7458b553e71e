"""What a study has seen and said so far: its trials in order of merit, its baseline, its notes and its cost."""

from pipetune.core.record import StudySummary, TrialRecord, TrialState
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.search.ranking import Yardstick, ranked
from pipetune.search.setting import Setting

OTHER_LOAD_CPUS = 0.3
"""From this much work of other programs on, the study says that it does not measure alone."""


class Ledger:
    """The trials as the storage has them, with what this run adds.

    `space` grows where the search widens it. `bars_workers` once workers were found to read other samples.
    """

    def __init__(self, setting: Setting, *, space: SearchSpace, baseline: TrialConfig) -> None:
        self._setting = setting
        self._notes: list[str] = []
        self._first_number = setting.store.trial_count()
        earlier = setting.store.summary()
        self._earlier_notes = earlier.notes if earlier else ()
        self.space = space
        self.baseline = baseline
        self.bars_workers = False

    def records(self) -> tuple[TrialRecord, ...]:
        """Every finished trial, in order, those of earlier runs too."""
        return self._setting.store.records()

    def records_of_this_run(self) -> list[TrialRecord]:
        """Without those of earlier runs."""
        return [record for record in self.records() if record.number >= self._first_number]

    def is_old_failure(self, record: TrialRecord) -> bool:
        """Whether an earlier run met it in code that may have been repaired since."""
        return record.number < self._first_number and record.state is TrialState.FAILED

    def tried(self) -> dict[TrialConfig, TrialRecord]:
        """The first trial of each configuration that need not be measured again."""
        found: dict[TrialConfig, TrialRecord] = {}
        for record in self.records():
            if not self.is_old_failure(record):
                found.setdefault(record.config, record)
        return found

    def candidates(self) -> tuple[TrialRecord, ...]:
        """Trials of what may win: none that was ended early. The baseline is compared with, whatever it is."""
        return tuple(r for r in self.records() if r.config == self.baseline or self._may_win(r))

    def _may_win(self, record: TrialRecord) -> bool:
        is_whole = record.measurement is None or not record.measurement.censored
        return is_whole and not (self.bars_workers and record.config.num_workers)

    def best_first(self) -> list[TrialRecord]:
        """Measured configurations that may win in the order of the objective, repeats pooled."""
        return ranked(self.candidates(), self.yardstick())

    def yardstick(self) -> Yardstick:
        """What measurements are compared by."""
        return Yardstick(
            objective=self._setting.config.objective, plan=self._setting.plan, baseline_rate=self.baseline_rate()
        )

    def baseline_rate(self, default: float = 1.0) -> float:
        """The baseline's rate; where it did not run, the first that did stands in for it."""
        measured = [(record.config, record.measurement) for record in self.records() if record.measurement is not None]
        # A stable sort: the first of the baseline, or else the first of all.
        for _, measurement in sorted(measured, key=lambda pair: pair[0] != self.baseline):
            return measurement.effective(self._setting.plan).value
        return default

    def note(self, text: str) -> None:
        """Tell it now, and keep it with the study."""
        self._notes.append(text)
        self._setting.progress.note(text)

    def note_other_load(self, busy: float) -> None:
        """Tell of CPUs that were busy while no trial ran: whatever they did was not ours."""
        if busy >= OTHER_LOAD_CPUS:
            self.note(
                f"other programs keep {busy:.1f} of {self._setting.hardware.cpus_present} CPUs busy: what is best "
                "beside them may not be best without them"
            )

    def keep_summary(self) -> StudySummary:
        """Keep what is known of the study beside its trials."""
        summary = StudySummary(
            study=self._setting.config.study,
            plan=self._setting.plan,
            space_size=len(self.space),
            most_workers=self.space.num_workers[-1],
            workers_limit=self._setting.hardware.cpus_limit,
            notes=tuple(dict.fromkeys([*self._earlier_notes, *self._notes])),
            seconds=self._setting.spending.seconds(),
        )
        self._setting.store.keep_summary(summary)
        return summary
