"""The user's model and optimizer on the device, brought back to their first state before every trial."""

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from pipetune.core.space import TrialConfig
from pipetune.training.batch import count_samples, to_device
from pipetune.training.workload import Workload
from pipetune.trial.device import release_memory
from pipetune.trial.randomness import seed_everything
from pipetune.trial.stages import StageClock, TimedStep
from pipetune.trial.state import put_aside


class Session:
    """Holds one built workload for the life of a host; `begin` gives each trial the same start."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        self.workload = workload
        self.device = device
        self.model = workload.model
        self.optimizer = _optimizer_of(workload)
        self.steps_taken = 0
        self.optimizer.register_step_post_hook(self._count_step)
        self.seed = seed
        self._modes = [module.training for module in self.model.modules()]
        state = self.model.state_dict()
        self._model_state = OrderedDict(put_aside(state))
        # The versions of its modules, which decide how they read it back.
        self._model_state._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # noqa: SLF001
        self._optimizer_state = put_aside(self.optimizer.state_dict())

    def begin(self, config: TrialConfig) -> "Training":
        """Restore weights, optimizer and random state, move to the device, release what others left."""
        self.rest()
        seed_everything(self.seed)
        self.model.load_state_dict(self._model_state)
        self.model.to(self.device)
        for module, mode in zip(self.model.modules(), self._modes, strict=False):
            module.training = mode  # each its own: a frozen layer stays in eval mode
        self.optimizer.zero_grad(set_to_none=True)
        # The optimizer's own restore keeps references; a copy stays what it was.
        self.optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
        return Training(self, config)

    def _count_step(self, *_: object) -> None:
        self.steps_taken += 1

    def rest(self) -> None:
        """Leave the device to others: the model goes back to the host, caches are emptied."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.model.to("cpu")
        release_memory(self.device)


class Training:
    """One trial's training: feed it micro-batches, it does what the user's own loop would do."""

    def __init__(self, session: Session, config: TrialConfig) -> None:
        self.workload = session.workload
        self.device = session.device
        self.model = session.model
        self.optimizer = session.optimizer
        self.non_blocking = config.pin_memory
        self.clock = StageClock()
        self.step = TimedStep(
            session.optimizer,
            self.clock,
            device=session.device,
            amp=config.amp,
            accumulation_steps=config.accumulation_steps,
        )
        self._session = session
        self._taken_before = session.steps_taken
        self._scale = self.step.scaler.get_scale()
        self._scale_drops = 0

    def skipped_steps(self) -> int:
        """Optimizer steps that the scaler left out since a gradient overflowed; waits for the device.

        A fused optimizer is called even then, and only the scale tells, once between two looks.
        """
        if not self.step.scaler.is_enabled():
            return 0
        scale, before = self.step.scaler.get_scale(), self._scale
        self._scale_drops += max(0, round(math.log2(before / scale))) if scale > 0 else 1
        self._scale = scale
        missed = self.step.optimizer_steps - (self._session.steps_taken - self._taken_before)
        return max(missed, self._scale_drops)

    def on_device(self, batch: Any) -> Any:
        """Copy a batch to the device as the import helper does."""
        with self.clock.timing("copy_s"):
            return to_device(batch, self.device, non_blocking=self.non_blocking)

    def count(self, batch: Any) -> int:
        """Samples in a batch, as the loader gave it."""
        counter = self.workload.count_samples
        return int(counter(batch)) if counter is not None else count_samples(batch)

    def weight(self, batch: Any) -> float | None:
        """Weight of a micro-batch, as the loader gave it; None where all weigh the same."""
        weigher = self.workload.loss_weight
        return float(weigher(batch)) if weigher is not None else None

    def learn(self, batch: Any, weight: float | None) -> None:
        """Forward, backward and, where the accumulation is complete, the optimizer step."""
        if self.workload.train_step is not None:
            self.workload.train_step(self.model, batch, self.optimizer, self.step)
            return
        assert self.workload.loss is not None
        with self.step.autocast():
            loss = self.workload.loss(self.model, batch)
        self.step.backward(loss, weight)
        self.step.update()


def _optimizer_of(workload: Workload) -> torch.optim.Optimizer:
    given = workload.optimizer
    optimizer = given if isinstance(given, torch.optim.Optimizer) else given(workload.model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"Workload.optimizer gave a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    return optimizer


def check_module(model: object) -> nn.Module:
    """Raise TypeError unless it is an nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Workload.model is a {type(model).__name__}; it must be an nn.Module")
    return model
