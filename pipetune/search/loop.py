"""The search: trial after trial until the budget, the space or the patience ends."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipetune.core.ceilings import MOSTLY_WAITING
from pipetune.core.costs import useful_workers
from pipetune.core.probes import knows_both_sides
from pipetune.core.record import TrialRecord, TrialState
from pipetune.core.space import TrialConfig, widened
from pipetune.search.certify import question
from pipetune.search.failures import is_beyond
from pipetune.search.guide import Guide
from pipetune.search.ledger import Ledger
from pipetune.search.plan import usual_rule
from pipetune.search.reference import due_reference
from pipetune.search.sampler import SpaceExhaustedError, SpaceSampler
from pipetune.search.setting import Setting
from pipetune.search.trials import Trials

LIKE_FAILURES_LIMIT = 5
"""The search ends when so many trials in a row failed in the same way."""
WAITING_PERCENT = 10.0
"""A leader at the top of the worker range that still waits this much for data gets a wider range."""


class SearchLoop:
    """Asks the sampler, runs what it proposes, and widens the space where the leader says so."""

    def __init__(self, setting: Setting, ledger: Ledger, guide: Guide, sampler: SpaceSampler, trials: Trials) -> None:
        self._setting = setting
        self._ledger = ledger
        self._guide = guide
        self._sampler = sampler
        self._trials = trials
        self._reference: TrialConfig | None = None

    def run(self, start_from: TrialConfig | None) -> None:
        """Search from the rule on, and from an older result before it."""
        self._widen_for_waiting()
        self._note_too_large()
        for seed in self._seeds(start_from):
            self._sampler.queue(seed)
        while self._may_go_on():
            if not self._sampler.has_queued and (reason := self._guide.enough(open_ones(self._ledger))) is not None:
                self._ledger.note(f"stopped searching: {reason}")
                return
            self._queue_reference()
            try:
                trial, config = self._sampler.ask(self._setting.store.study)
            except SpaceExhaustedError:
                self._ledger.note("every configuration that can work here has been measured")
                return
            self._run(trial, config)
            if self._fails_alike():
                return

    def _note_too_large(self) -> None:
        """Say how much of the space is not tried since probes saw that it needs more memory than there is."""
        missing = self._ledger.missing_memory()
        counts = Counter(kind for config in self._ledger.space.configs() if (kind := missing(config)) is not None)
        for kind, count in counts.items():
            self._ledger.note(f"{count} of {len(self._ledger.space)} configurations need more {kind} than there is")

    def _run(self, trial: Any, config: TrialConfig) -> None:
        if config == self._reference:
            self._reference = None
            self._trials.run(trial, config, "reference")
        elif config in self._ledger.space and open_ones(self._ledger)(config):
            self._trials.run(trial, config, "search")
            self._widen()
        else:
            # Enqueued by another program.
            self._setting.store.abandon(trial)

    def _may_go_on(self) -> bool:
        """Whether a trial fits beside the certification of what leads now."""
        records, ledger = self._ledger.records(), self._ledger
        spending = self._setting.spending
        if spending.allows_first(records):
            return True
        seconds = {record.config: spending.fresh_s(record.seconds) for record in ledger.best_first()}
        if not seconds:
            return spending.allows_trial(records, [])
        asked = question(ledger.candidates(), ledger.baseline, ledger.yardstick())
        pair = [seconds.get(config, 0.0) for config in (*asked.line[:1], asked.baseline)]
        finalists = [seconds[config] for config in asked.finalists()]
        return spending.allows_trial(records, pair, finalists if len(finalists) > 1 else ())

    def _queue_reference(self) -> None:
        due = due_reference(self._ledger.records(), self._setting.plan)
        if due is not None and self._reference is None:
            self._reference = due
            self._sampler.queue_next(due)

    def _seeds(self, start_from: TrialConfig | None) -> list[TrialConfig]:
        """An older result, moved into this space, and the rule; without what was measured already.

        Where the loader and the step were probed, what they foretell is better than the rule.
        """
        seeds, is_probed = [], knows_both_sides(self._ledger.probes)
        with suppress(SpaceExhaustedError):
            if start_from is not None:
                older = self._sampler.nearest_open(start_from)
                seeds.append(self._guide.corrected(older, open_ones(self._ledger)) if is_probed else older)
        if not is_probed:
            seeds.append(usual_rule(self._ledger.space, cpus_usable=self._setting.hardware.cpus_usable))
        tried = self._ledger.tried()
        return [config for config in dict.fromkeys(seeds) if config not in tried]

    def _fails_alike(self) -> bool:
        """Whether the last trials all failed, and in one way: the next would too."""
        last = self._ledger.records_of_this_run()[-LIKE_FAILURES_LIMIT:]
        kinds = {record.failure.kind if record.failure else None for record in last}
        if len(last) < LIKE_FAILURES_LIMIT or len(kinds) > 1 or last[0].state is not TrialState.FAILED:
            return False
        self._ledger.note(f"stopped searching: {len(last)} trials in a row failed with {kinds.pop()}")
        return True

    def _widen_for_waiting(self) -> None:
        """Allow more workers than CPUs from the start where reading a sample is mostly waiting."""
        ledger, costs = self._ledger, self._guide.costs()
        load = costs.load
        if not self._may_widen() or load.wait_share < MOSTLY_WAITING:
            return
        useful = useful_workers(costs, ledger.space.batch_size[-1])
        if self._widened(to=useful):
            ledger.note(
                f"reading a sample is waiting for {load.wait_share:.0%} of its time: up to "
                f"{ledger.space.num_workers[-1]} workers are tried"
            )

    def _may_widen(self) -> bool:
        return self._setting.config.search.num_workers == "auto" and not self._ledger.bars_workers

    def _widened(self, *, to: int | None = None) -> bool:
        """Whether there was room for more workers, which are used from now on."""
        ledger = self._ledger
        wider = widened(ledger.space, cpus_usable=self._setting.hardware.cpus_usable, to=to)
        if wider is ledger.space:
            return False
        ledger.space = wider
        self._sampler.use(wider)
        return True

    def _widen(self) -> None:
        """Allow more workers where the leader has the most and still waits for data."""
        ledger, best = self._ledger, self._ledger.best_first()
        if not self._may_widen() or not best or not _wants_more(best[0], ledger) or not self._widened():
            return
        wider = ledger.space
        leader = best[0].config
        more = wider.num_workers[-1]
        prefetch = leader.prefetch_factor or wider.prefetch_factor[0]
        self._sampler.queue(replace(leader, num_workers=more, prefetch_factor=prefetch))
        ledger.keep_summary()
        ledger.note(
            f"the best so far uses all {leader.num_workers} workers that were allowed and still waits "
            f"for data: up to {more} are tried"
        )


def _wants_more(leader: TrialRecord, ledger: Ledger) -> bool:
    # A baseline of the user's own may have more than the space.
    is_at_top = leader.config.num_workers >= ledger.space.num_workers[-1]
    return is_at_top and leader.measurement is not None and leader.measurement.data_wait_percent() >= WAITING_PERCENT


def open_ones(ledger: Ledger) -> Callable[[TrialConfig], bool]:
    """Tells, as things stand, whether a configuration may be tried: not done yet, and not beyond a memory limit."""
    tried, missing = ledger.tried(), ledger.missing_memory()
    failures = [record.failure for record in ledger.records() if record.failure is not None]

    def is_open(config: TrialConfig) -> bool:
        is_too_large = missing(config) is not None or any(is_beyond(config, failure) for failure in failures)
        return config not in tried and not is_too_large

    return is_open
