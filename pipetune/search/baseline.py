"""The baseline: what the user has today as the first trial, torch's own defaults where they did not say."""

from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import FailureKind, Measurement, TrialFailure, TrialOutcome
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.errors import InputError, WorkloadError
from pipetune.search.ledger import Ledger
from pipetune.search.plan import default_baseline
from pipetune.search.sampler import SpaceSampler
from pipetune.search.setting import Setting
from pipetune.search.trials import Trials


class BaselineTrial:
    """Measures it, or takes it from an earlier run."""

    def __init__(self, setting: Setting, ledger: Ledger, sampler: SpaceSampler, trials: Trials) -> None:
        self._setting = setting
        self._ledger = ledger
        self._sampler = sampler
        self._trials = trials

    def run(self) -> None:
        """Only a baseline that the user wrote stops the study when it fails (WorkloadError)."""
        theirs = self._setting.config.baseline
        if theirs is None:
            self._run_default()
            return
        check_baseline(theirs, self._setting.facts, self._setting.plan)
        self._ledger.baseline = theirs
        outcome = self._outcome_of(theirs)
        if isinstance(outcome, TrialFailure):
            raise WorkloadError(
                f"baseline: your present settings ({theirs.label()}) fail without any tuning: {outcome.headline()}",
                outcome.traceback_text or outcome.log_tail,
            )

    def _run_default(self) -> None:
        """The largest batch that fits; what breaks in another way will not run with a smaller one either."""
        space = self._ledger.space
        for config in default_baseline(space.batch_size, space.effective_batch_size):
            self._ledger.baseline = config
            outcome = self._outcome_of(config)
            if isinstance(outcome, Measurement):
                return
            if not outcome.kind.is_memory and outcome.kind is not FailureKind.TIMEOUT:
                return
            if self._setting.spending.seconds_left() == 0:
                return

    def _outcome_of(self, config: TrialConfig) -> TrialOutcome:
        """The outcome of an earlier run, or a trial of it now."""
        record = self._ledger.tried().get(config)
        if record is not None and not (record.measurement and record.measurement.censored):
            return record.outcome
        self._sampler.queue(config, always=True)
        while True:
            trial, asked = self._sampler.ask(self._setting.store.study)
            if asked == config:
                return self._trials.run(trial, asked, "baseline")
            # Enqueued by another program; the baseline comes first.
            self._setting.store.abandon(trial)


def stand_in(ledger: Ledger) -> None:
    """Where the baseline did not run, compare with what is nearest to it, and say so."""
    best = ledger.best_first()
    if any(record.config == ledger.baseline for record in best):
        return
    # The one nearest to torch's defaults, not the slowest: that would flatter the winner.
    nearest = min(best, key=lambda r: (r.config.num_workers, r.config.amp is not Amp.FP32, r.number))
    ledger.note(f"the baseline {ledger.baseline.label()} did not run; compared with trial {nearest.number}")
    ledger.baseline = nearest.config


def check_baseline(baseline: TrialConfig, facts: WorkloadFacts, plan: TrainingPlan) -> None:
    """Raise InputError for a baseline that this study cannot measure."""
    if baseline.amp not in facts.amps:
        raise InputError(
            f"baseline.amp: this device has no {baseline.amp} of its own; it supports {', '.join(facts.amps)}"
        )
    if baseline.effective_batch_size != plan.effective_batch_size:
        raise InputError(
            f"baseline: its effective batch is {baseline.effective_batch_size}, but "
            f"training.effective_batch_size is {plan.effective_batch_size}"
        )
    fixed = facts.fixed_batch
    if fixed is not None and baseline.batch_size != fixed:
        raise InputError(
            f"baseline.batch_size: is {baseline.batch_size}, but the workload's own batch sampler gives {fixed}"
        )
