"""What to measure next: every configuration in the order of what its trial is expected to gain for its time."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from pipetune.core.alternatives import Alternative, neighbours
from pipetune.core.ceilings import is_reached, loader_ceiling, step_ceiling
from pipetune.core.costs import Costs, costs_of_probes, costs_of_trial, guessed_costs
from pipetune.core.objective import Objective
from pipetune.core.record import TrialRecord
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.search.belief import Belief, FloatArray, Seen, expected_gains, trial_seconds
from pipetune.search.failures import is_beyond
from pipetune.search.ledger import Ledger
from pipetune.search.ranking import Yardstick, merged
from pipetune.search.setting import Setting

MOST_POINTS = 5000
"""Of larger spaces every second value of the counts is looked at, or every fourth, and all around the leader."""
LEAST_TRIALS = 6
"""So many configurations are measured before what is expected of the others is believed at all."""
SURE_TRIALS = 10
"""So many before it is believed that nothing better is left, however long the planned run."""
CEILING_GAIN = 0.05
"""A ceiling that is reached ends the search where no more than this is expected of anything that is left."""
CORRECTED_GAIN = math.log(1.1)
"""An older result is moved only where so much more is expected: it was measured, if elsewhere."""
LEAST_GAIN = 0.005
"""What a trial is expected to gain at least, to be worth its time."""
FAILED_LOSS = math.log(2)
"""What fails is taken to be so much slower than believed: what it has in common with others is tried last."""
FAILED_SD = 0.2
THRIFT = 0.25
"""How much the seconds of a trial count against what it may gain: 1 is gain a second, which puts off what is dear for
too many trials; 0 asks for the gain alone, in more seconds. Chosen by tests/benchmarks/search.py."""
TRIAL_OVERHEAD_S = 3.0
"""Of a trial in a warm host, beside the least time of its windows."""
CENSORED_SD = 0.2
"""A trial that was ended early tells no epoch start: its rate is known to so much only."""
LEAST_RATE = 1e-9


class Guide:
    """Orders a space by the belief that the ledger's trials lead to."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self._setting = setting
        self._ledger = ledger
        self._asked: tuple[object, dict[TrialConfig, float]] = (None, {})

    def order(self, space: SearchSpace) -> Iterator[TrialConfig]:
        """Every configuration of it: what was looked at, what is worth most first, then the others."""
        gains = self._gains(space)
        return itertools.chain(gains, (config for config in space.configs() if config not in gains))

    def enough(self, is_open: Callable[[TrialConfig], bool]) -> str | None:
        """Why no further trial is worth its time, in words; None where one is.

        What is expected is expected of a rate; of a front nobody knows what it lacks.
        """
        best_first = self._ledger.best_first()
        best = best_first[0].measurement if best_first else None
        if best is None or self._setting.config.objective is not Objective.THROUGHPUT:
            return None
        rate = best.effective(self._setting.plan).value
        gains = [gain for config, gain in self._gains(self._ledger.space).items() if is_open(config)]
        if not gains:
            return None
        return self._at_ceiling(rate, max(gains)) or self._not_worth_it(rate, max(gains))

    def _at_ceiling(self, rate: float, gain: float) -> str | None:
        """Sizes that were not probed may do better than those that were, and a probe may be wrong: belief is asked."""
        if gain > CEILING_GAIN:
            return None
        probes, cpus = self._ledger.probes, self._setting.hardware.cpus_usable
        for name, ceiling in (
            ("that the step alone reaches", step_ceiling(probes, self._ledger.space)),
            (f"that {cpus} CPUs can load", loader_ceiling(probes, cpus)),
        ):
            if ceiling is not None and is_reached(rate, ceiling):
                return f"the best makes {rate / ceiling:.0%} of the {ceiling:.4g} samples/s {name}"
        return None

    def _not_worth_it(self, rate: float, gain: float) -> str | None:
        """What the best trial that is left is expected to gain, where that is too little."""
        records, plan = merged(self._ledger.records()), self._setting.plan
        if len(records) < LEAST_TRIALS:
            return None
        planned_s = plan.epochs * plan.epoch_samples / rate
        trial_s, saved_s = median(record.seconds for record in records), gain * planned_s
        if saved_s < trial_s:
            epochs = "1 epoch that is" if plan.epochs == 1 else f"{plan.epochs} epochs that are"
            return (
                f"another trial takes about {trial_s:.0f} s and is expected to save {saved_s:.1f} s of "
                f"{planned_s / 60:.1f} min, the {epochs} planned (training.epochs)"
            )
        if len(records) >= SURE_TRIALS and gain < LEAST_GAIN:
            return f"nothing that is left is expected to gain {LEAST_GAIN:.1%} or more"
        return None

    def corrected(self, older: TrialConfig, is_open: Callable[[TrialConfig], bool]) -> TrialConfig:
        """An older result as it is believed to be best here: other workers, micro-batch or precision where that pays.

        Where it came from another machine, those are what its hardware decided.
        """
        alike = [
            config
            for config in self._ledger.space.configs()
            if is_open(config)
            and config.pin_memory == older.pin_memory
            and (older.num_workers == 0 or _keeps_batches_alike(config, older))
        ]
        records = self._ledger.records()
        ran = merged(records)
        mean, _ = self._belief([older, *alike], records, ran, self._rate)
        best = int(np.argmax(mean))
        return [older, *alike][best] if mean[best] - mean[0] > CORRECTED_GAIN else older

    def costs(self) -> Costs:
        """What the parts cost, as far as probes and the first trial tell."""
        return self._costs(merged(self._ledger.records()))

    def alternatives(self, chosen: TrialConfig, rate: float) -> tuple[Alternative, ...]:
        """One knob changed at a time: from trials where they ran, else from what is believed; without what failed.

        All are told against `rate` samples/s of the chosen one, which was measured again: as ratios to its own trial.
        """
        records = self._ledger.records()
        ran = merged(records)
        measured = {one.config: one for one in ran if one.measurement and not one.measurement.censored}
        around = [
            (knob, config)
            for knob, config in neighbours(chosen, self._ledger.space)
            if config in measured or not self._is_hopeless(config, records)
        ]
        mean, _ = self._belief([chosen, *(config for _, config in around)], records, ran, self._rate)
        ratios = np.exp(mean[1:] - mean[0])
        found = []
        for (knob, config), ratio in zip(around, ratios, strict=True):
            trial = measured.get(config) if chosen in measured else None
            seen = self._rate(trial) / self._rate(measured[chosen]) if trial else float(ratio)
            number = trial.number if trial else None
            found.append(Alternative(knob=knob, config=config, samples_per_sec=rate * seen, trial=number))
        return tuple(found)

    def _is_hopeless(self, config: TrialConfig, records: Sequence[TrialRecord]) -> bool:
        failed = [one for one in records if one.failure is not None and not self._ledger.is_old_failure(one)]
        return self._ledger.missing_memory()(config) is not None or any(
            one.config == config or (one.failure and is_beyond(config, one.failure)) for one in failed
        )

    def _gains(self, space: SearchSpace) -> dict[TrialConfig, float]:
        """Expected gains over the best so far as a share, what is worth most first; or rates where none ran."""
        records = self._ledger.records()
        asked = (len(records), space, self._ledger.baseline)
        if self._asked[0] != asked:
            self._asked = (asked, self._reckoned(space, records))
        return self._asked[1]

    def _reckoned(self, space: SearchSpace, records: Sequence[TrialRecord]) -> dict[TrialConfig, float]:
        best_first = self._ledger.best_first()
        # Those that had to clear the GPU's memory come last there, and lead only where all had to.
        sound = [one.config for one in best_first if one.measurement and not one.measurement.allocation_retries]
        leaders = sound or [one.config for one in best_first]
        configs = tuple(dict.fromkeys([*_looked_at(space, leaders[:1]), *leaders]))
        measured = merged(records)
        mean, sd = self._belief(configs, records, measured, self._score(measured))
        places = {config: index for index, config in enumerate(configs)}
        # The highest mean, not the fastest trial: a lucky one does not lead.
        best = max((float(mean[places[config]]) for config in leaders), default=None)
        gains = mean if best is None else expected_gains(mean, sd, best)
        seconds = trial_seconds(configs, mean, TRIAL_OVERHEAD_S + self._setting.limits.min_s)
        worth = mean if best is None else gains / seconds**THRIFT
        in_order = (configs[index] for index in np.argsort(-worth, kind="stable"))
        return {config: float(gains[places[config]]) for config in in_order if config in space}

    def _belief(
        self,
        configs: Sequence[TrialConfig],
        records: Sequence[TrialRecord],
        measured: Sequence[TrialRecord],
        value_of: Callable[[TrialRecord], float],
    ) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the logarithm of each value, after all trials so far.

        `measured` are those of `records` that ran, merged.
        """
        costs = self._costs(measured)
        seen = [self._seen(record, value_of(record)) for record in measured if record.config.amp in costs.steps]
        failed = self._failed(records, costs)
        if failed:
            # Slower than what is believed of them without their failure, not than what was foretold.
            mean, _ = Belief(failed, costs, self._setting.plan).about(seen)
            seen += [
                Seen(config=config, rate=math.exp(log_rate - FAILED_LOSS), sd=FAILED_SD)
                for config, log_rate in zip(failed, mean, strict=True)
            ]
        return Belief(configs, costs, self._setting.plan).about(seen)

    def _costs(self, measured: Sequence[TrialRecord]) -> Costs:
        """From the baseline where it ran, else from the first trial that did; probes know better what they saw."""
        facts, cpus = self._setting.facts, float(self._setting.hardware.cpus_usable)
        for record in sorted(measured, key=lambda record: record.config != self._ledger.baseline):
            assert record.measurement is not None
            if record.config.amp in facts.amps and record.measurement.steady().value > 0:
                known = costs_of_trial(
                    record.measurement, cpus=cpus, amps=facts.amps, has_accelerator=facts.has_accelerator
                )
                return costs_of_probes(self._ledger.probes, known)
        guessed = guessed_costs(cpus=cpus, amps=facts.amps, has_accelerator=facts.has_accelerator)
        return costs_of_probes(self._ledger.probes, guessed)

    def _seen(self, record: TrialRecord, value: float) -> Seen:
        assert record.measurement is not None
        rate = record.measurement.effective(self._setting.plan)
        sd = min(1.0, (rate.high - rate.low) / 3.92 / max(rate.value, LEAST_RATE))
        if record.measurement.censored:
            sd = max(sd, CENSORED_SD)
        return Seen(config=record.config, rate=max(value, LEAST_RATE), sd=sd)

    def _rate(self, record: TrialRecord) -> float:
        assert record.measurement is not None
        return max(record.measurement.effective(self._setting.plan).value, LEAST_RATE)

    def _score(self, measured: Sequence[TrialRecord]) -> Callable[[TrialRecord], float]:
        """What the objective says of a trial, as a rate: for `throughput` it is the rate."""
        yardstick = self._ledger.yardstick()
        offset = _offset(measured, self._ledger.baseline, yardstick)

        def score(record: TrialRecord) -> float:
            assert record.measurement is not None
            return math.exp(yardstick.of(record.measurement) + offset)

        return score

    def _failed(self, records: Sequence[TrialRecord], costs: Costs) -> list[TrialConfig]:
        """What failed in another way than by memory, which has a boundary of its own; never what an earlier run met."""
        measured = {record.config for record in records if record.measurement is not None}
        return list(
            dict.fromkeys(
                record.config
                for record in records
                if record.failure is not None
                and not record.failure.kind.is_memory
                and not self._ledger.is_old_failure(record)
                and record.config not in measured
                and record.config.amp in costs.steps
            )
        )


def _keeps_batches_alike(one: TrialConfig, other: TrialConfig) -> bool:
    return (one.prefetch_factor, one.persistent_workers) == (other.prefetch_factor, other.persistent_workers)


def _offset(measured: Sequence[TrialRecord], baseline: TrialConfig, yardstick: Yardstick) -> float:
    """What turns the objective's logarithm into that of a rate, at the baseline."""
    for record in sorted(measured, key=lambda record: record.config != baseline):
        assert record.measurement is not None
        rate = max(record.measurement.effective(yardstick.plan).value, LEAST_RATE)
        return math.log(rate) - yardstick.of(record.measurement)
    return 0.0


def _looked_at(space: SearchSpace, leaders: Sequence[TrialConfig]) -> Iterator[TrialConfig]:
    """The space, with fewer values of the counts where it is very large, and all that lies around the leaders."""
    yield from _thinned(space).configs()
    for leader in leaders:
        yield from (config for _, config in neighbours(leader, space) if config in space)


def _thinned(space: SearchSpace) -> SearchSpace:
    """Every second value of the longest count, again and again, until it is small enough or nothing is left to drop."""
    names = ("num_workers", "prefetch_factor", "batch_size")
    while len(space) > MOST_POINTS:
        longest = max(names, key=lambda name: len(getattr(space, name)))
        values = getattr(space, longest)
        if len(values) <= 2:
            break
        fewer: dict[str, Any] = {longest: tuple(dict.fromkeys([*values[:-1:2], values[-1]]))}
        space = replace(space, **fewer)
    return space
