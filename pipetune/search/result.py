"""The outcome of a study as it is written: the winner with its figures, what it was compared with, where it is from."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pipetune.core.ceilings import loader_demand
from pipetune.core.diagnosis import Bottleneck, bottleneck
from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import CacheState
from pipetune.core.objective import TIE_FLOOR, Objective
from pipetune.core.pooling import reported
from pipetune.core.probes import Probe, StepProbe
from pipetune.core.record import Arm, Certification, StudyResult, TrialRecord, TrialState
from pipetune.core.repeats import PRIOR, pooled
from pipetune.core.space import TrialConfig
from pipetune.core.study import CachePolicy
from pipetune.core.tuned import Ceiling, Measured, Status, TunedConfig, training_changes
from pipetune.search.guide import Guide
from pipetune.search.ledger import Ledger
from pipetune.search.ranking import fresh_noise
from pipetune.search.setting import Setting
from pipetune.search.terms import hardware_facts

DRIFT_RATIO = 1.3
"""From this ratio between two measurements of the baseline on, the study says that the machine is not steady."""


class Results:
    """Puts results together and writes them."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self._setting = setting
        self._ledger = ledger

    def write_provisional(self) -> None:
        """Write the best so far, if there is one."""
        best = self._ledger.best_first()
        if best:
            self._setting.write(self._provisional(best[0]))

    def provisional(self) -> StudyResult:
        """The best of the search, not measured again."""
        return self._result(self._provisional(self._ledger.best_first()[0]))

    def certified(self, certification: Certification) -> StudyResult:
        """The winner of a finished certification."""
        return self._result(self._certified(certification))

    def _result(self, tuned: TunedConfig) -> StudyResult:
        self._setting.write(tuned)
        limit = bottleneck(tuned.measured, tuned.ceiling)
        guide, rate = Guide(self._setting, self._ledger), tuned.measured.effective_samples_per_sec.value
        self._ledger.alternatives = guide.alternatives(tuned.config, rate)
        self._ledger.importances = self._setting.store.importances()
        # On a CPU the step takes its CPUs from the loader: there is no rate that only the loader is short of.
        is_asked = limit is Bottleneck.INPUT and self._setting.facts.has_accelerator
        self._ledger.demand = loader_demand(tuned.config, guide.costs()) if is_asked else None
        return StudyResult(
            folder=self._setting.folder,
            tuned=tuned,
            bottleneck=limit,
            records=self._ledger.records(),
            summary=self._ledger.keep_summary(),
        )

    def _certified(self, certification: Certification) -> TunedConfig:
        assert certification.winner is not None
        arm, baseline = certification.arm(certification.winner), certification.arm(certification.baseline)
        status = Status.NO_GAIN if arm.config == baseline.config else Status.CERTIFIED
        measured = self._reported(arm, certification)
        baseline_measured = self._reported(baseline, certification)
        if self._setting.config.cache is CachePolicy.COLD and measured.cache is CacheState.WARM:
            self._ledger.note("cache: cold was asked for, but the data came from memory; are data_paths all its files?")
        self._tell_of_drift(baseline.config, baseline_measured.effective_samples_per_sec.value)
        return self._tuned(
            status,
            (arm.config, measured),
            (baseline.config, baseline_measured),
            _ceiling(arm, measured, self._ledger.probes, self._setting.facts),
        )

    def _reported(self, arm: Arm, certification: Certification) -> Measured:
        """Figures with the noise of all that was repeated in fresh processes."""
        rates = replace(self._ledger.yardstick(), objective=Objective.THROUGHPUT)
        noise = pooled(PRIOR, fresh_noise(certification.rounds, rates))
        return reported(arm.rounds, self._setting.plan, noise)

    def _tell_of_drift(self, baseline: TrialConfig, again: float) -> None:
        """Say where the baseline ran at quite another rate when it was measured again."""
        record = self._measured(baseline)
        if record is None or record.measurement is None:
            return
        before = record.measurement.effective(self._setting.plan).value
        if max(again, before) > DRIFT_RATIO * min(again, before):
            self._ledger.note(
                f"the baseline made {before:.4g} samples/s in the search and {again:.4g} when it was measured "
                "again: this machine is not quiet, and the figures hold for that hour only"
            )

    def _measured(self, config: TrialConfig) -> TrialRecord | None:
        """The first trial of a configuration that ran."""
        found = (r for r in self._ledger.records() if r.config == config and r.measurement is not None)
        return next(found, None)

    def _provisional(self, leader: TrialRecord) -> TunedConfig:
        plan = self._setting.plan
        baseline = self._measured(self._ledger.baseline) or leader
        assert leader.measurement is not None
        assert baseline.measurement is not None
        return self._tuned(
            Status.PROVISIONAL,
            (leader.config, Measured.of(leader.measurement, plan)),
            (baseline.config, Measured.of(baseline.measurement, plan)),
            None,
        )

    def _tuned(
        self,
        status: Status,
        winner: tuple[TrialConfig, Measured],
        baseline: tuple[TrialConfig, Measured],
        ceiling: Ceiling | None,
    ) -> TunedConfig:
        setting = self._setting
        return TunedConfig(
            status=status,
            config=winner[0],
            changes_training=training_changes(baseline[0], winner[0], setting.facts.traits),
            measured=winner[1],
            baseline_config=baseline[0],
            baseline_measured=baseline[1],
            ceiling=ceiling,
            hardware=hardware_facts(setting.hardware, setting.facts),
            provenance=self._provenance(),
        )

    def _provenance(self) -> dict[str, Any]:
        setting, plan, facts = self._setting, self._setting.plan, self._setting.facts
        measured = sum(1 for record in self._ledger.records() if record.state is TrialState.MEASURED)
        return {
            "study": setting.config.study,
            "optuna_study": setting.store.name,
            "trials": measured,
            "objective": setting.config.objective.value,
            "epochs": plan.epochs,
            "epoch_samples": plan.epoch_samples,
            "seconds": round(setting.spending.seconds(), 1),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **setting.versions,
            "torch": facts.torch_version,
            "cuda": facts.cuda_version,
            "start_method": facts.start_method,
            "flags": dict(facts.flags),
        }


def _ceiling(arm: Arm, measured: Measured, probes: Sequence[Probe], facts: WorkloadFacts) -> Ceiling | None:
    """The fastest that the step alone was seen, since others can only slow it down.

    None where it was not measured, or so disturbed that real training was faster.
    """
    rates = [one.compute_only_samples_per_sec for one in arm.rounds if one.compute_only_samples_per_sec is not None]
    if rates:
        own = (arm.config.batch_size, arm.config.amp)
        steps = [one for one in probes if isinstance(one, StepProbe)]
        rates += [one.samples_per_sec for one in steps if (one.config.batch_size, one.config.amp) == own]
    if not rates or max(rates) < measured.steady_samples_per_sec.value * (1 - TIE_FLOOR):
        return None
    return Ceiling(samples_per_sec=max(rates), limit="compute" if facts.has_accelerator else "cpu_compute")
