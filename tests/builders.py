"""Plausible values for tests: each builder takes what the test is about and fills in the rest."""

from collections.abc import Sequence

from hypothesis import strategies as st

from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import Gpu, HardwareProfile
from pipetune.core.measurement import FailureKind, GpuUsage, Measurement, Phase, TrialFailure
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp, SearchSpace, TrialConfig, divisors
from pipetune.core.throughput import EpochStart, Estimate, TrainingPlan, Window
from pipetune.core.tuned import Measured, WorkloadTraits

PLAN = TrainingPlan(effective_batch_size=256, epochs=10, epoch_samples=50_000)


def trial_config(num_workers=4, *, batch_size=64, accumulation_steps=4, amp=Amp.FP32, **changes):
    """A valid point; what means nothing at 0 workers is left out there."""
    has_workers = num_workers > 0
    values = {
        "prefetch_factor": 2 if has_workers else None,
        "pin_memory": False,
        "persistent_workers": has_workers,
    }
    return TrialConfig(
        num_workers=num_workers,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        amp=amp,
        **values | changes,
    )


def space(**changes):
    """A space of 4 x 2 x 2 x 2 x 3 x 2 values with an effective batch of 256."""
    values = {
        "num_workers": (0, 1, 2, 4),
        "prefetch_factor": (2, 4),
        "pin_memory": (False, True),
        "persistent_workers": (False, True),
        "batch_size": (64, 128, 256),
        "amp": (Amp.FP32, Amp.BF16),
        "effective_batch_size": 256,
    }
    return SearchSpace(**values | changes)


def windows(rates: Sequence[float], *, seconds=0.5, wait_share=0.1, work_share=None, began_s=100.0):
    """One window after another, each with its own rate; samples are whole numbers."""
    made = []
    for rate in rates:
        samples = max(1, round(rate * seconds))
        took = samples / rate
        wait_s = wait_share * took
        work_s = None if work_share is None else work_share * wait_s
        made.append(Window(samples=samples, seconds=took, data_wait_s=wait_s, data_work_s=work_s, began_s=began_s))
        began_s += took
    return tuple(made)


def measurement(config=None, *, rate=1000.0, rates=None, wait_share=0.1, work_share=None, **changes):
    """A settled trial at a constant rate (or at these window rates), without a GPU."""
    config = config or trial_config()
    values = {
        "windows": windows(rates or [rate] * 10, wait_share=wait_share, work_share=work_share),
        "epoch_start": EpochStart(fresh_s=0.5, refill_s=0.1 if config.persistent_workers else None),
        "settled": True,
        "gpu": None,
        "gpu_reason": "no GPU: trials ran on the CPU",
        "peak_gpu_memory_bytes": None,
        "host_memory_bytes": 2**30,
        "compute_only_samples_per_sec": None,
        "seconds": 7.0,
        "phase_seconds": {"measure": 5.0},
    }
    return Measurement(config=config, **values | changes)


def usage(mean_percent, *, spread_percent=1.0, samples=30):
    return GpuUsage(mean_percent=mean_percent, spread_percent=spread_percent, samples=samples)


def failure(config=None, kind=FailureKind.CRASH, *, phase=Phase.MEASURE, message="killed", **changes):
    return TrialFailure(config=config or trial_config(), kind=kind, phase=phase, message=message, **changes)


def estimate(value, half=0.0):
    return Estimate(value=value, low=value - half, high=value + half)


def measured(rate=1000.0, half=0.0, *, gpu=None, gpu_half=0.5, **changes):
    """Figures with a rate of `rate` +- `half` and a utilisation of `gpu` +- `gpu_half` percent."""
    values = {
        "effective_samples_per_sec": estimate(rate, half),
        "steady_samples_per_sec": estimate(rate, half),
        "gpu_utilization_percent": None if gpu is None else estimate(gpu, gpu_half),
        "gpu_utilization_reason": "no GPU" if gpu is None else None,
        "data_wait_percent": 1.0,
        "epoch_start_s": 0.5,
        "peak_gpu_memory_bytes": None,
        "host_memory_bytes": 2**30,
    }
    return Measured(**values | changes)


def traits(**changes):
    values = {"has_batch_norm": False, "dataset_has_set_epoch": False, "weighs_micro_batches": False}
    return WorkloadTraits(**values | changes)


def hardware(cpus_usable=4, **changes):
    values = {
        "cpu_model": "A CPU",
        "cpus_usable": cpus_usable,
        "cpus_present": 64,
        "cpus_limit": f"CPU affinity ({cpus_usable} of 64)",
        "memory_bytes": 64 * 2**30,
        "shared_memory_bytes": 32 * 2**30,
        "gpus": (),
        "gpu_reason": "no driver",
        "driver": None,
        "system": "Linux",
        "python": "3.11",
    }
    return HardwareProfile(**values | changes)


GPU = Gpu(name="NVIDIA H200", uuid="GPU-1", memory_bytes=141 * 2**30)


def facts(*, gpu=False, **changes):
    """Facts of a map-style dataset of 50,000 samples, on a CPU, or on a GPU that has every precision."""
    values = {
        "dataset_samples": 50_000,
        "is_iterable": False,
        "fixed_batch": None,
        "start_method": "fork",
        "traits": traits(),
        "has_data_paths": True,
        "device": "cuda" if gpu else "cpu",
        "device_name": GPU.name if gpu else "A CPU",
        "device_uuid": GPU.uuid if gpu else None,
        "device_pci_bus_id": "00000000:01:00.0" if gpu else None,
        "amps": tuple(Amp) if gpu else (Amp.FP32,),
        "torch_version": "2.13.0",
        "cuda_version": "12.8" if gpu else None,
        "flags": {"cudnn.benchmark": "False"},
    }
    return WorkloadFacts(**values | changes)


@st.composite
def spaces(draw, max_workers=9):
    """Any space that `resolve` could give: ascending values, micro-batches that divide the effective batch."""

    def some(values):
        values = tuple(values)
        chosen = draw(st.sets(st.sampled_from(range(len(values))), min_size=1, max_size=4))
        return tuple(values[i] for i in sorted(chosen))

    effective = draw(st.sampled_from([1, 7, 12, 64, 96, 512, 1000]))
    return SearchSpace(
        num_workers=some(range(max_workers + 1)),
        prefetch_factor=some((1, 2, 3, 4, 8)),
        pin_memory=some((False, True)),
        persistent_workers=some((False, True)),
        batch_size=some(divisors(effective)),
        amp=some(Amp),
        effective_batch_size=effective,
    )


def probe_of_step(*, batch_size=64, amp=Amp.FP32, batch_s=0.1, **changes):
    """The step alone, on a CPU unless told otherwise."""
    values = {
        "copy_s": None,
        "pinned_copy_s": None,
        "peak_gpu_memory_bytes": None,
        "batch_bytes": batch_size * 1024,
        "seconds": 1.0,
    }
    config = trial_config(1, batch_size=batch_size, accumulation_steps=max(1, 256 // batch_size), amp=amp)
    return StepProbe(config=config, batch_s=batch_s, **values | changes)


def probe_of_loader(num_workers, *, batch_size=32, batch_s=0.1, pin_memory=False, **changes):
    """The loader alone; nothing but work."""
    values = {
        "first_batch_s": batch_s * max(1, num_workers),
        "receive_s": 0.0,
        "work_share": 1.0,
        "spread": None,
        "batches": 10,
        "batch_bytes": batch_size * 1024,
        "worker_memory_bytes": 2**28 if num_workers else None,
        "seconds": 1.0,
    }
    config = trial_config(
        num_workers, batch_size=batch_size, accumulation_steps=max(1, 256 // batch_size), pin_memory=pin_memory
    )
    return LoaderProbe(config=config, batch_s=batch_s, **values | changes)
