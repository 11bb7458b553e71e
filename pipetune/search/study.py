"""One study from its first process to its result: baseline, search, certification."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipetune.core.diagnosis import bottleneck
from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import HardwareProfile
from pipetune.core.measurement import FailureKind, Measurement, Phase, TrialFailure, TrialOutcome
from pipetune.core.objective import TIE_FLOOR, score
from pipetune.core.record import Arm, Certification, StudyResult, StudySummary, TrialRecord, TrialState
from pipetune.core.space import Amp, SearchSpace, TrialConfig, widened
from pipetune.core.study import StudyConfig
from pipetune.core.tuned import Ceiling, Measured, Status, TunedConfig, training_changes
from pipetune.errors import InputError, NothingWorksError, WorkloadError
from pipetune.search.budget import Spending
from pipetune.search.certify import choose, finalists, ranked, reported
from pipetune.search.plan import default_baseline, seeds
from pipetune.search.progress import Progress
from pipetune.search.sampler import SpaceExhaustedError, SpaceSampler, params_of
from pipetune.search.signals import Signals
from pipetune.search.terms import hardware_facts, measure_limits, resolved_space, study_key, training_plan
from pipetune.storage.study_store import StudyKey, StudyStore
from pipetune.trial.runner import TrialRunner

LIKE_FAILURES_LIMIT = 5
"""The search ends when so many trials in a row failed in the same way."""
OTHER_LOAD_CPUS = 0.3
"""From this much work of other programs on, the study says that it does not measure alone."""
DRIFT_RATIO = 1.3
"""From this ratio between two measurements of the baseline on, the study says that the machine is not steady."""
WAITING_PERCENT = 10.0
"""A leader at the top of the worker range that still waits this much for data gets a wider range."""


class StudyRun:
    """Runs one study; every part that touches the world is handed in.

    `open_store` opens the storage under the study's key; `write` writes best.yaml; `busy_cpus` tells how much the
    whole machine works at the moment.
    """

    def __init__(
        self,
        config: StudyConfig,
        *,
        runner: TrialRunner,
        hardware: HardwareProfile,
        versions: Mapping[str, str],
        open_store: Callable[[StudyKey], StudyStore],
        write: Callable[[TunedConfig], None],
        folder: Path,
        progress: Progress,
        signals: Signals,
        start_from: TrialConfig | None = None,
        busy_cpus: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config = config
        self._runner = runner
        self._hardware = hardware
        self._versions = versions
        self._open_store = open_store
        self._write = write
        self._folder = folder
        self._progress = progress
        self._signals = signals
        self._start_from = start_from
        self._busy_cpus = busy_cpus
        self._limits = measure_limits(config)
        self._notes: list[str] = []

    def run(self) -> StudyResult:
        """Raise InputError for what cannot be tuned, NothingWorksError where no configuration ran."""
        self._tell_of_other_load()
        began = time.monotonic()
        with self._signals.interruptible():
            self._facts = self._runner.describe()
        set_up_s = time.monotonic() - began
        self._plan = training_plan(self._config, self._facts)
        self._space = resolved_space(self._config, self._facts, self._hardware)
        self._check_objective()
        self._store = self._open_store(study_key(self._config, self._plan, self._hardware, self._facts))
        self._store.fail_stale_trials()
        self._first_number = self._store.trial_count()
        self._spending = Spending(self._config.budget, spent_before_s=self._spent_before_s())
        self._spending.set_up_s = set_up_s
        self._space = self._as_wide_as_before(self._space)
        self._sampler = SpaceSampler(self._space, seed=self._config.seed, is_open=self._is_open)
        self._store.study.sampler = self._sampler
        self._progress.ready(self._facts, self._space, self._hardware.cpus_limit, self._plan)
        certification = self._kept_certification()
        if certification is None:
            self._measure_baseline()
            self._search()
            certification = self._certify()
        if certification is None:
            return self._result(self._provisional(self._best_first(self._records())[0]))
        return self._result(self._certified(certification))

    def _tell_of_other_load(self) -> None:
        """Called while no trial runs: whatever is busy now is not ours."""
        busy = self._busy_cpus()
        if busy >= OTHER_LOAD_CPUS:
            self._note(
                f"other programs keep {busy:.1f} of {self._hardware.cpus_present} CPUs busy: what is best beside "
                "them may not be best without them"
            )

    # --- what there is -------------------------------------------------------------------------------------

    def _records(self) -> tuple[TrialRecord, ...]:
        return self._store.records()

    def _spent_before_s(self) -> float:
        """What the trials cost, and set-ups and certifications too where an earlier run came to say so."""
        summary = self._store.summary()
        return max(sum(record.seconds for record in self._records()), summary.seconds if summary else 0.0)

    def _as_wide_as_before(self, space: SearchSpace) -> SearchSpace:
        """Widen the workers as far as an earlier run did."""
        summary = self._store.summary()
        while summary is not None and space.num_workers[-1] < summary.most_workers:
            wider = widened(space, cpus_usable=self._hardware.cpus_usable)
            if wider is space:
                break
            space = wider
        return space

    def _check_objective(self) -> None:
        if self._config.objective.needs_utilization and not self._facts.has_accelerator:
            raise InputError(
                f"objective: {self._config.objective} needs GPU utilisation, and there is no GPU here; "
                "use `objective: throughput`"
            )

    def _is_open(self, config: TrialConfig) -> bool:
        """Whether a configuration was not tried yet and is not beyond a memory limit that was met."""
        records = self._records()
        if any(record.config == config and not self._is_old_failure(record) for record in records):
            return False
        return not any(record.failure is not None and _is_beyond(config, record.failure) for record in records)

    def _is_old_failure(self, record: TrialRecord) -> bool:
        """Whether an earlier run met it in code that may have been repaired since."""
        return record.number < self._first_number and record.state is TrialState.FAILED

    def _kept_certification(self) -> Certification | None:
        """The result of an earlier run, unless this one may spend more."""
        kept = self._store.certification()
        if kept is None or self._config.baseline not in {None, kept.arms[-1].config}:
            return None
        return None if self._config.budget.exceeds(kept.budget) else kept

    # --- the baseline --------------------------------------------------------------------------------------

    def _measure_baseline(self) -> None:
        """Measure what the user has today as the first trial; torch's own defaults where they did not say."""
        if self._config.baseline is not None:
            self._baseline = self._config.baseline
            self._check_baseline(self._config.baseline)
            outcome = self._outcome_of(self._config.baseline)
            if isinstance(outcome, TrialFailure):
                raise WorkloadError(
                    f"baseline: your present settings ({self._baseline.label()}) fail without any tuning: "
                    f"{outcome.headline()}",
                    outcome.traceback_text or outcome.log_tail,
                )
            return
        candidates = default_baseline(self._space.batch_size, self._space.effective_batch_size)
        for self._baseline in candidates:
            outcome = self._outcome_of(self._baseline)
            if isinstance(outcome, Measurement):
                return
            if not outcome.kind.is_memory and outcome.kind is not FailureKind.TIMEOUT:
                break

    def _check_baseline(self, baseline: TrialConfig) -> None:
        if baseline.amp not in self._facts.amps:
            raise InputError(
                f"baseline.amp: this device has no {baseline.amp} of its own; it supports {', '.join(self._facts.amps)}"
            )
        if baseline.effective_batch_size != self._plan.effective_batch_size:
            raise InputError(
                f"baseline: its effective batch is {baseline.effective_batch_size}, but "
                f"training.effective_batch_size is {self._plan.effective_batch_size}"
            )
        fixed = self._facts.fixed_batch
        if fixed is not None and baseline.batch_size != fixed:
            raise InputError(
                f"baseline.batch_size: is {baseline.batch_size}, but the workload's own batch sampler gives {fixed}"
            )

    def _outcome_of(self, config: TrialConfig) -> TrialOutcome:
        """The outcome of an earlier run, or a trial of it now."""
        for record in self._records():
            if record.config == config and not self._is_old_failure(record):
                return record.outcome
        self._sampler.queue(config, always=True)
        while True:
            trial, asked = self._sampler.ask(self._store.study)
            if asked == config:
                return self._run_trial(trial, asked, "baseline")
            # Enqueued by another program; the baseline comes first.
            self._store.abandon(trial)

    # --- the search ----------------------------------------------------------------------------------------

    def _search(self) -> None:
        for seed in self._seeds():
            self._sampler.queue(seed)
        while self._spending.allows_trial(self._records(), self._least_arm_seconds()):
            try:
                trial, config = self._sampler.ask(self._store.study)
            except SpaceExhaustedError:
                self._note("every configuration that can work here has been measured")
                return
            if config not in self._space or not self._is_open(config):
                self._store.abandon(trial)
                continue
            self._run_trial(trial, config, "search")
            if self._fails_alike():
                return
            self._widen()

    def _seeds(self) -> list[TrialConfig]:
        """An older result, moved into this space, and the rules; without what was measured already."""
        older = []
        with suppress(SpaceExhaustedError):
            older = [self._sampler.nearest_open(params_of(self._start_from))] if self._start_from else []
        tried = {record.config for record in self._records() if not self._is_old_failure(record)}
        wished = dict.fromkeys([*older, *seeds(self._space, cpus_usable=self._hardware.cpus_usable)])
        return [config for config in wished if config not in tried]

    def _least_arm_seconds(self) -> list[float]:
        """The leader's and the baseline's: time is kept back for these two, others are certified where some is left."""
        arms = self._arm_seconds()
        return [arms[0], arms[-1]] if len(arms) > 1 else arms

    def _arm_seconds(self) -> list[float]:
        """What each arm of a certification took as a trial."""
        records = self._records()
        arms = finalists(self._best_first(records), self._baseline, self._plan)
        return [next((r.seconds for r in records if r.config == arm and r.measurement), 0.0) for arm in arms]

    def _run_trial(self, trial: Any, config: TrialConfig, purpose: str) -> TrialOutcome:
        self._progress.trial_began(config, purpose, self._spending.seconds_left())
        began = time.monotonic()
        try:
            with self._signals.interruptible():
                outcome = self._judged(self._runner.run(config, self._limits))
        except BaseException:
            self._store.abandon(trial)
            raise
        outcome = replace(outcome, seconds=time.monotonic() - began)
        self._store.tell(trial, config, outcome, self._plan, self._values(outcome))
        self._keep_summary()
        self._after_trial(trial.number)
        return outcome

    def _judged(self, outcome: TrialOutcome) -> TrialOutcome:
        """A measurement without the utilisation that the objective needs is none.

        Raises InputError where already the baseline has none: nothing else will.
        """
        if isinstance(outcome, TrialFailure) or outcome.gpu or not self._config.objective.needs_utilization:
            return outcome
        message = (
            f"objective: {self._config.objective} needs GPU utilisation, which is not known: {outcome.gpu_reason}; "
            "use `objective: throughput`"
        )
        if outcome.config == self._baseline:
            raise InputError(message)
        return TrialFailure(config=outcome.config, kind=FailureKind.INVALID_DATA, phase=Phase.MEASURE, message=message)

    def _values(self, outcome: TrialOutcome) -> tuple[float, ...]:
        if not isinstance(outcome, Measurement):
            return ()
        measured = Measured.of(outcome, self._plan)
        return score(self._config.objective, measured, baseline_rate=self._baseline_rate(measured))

    def _baseline_rate(self, default: Measured | None = None) -> float:
        """The baseline's rate; where it did not run, the first that did stands in for it."""
        measured = [record for record in self._records() if record.measurement is not None]
        of_baseline = [record for record in measured if record.config == self._baseline]
        for record in (*of_baseline, *measured):
            assert record.measurement is not None
            return record.measurement.effective(self._plan).value
        return default.effective_samples_per_sec.value if default else 1.0

    def _after_trial(self, number: int) -> None:
        records = self._records()
        best = self._best_first(records)
        if best:
            self._write(self._provisional(best[0]))
        record = next(r for r in records if r.number == number)
        self._progress.trial_ended(record, best[0] if best else None, self._spending.seconds_left())

    def _best_first(self, records: tuple[TrialRecord, ...]) -> list[TrialRecord]:
        return ranked(records, self._plan, self._config.objective, self._baseline_rate())

    def _fails_alike(self) -> bool:
        """Whether the last trials all failed, and in one way: the next would too."""
        last = [r for r in self._records() if r.number >= self._first_number][-LIKE_FAILURES_LIMIT:]
        kinds = {record.failure.kind if record.failure else None for record in last}
        if len(last) < LIKE_FAILURES_LIMIT or len(kinds) > 1 or last[0].state is not TrialState.FAILED:
            return False
        self._note(f"stopped searching: {len(last)} trials in a row failed with {kinds.pop()}")
        return True

    def _widen(self) -> None:
        """Allow more workers where the leader has the most and still waits for data."""
        best = self._best_first(self._records())
        if self._config.search.num_workers != "auto" or not best:
            return
        leader, measurement = best[0], best[0].measurement
        is_at_top = leader.config.num_workers == self._space.num_workers[-1]
        if measurement is None or not is_at_top or measurement.data_wait_percent() < WAITING_PERCENT:
            return
        wider = widened(self._space, cpus_usable=self._hardware.cpus_usable)
        if wider is self._space:
            return
        self._space = wider
        self._sampler.use(wider)
        more = replace(
            leader.config,
            num_workers=wider.num_workers[-1],
            prefetch_factor=leader.config.prefetch_factor or wider.prefetch_factor[0],
        )
        self._sampler.queue(more)
        self._keep_summary()
        self._note(
            f"the best so far uses all {leader.config.num_workers} workers that were allowed and still waits "
            f"for data: up to {wider.num_workers[-1]} are tried"
        )

    # --- the winner ----------------------------------------------------------------------------------------

    def _certify(self) -> Certification | None:
        """Measure the finalists and the baseline again, interleaved, each in a fresh process a round.

        None where the baseline failed then: there is nothing to compare with, and the result stays provisional.
        """
        best = self._best_first(self._records())
        if not best:
            raise NothingWorksError(_table_of_reasons(self._records()))
        if not any(record.config == self._baseline for record in best):
            # The one nearest to torch's defaults, not the slowest: that would flatter the winner.
            nearest = min(best, key=lambda r: (r.config.num_workers, r.config.amp is not Amp.FP32, r.number))
            self._note(f"the baseline {self._baseline.label()} did not run; compared with trial {nearest.number}")
            self._baseline = nearest.config
        with self._signals.interruptible():
            self._runner.close_hosts()
        self._tell_of_other_load()
        began = time.monotonic()
        chosen = finalists(best, self._baseline, self._plan)
        affordable = self._spending.affordable_arms(self._arm_seconds())
        if len(self._records()) == 1:
            self._note("only the baseline was measured: give the study more time or trials")
        self._progress.note(f"measuring {', '.join(c.label() for c in chosen)} again, each in a fresh process")
        arms: dict[TrialConfig, list[Measurement]] = {c: [] for c in (*chosen[: affordable - 1], self._baseline)}
        done, round_s = 0, 0.0
        while self._baseline in arms and self._spending.allows_round(done, round_s):
            round_began = time.monotonic()
            self._certify_round(arms, done)
            done, round_s = done + 1, time.monotonic() - round_began
        if self._baseline not in arms:
            return None
        certification = Certification(
            arms=tuple(Arm(config=config, rounds=tuple(rounds)) for config, rounds in arms.items()),
            seconds=time.monotonic() - began,
            budget=self._config.budget,
        )
        self._store.keep_certification(certification)
        return certification

    def _certify_round(self, arms: dict[TrialConfig, list[Measurement]], done: int) -> None:
        """One round over the arms, every other one backwards; an arm that fails is out."""
        order = list(arms) if done % 2 == 0 else list(reversed(arms))
        for config in order:
            self._progress.trial_began(config, "certify", self._spending.seconds_left())
            with self._signals.interruptible():
                outcome = self._judged(self._runner.run(config, self._limits, fresh=True, compute_only=done == 0))
            if isinstance(outcome, Measurement):
                arms[config].append(outcome)
                continue
            self._note(f"{config.label()} failed when it was measured again: {outcome.headline()}")
            del arms[config]
            if config == self._baseline:
                return

    def _result(self, tuned: TunedConfig) -> StudyResult:
        self._write(tuned)
        return StudyResult(
            folder=self._folder,
            tuned=tuned,
            bottleneck=bottleneck(tuned.measured, tuned.ceiling),
            records=self._records(),
            summary=self._keep_summary(),
        )

    def _certified(self, certification: Certification) -> TunedConfig:
        winner = choose(certification, self._plan, self._config.objective)
        arm, baseline = certification.arms[winner], certification.arms[-1]
        status = Status.NO_GAIN if arm is baseline else Status.CERTIFIED
        measured = reported(arm, self._plan)
        self._tell_of_drift(baseline)
        return self._tuned(status, arm.config, measured, baseline, _ceiling(arm, measured, self._facts))

    def _keep_summary(self) -> StudySummary:
        earlier = self._store.summary()
        notes = (*(earlier.notes if earlier else ()), *self._notes)
        summary = StudySummary(
            study=self._config.study,
            plan=self._plan,
            space_size=len(self._space),
            most_workers=self._space.num_workers[-1],
            workers_limit=self._hardware.cpus_limit,
            notes=tuple(dict.fromkeys(notes)),
            seconds=self._spending.seconds(),
        )
        self._store.keep_summary(summary)
        return summary

    def _tell_of_drift(self, baseline: Arm) -> None:
        """Say where the baseline ran at quite another rate when it was measured again."""
        again = reported(baseline, self._plan).effective_samples_per_sec.value
        for record in self._records():
            if record.config == baseline.config and record.measurement is not None:
                before = record.measurement.effective(self._plan).value
                if max(again, before) > DRIFT_RATIO * min(again, before):
                    self._note(
                        f"the baseline made {before:.4g} samples/s in the search and {again:.4g} when it was measured "
                        "again: this machine is not quiet, and the figures hold for that hour only"
                    )
                return

    def _provisional(self, leader: TrialRecord) -> TunedConfig:
        assert leader.measurement is not None
        baseline = next(
            (r for r in self._records() if r.config == self._baseline and r.measurement is not None), leader
        )
        assert baseline.measurement is not None
        arm = Arm(config=baseline.config, rounds=(baseline.measurement,))
        measured = Measured.of(leader.measurement, self._plan)
        return self._tuned(Status.PROVISIONAL, leader.config, measured, arm, None)

    def _tuned(
        self, status: Status, config: TrialConfig, measured: Measured, baseline: Arm, ceiling: Ceiling | None
    ) -> TunedConfig:
        return TunedConfig(
            status=status,
            config=config,
            changes_training=training_changes(baseline.config, config, self._facts.traits),
            measured=measured,
            baseline_config=baseline.config,
            baseline_measured=reported(baseline, self._plan),
            ceiling=ceiling,
            hardware=hardware_facts(self._hardware, self._facts),
            provenance=self._provenance(),
        )

    def _provenance(self) -> dict[str, Any]:
        measured = sum(1 for record in self._records() if record.state is TrialState.MEASURED)
        return {
            "study": self._config.study,
            "optuna_study": self._store.name,
            "trials": measured,
            "objective": self._config.objective.value,
            "epochs": self._plan.epochs,
            "epoch_samples": self._plan.epoch_samples,
            "seconds": round(self._spending.seconds(), 1),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._versions,
            "torch": self._facts.torch_version,
            "cuda": self._facts.cuda_version,
            "start_method": self._facts.start_method,
            "flags": dict(self._facts.flags),
        }

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._progress.note(text)


def _ceiling(arm: Arm, measured: Measured, facts: WorkloadFacts) -> Ceiling | None:
    """None where it was not measured, or so disturbed that real training was faster."""
    rates = [one.compute_only_samples_per_sec for one in arm.rounds if one.compute_only_samples_per_sec is not None]
    if not rates or max(rates) < measured.steady_samples_per_sec.value * (1 - TIE_FLOOR):
        return None
    return Ceiling(samples_per_sec=max(rates), limit="compute" if facts.has_accelerator else "cpu_compute")


def _is_beyond(config: TrialConfig, failure: TrialFailure) -> bool:
    """Whether a configuration needs at least as much of the memory that ran out."""
    met = failure.config
    if failure.kind is FailureKind.GPU_OUT_OF_MEMORY:
        return config.amp is met.amp and config.batch_size >= met.batch_size
    if failure.kind in {FailureKind.SHARED_MEMORY, FailureKind.HOST_OUT_OF_MEMORY}:
        return (
            config.num_workers >= met.num_workers > 0
            and config.batch_size >= met.batch_size
            and (config.prefetch_factor or 0) >= (met.prefetch_factor or 0)
        )
    return False


def _table_of_reasons(records: tuple[TrialRecord, ...]) -> str:
    """How many trials failed in which way, and the first traceback in full."""
    failures = [record.failure for record in records if record.failure is not None]
    counts: dict[str, int] = {}
    for failure in failures:
        counts[failure.headline()] = counts.get(failure.headline(), 0) + 1
    lines = [f"  {count} x {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])]
    text = "\n".join([f"no configuration works: {len(failures)} trials, none ran to its end", *lines])
    first = next((f for f in failures if f.traceback_text or f.log_tail), None)
    if first is None:
        return text
    return f"{text}\n\nthe first of them ({first.config.label()}):\n{first.traceback_text or first.log_tail}"
