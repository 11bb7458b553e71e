"""A result for programs: the one JSON object of `tune --json` and `show --json`."""

from typing import Any

from pipetune.config.tuned_file import best_measured_block, ceiling_block, config_blocks, flat_config, measured_block
from pipetune.core.ceilings import LoaderDemand
from pipetune.core.record import StudyResult, TrialRecord, Validation
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import Measured


def result_object(result: StudyResult) -> dict[str, Any]:
    """Plain types only, under the names of the contract."""
    tuned = result.tuned
    return {
        "study_dir": str(result.folder),
        "status": tuned.status.value,
        "best": {**config_blocks(tuned.config), "measured": best_measured_block(tuned)},
        "baseline": {
            "config": flat_config(tuned.baseline_config),
            "measured": measured_block(tuned.baseline_measured),
        },
        "speedup": tuned.speedup,
        "changes_training": list(tuned.changes_training),
        "ceiling": ceiling_block(tuned.ceiling),
        "bottleneck": result.bottleneck.value,
        "trials": [trial_object(record, result.summary.plan) for record in result.records],
        "alternatives": [
            {
                "knob": one.knob,
                "config": flat_config(one.config),
                "samples_per_sec": one.samples_per_sec,
                "trial": one.trial,
            }
            for one in result.summary.alternatives
        ],
        "importances": {knob: round(share, 4) for knob, share in result.summary.importances.items()} or None,
        "notes": list(result.summary.notes),
        "loader_demand": _demand(result.summary.demand),
        "seconds": round(result.summary.seconds, 1),
        "probe_seconds": round(result.summary.probes_s, 1),
        "pays_off_s": None if result.pays_off_s is None else round(result.pays_off_s, 1),
    }


def _demand(demand: LoaderDemand | None) -> dict[str, float] | None:
    """What loading would need to keep up with the step; null where it does not limit."""
    return None if demand is None else {"cpus": round(demand.cpus, 2), "wait_share": round(demand.wait_share, 3)}


def validation_object(validation: Validation) -> dict[str, Any]:
    """The search space and the workload as found."""
    space, facts = validation.space, validation.facts
    return {
        "valid": True,
        "device": facts.device_name,
        "dataset_samples": facts.dataset_samples,
        "epoch_samples": validation.plan.epoch_samples,
        "configurations": len(space),
        "search": {
            "num_workers": list(space.num_workers),
            "prefetch_factor": list(space.prefetch_factor),
            "pin_memory": list(space.pin_memory),
            "persistent_workers": list(space.persistent_workers),
            "batch_size": list(space.batch_size),
            "amp": [amp.value for amp in space.amp],
        },
        "workers_limit": validation.workers_limit,
    }


def trial_object(record: TrialRecord, plan: TrainingPlan) -> dict[str, Any]:
    """One trial; rates are null where there is none, `failure` where there is."""
    trial: dict[str, Any] = {
        "number": record.number,
        "config": flat_config(record.config),
        "state": record.state.value,
        "steady_samples_per_sec": None,
        "effective_samples_per_sec": None,
        "gpu_utilization_percent": None,
        "failure": record.failure.headline() if record.failure else None,
        "seconds": round(record.seconds, 2),
    }
    if record.measurement is not None:
        measured = Measured.of(record.measurement, plan)
        utilization = measured.gpu_utilization_percent
        trial |= {
            "steady_samples_per_sec": measured.steady_samples_per_sec.value,
            "effective_samples_per_sec": measured.effective_samples_per_sec.value,
            "gpu_utilization_percent": utilization.value if utilization else None,
            "cache": measured.cache.value if measured.cache else None,
            "stable": measured.stable,
            "remarks": list(record.measurement.remarks()),
        }
    return trial
