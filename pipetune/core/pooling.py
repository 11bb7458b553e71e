"""Several measurements of one configuration as one, and what is reported of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, sqrt

from pipetune.core.measurement import GpuUsage, Measurement
from pipetune.core.repeats import Noise, margin
from pipetune.core.throughput import EpochStart, Estimate, TrainingPlan
from pipetune.core.tuned import Measured

LEAST_FREEDOM = 3.0
"""With fewer degrees of freedom the noise between processes says less than the processes themselves."""


def pooled_measurement(rounds: Sequence[Measurement]) -> Measurement:
    """All windows, mean epoch starts, the largest memory; whatever was noted of any."""
    first = rounds[0]
    usage = _pooled_usage([one.gpu for one in rounds if one.gpu is not None])
    refills = [one.epoch_start.refill_s for one in rounds if one.epoch_start.refill_s is not None]
    retries = [one.allocation_retries for one in rounds if one.allocation_retries is not None]
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
        drained_samples=sum(one.drained_samples for one in rounds),
        set_aside=tuple(window for one in rounds for window in one.set_aside),
        interference=_each_once(text for one in rounds for text in one.interference),
        allocation_retries=sum(retries) if retries else None,
        notes=_each_once(text for one in rounds for text in one.notes),
    )


def reported(rounds: Sequence[Measurement], plan: TrainingPlan, noise: Noise) -> Measured:
    """Figures of one configuration out of rounds in fresh processes.

    `noise` is what processes were seen to differ by, as logarithms. The interval of a rate holds every round (a run
    of tomorrow is one process, too), the 95 % of the windows, and the 95 % of the mean where the noise is known.
    """
    pooled = Measured.of(pooled_measurement(rounds), plan)
    is_known = noise.freedom >= LEAST_FREEDOM
    factor = exp(margin(noise, rounds=len(rounds), confidence=0.975) / sqrt(2)) if is_known else 1.0
    rates = [one.effective(plan).value for one in rounds]
    steady = [one.steady().value for one in rounds]
    return replace(
        pooled,
        effective_samples_per_sec=_widened(pooled.effective_samples_per_sec, rates, factor),
        steady_samples_per_sec=_widened(pooled.steady_samples_per_sec, steady, factor),
    )


def _widened(estimate: Estimate, values: Sequence[float], factor: float) -> Estimate:
    value = estimate.value
    return Estimate(
        value=value,
        low=min(estimate.low, value / factor, *values),
        high=max(estimate.high, value * factor, *values),
    )


def _each_once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _pooled_usage(usages: Sequence[GpuUsage]) -> GpuUsage | None:
    count = sum(usage.samples for usage in usages)
    if count == 0:
        return None
    mean = sum(usage.mean_percent * usage.samples for usage in usages) / count
    variance = (
        sum(usage.samples * (usage.spread_percent**2 + (usage.mean_percent - mean) ** 2) for usage in usages) / count
    )
    return GpuUsage(
        mean_percent=mean,
        spread_percent=variance**0.5,
        samples=count,
        sm_percent=_mean_of([usage.sm_percent for usage in usages]),
        tensor_percent=_mean_of([usage.tensor_percent for usage in usages]),
        memory_bandwidth_percent=_mean_of([usage.memory_bandwidth_percent for usage in usages]),
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
