from itertools import pairwise

import pytest
import torch
from torch import nn

from pipetune.core.space import Amp
from pipetune.training.step import Step

CPU = torch.device("cpu")
TOKENS = torch.tensor([5, 5, 1, 1, 4, 2, 3, 1])  # valid tokens of each row: unequal, so means of means are wrong


def step_of(model, *, accumulation_steps=1, amp=Amp.FP32, learning_rate=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return Step(optimizer, device=CPU, amp=amp, accumulation_steps=accumulation_steps)


def linear(inputs=5, outputs=5):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def inputs(rows=8):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))


def square(model, batch):
    return model(batch).float().square().mean()


def token_mean(model, batch, counts):
    mask = (torch.arange(5) < counts[:, None]).float()
    return (model(batch).float().square() * mask).sum() / mask.sum()


def gradient(model, loss):
    """The gradient of the weights as autograd gives it, without any Step."""
    return torch.autograd.grad(loss, model.weight)[0]


def weights_after(model, step, losses, weights):
    """How far one optimizer step at rate 1 moves the weights: the gradient that the step used."""
    before = model.weight.detach().clone()
    for loss, weight in zip(losses, weights, strict=True):
        with step.autocast():
            value = loss()
        step.backward(value, weight)
        step.update()
    assert step.optimizer_steps == 1
    return before - model.weight.detach()


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4, 8])
def test_accumulated_gradients_are_those_of_the_full_batch(accumulation_steps):
    model, batch = linear(), inputs()
    step = step_of(model, accumulation_steps=accumulation_steps)
    wanted = gradient(model, square(model, batch))
    parts = batch.split(8 // accumulation_steps)
    used = weights_after(model, step, [lambda p=p: square(model, p) for p in parts], [None] * len(parts))
    torch.testing.assert_close(used, wanted, rtol=0, atol=1e-6)


def test_weighted_micro_batches_give_the_mean_over_all_tokens():
    model, batch = linear(), inputs()
    step = step_of(model, accumulation_steps=4)
    wanted = gradient(model, token_mean(model, batch, TOKENS))
    parts = list(zip(batch.split(2), TOKENS.split(2), strict=True))
    naive = torch.stack([gradient(model, token_mean(model, *part)) for part in parts]).mean(dim=0)
    assert not torch.allclose(naive, wanted, atol=1e-3)
    losses = [lambda p=p: token_mean(model, *p) for p in parts]
    used = weights_after(model, step, losses, [float(counts.sum()) for _, counts in parts])
    torch.testing.assert_close(used, wanted, rtol=0, atol=1e-5)


def test_a_micro_batch_without_tokens_adds_nothing():
    """Its own mean is 0/0, but in the whole batch it is a part like any other."""
    model, batch = linear(), inputs(4)
    counts = torch.tensor([0, 0, 3, 2])
    wanted = gradient(model, token_mean(model, batch, counts))
    step = step_of(model, accumulation_steps=2)
    parts = zip(batch.split(2), counts.split(2), strict=True)
    used = weights_after(model, step, [lambda p=p: token_mean(model, *p) for p in parts], [0.0, 5.0])
    torch.testing.assert_close(used, wanted, rtol=0, atol=1e-5)
    assert step.losses_are_finite()


@pytest.mark.parametrize("weight", [3.0, 100_000.0], ids=["few", "many"])
def test_weights_survive_fp16(weight):
    model, batch = linear(), inputs() / 10  # small enough for the scaler's first, large scale
    step = step_of(model, accumulation_steps=2, amp=Amp.FP16)
    wanted = gradient(model, square(model, batch))
    halves = batch.split(4)
    used = weights_after(model, step, [lambda p=p: square(model, p) for p in halves], [weight, weight])
    torch.testing.assert_close(used, wanted, rtol=0, atol=0.01 * wanted.abs().max().item())


def test_groups_do_not_leak_into_each_other():
    model, batch = linear(), inputs()
    step = step_of(model, accumulation_steps=2)
    for weight in (1.0, 1000.0):
        step.backward(square(model, batch[:4]), weight)
        step.update()
    wanted = gradient(model, square(model, batch))
    before = model.weight.detach().clone()
    for half in batch.split(4):
        step.backward(square(model, half), 2.0)
        step.update()
    torch.testing.assert_close(before - model.weight.detach(), wanted, rtol=0, atol=1e-6)


def test_sparse_gradients_can_be_weighted():
    model = nn.Embedding(10, 5, sparse=True)
    rows = torch.tensor([1, 2, 3, 4])
    wanted = torch.zeros(10, 5).index_add_(0, rows, torch.full((4, 5), 1 / 20))
    step = step_of(model, accumulation_steps=2)
    used = weights_after(model, step, [lambda p=p: model(p).mean() for p in rows.split(2)], [2.0, 2.0])
    torch.testing.assert_close(used, wanted, rtol=0, atol=1e-6)


def test_the_optimizer_steps_once_a_group():
    model, batch = linear(), inputs()
    step = step_of(model, accumulation_steps=3)
    updates, weights = [], [model.weight.detach().clone()]
    for _ in range(7):
        step.backward(square(model, batch))
        updates.append(step.update())
        weights.append(model.weight.detach().clone())
    assert updates == [False, False, True, False, False, True, False]
    assert step.optimizer_steps == 2
    changed = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert changed == updates


def test_two_losses_of_one_micro_batch_are_one_micro_batch():
    # GIVEN two micro-batches a step and two losses each, as a generator and a discriminator have
    step = step_of(linear(), accumulation_steps=2)
    parameters = step._optimizer.param_groups[0]["params"]
    updates = []
    for _ in range(4):
        for _ in range(2):
            step.backward((parameters[0] ** 2).sum())
        updates.append(step.update())
    assert updates == [False, True, False, True]


def test_gradients_are_gone_after_the_step():
    model = linear()
    step = step_of(model)
    step.backward(square(model, inputs()))
    assert step.update()
    assert model.weight.grad is None


def test_an_update_without_a_gradient_does_nothing():
    model = linear()
    step = step_of(model)
    assert not step.update()
    assert step.optimizer_steps == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_loss_among_good_ones_is_noticed(bad):
    model = linear()
    step = step_of(model, learning_rate=0.0)
    step.backward(square(model, inputs()))
    assert step.losses_are_finite()
    step.backward(square(model, inputs()) * bad)
    step.backward(square(model, inputs()))
    assert not step.losses_are_finite()


def test_an_infinity_of_each_sign_is_noticed():
    model = linear()
    step = step_of(model, learning_rate=0.0)
    for sign in (1, -1):
        step.backward(square(model, inputs()) * (sign * float("inf")))
    assert not step.losses_are_finite()


def test_a_loss_of_one_element_counts_as_a_scalar():
    """Torch takes `loss.backward()` for it, so a user's loop may give it."""
    model = linear()
    step = step_of(model)
    step.backward(square(model, inputs()).reshape(1))
    assert step.update()
