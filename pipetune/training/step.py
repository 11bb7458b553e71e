"""One optimizer step over several micro-batches: autocast, scaling, accumulation and update."""

from contextlib import AbstractContextManager

import torch

from pipetune.core.space import Amp
from pipetune.errors import InputError
from pipetune.training.precision import autocast, grad_scaler


class Step:
    """Accumulates micro-batches so that the update equals the one of the whole batch.

    For each micro-batch, in order: `with step.autocast(): loss = ...`, `step.backward(loss)`, `step.update()`.
    With equal weights the gradient is the mean of the micro-batches' gradients; with `weight` (a count of what
    the loss is a mean over) it is their weighted mean, which is the gradient of the mean over all of them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, device: torch.device, amp: Amp, accumulation_steps: int
    ) -> None:
        self.device = device
        self.accumulation_steps = accumulation_steps
        self.scaler = grad_scaler(device, amp)
        self.optimizer_steps = 0
        self._amp = amp
        self._optimizer = optimizer
        self._is_pending = False
        self._micro_batches = 0
        self._weight_sum = 0.0
        self._weight_unit = 0.0
        # Summed on the device: a NaN or an infinity stays in the sum, and is read at window borders only.
        self._loss_sum = torch.zeros((), device=device)

    def autocast(self) -> AbstractContextManager[None]:
        """The forward pass and the loss belong inside."""
        return autocast(self.device, self._amp)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's share of the gradient; `weight` where micro-batches count unequally."""
        self._is_pending = True
        if weight == 0:
            # Its own mean is 0/0, and it has no share in the mean over all.
            return
        if loss.numel() != 1:
            raise InputError(f"the loss has the shape {list(loss.shape)}; it must be one number: take its mean()")
        loss = loss if loss.dim() == 0 else loss.sum()
        self._loss_sum.add_(loss.detach())
        if weight is None:
            scaled = loss / self.accumulation_steps if self.accumulation_steps > 1 else loss
        else:
            # Relative to the group's first weight: a raw token count would overflow fp16.
            self._weight_unit = self._weight_unit or weight
            self._weight_sum += weight / self._weight_unit
            scaled = loss * (weight / self._weight_unit)
        self.scaler.scale(scaled).backward()

    def update(self) -> bool:
        """Step the optimizer once accumulation_steps micro-batches are in; True where it did.

        Called once a micro-batch, however many losses that has.
        """
        if not self._is_pending:
            return False
        self._is_pending = False
        self._micro_batches += 1
        if self._micro_batches < self.accumulation_steps:
            return False
        if self._weight_sum > 0:
            self._divide_gradients(self._weight_sum)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._micro_batches = 0
        self._weight_sum = 0.0
        self._weight_unit = 0.0
        self.optimizer_steps += 1
        return True

    def losses_are_finite(self) -> bool:
        """Whether every loss so far was a finite number; waits for the device."""
        return bool(torch.isfinite(self._loss_sum).item())

    def _divide_gradients(self, weight_sum: float) -> None:
        self.scaler.unscale_(self._optimizer)
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, weight_sum)
