"""The terms of a study, from what was asked for and what was found: pure functions of values."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import HardwareProfile
from pipetune.core.space import Bounds, MachineLimits, SearchSpace, resolve
from pipetune.core.study import CachePolicy, StudyConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.errors import InputError
from pipetune.storage.study_store import StudyKey
from pipetune.trial.protocol import MeasureLimits


def measure_limits(config: StudyConfig) -> MeasureLimits:
    """Seconds of windows a trial: a thirtieth of the time budget, but 4 to 20."""
    seconds = config.budget.seconds
    max_s = 20.0 if seconds is None else min(20.0, max(4.0, seconds / 30))
    return MeasureLimits(max_s=max_s)


def training_plan(config: StudyConfig, facts: WorkloadFacts) -> TrainingPlan:
    """Raise InputError where nobody says how long an epoch is, or where it is shorter than one step."""
    samples = config.epoch_samples or facts.dataset_samples
    if samples is None:
        raise InputError("training.epoch_samples: the dataset has no length; say how many samples an epoch has")
    if config.effective_batch_size > samples:
        raise InputError(
            f"training.effective_batch_size: {config.effective_batch_size} is more than the {samples} samples "
            "of an epoch"
        )
    return TrainingPlan(effective_batch_size=config.effective_batch_size, epochs=config.epochs, epoch_samples=samples)


def resolved_space(config: StudyConfig, facts: WorkloadFacts, hardware: HardwareProfile) -> SearchSpace:
    """What the config's search means for this workload on this machine.

    Kept workers are not tried where the dataset has a set_epoch(), unless the config asks for them.
    """
    limits = MachineLimits(
        cpus_usable=hardware.cpus_usable,
        has_accelerator=facts.has_accelerator,
        amps=facts.amps,
        epochs=config.epochs,
        largest_batch=None if facts.is_iterable else facts.dataset_samples,
        fixed_batch=facts.fixed_batch,
    )
    space = resolve(config.search, limits, effective_batch_size=config.effective_batch_size)
    if keeps_no_workers(config, facts):
        # Kept workers hold the dataset as it was, and would train on the order of the first epoch for ever.
        space = replace(space, persistent_workers=(False,))
    return space


def keeps_no_workers(config: StudyConfig, facts: WorkloadFacts) -> bool:
    """Whether kept workers are left out since they would not hear of a new epoch."""
    return facts.traits.dataset_has_set_epoch and config.search.persistent_workers == "auto" and config.epochs > 1


def check_cache(config: StudyConfig, facts: WorkloadFacts) -> None:
    """Raise InputError where a cold cache is asked for and nobody says of what."""
    if config.cache is CachePolicy.COLD and not facts.has_data_paths:
        raise InputError("cache: cold needs the files behind the dataset; give the Workload its data_paths")


def study_key(config: StudyConfig, plan: TrainingPlan, hardware: HardwareProfile, facts: WorkloadFacts) -> StudyKey:
    """Workload, declared space, training, objective and hardware; the budget is not part of it."""
    return StudyKey(
        parts={
            "workload": _full_target(config),
            "options": ", ".join(f"{k}={v!r}" for k, v in sorted(config.workload.options.items())),
            "training": f"{plan.effective_batch_size} x {plan.epochs} epochs of {plan.epoch_samples}",
            **{f"search.{f.name}": _declared(getattr(config.search, f.name)) for f in fields(config.search)},
            "objective": config.objective.value,
            "cache": config.cache.value,
            "gpu_memory_headroom": f"{config.gpu_memory_headroom:g}",
            "hardware": f"{hardware.fingerprint(facts.device_name)} ({facts.device_name}, {hardware.cpus_usable} CPUs)",
        }
    )


def _declared(domain: Any) -> str:
    """A knob's domain as a config spells it."""
    if isinstance(domain, Bounds):
        return f"{{min: {domain.low}, max: {domain.high}}}"
    if isinstance(domain, tuple):
        return f"[{', '.join(str(value).lower() for value in domain)}]"
    return str(domain)


def _full_target(config: StudyConfig) -> str:
    """The target with the whole path of its file: two folders may both have a job.py."""
    place, _, name = config.workload.target.rpartition(":")
    if not place.endswith(".py"):
        return config.workload.target
    return f"{Path(config.workload.folder, place).resolve()}:{name}"


def hardware_facts(hardware: HardwareProfile, facts: WorkloadFacts) -> dict[str, Any]:
    """What best.yaml says of the machine."""
    return {
        "fingerprint": hardware.fingerprint(facts.device_name),
        "gpu": facts.device_name if facts.has_accelerator else None,
        "cpu": hardware.cpu_model,
        "cpus_usable": hardware.cpus_usable,
        "cpus_limit": hardware.cpus_limit,
        "memory_bytes": hardware.memory_bytes,
        "shared_memory_bytes": hardware.shared_memory_bytes,
        "driver": hardware.driver,
        "system": hardware.system,
        "amps": [amp.value for amp in facts.amps],
    }
