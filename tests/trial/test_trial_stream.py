"""The stream keeps no more of the user's data alive than a loop as people write it."""

import gc
import weakref

import pytest
import torch
from builders import trial_config
from torch import nn

from pipetune.training.workload import Workload
from pipetune.trial.loader import build_loader
from pipetune.trial.loop import Loop, Sight
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.session import Session, Training
from pipetune.trial.stream import Stream

CONFIG = trial_config(0, batch_size=8, accumulation_steps=1)


class Look:
    """A loss that looks which batches are alive."""

    def __init__(self):
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.seen: list[int] = []

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.alive.append(weakref.ref(batch))
        self.seen.append(sum(ref() is not None for ref in self.alive))
        return model(batch).mean()


class Quiet:
    """A watch that sees nothing."""

    def begin(self, worker_pids):
        pass

    def look(self):
        return Sight()


@pytest.fixture
def collected_by_counting_only():
    gc.disable()
    yield
    gc.enable()


def streamed(loss):
    workload = Workload(
        model=nn.Linear(4, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=list(torch.randn(64, 4)),
        loss=loss,
    )
    session = Session(workload, torch.device("cpu"), seed=0)
    session.begin(CONFIG)
    loader, endless = build_loader(workload, CONFIG)
    return Stream(loader, Training(session, CONFIG)), endless


@pytest.mark.usefixtures("collected_by_counting_only")
def test_the_batch_before_is_gone_while_one_is_learnt_from():
    look = Look()
    stream, _ = streamed(look)
    stream.start_epoch()
    stream.train_batches(5)
    # THEN each is the only one: one more would take its memory on the device, and page faults on the host
    assert look.seen == [1] * 5
    assert stream.last_batch is look.alive[-1]()


@pytest.mark.usefixtures("collected_by_counting_only")
def test_the_loaded_batch_is_held_until_the_next_one_is_here_as_by_a_for_loop(monkeypatch):
    # GIVEN a device of its own memory
    loaded, seen = [], []

    def copied(batch):
        loaded.append(weakref.ref(batch))
        return batch.clone()

    def look(model, batch):
        seen.append([ref() is not None for ref in loaded[-2:]])
        return model(batch).mean()

    stream, _ = streamed(look)
    monkeypatch.setattr(stream.training, "on_device", copied)
    stream.start_epoch()
    stream.train_batches(3)
    # THEN freeing it is not waited for between its copy and its step
    assert seen == [[True], [False, True], [False, True]]
    stream.close()
    assert loaded[-1]() is None


@pytest.mark.usefixtures("collected_by_counting_only")
def test_a_whole_measurement_keeps_no_batch_either():
    look = Look()
    stream, endless = streamed(look)
    limits = MeasureLimits(min_s=0.05, max_s=0.1, window_s=0.01, warm_up_s=0.01)
    Loop(stream, endless, CONFIG, limits, enter=lambda _: None, watch=Quiet()).measure()
    assert set(look.seen) == {1}
