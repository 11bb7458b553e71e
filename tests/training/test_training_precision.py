import warnings

import pytest
import torch
from torch import nn

from pipetune.core.space import Amp
from pipetune.training.precision import autocast, grad_scaler
from pipetune.training.step import Step

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("amp", "dtype"), [(Amp.FP32, torch.float32), (Amp.BF16, torch.bfloat16), (Amp.FP16, torch.float16)]
)
def test_activations_have_the_precision_that_was_asked_for(amp, dtype):
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    with autocast(CPU, amp):
        assert model(batch).dtype is dtype
    assert model(batch).dtype is torch.float32
    assert model.weight.dtype is torch.float32


def test_fp32_is_what_the_model_gives_without_autocast():
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    plain = model(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autocast(CPU, Amp.FP32):
            assert not torch.is_autocast_enabled("cpu")
            assert torch.equal(model(batch), plain)


@pytest.mark.parametrize("amp", list(Amp))
def test_only_fp16_scales_its_loss(amp):
    scaler = grad_scaler(CPU, amp)
    scaled = scaler.scale(torch.ones(()))
    assert scaler.is_enabled() is (amp is Amp.FP16)
    assert (scaled.item() > 1) is (amp is Amp.FP16)


def test_an_overflow_in_fp16_leaves_the_weights_alone():
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    step = Step(torch.optim.SGD(model.parameters(), lr=1.0), device=CPU, amp=Amp.FP16, accumulation_steps=1)
    scale = step.scaler.get_scale()
    with step.autocast():
        loss = model(torch.full((2, 4), 60_000.0)).mean()
    step.backward(loss)
    step.update()
    assert torch.equal(model.weight, before)
    assert step.scaler.get_scale() < scale


@pytest.mark.parametrize("amp", list(Amp))
def test_it_is_a_decorator_in_every_precision(amp):
    @autocast(torch.device("cpu"), amp)
    def forward():
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    assert forward() is {Amp.FP32: torch.float32, Amp.BF16: torch.bfloat16, Amp.FP16: torch.float16}[amp]
