"""How trials are ranked: the score of one, and the choice among those that noise cannot tell apart."""

from collections.abc import Sequence
from enum import StrEnum

from pipetune.core.space import Amp, TrialConfig
from pipetune.core.tuned import Measured
from pipetune.errors import InputError

TIE_FLOOR = 0.02
"""Differences under this share are noise whatever the interval says."""


class Objective(StrEnum):
    """What the study maximises."""

    THROUGHPUT = "throughput"
    WEIGHTED = "weighted"
    PARETO = "pareto"

    @property
    def needs_utilization(self) -> bool:
        """Whether trials without GPU utilisation cannot be scored."""
        return self is not Objective.THROUGHPUT

    @property
    def directions(self) -> int:
        """How many values a trial has, each to be maximised."""
        return 2 if self is Objective.PARETO else 1


def score(objective: Objective, measured: Measured, *, baseline_rate: float) -> tuple[float, ...]:
    """Value or values of a trial, all to be maximised.

    throughput: (samples/s,). weighted: (0.8 * rate / baseline rate + 0.2 * utilisation / 100,).
    pareto: (samples/s, utilisation percent). Raises InputError where utilisation is needed and unknown.
    """
    rate = measured.effective_samples_per_sec.value
    if objective is Objective.THROUGHPUT:
        return (rate,)
    if measured.gpu_utilization_percent is None:
        raise InputError(
            f"objective: {objective} needs GPU utilisation, which is not available: "
            f"{measured.gpu_utilization_reason}; use `objective: throughput`"
        )
    utilization = measured.gpu_utilization_percent.value
    if objective is Objective.WEIGHTED:
        return (0.8 * rate / baseline_rate + 0.2 * utilization / 100,)
    return (rate, utilization)


def preferred(tied: Sequence[tuple[TrialConfig, Measured]]) -> int:
    """Index of the best among configurations that speed cannot tell apart; the leader comes first.

    Higher utilisation (by more than its own noise), then fp32 before reduced precision, fewer workers, less
    memory.
    """
    top = _busiest(tied)
    return min(top, key=lambda i: (tied[i][0].amp is not Amp.FP32, tied[i][0].num_workers, _memory(tied[i][1])))


def _busiest(tied: Sequence[tuple[TrialConfig, Measured]]) -> list[int]:
    known = [m.gpu_utilization_percent for _, m in tied]
    if any(u is None for u in known):
        return list(range(len(tied)))
    best = max((u for u in known if u is not None), key=lambda u: u.value)
    return [i for i, u in enumerate(known) if u is not None and u.high >= best.low]


def _memory(measured: Measured) -> int:
    return (measured.peak_gpu_memory_bytes or 0) + (measured.host_memory_bytes or 0)
