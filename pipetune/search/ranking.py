"""Which trials lead: repeats of a configuration as one trial, and all of them in the order of the objective."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipetune.core.measurement import Measurement
from pipetune.core.objective import Objective, score
from pipetune.core.pooling import pooled_measurement
from pipetune.core.record import Round, Stage, TrialRecord
from pipetune.core.repeats import Noise, pooled, repeat_noise, round_noise
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """How measurements of one study are compared: the first value of its objective, as a natural logarithm."""

    objective: Objective
    plan: TrainingPlan
    baseline_rate: float

    def of(self, measurement: Measurement) -> float:
        """Differences of two are ratios, less 1 where they are small."""
        measured = Measured.of(measurement, self.plan)
        return math.log(max(score(self.objective, measured, baseline_rate=self.baseline_rate)[0], 1e-12))


def merged(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Measured trials, repeats of a configuration pooled under its first number: a lucky repeat leads nobody."""
    return [_as_one(group) for group in _repeats(records)]


def _repeats(records: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    """Measured trials by configuration; one that was ended early counts only where none ran to its end."""
    groups: dict[TrialConfig, list[TrialRecord]] = {}
    for record in records:
        if record.measurement is not None:
            groups.setdefault(record.config, []).append(record)
    whole = ([one for one in group if not (one.measurement and one.measurement.censored)] for group in groups.values())
    return [own or group for own, group in zip(whole, groups.values(), strict=True)]


def _as_one(group: Sequence[TrialRecord]) -> TrialRecord:
    if len(group) == 1:
        return group[0]
    outcome = pooled_measurement([one.measurement for one in group if one.measurement is not None])
    return replace(group[0], outcome=outcome, seconds=sum(one.seconds for one in group) / len(group))


def ranked(records: Sequence[TrialRecord], yardstick: Yardstick) -> list[TrialRecord]:
    """Measured configurations, best first; for pareto the fastest first.

    Those that had to clear the GPU's memory to go on come last: training meets longer samples than they did.
    """

    def key(record: TrialRecord) -> tuple[bool, float]:
        assert record.measurement is not None
        return not record.measurement.allocation_retries, yardstick.of(record.measurement)

    return sorted(merged(records), key=key, reverse=True)


def search_noise(records: Sequence[TrialRecord], yardstick: Yardstick) -> Noise:
    """What the trials of one configuration differed by."""
    return repeat_noise(
        [yardstick.of(one.measurement) for one in group if one.measurement is not None] for group in _repeats(records)
    )


def round_values(one: Round, yardstick: Yardstick) -> dict[TrialConfig, float]:
    """What a round says of those that it measured."""
    return {config: yardstick.of(found) for config, found in one.measured().items()}


def fresh_noise(rounds: Sequence[Round], yardstick: Yardstick) -> Noise:
    """What fresh processes of one configuration differed by, beside what moved whole rounds."""
    stages = [[round_values(one, yardstick) for one in rounds if one.stage is stage] for stage in Stage]
    return pooled(*(round_noise(stage) for stage in stages))
