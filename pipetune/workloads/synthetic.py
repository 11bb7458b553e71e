"""Samples whose cost is a setting: computing, waiting, a heavy tail, size; with a perceptron behind them."""

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipetune.training.workload import Workload
from pipetune.workloads import options
from pipetune.workloads.mlp import make_mlp

_FLOAT_BYTES = 4


class CostlySamples(Dataset[Tensor]):
    """Samples that compute `busy_s[i]` and then wait `wait_s[i]` seconds: float32 [values] each."""

    def __init__(self, busy_s: np.ndarray, wait_s: np.ndarray, *, values: int) -> None:
        self._busy_s = busy_s
        self._wait_s = wait_s
        self._template = torch.linspace(-1.0, 1.0, values)

    def __len__(self) -> int:
        return len(self._busy_s)

    def __getitem__(self, index: int) -> Tensor:
        if index < 0:
            raise IndexError(index)
        busy_s, wait_s = float(self._busy_s[index]), float(self._wait_s[index])
        if busy_s > 0:
            compute(busy_s)
        if wait_s > 0:
            time.sleep(wait_s)
        return self._template.clone()


def compute(seconds: float) -> None:
    """Keep this thread busy for some seconds of CPU time; on a core that is shared it takes longer."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def build(
    *,
    length: int = 10_000,
    cpu_ms: float = 1.0,
    wait_ms: float = 0.0,
    wait_ms_max: float | None = None,
    heavy_share: float = 0.0,
    heavy_ms: float = 0.0,
    payload_bytes: int = 4096,
    width: int = 256,
    layers: int = 2,
    seed: int = 0,
) -> Workload:
    """Return the workload; a batch is float32 [n, payload_bytes / 4]; the model reads `width` of each.

    cpu_ms                  milliseconds that a sample computes
    wait_ms, wait_ms_max    milliseconds that it then waits, uniform between the two where both are given
    heavy_share, heavy_ms   this share of the samples, 0 to 1, computes heavy_ms instead of cpu_ms
    payload_bytes           size of a sample
    width, layers           of the perceptron
    seed                    decides which samples are heavy, and how long each waits
    """
    options.whole("length", length)
    options.whole("payload_bytes", payload_bytes, low=_FLOAT_BYTES)
    options.whole("width", width)
    options.whole("layers", layers)
    options.whole("seed", seed, low=0)
    rng = np.random.default_rng(seed)
    dataset = CostlySamples(
        _busy_seconds(rng, length, cpu_ms, heavy_share, heavy_ms),
        _wait_seconds(rng, length, wait_ms, wait_ms_max),
        values=payload_bytes // _FLOAT_BYTES,
    )
    inputs = min(width, payload_bytes // _FLOAT_BYTES)
    return Workload(
        dataset=dataset,
        model=FirstValues(inputs, make_mlp(inputs=inputs, width=width, layers=layers, outputs=1)),
        optimizer=make_optimizer,
        loss=mean_square,
    )


class FirstValues(nn.Module):
    """A model on the first `inputs` values of each sample, so that large samples need no large model."""

    def __init__(self, inputs: int, model: nn.Module) -> None:
        super().__init__()
        self.inputs = inputs
        self.model = model

    def forward(self, samples: Tensor) -> Tensor:
        """Map float [n, values] to [n, 1]."""
        out: Tensor = self.model(samples[:, : self.inputs])
        return out


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean square of the outputs; these samples teach nothing."""
    out: Tensor = model(batch)
    return out.square().mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _busy_seconds(
    rng: np.random.Generator, length: int, cpu_ms: float, heavy_share: float, heavy_ms: float
) -> np.ndarray:
    options.number("cpu_ms", cpu_ms)
    options.number("heavy_share", heavy_share, high=1.0)
    options.number("heavy_ms", heavy_ms)
    if (heavy_share > 0) != (heavy_ms > 0):
        raise options.refuse("heavy_share", heavy_share, f"heavy_ms is {heavy_ms}; give both, or neither")
    heavy = rng.random(length) < heavy_share
    return np.where(heavy, heavy_ms, cpu_ms) / 1000


def _wait_seconds(rng: np.random.Generator, length: int, wait_ms: float, wait_ms_max: float | None) -> np.ndarray:
    low = options.number("wait_ms", wait_ms)
    high = low if wait_ms_max is None else options.number("wait_ms_max", wait_ms_max)
    if high < low:
        raise options.refuse("wait_ms_max", wait_ms_max, f"give wait_ms, which is {low:g}, or more")
    return rng.uniform(low, high, length) / 1000
