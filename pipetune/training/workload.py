"""The workload contract: what a user's build function returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetune.errors import InputError

if TYPE_CHECKING:  # the parent process reads this module too, and never imports torch
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from pipetune.core.space import TrialConfig
    from pipetune.training.step import Step


@dataclass(slots=True, kw_only=True)
class Workload:
    """What is trained. Made by the user's `build(**options)`, in the process that measures it.

    dataset         map-style or iterable; with `loader` it may be left out
    model           an nn.Module; moved to the device by pipetune
    optimizer       an optimizer over the model's parameters, or a function of the model that returns one
    loss            `loss(model, batch) -> scalar tensor`; the batch is on the device already
    train_step      instead of loss: `train_step(model, batch, optimizer, step)`; `step` (training.step.Step) offers
                    `autocast()`, `backward(loss)` and `update()`
    loader          an existing DataLoader, rebuilt for each trial with every other setting kept
    make_loader     instead: `make_loader(config) -> DataLoader`, config being a TrialConfig
    collate_fn ... multiprocessing_context
                    DataLoader's own arguments, passed on as they are
    count_samples   `count_samples(batch) -> int` where the batch dimension of the first tensor is not it
    loss_weight     `loss_weight(batch) -> float` where micro-batches weigh unequally (token counts)
    data_paths      the files behind the dataset, for the page cache
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer]
    dataset: Any = None
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    train_step: Callable[[nn.Module, Any, torch.optim.Optimizer, Step], None] | None = None
    loader: DataLoader[Any] | None = None
    make_loader: Callable[[TrialConfig], DataLoader[Any]] | None = None
    shuffle: bool = True
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    drop_last: bool = True
    multiprocessing_context: Any = None
    timeout: float = 0.0
    count_samples: Callable[[Any], int] | None = None
    loss_weight: Callable[[Any], float] | None = None
    data_paths: Sequence[str | Path] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.train_step is None):
            raise InputError("a Workload needs exactly one of loss and train_step")
        sources = [self.dataset is not None, self.loader is not None, self.make_loader is not None]
        if sum(sources) == 0:
            raise InputError("a Workload needs a dataset, a loader or make_loader")
        if self.loader is not None and (self.dataset is not None or self.make_loader is not None):
            raise InputError("a Workload with a loader takes neither dataset nor make_loader: the loader has them")
        if self.sampler is not None and self.batch_sampler is not None:
            raise InputError("a Workload takes a sampler or a batch_sampler, not both")
