"""The stream of a trial: a feed of batches that are trained on one after another, with an account of both."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from pipetune.trial.device import synchronize
from pipetune.trial.feed import DataEndedError, Feed
from pipetune.trial.overflow import Overflows
from pipetune.trial.session import Training


class NoStepError(RuntimeError):
    """Batches go by, and the optimizer does nothing."""


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite, or gradients kept overflowing."""


class Stream(Feed):
    """Takes batches from the loader and trains on them, keeping account of the samples."""

    def __init__(
        self, loader: DataLoader[Any], training: Training, sign_of_life: Callable[[], None] = lambda: None
    ) -> None:
        """`sign_of_life` is called with each batch."""
        super().__init__(loader, sign_of_life)
        self.training = training
        self.samples = 0
        self.batches = 0
        self.last_batch: Any = None
        self.last_samples = 0
        self._loaded: Any = None
        self._overflows = Overflows()

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        synchronize(self.training.device)

    def train_on(self, batch: Any) -> bool:
        """One micro-batch; False for the end of the epoch."""
        if batch is self:
            return False
        # Held as the variable of a for loop is: freeing a large batch of workers takes the main thread a while, and is
        # to come when the next one is here and the device works on this one.
        self._loaded = batch
        training = self.training
        samples, weight = training.count(batch), training.weight(batch)
        batch = training.on_device(batch)
        # Before it is learnt from: the one before it must not hold memory meanwhile, which it does in no other loop.
        self.last_batch, self.last_samples = batch, samples
        training.learn(batch, weight)
        self.samples += samples
        self.batches += 1
        return True

    def train_batches(self, count: int) -> None:
        """`count` micro-batches; raises DataEndedError where the data ends first."""
        for _ in range(count):
            if not self.train_on(self.fetch()):
                raise DataEndedError(
                    f"the loader ended after {self.batches} batches of this trial; a dataset or sampler that "
                    "can be iterated only once cannot be measured"
                )

    def is_scale_settling(self) -> bool:
        """Whether fp16 still looks for its loss scale; waits for the device."""
        self._overflows.look(self.training.step.optimizer_steps, self.training.skipped_steps())
        return self._overflows.is_settling

    def check(self, *, at_end: bool = False) -> None:
        """Raise NonFiniteLossError or NoStepError where this does not train; for window borders, since it waits."""
        step = self.training.step
        if step.optimizer_steps == 0:
            raise NoStepError(
                f"{self.batches} batches went by without an optimizer step: train_step must call "
                "step.backward(loss) and step.update() for each micro-batch"
            )
        if not step.losses_are_finite():
            raise NonFiniteLossError(
                f"the loss became NaN or infinite within {step.optimizer_steps} optimizer steps; "
                "a faster configuration that does not train is not a result"
            )
        self._overflows.look(step.optimizer_steps, self.training.skipped_steps())
        if (problem := self._overflows.problem(at_end=at_end)) is not None:
            raise NonFiniteLossError(
                f"gradients overflowed: {problem}; a faster configuration that does not train is not a result"
            )

    def close(self) -> None:
        """Stop the workers and let their last batch go."""
        self._loaded = None
        super().close()

    def drain(self) -> None:
        """Train on what is left of the epoch."""
        while self.train_on(self.fetch()):
            pass
