"""One study from its first process to its result: baseline, search, certification."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import HardwareProfile
from pipetune.core.record import Certification, CertificationState, StudyResult
from pipetune.core.space import SearchSpace, TrialConfig, widened
from pipetune.core.study import StudyConfig
from pipetune.core.tuned import TunedConfig
from pipetune.errors import InputError, NothingWorksError
from pipetune.search.baseline import BaselineTrial, stand_in
from pipetune.search.bench import Bench
from pipetune.search.budget import Spending
from pipetune.search.certifier import Certifier
from pipetune.search.failures import table_of_reasons
from pipetune.search.guide import Guide
from pipetune.search.ledger import Ledger
from pipetune.search.loop import SearchLoop, open_ones
from pipetune.search.plan import default_baseline
from pipetune.search.prepare import prepare
from pipetune.search.probing import Probing
from pipetune.search.progress import Progress
from pipetune.search.result import Results
from pipetune.search.sampler import SpaceSampler
from pipetune.search.setting import Setting
from pipetune.search.signals import Signals
from pipetune.search.terms import check_cache, measure_limits, resolved_space, study_key, training_plan
from pipetune.search.trials import Trials
from pipetune.storage.study_store import StudyKey, StudyStore
from pipetune.trial.runner import TrialRunner


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

    def run(self) -> StudyResult:
        """Raise InputError for what cannot be tuned, NothingWorksError where no configuration ran."""
        busy = self._busy_cpus()
        began = time.monotonic()
        with self._signals.interruptible():
            facts = self._runner.describe()
        setting, space = self._opened(facts, set_up_s=time.monotonic() - began)
        baseline = default_baseline(space.batch_size, space.effective_batch_size)[0]
        ledger = Ledger(setting, space=space, baseline=self._config.baseline or baseline)
        ledger.note_other_load(busy)
        self._progress.ready(facts, space, self._hardware.cpus_limit, setting.plan)
        return self._worked(setting, ledger)

    def _opened(self, facts: WorkloadFacts, *, set_up_s: float) -> tuple[Setting, SearchSpace]:
        """The storage under the key of what was found, and what is left of the budget."""
        plan = training_plan(self._config, facts)
        space = resolved_space(self._config, facts, self._hardware)
        self._check_objective(facts)
        check_cache(self._config, facts)
        store = self._open_store(study_key(self._config, plan, self._hardware, facts))
        store.fail_stale_trials()
        spending = Spending(self._config.budget, spent_before_s=_spent_before_s(store))
        spending.set_up_s = set_up_s
        setting = Setting(
            config=self._config,
            runner=self._runner,
            hardware=self._hardware,
            facts=facts,
            plan=plan,
            limits=replace(self._limits, epoch_samples=plan.epoch_samples),
            store=store,
            spending=spending,
            progress=self._progress,
            signals=self._signals,
            versions=self._versions,
            write=self._write,
            folder=self._folder,
            busy_cpus=self._busy_cpus,
        )
        return setting, _as_wide_as_before(space, store, self._hardware.cpus_usable)

    def _check_objective(self, facts: WorkloadFacts) -> None:
        if self._config.objective.needs_utilization and not facts.has_accelerator:
            raise InputError(
                f"objective: {self._config.objective} needs GPU utilisation, and there is no GPU here; "
                "use `objective: throughput`"
            )

    def _worked(self, setting: Setting, ledger: Ledger) -> StudyResult:
        """From what the storage has to a result; nothing is measured where an earlier run came to an end."""
        results, bench = Results(setting, ledger), Bench(setting, ledger)
        kept = self._kept_certification(setting.store)
        if kept is None or kept.state is CertificationState.UNFINISHED:
            prepare(setting, ledger)
        if kept is None:
            self._search(setting, ledger, Trials(setting, ledger, bench, results))
        else:
            ledger.baseline = kept.baseline
        if kept is None or kept.state is CertificationState.UNFINISHED:
            kept = Certifier(setting, ledger, bench).run(setting.store.certification())
        return results.provisional() if kept is None else results.certified(kept)

    def _kept_certification(self, store: StudyStore) -> Certification | None:
        """What an earlier run finished or began, unless this one may spend more."""
        kept = store.certification()
        if kept is None or self._config.baseline not in {None, kept.baseline}:
            return None
        return None if self._config.budget.exceeds(kept.budget) else kept

    def _search(self, setting: Setting, ledger: Ledger, trials: Trials) -> None:
        """The baseline first, then what may be better."""
        guide = Guide(setting, ledger)
        sampler = SpaceSampler(
            ledger.space, seed=self._config.seed, open_ones=partial(open_ones, ledger), order=guide.order
        )
        setting.store.study.sampler = sampler
        BaselineTrial(setting, ledger, sampler, trials).run()
        Probing(setting, ledger, guide.costs()).run()
        SearchLoop(setting, ledger, guide, sampler, trials).run(self._start_from)
        if not ledger.best_first():
            raise NothingWorksError(table_of_reasons(ledger.records()))
        stand_in(ledger)


def _spent_before_s(store: StudyStore) -> float:
    """What the trials cost, and set-ups and certifications too where an earlier run came to say so."""
    summary = store.summary()
    return max(sum(record.seconds for record in store.records()), summary.seconds if summary else 0.0)


def _as_wide_as_before(space: SearchSpace, store: StudyStore, cpus_usable: int) -> SearchSpace:
    """Widen the workers as far as an earlier run did."""
    summary = store.summary()
    return space if summary is None else widened(space, cpus_usable=cpus_usable, to=summary.most_workers)
