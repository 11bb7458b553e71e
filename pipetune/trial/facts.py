"""What a host finds out about the user's workload before any trial."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from pipetune.core.facts import WorkloadFacts
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.tuned import WorkloadTraits
from pipetune.errors import WorkloadError
from pipetune.training.batch import count_samples
from pipetune.training.loader import start_method
from pipetune.training.workload import Workload
from pipetune.trial import device as devices
from pipetune.trial.loader import EndlessStream, build_loader


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """The first batch of a serial host, and the loader that gave it."""

    batch_samples: int
    decides_batch: bool
    dataset: Any
    sampler: Any


def first_batch(workload: Workload) -> FirstBatch:
    """Load a batch of two in this very process; raises WorkloadError where its samples cannot be counted."""
    config = TrialConfig(
        num_workers=0,
        prefetch_factor=None,
        pin_memory=False,
        persistent_workers=False,
        batch_size=2,
        accumulation_steps=1,
        amp=Amp.FP32,
    )
    loader, endless = build_loader(workload, config)
    try:
        batch = next(iter(loader))
    except StopIteration:
        raise WorkloadError("the dataset gives no batch: it is empty, or shorter than one batch") from None
    counter = workload.count_samples or count_samples
    samples = int(counter(batch))
    first = FirstBatch(
        batch_samples=samples,
        decides_batch=loader.batch_size is None and not _follows(workload, config, samples),
        dataset=endless.inner if isinstance(endless, EndlessStream) else loader.dataset,
        sampler=None if isinstance(endless, EndlessStream) else loader.sampler,
    )
    if first.batch_samples != config.batch_size and not first.decides_batch:
        raise WorkloadError(
            f"a batch of {config.batch_size} samples counts as {first.batch_samples}; "
            "give the Workload a count_samples(batch) -> int"
        )
    return first


def _follows(workload: Workload, config: TrialConfig, samples: int) -> bool:
    """Whether a make_loader with a batch sampler of its own gives larger batches where it is asked to."""
    if workload.make_loader is None:
        return False
    larger = replace(config, batch_size=config.batch_size + 1)
    loader, _ = build_loader(workload, larger)
    counter = workload.count_samples or count_samples
    batch = next(iter(loader), None)
    return batch is None or int(counter(batch)) != samples


def facts_of(workload: Workload, device: torch.device, first: FirstBatch | None) -> WorkloadFacts:
    """What the parent needs to know; without a first batch (in a forking host) the data stays untouched."""
    dataset = first.dataset if first else None
    uuid, bus_id = devices.device_ids(device)
    return WorkloadFacts(
        dataset_samples=_length(first.sampler, dataset) if first else None,
        is_iterable=isinstance(dataset, torch.utils.data.IterableDataset),
        fixed_batch=first.batch_samples if first and first.decides_batch else None,
        start_method=_start_method(workload),
        traits=WorkloadTraits(
            has_batch_norm=any(
                isinstance(m, torch.nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the base of them all
                for m in workload.model.modules()
            ),
            dataset_has_set_epoch=hasattr(dataset, "set_epoch"),
            weighs_micro_batches=workload.loss_weight is not None,
        ),
        has_data_paths=bool(workload.data_paths),
        device=str(device),
        device_name=devices.device_name(device),
        device_uuid=uuid,
        device_pci_bus_id=bus_id,
        amps=devices.supported_amps(device),
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        flags=devices.speed_flags(device),
    )


def _length(sampler: Any, dataset: Any) -> int | None:
    """Samples of an epoch: the sampler's where there is one, else the dataset's; None where neither tells."""
    for sized in (sampler, dataset):
        try:
            return len(sized)
        except (TypeError, NotImplementedError):
            continue
    return None


def _start_method(workload: Workload) -> str:
    loader = workload.loader
    return start_method(loader.multiprocessing_context if loader is not None else workload.multiprocessing_context)
