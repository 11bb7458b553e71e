import math
import random

import numpy as np
import pytest
import torch
from builders import trial_config
from torch import nn

from pipetune.core.space import Amp
from pipetune.training.workload import Workload
from pipetune.trial.session import Session

CPU = torch.device("cpu")


class Versioned(nn.Module):
    """Reads files of its version 1 by doubling what they hold, as modules do that changed a unit."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def session_of(model, optimizer=None):
    workload = Workload(
        model=model,
        optimizer=optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
        dataset=[1],
        loss=lambda m, batch: m(batch).square().mean(),
    )
    return Session(workload, CPU, seed=5)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def train(session, steps=3):
    """A trial of a few steps: the losses it saw."""
    training = session.begin(trial_config(0, batch_size=8, accumulation_steps=1))
    losses = []
    for _ in range(steps):
        batch = torch.randn(8, 4)  # from the global generator, as augmentations do
        training.learn(batch, None)
        losses.append(session.model(batch).sum().item())
    return losses


@pytest.mark.parametrize("given", ["instance", "function"])
def test_every_trial_begins_like_the_first(given):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if given == "instance" else None
    session = session_of(model, optimizer)
    first = train(session)
    assert len(set(first)) == len(first)
    assert train(session) == first
    assert train(session, steps=5)[:3] == first


def test_a_trial_begins_with_the_weights_and_statistics_that_build_gave():
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    session = session_of(model)
    train(session)
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    session.begin(trial_config(0))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert session.optimizer.state_dict()["state"] == {}


def test_a_trial_begins_with_the_learning_rate_that_build_gave():
    session = session_of(net())
    session.optimizer.param_groups[0]["lr"] = 7.0
    session.begin(trial_config(0))
    assert session.optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_that_has_stepped_keeps_what_it_knew():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    session = session_of(model, optimizer)
    for _ in range(2):
        train(session)
        session.begin(trial_config(0))
        assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_every_generator_of_random_numbers_is_set():
    session = session_of(net())
    draws = []
    for _ in range(2):
        session.begin(trial_config(0))
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert draws[0] == draws[1]


def test_layers_that_were_frozen_stay_frozen():
    """A pretrained backbone in eval() inside a model that trains."""
    model = net()
    model[1].eval()
    session = session_of(model)
    session.begin(trial_config(0))
    assert [module.training for module in model] == [True, False, True, True]
    assert model.training


def test_a_module_with_a_version_is_restored_as_its_own_version():
    model = nn.Sequential(Versioned())
    session = session_of(model)
    session.begin(trial_config(0))
    assert model[0].scale.item() == 1.0


def test_the_optimizer_keeps_the_models_own_parameters():
    session = session_of(net())
    session.begin(trial_config(0))
    held = [parameter for group in session.optimizer.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(held, session.model.parameters(), strict=True))


# --- skipped steps


class Overflowing(nn.Module):
    """Gives an infinite gradient in the steps that are named."""

    def __init__(self, overflows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls = 0
        self._overflows = overflows

    def forward(self, batch):
        self.calls += 1
        factor = math.inf if self.calls in self._overflows else 1.0
        return batch * (self.weight - 1.0) + self.weight * 0 + _scaled_gradient(self.weight, factor)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def _scaled_gradient(value, factor):
    return _ScaledGradient.apply(value, factor)


@pytest.mark.parametrize("amp", [Amp.FP16, Amp.FP32])
def test_steps_that_the_scaler_left_out_are_counted(amp):
    session = session_of(Overflowing({2, 3, 6}))
    training = session.begin(trial_config(0, batch_size=8, accumulation_steps=1, amp=amp))
    counted = []
    for _ in range(7):
        training.learn(torch.ones(8, 1), None)
        counted.append(training.skipped_steps())
    expected = [0, 1, 2, 2, 2, 3, 3] if amp is Amp.FP16 else [0] * 7
    assert counted == expected
    # AND the next trial counts its own
    assert session.begin(trial_config(0, batch_size=8, accumulation_steps=1, amp=amp)).skipped_steps() == 0
