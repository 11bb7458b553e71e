"""The answer in training code: a best.yaml as loader arguments, autocast, scaler and optimizer step."""

from __future__ import annotations

import platform
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipetune.core.space import Amp
from pipetune.core.tuned import TunedConfig
from pipetune.errors import InputError
from pipetune.hardware.host import cpu_amps, usable_cpus
from pipetune.training.loader import loader_kwargs, start_method

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.utils.data import DataLoader

    from pipetune.training.step import Step

_OURS = frozenset({"batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers"})


@dataclass(frozen=True, slots=True)
class Tuned:
    """The settings of a best.yaml, applied exactly as pipetune's own trials apply them."""

    result: TunedConfig

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.result.config.accumulation_steps

    @property
    def batch_size(self) -> int:
        """Samples of one micro-batch of one process."""
        return self.result.config.batch_size

    @property
    def amp(self) -> str:
        """fp32, bf16 or fp16."""
        return self.result.config.amp.value

    @property
    def device(self) -> torch.device:
        """The current GPU where the file was tuned on one and there is one, else the CPU."""
        import torch

        return torch.device("cuda" if self.result.hardware.get("gpu") and torch.cuda.is_available() else "cpu")

    def dataloader_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for DataLoader; those that torch refuses at 0 workers are left out there."""
        return loader_kwargs(self.result.config)

    def dataloader(self, dataset: Any, **kwargs: Any) -> DataLoader[Any]:
        """A DataLoader with the tuned settings and whatever else is given (shuffle, collate_fn, ...).

        Raises InputError where an argument would override a tuned one.
        """
        from torch.utils.data import DataLoader

        clashing = sorted(_OURS & set(kwargs))
        if clashing:
            raise InputError(
                f"dataloader(): {', '.join(clashing)} come(s) from the file; leave it out here, or build a "
                "DataLoader from dataloader_kwargs() and change it there"
            )
        tuned = self.dataloader_kwargs()
        if kwargs.get("batch_sampler") is not None:
            tuned.pop("batch_size")
        return DataLoader(dataset, **tuned, **kwargs)

    def to_device(self, batch: Any, device: torch.device | str | None = None) -> Any:
        """Copy a nested batch to the device, without waiting where its memory is pinned."""
        import torch

        from pipetune.training.batch import to_device

        target = self.device if device is None else torch.device(device)
        return to_device(batch, target, non_blocking=self.result.config.pin_memory)

    def autocast(self) -> AbstractContextManager[None]:
        """The forward pass and the loss belong inside; for fp32 nothing, but one that is on outside is off in it."""
        from pipetune.training.precision import autocast

        return autocast(self.device, self.result.config.amp)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """A gradient scaler: works for fp16, passes everything through otherwise."""
        from pipetune.training.precision import grad_scaler

        return grad_scaler(self.device, self.result.config.amp)

    def step(self, optimizer: torch.optim.Optimizer) -> Step:
        """Autocast, scaling, accumulation and update in one object, the very one that the trials used."""
        from pipetune.training.step import Step

        config = self.result.config
        return Step(optimizer, device=self.device, amp=config.amp, accumulation_steps=config.accumulation_steps)


def check_machine(result: TunedConfig) -> None:
    """Warn once for each difference to the machine that was measured; refuse what cannot work here.

    Raises InputError where the precision or the GPU of the file is not to be had.
    """
    _refuse_missing(result)
    for text in _differences(result.hardware, result.provenance):
        warnings.warn(f"pipetune: {text}", stacklevel=3)


def _refuse_missing(result: TunedConfig) -> None:
    import torch

    amp = result.config.amp
    if result.hardware.get("gpu"):
        if not torch.cuda.is_available():
            raise InputError(
                f"these settings were tuned on {result.hardware['gpu']}, and torch sees no GPU here; "
                "tune on this machine, or load with check=False"
            )
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if amp is Amp.BF16 and not has_bf16:
            raise InputError(
                f"these settings use bf16, which {torch.cuda.get_device_name()} would only emulate; "
                "tune on this machine, or load with check=False"
            )
    elif amp is not Amp.FP32 and amp not in cpu_amps():
        raise InputError(
            f"these settings use {amp}, which this CPU would only emulate; "
            "tune on this machine, or load with check=False"
        )


def _differences(hardware: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[str]:
    import torch

    now = {
        "GPU": torch.cuda.get_device_name() if hardware.get("gpu") else None,
        "usable CPUs": usable_cpus().count,
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "start method": start_method(),
    }
    then = {
        "GPU": hardware.get("gpu"),
        "usable CPUs": hardware.get("cpus_usable"),
        "torch": provenance.get("torch"),
        "Python": ".".join(str(provenance.get("python", "")).split(".")[:2]) or None,
        "start method": provenance.get("start_method"),
    }
    return [
        f"these settings were measured with {name} {then[name]}, and here it is {now[name]}; "
        "`pipetune tune` tells what is best here"
        for name in now
        if then[name] is not None and now[name] is not None and str(then[name]) != str(now[name])
    ]
