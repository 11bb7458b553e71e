"""The winner with where it came from: what best.yaml holds, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipetune.core.measurement import CacheState, Measurement
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import Estimate, TrainingPlan

SCHEMA_VERSION = 1


class Status(StrEnum):
    """How far a result can be trusted."""

    CERTIFIED = "certified"
    NO_GAIN = "no_gain"
    PROVISIONAL = "provisional"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one configuration; `gpu_utilization_reason` is set exactly where utilisation is None.

    The three counters after it are the chip's own, percent, None where it has none. `cache` tells where the data
    came from, None where that is not known; `stable` whether the rate settled in the time for it.
    """

    effective_samples_per_sec: Estimate
    steady_samples_per_sec: Estimate
    gpu_utilization_percent: Estimate | None
    gpu_utilization_reason: str | None
    data_wait_percent: float
    epoch_start_s: float
    peak_gpu_memory_bytes: int | None
    host_memory_bytes: int | None
    gpu_sm_percent: float | None = None
    gpu_tensor_percent: float | None = None
    gpu_memory_bandwidth_percent: float | None = None
    cache: CacheState | None = None
    stable: bool = True

    @classmethod
    def of(cls, measurement: Measurement, plan: TrainingPlan) -> "Measured":
        """Derive the figures from a trial's raw windows."""
        gpu = measurement.gpu
        return cls(
            effective_samples_per_sec=measurement.effective(plan),
            steady_samples_per_sec=measurement.steady(),
            gpu_utilization_percent=gpu.estimate() if gpu else None,
            gpu_utilization_reason=measurement.gpu_reason,
            data_wait_percent=measurement.data_wait_percent(),
            epoch_start_s=measurement.epoch_start.fresh_s,
            peak_gpu_memory_bytes=measurement.peak_gpu_memory_bytes,
            host_memory_bytes=measurement.host_memory_bytes,
            gpu_sm_percent=gpu.sm_percent if gpu else None,
            gpu_tensor_percent=gpu.tensor_percent if gpu else None,
            gpu_memory_bandwidth_percent=gpu.memory_bandwidth_percent if gpu else None,
            cache=measurement.cache,
            stable=measurement.settled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The rate that no loader setting can pass, and what sets it."""

    samples_per_sec: float
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedConfig:
    """A result: the chosen configuration, how it did, and what it was compared with."""

    status: Status
    config: TrialConfig
    changes_training: tuple[str, ...]
    measured: Measured
    baseline_config: TrialConfig
    baseline_measured: Measured
    ceiling: Ceiling | None
    hardware: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def speedup(self) -> float:
        """Effective rate over the baseline's."""
        return self.measured.effective_samples_per_sec.value / self.baseline_measured.effective_samples_per_sec.value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadTraits:
    """What the model and the dataset are, as far as a setting may change what is trained."""

    has_batch_norm: bool
    dataset_has_set_epoch: bool
    weighs_micro_batches: bool


def training_changes(baseline: TrialConfig, chosen: TrialConfig, traits: WorkloadTraits) -> tuple[str, ...]:
    """Say in words what the chosen settings change in training beside its speed; empty if nothing."""
    changes = []
    if chosen.amp is not baseline.amp:
        changes.append(
            f"the forward pass runs in {chosen.amp} instead of {baseline.amp}: losses differ in the last digits"
        )
    if chosen.batch_size != baseline.batch_size:
        if traits.has_batch_norm:
            changes.append(
                f"BatchNorm statistics come from micro-batches of {chosen.batch_size} samples "
                f"instead of {baseline.batch_size}"
            )
        if not traits.weighs_micro_batches:
            many = "micro-batch" if chosen.accumulation_steps == 1 else "micro-batches"
            changes.append(
                f"the loss is averaged over {chosen.accumulation_steps} {many} a step instead of "
                f"{baseline.accumulation_steps}, which changes it where it is no mean over samples but over "
                "tokens, say (give the workload a loss_weight then)"
            )
    if chosen.persistent_workers and not baseline.persistent_workers and traits.dataset_has_set_epoch:
        changes.append(
            "workers are kept between epochs and hold the dataset as it was when they started: "
            "set_epoch() in the main process does not reach them"
        )
    return tuple(changes)
