"""Batches: moving nested ones to the device, counting their samples and bytes."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from pipetune.errors import WorkloadError


def to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Copy every tensor inside mappings, sequences, named tuples, dataclasses; leave the rest as it is.

    Anything else with a `.to` of its own (a BatchEncoding, a PackedSequence) is moved by it.
    """
    # What most batches are comes first: this runs in every step.
    if type(batch) in {tuple, list}:
        return type(batch)([to_device(value, device, non_blocking=non_blocking) for value in batch])
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return _by_its_own_to(batch, device, non_blocking=non_blocking)
    return _container_to(batch, device, non_blocking=non_blocking)


def _container_to(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        return moved if type(batch) is dict else _rebuilt_mapping(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, non_blocking=non_blocking) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, non_blocking=non_blocking) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {
            field.name: to_device(getattr(batch, field.name), device, non_blocking=non_blocking)
            for field in dataclasses.fields(batch)
            if field.init
        }
        return dataclasses.replace(batch, **moved)
    return batch


def count_samples(batch: Any) -> int:
    """Length of the first dimension of the first tensor; raises WorkloadError where there is none."""
    tensor = first_tensor(batch)
    if tensor is None or tensor.dim() == 0:
        raise WorkloadError(
            f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension; "
            "give the Workload a count_samples(batch) -> int"
        )
    return int(tensor.shape[0])


def batch_bytes(batch: Any) -> int:
    """Bytes of all tensors in a batch, nested ones included."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    return sum(map(batch_bytes, _parts(batch)))


def first_tensor(batch: Any) -> torch.Tensor | None:
    """The first tensor found, depth first, or None."""
    if isinstance(batch, torch.Tensor):
        return batch
    for part in _parts(batch):
        found = first_tensor(part)
        if found is not None:
            return found
    return None


def _parts(batch: Any) -> Collection[Any]:
    if isinstance(batch, list | tuple):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if hasattr(batch, "data") and isinstance(batch.data, Mapping | torch.Tensor):
        return [batch.data]
    return []


def _by_its_own_to(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    try:
        moved = batch.to(device, non_blocking=non_blocking)
    except TypeError:
        moved = batch.to(device)
    # Some move their own tensors and return nothing.
    return batch if moved is None else moved


def _rebuilt_mapping(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved
