"""What to measure next: every configuration in the order of what it is expected to gain."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from pipetune.core.costs import Costs, costs_of_trial, guessed_costs
from pipetune.core.measurement import Measurement
from pipetune.core.record import TrialRecord
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.search.belief import Belief, Seen, expected_gains, leading
from pipetune.search.ledger import Ledger
from pipetune.search.ranking import Yardstick, merged
from pipetune.search.setting import Setting

MOST_POINTS = 5000
"""Larger spaces are looked at in fewer worker counts, closer together where they are small."""
LEAST_TRIALS = 10
"""So many configurations are measured before it is believed that nothing better is left."""
LEAST_GAIN = 0.005
"""What a trial is expected to gain at least, to be worth its time."""
FAILED_LOSS = math.log(2)
"""What fails is taken to be so much slower than foretold: what it has in common with others is tried last."""
FAILED_SD = 0.2


class Guide:
    """Orders a space by the belief that the ledger's trials lead to."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self._setting = setting
        self._ledger = ledger
        self._asked: tuple[object, dict[TrialConfig, float]] = (None, {})

    def order(self, space: SearchSpace) -> Iterator[TrialConfig]:
        """Every configuration of it, the one with the greatest expected gain first."""
        gains = self._gains(space)
        return itertools.chain(gains, (config for config in space.configs() if config not in gains))

    def has_hope(self, space: SearchSpace, is_open: Callable[[TrialConfig], bool]) -> bool:
        """Whether something open is still expected to gain what is worth a trial; true where nothing is open."""
        if len(merged(self._ledger.records())) < LEAST_TRIALS:
            return True
        most = next((gain for config, gain in self._gains(space).items() if is_open(config)), math.inf)
        return most >= LEAST_GAIN

    def _gains(self, space: SearchSpace) -> dict[TrialConfig, float]:
        """Expected gains over the best so far as a share, the greatest first; anything where nothing ran yet."""
        records = self._ledger.records()
        asked = (len(records), space)
        if self._asked[0] != asked:
            self._asked = (asked, self._reckoned(space, records))
        return self._asked[1]

    def _reckoned(self, space: SearchSpace, records: Sequence[TrialRecord]) -> dict[TrialConfig, float]:
        measured = merged(records)
        configs = _looked_at(space, [record.config for record in measured])
        costs = self._costs(measured)
        belief = Belief(configs, costs, self._setting.plan)
        mean, sd = belief.about([*self._seen(measured), *self._failed(records, costs)])
        best = leading(mean, configs, {record.config for record in measured})
        gains = expected_gains(mean, sd, best) if measured else mean
        return {configs[index]: float(gains[index]) for index in np.argsort(-gains, kind="stable")}

    def _costs(self, measured: Sequence[TrialRecord]) -> Costs:
        """From the baseline where it ran, else from the first trial that did."""
        facts, hardware = self._setting.facts, self._setting.hardware
        of_baseline = [record for record in measured if record.config == self._ledger.baseline]
        first = (of_baseline or measured)[:1]
        cpus = float(hardware.cpus_usable)
        if not first:
            return guessed_costs(cpus=cpus, amps=facts.amps, has_accelerator=facts.has_accelerator)
        assert isinstance(first[0].measurement, Measurement)
        return costs_of_trial(first[0].measurement, cpus=cpus, amps=facts.amps, has_accelerator=facts.has_accelerator)

    def _seen(self, measured: Sequence[TrialRecord]) -> list[Seen]:
        """What the objective says of each trial, as a rate: for `throughput` it is the rate."""
        yardstick = self._ledger.yardstick()
        offset = _offset(measured, self._ledger.baseline, yardstick)
        found = []
        for record in measured:
            assert record.measurement is not None
            rate = record.measurement.effective(self._setting.plan)
            sd = min(1.0, (rate.high - rate.low) / 3.92 / rate.value)
            found.append(Seen(config=record.config, rate=math.exp(yardstick.of(record.measurement) + offset), sd=sd))
        return found

    def _failed(self, records: Sequence[TrialRecord], costs: Costs) -> list[Seen]:
        """Failures other than of memory, which have a boundary of their own."""
        configs = {
            record.config for record in records if record.failure is not None and not record.failure.kind.is_memory
        } - {record.config for record in records if record.measurement is not None}
        failed = [config for config in configs if config.amp in costs.steps]
        if not failed:
            return []
        foretold = Belief(failed, costs, self._setting.plan).predicted()
        return [
            Seen(config=config, rate=math.exp(log_rate - FAILED_LOSS), sd=FAILED_SD)
            for config, log_rate in zip(failed, foretold, strict=True)
        ]


def _offset(measured: Sequence[TrialRecord], baseline: TrialConfig, yardstick: Yardstick) -> float:
    """What turns the objective's logarithm into that of a rate, at the baseline."""
    for record in sorted(measured, key=lambda record: record.config != baseline):
        assert record.measurement is not None
        return math.log(record.measurement.effective(yardstick.plan).value) - yardstick.of(record.measurement)
    return 0.0


def _looked_at(space: SearchSpace, tried: Sequence[TrialConfig]) -> tuple[TrialConfig, ...]:
    """What was tried, and the space, with fewer worker counts where it is very large."""
    thinned = space
    ratio = 1.05
    while len(thinned) > MOST_POINTS and len(thinned.num_workers) > 2:
        thinned = replace(space, num_workers=_spread(space.num_workers, ratio))
        ratio *= 1.1
    return tuple(dict.fromkeys([*thinned.configs(), *(config for config in tried if config in space)]))


def _spread(counts: Sequence[int], ratio: float) -> tuple[int, ...]:
    """Some of them, each at least `ratio` times the one before, the largest included."""
    kept = [counts[0]]
    for count in counts[1:-1]:
        if count >= kept[-1] * ratio:
            kept.append(count)
    return (*kept, counts[-1])
