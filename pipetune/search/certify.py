"""Naming a winner: the best few and the baseline measured again, and the rule that chooses among them."""

from collections.abc import Sequence
from dataclasses import replace

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
    """The leader and those that noise cannot tell from it, then the baseline; at least two where there are two."""
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
    """Index of the winning arm: the baseline (the last one) unless another is better beyond the noise."""
    arms = certification.arms
    baseline = len(arms) - 1
    if baseline == 0:
        return 0
    if objective is Objective.WEIGHTED:
        return _choose_weighted(certification, plan)
    first = [Measured.of(_pooled(arm.rounds[:CHOOSING_ROUNDS]), plan) for arm in arms]
    order = sorted(range(baseline), key=lambda i: first[i].effective_samples_per_sec.value, reverse=True)
    tied = [i for i in order if is_tied(first[order[0]], first[i])]
    winner = tied[preferred([(arms[i].config, first[i]) for i in tied])]
    return winner if gains(reported(arms[winner], plan), reported(arms[baseline], plan)) else baseline


def _choose_weighted(certification: Certification, plan: TrainingPlan) -> int:
    measured = [reported(arm, plan) for arm in certification.arms]
    rate = measured[-1].effective_samples_per_sec.value
    scores = [score(Objective.WEIGHTED, one, baseline_rate=rate)[0] for one in measured]
    winner = max(range(len(scores)), key=scores.__getitem__)
    return winner if scores[winner] > scores[-1] * (1 + TIE_FLOOR) else len(scores) - 1


def _spanning(estimate: Estimate, values: Sequence[float]) -> Estimate:
    """An interval is never narrower than what fresh processes differed by."""
    return Estimate(value=estimate.value, low=min(estimate.low, *values), high=max(estimate.high, *values))


def _pooled(rounds: Sequence[Measurement]) -> Measurement:
    """Several measurements of one configuration as one: all windows, mean epoch starts."""
    first = rounds[0]
    refills = [one.epoch_start.refill_s for one in rounds if one.epoch_start.refill_s is not None]
    return replace(
        first,
        windows=tuple(window for one in rounds for window in one.windows),
        epoch_start=EpochStart(
            fresh_s=sum(one.epoch_start.fresh_s for one in rounds) / len(rounds),
            refill_s=sum(refills) / len(refills) if refills else None,
        ),
        settled=all(one.settled for one in rounds),
        gpu=_pooled_usage([one.gpu for one in rounds if one.gpu is not None]),
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
