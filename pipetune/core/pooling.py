"""Several measurements of one configuration as one, and what is reported of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, isfinite, sqrt
from statistics import fmean, geometric_mean

from pipetune.core.measurement import GpuUsage, Measurement
from pipetune.core.repeats import Noise, margin
from pipetune.core.throughput import EpochStart, Estimate, TrainingPlan
from pipetune.core.tuned import Measured


def pooled_measurement(rounds: Sequence[Measurement]) -> Measurement:
    """All windows, mean epoch starts, the largest memory; whatever was noted of any."""
    first = rounds[0]
    usage = _pooled_usage([one.gpu for one in rounds if one.gpu is not None])
    retries = [one.allocation_retries for one in rounds if one.allocation_retries is not None]
    merged = replace(
        first,
        windows=tuple(window for one in rounds for window in one.windows),
        drained_samples=sum(one.drained_samples for one in rounds),
    )
    return replace(
        merged,
        epoch_start=_pooled_start(rounds, merged.steady().value),
        settled=all(one.settled for one in rounds),
        censored=any(one.censored for one in rounds),
        gpu=usage,
        gpu_reason=None if usage else first.gpu_reason,
        peak_gpu_memory_bytes=max((one.peak_gpu_memory_bytes or 0 for one in rounds), default=0) or None,
        host_memory_bytes=max((one.host_memory_bytes or 0 for one in rounds), default=0) or None,
        set_aside=tuple(window for one in rounds for window in one.set_aside),
        interference=_each_once(text for one in rounds for text in one.interference),
        allocation_retries=sum(retries) if retries else None,
    )


def _pooled_start(rounds: Sequence[Measurement], rate: float) -> EpochStart:
    """Means; where all timed whole epochs, so that with the pooled `rate` those take the mean of what they took."""
    starts = [one.epoch_start for one in rounds]
    refills = [start.refill_s for start in starts if start.refill_s is not None]
    whole = {start.whole_samples for start in starts}
    samples = whole.pop() if len(whole) == 1 else None
    shift_s = 0.0 if samples is None else fmean(samples / one.steady().value for one in rounds) - samples / rate
    return EpochStart(
        fresh_s=fmean(start.fresh_s for start in starts) + shift_s,
        refill_s=fmean(refills) + shift_s if refills else None,
        spread_s=max(start.spread_s for start in starts),
        whole_samples=samples,
    )


def reported(rounds: Sequence[Measurement], plan: TrainingPlan, noise: Noise) -> Measured:
    """Figures of one configuration out of rounds in fresh processes.

    `noise` is what processes are known to differ by, as logarithms. A rate is the geometric mean of the rounds, since
    ratios are what is judged. Its interval holds every round (a run of tomorrow is one process, too), and the 95 % of
    the mean, for the processes and for the windows.
    """
    pooled = Measured.of(pooled_measurement(rounds), plan)
    factor = exp(margin(noise, rounds=len(rounds), confidence=0.975) / sqrt(2))
    return replace(
        pooled,
        effective_samples_per_sec=_of_rounds([one.effective(plan) for one in rounds], factor),
        steady_samples_per_sec=_of_rounds([one.steady() for one in rounds], factor),
    )


def _of_rounds(rounds: Sequence[Estimate], factor: float) -> Estimate:
    values = [one.value for one in rounds]
    value = geometric_mean(values)
    windows = sqrt(sum(_half_width(one) ** 2 for one in rounds)) / len(rounds)
    return Estimate(
        value=value,
        low=min(value / factor, value * max(0.0, 1 - windows), *values),
        high=max(value * factor, value * (1 + windows), *values),
    )


def _half_width(estimate: Estimate) -> float:
    """Of the interval, as a share of the value; where there is none it says nothing."""
    half = estimate.high - estimate.value
    return half / estimate.value if isfinite(half) else 0.0


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
