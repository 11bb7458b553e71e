"""The stream keeps no more of the user's data alive than a loop as people write it."""

import gc
import weakref

import torch
from builders import trial_config
from torch import nn

from pipetune.training.workload import Workload
from pipetune.trial.loader import build_loader
from pipetune.trial.session import Session, Training
from pipetune.trial.stream import Stream


def test_the_batch_before_is_gone_while_one_is_learnt_from():
    # GIVEN a loss that looks which batches are alive
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(batch))
        seen.append(sum(ref() is not None for ref in alive))
        return model(batch).mean()

    workload = Workload(
        model=nn.Linear(4, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=list(torch.randn(64, 4)),
        loss=loss,
    )
    config = trial_config(0, batch_size=8, accumulation_steps=1)
    session = Session(workload, torch.device("cpu"), seed=0)
    session.begin(config)
    loader, _ = build_loader(workload, config)
    stream = Stream(loader, Training(session, config))
    # WHEN it is trained on a few batches
    gc.disable()
    try:
        stream.start_epoch()
        stream.train_batches(5)
    finally:
        gc.enable()
    # THEN each is the only one: one more would take its memory on the device, and page faults on the host
    assert seen == [1] * 5
    assert stream.last_batch is alive[-1]()
