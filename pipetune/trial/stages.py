"""Where the main thread's time goes between two batches: copying, forward, backward, optimizer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipetune.core.space import Amp
from pipetune.core.throughput import Stages
from pipetune.training.step import Step


class StageClock:
    """Adds up the seconds of each stage, as the main thread sees them: what a GPU does meanwhile is not waited for.

    One stage inside another stops the outer one.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("copy_s", "forward_s", "backward_s", "optimizer_s"), 0.0)
        self._open: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Everything inside is of this stage."""
        self._turn()
        self._open.append(stage)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def read(self) -> Stages:
        """All seconds so far, of stages that are over."""
        return Stages(**self._seconds)

    def _turn(self) -> None:
        """Give the time until now to the stage that it was spent in."""
        now = time.monotonic()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since_s
        self._since_s = now


class TimedStep(Step):
    """A step that tells a clock what it spends; also inside a train_step of the user's own.

    The forward pass is what runs inside `autocast()`, the loss included.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clock: StageClock,
        *,
        device: torch.device,
        amp: Amp,
        accumulation_steps: int,
    ) -> None:
        super().__init__(optimizer, device=device, amp=amp, accumulation_steps=accumulation_steps)
        self._clock = clock

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """As a step's."""
        with self._clock.timing("forward_s"), super().autocast():
            yield

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """As a step's."""
        with self._clock.timing("backward_s"):
            super().backward(loss, weight)

    def update(self) -> bool:
        """As a step's."""
        with self._clock.timing("optimizer_s"):
            return super().update()
