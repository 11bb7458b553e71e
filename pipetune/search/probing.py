"""Before the search: single costs, probed apart, as far as their share of the budget goes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pipetune.core.costs import Costs
from pipetune.core.measurement import TrialFailure
from pipetune.core.probes import LoaderProbe, Probe, ProbeKind, StepProbe
from pipetune.core.space import Amp, TrialConfig
from pipetune.search.failures import is_beyond
from pipetune.search.ledger import Ledger
from pipetune.search.plan import AMPS_FASTEST_FIRST, loader_config
from pipetune.search.setting import Setting

SHARE = 0.1
"""Probes may take this share of the time budget."""
MOST_S = 60.0
PROBE_S = 1.0
"""What one times, at most; slow steps and workers that start come on top."""
LEAST_S = 0.3
PROBES = 8
"""About so many are made."""
LEAST_STEPS = 2
"""Optimizer steps that a probe of the step makes, however long they take."""
FEW_WORKERS = 2
SMALLER = 4
"""The second micro-batch of a step is so many times smaller: enough to see a line, and not launching alone."""

P = TypeVar("P", LoaderProbe, StepProbe)


class Probing:
    """Asks the runner for one probe after another; keeps them with the study, so that a resumed one has them."""

    def __init__(self, setting: Setting, ledger: Ledger, costs: Costs) -> None:
        """`costs` are what is known beforehand: what would take too long is left out."""
        self._setting = setting
        self._ledger = ledger
        self._costs = costs
        left_s = setting.spending.seconds_left()
        self._limit_s = MOST_S if left_s is None else min(MOST_S, SHARE * left_s)
        self._probe_s = min(PROBE_S, max(LEAST_S, self._limit_s / PROBES))
        self._ends_s = 0.0
        # One worker hands the batch over: that host forks, and never touches the dataset.
        self._step_workers = min((count for count in ledger.space.num_workers if count), default=0)

    def run(self) -> None:
        """Probe what the config asks for and no earlier run has; what fails is told and leaves a gap."""
        asked, count = self._setting.config.probes, len(self._ledger.probes)
        began = time.monotonic()
        self._ends_s = began + self._limit_s
        try:
            if ProbeKind.SAMPLE in asked:
                self._loader(loader_config(self._ledger.space, 0))
            if ProbeKind.STEP in asked:
                self._steps()
            if ProbeKind.LOADER in asked:
                self._loaders()
        finally:
            if len(self._ledger.probes) > count:
                self._ledger.probes_s += time.monotonic() - began
                self._ledger.keep_summary()

    def _has_time(self, needed_s: float = 0.0) -> bool:
        return time.monotonic() + needed_s < self._ends_s

    def _worker_counts(self) -> Iterator[int]:
        """As many workers as CPUs, which tells most, and a few."""
        space, cpus = self._ledger.space, self._setting.hardware.cpus_usable
        counts = [count for count in space.num_workers if count > 0]
        if counts:
            many = min(counts, key=lambda count: abs(count - cpus))
            few = min(counts, key=lambda count: abs(count - FEW_WORKERS))
            yield from dict.fromkeys((many, few))

    def _loaders(self) -> None:
        """With many workers pinned and with few not, where both are asked for: receiving costs differ by that."""
        space = self._ledger.space
        pinned_first = (space.pin_memory[-1], space.pin_memory[0])
        for workers, pin_memory in zip(self._worker_counts(), pinned_first, strict=False):
            self._loader(loader_config(space, workers, pin_memory=pin_memory))

    def _loader(self, config: TrialConfig) -> None:
        known = (probe.config for probe in self._ledger.probes if isinstance(probe, LoaderProbe))
        if config in known or not self._has_time():
            return
        outcome = self._probed(
            "loader alone", config, partial(self._setting.runner.probe_loader, seconds=self._probe_s)
        )
        if isinstance(outcome, LoaderProbe):
            told = f"loader alone, {_workers(config)}: {outcome.samples_per_sec:.4g} samples/s"
            self._keep(outcome, told)

    def _steps(self) -> None:
        """Each precision at the largest micro-batch that fits, the fastest first, then at a smaller one."""
        largest = {amp: self._largest_step(amp) for amp in AMPS_FASTEST_FIRST if amp in self._ledger.space.amp}
        for amp, size in largest.items():
            if size is not None and (smaller := self._smaller(size)) != size:
                self._step(amp, smaller)

    def _largest_step(self, amp: Amp) -> int | None:
        """The micro-batch that was probed; None where none was."""
        for size in sorted(self._ledger.space.batch_size, reverse=True):
            if self._is_beyond(self._step_config(amp, size)):
                continue
            outcome = self._step(amp, size)
            if self._step_workers and isinstance(outcome, TrialFailure) and not outcome.kind.is_memory:
                # Perhaps it was the worker: the step has none.
                self._step_workers = 0
                outcome = self._step(amp, size)
            if not isinstance(outcome, TrialFailure) or not outcome.kind.is_memory:
                return size if isinstance(outcome, StepProbe) else None
        return None

    def _is_beyond(self, config: TrialConfig) -> bool:
        """Whether it needs at least what did not fit in a trial or a probe."""
        trials = (record.failure for record in self._ledger.records() if record.failure is not None)
        return any(is_beyond(config, failure) for failure in (*trials, *self._ledger.unfit_probes))

    def _smaller(self, size: int) -> int:
        return min(self._ledger.space.batch_size, key=lambda one: abs(one - size / SMALLER))

    def _step_config(self, amp: Amp, size: int) -> TrialConfig:
        space = self._ledger.space
        return replace(
            loader_config(space, self._step_workers),
            batch_size=size,
            accumulation_steps=space.effective_batch_size // size,
            amp=amp,
        )

    def _step(self, amp: Amp, size: int) -> StepProbe | TrialFailure | None:
        """None where there was no time for it: one process reads the batch, and whole optimizer steps are made."""
        config = self._step_config(amp, size)
        known = self._known_step(amp, size)
        if known is not None:
            return known
        step_s = config.accumulation_steps * self._costs.steps[amp].seconds(size)
        if not self._has_time(size * self._costs.load.seconds + LEAST_STEPS * step_s):
            return None
        outcome = self._probed("step alone", config, partial(self._setting.runner.probe_step, seconds=self._probe_s))
        if isinstance(outcome, StepProbe):
            told = f"step alone, micro-batch {size} {amp}: {outcome.samples_per_sec:.4g} samples/s"
            self._keep(outcome, told)
        elif outcome.kind.is_memory:
            self._ledger.keep_probe(outcome)
        return outcome

    def _known_step(self, amp: Amp, size: int) -> StepProbe | None:
        """What an earlier run probed; who handed the batch over does not matter."""
        steps = (probe for probe in self._ledger.probes if isinstance(probe, StepProbe))
        return next((one for one in steps if (one.config.amp, one.config.batch_size) == (amp, size)), None)

    def _probed(
        self, name: str, config: TrialConfig, ask: Callable[[TrialConfig], P | TrialFailure]
    ) -> P | TrialFailure:
        setting = self._setting
        setting.progress.trial_began(config, f"probe, {name}", setting.spending.seconds_left())
        with setting.signals.interruptible():
            outcome = ask(config)
        if isinstance(outcome, TrialFailure):
            setting.progress.probed(f"{name}, {config.label()}: {outcome.headline()}", outcome.seconds)
        return outcome

    def _keep(self, probe: Probe, told: str) -> None:
        self._ledger.keep_probe(probe)
        self._setting.progress.probed(told, probe.seconds)


def _workers(config: TrialConfig) -> str:
    return f"{config.num_workers} worker{'' if config.num_workers == 1 else 's'}"
