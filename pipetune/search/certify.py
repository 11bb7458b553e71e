"""Naming a winner: the best few and the baseline measured again, and the rule that chooses among them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pipetune.core.measurement import GpuUsage, Measurement
from pipetune.core.objective import TIE_FLOOR, Objective, gains, is_tied, preferred, score
from pipetune.core.record import Arm, Certification, TrialRecord
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import EpochStart, Estimate, TrainingPlan
from pipetune.core.tuned import Measured

MAX_FINALISTS = 3
"""Configurations beside the baseline that are measured again."""
CHOOSING_ROUNDS = 1
"""Rounds that choose the winner; its figures come from the others, which did not."""
ROUNDS = 3


def ranked(
    records: Sequence[TrialRecord], plan: TrainingPlan, objective: Objective, baseline_rate: float
) -> list[TrialRecord]:
    """Measured trials, best first; for pareto the fastest first."""

    def key(record: TrialRecord) -> float:
        assert record.measurement is not None
        return score(objective, Measured.of(record.measurement, plan), baseline_rate=baseline_rate)[0]

    return sorted((r for r in records if r.measurement is not None), key=key, reverse=True)


def finalists(best_first: Sequence[TrialRecord], baseline: TrialConfig, plan: TrainingPlan) -> list[TrialConfig]:
    """The leader and those that noise cannot tell from it, then the baseline."""
    others = [record for record in best_first if record.config != baseline]
    if not others:
        return [baseline]
    leader = others[0]
    assert leader.measurement is not None
    lead = Measured.of(leader.measurement, plan)
    chosen = [leader.config]
    for record in others[1:]:
        if len(chosen) == MAX_FINALISTS:
            break
        assert record.measurement is not None
        if is_tied(lead, Measured.of(record.measurement, plan)):
            chosen.append(record.config)
    return [*chosen, baseline]


def reported(arm: Arm, plan: TrainingPlan) -> Measured:
    """Figures from the rounds that did not choose the winner; their spread widens the interval."""
    rounds = arm.rounds[CHOOSING_ROUNDS:] or arm.rounds
    pooled = Measured.of(_pooled(rounds), plan)
    rates = [Measured.of(one, plan).effective_samples_per_sec.value for one in rounds]
    steady = [one.steady().value for one in rounds]
    return replace(
        pooled,
        effective_samples_per_sec=_spanning(pooled.effective_samples_per_sec, rates),
        steady_samples_per_sec=_spanning(pooled.steady_samples_per_sec, steady),
    )


def choose(certification: Certification, plan: TrainingPlan, objective: Objective) -> int:
    """Index of the winning arm: the baseline (the last one) unless another is better beyond the noise.

    The first rounds order the arms and tell which are tied; of the tied the preferred one that gains wins.
    """
    arms, baseline = certification.arms, len(certification.arms) - 1
    first = [Measured.of(_pooled(arm.rounds[:CHOOSING_ROUNDS]), plan) for arm in arms]
    later = [reported(arm, plan) for arm in arms]
    scores = _scores(first, objective)
    order = sorted(range(baseline), key=scores.__getitem__, reverse=True)
    tied = [i for i in order if _is_level(i, order[0], first, scores, objective)]
    while tied:
        winner = tied[preferred([(arms[i].config, first[i]) for i in tied])]
        if _gains(winner, later, objective):
            return winner
        tied.remove(winner)
    return baseline


def _scores(measured: Sequence[Measured], objective: Objective) -> list[float]:
    rate = measured[-1].effective_samples_per_sec.value
    return [score(objective, one, baseline_rate=rate)[0] for one in measured]


def _is_level(
    one: int, leader: int, measured: Sequence[Measured], scores: Sequence[float], objective: Objective
) -> bool:
    if objective is Objective.WEIGHTED:
        return scores[one] >= scores[leader] * (1 - TIE_FLOOR)
    return is_tied(measured[leader], measured[one])


def _gains(winner: int, measured: Sequence[Measured], objective: Objective) -> bool:
    if objective is not Objective.WEIGHTED:
        return gains(measured[winner], measured[-1])
    scores = _scores(measured, objective)
    worst, best = _weighted_at(measured[winner], measured[-1], "low"), _weighted_at(measured[-1], measured[-1], "high")
    return scores[winner] * (1 - TIE_FLOOR) > scores[-1] and worst > best


def _weighted_at(one: Measured, baseline: Measured, end: Literal["low", "high"]) -> float:
    """The weighted score at one end of the intervals; utilisation is known where it is asked for."""
    assert one.gpu_utilization_percent is not None
    rate: float = getattr(one.effective_samples_per_sec, end)
    utilization: float = getattr(one.gpu_utilization_percent, end)
    return 0.8 * rate / baseline.effective_samples_per_sec.value + 0.2 * utilization / 100


def _spanning(estimate: Estimate, values: Sequence[float]) -> Estimate:
    """An interval is never narrower than what fresh processes differed by."""
    return Estimate(value=estimate.value, low=min(estimate.low, *values), high=max(estimate.high, *values))


def _pooled(rounds: Sequence[Measurement]) -> Measurement:
    """Several measurements of one configuration as one: all windows, mean epoch starts."""
    first = rounds[0]
    usage = _pooled_usage([one.gpu for one in rounds if one.gpu is not None])
    refills = [one.epoch_start.refill_s for one in rounds if one.epoch_start.refill_s is not None]
    return replace(
        first,
        windows=tuple(window for one in rounds for window in one.windows),
        epoch_start=EpochStart(
            fresh_s=sum(one.epoch_start.fresh_s for one in rounds) / len(rounds),
            refill_s=sum(refills) / len(refills) if refills else None,
        ),
        settled=all(one.settled for one in rounds),
        gpu=usage,
        gpu_reason=None if usage else first.gpu_reason,
        peak_gpu_memory_bytes=max((one.peak_gpu_memory_bytes or 0 for one in rounds), default=0) or None,
        host_memory_bytes=max((one.host_memory_bytes or 0 for one in rounds), default=0) or None,
    )


def _pooled_usage(usages: Sequence[GpuUsage]) -> GpuUsage | None:
    count = sum(usage.samples for usage in usages)
    if count == 0:
        return None
    mean = sum(usage.mean_percent * usage.samples for usage in usages) / count
    variance = (
        sum(usage.samples * (usage.spread_percent**2 + (usage.mean_percent - mean) ** 2) for usage in usages) / count
    )
    return GpuUsage(mean_percent=mean, spread_percent=variance**0.5, samples=count)
