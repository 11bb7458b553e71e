"""Precision: the autocast context and the gradient scaler that belong to an AMP setting."""

from contextlib import AbstractContextManager, ContextDecorator, nullcontext

import torch

from pipetune.core.space import Amp

_DTYPES = {Amp.BF16: torch.bfloat16, Amp.FP16: torch.float16}


class _AsItIs(nullcontext[None], ContextDecorator):
    """Nothing, and a decorator like autocast itself."""


def autocast(device: torch.device, amp: Amp) -> AbstractContextManager[None]:
    """Autocast to the reduced precision; for fp32 none, one that is on outside switched off. Enter it at once."""
    dtype = _DTYPES.get(amp)
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return _AsItIs()  # entering autocast that is off costs a small model half a per cent of its step
    return torch.amp.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def grad_scaler(device: torch.device, amp: Amp) -> torch.amp.GradScaler:
    """A scaler that works for fp16 and passes everything through otherwise."""
    return torch.amp.GradScaler(device.type, enabled=amp is Amp.FP16)
