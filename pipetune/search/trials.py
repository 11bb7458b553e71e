"""Trials of the Optuna study: measured on the bench, told to the storage, and the best so far written each time."""

from typing import Any

from pipetune.core.measurement import Measurement, TrialOutcome
from pipetune.core.objective import score
from pipetune.core.space import TrialConfig
from pipetune.core.tuned import Measured
from pipetune.search.bench import Bench
from pipetune.search.ledger import Ledger
from pipetune.search.reference import drift_note
from pipetune.search.result import Results
from pipetune.search.setting import Setting


class Trials:
    """Runs what the sampler proposed."""

    def __init__(self, setting: Setting, ledger: Ledger, bench: Bench, results: Results) -> None:
        self._setting = setting
        self._ledger = ledger
        self._bench = bench
        self._results = results

    def run(self, trial: Any, config: TrialConfig, purpose: str) -> TrialOutcome:
        """One trial from its first process to the storage; an interrupted one is abandoned."""
        setting = self._setting
        try:
            least_rate = self._ledger.least_rate() if purpose == "search" else None
            outcome = self._bench.measure(config, purpose, least_rate=least_rate)
        except BaseException:
            setting.store.abandon(trial)
            raise
        setting.store.tell(trial, config, outcome, setting.plan, self._values(outcome))
        self._tell(trial.number)
        self._ledger.keep_summary()
        return outcome

    def _values(self, outcome: TrialOutcome) -> tuple[float, ...]:
        if not isinstance(outcome, Measurement):
            return ()
        measured = Measured.of(outcome, self._setting.plan)
        rate = self._ledger.baseline_rate(measured.effective_samples_per_sec.value)
        return score(self._setting.config.objective, measured, baseline_rate=rate)

    def _tell(self, number: int) -> None:
        """Write the best so far and say what this trial gave."""
        self._results.write_provisional()
        records, best = self._ledger.records(), self._ledger.best_first()
        record = next(one for one in records if one.number == number)
        left = self._setting.spending.seconds_left()
        self._setting.progress.trial_ended(record, best[0] if best else None, left)
        note = drift_note(records, record, self._setting.plan)
        if note is not None:
            self._ledger.note(note)
