"""Rows of a memory-mapped table, and a perceptron that predicts its last column."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from pipetune.training.workload import Workload
from pipetune.workloads import options
from pipetune.workloads.cache import made_once
from pipetune.workloads.mapped import MappedArray
from pipetune.workloads.mlp import make_mlp

FORMAT_VERSION = 1
"""Raised whenever the same options give another file; part of the cache folder's name."""

_CHUNK = 2**14

Row = tuple[Tensor, Tensor]


class TableRows(Dataset[Row]):
    """Rows of a table: (float32 [features], float32 scalar), the scalar being the last column."""

    def __init__(self, table: MappedArray) -> None:
        self._table = table
        self._length = len(table.array)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._length:
            raise IndexError(index)
        row = torch.from_numpy(self._table.array[index].copy())  # torch wants numbers that it may write to
        return row[:-1], row[-1]


def build(
    *,
    path: str | None = None,
    rows: int = 200_000,
    features: int = 64,
    width: int = 512,
    layers: int = 3,
    cache_dir: str | None = None,
    seed: int = 0,
) -> Workload:
    """Return the workload; a batch is (float32 [n, features], float32 [n]).

    path            the user's own: a .npy file, float32 [rows, features + 1], the target in the last column
    rows, features, cache_dir, seed
                    of the table that is otherwise made once: its size, where, from which seed
    width, layers   of the perceptron's hidden layers
    """
    options.whole("width", width)
    options.whole("layers", layers)
    file = _made_file(rows, features, seed, cache_dir) if path is None else options.existing_file("path", path)
    table = MappedArray(file)
    columns = _columns(table)
    return Workload(
        dataset=TableRows(table),
        model=make_mlp(inputs=columns - 1, width=width, layers=layers, outputs=1),
        optimizer=make_optimizer,
        loss=squared_error,
        data_paths=[file],
    )


def squared_error(model: nn.Module, batch: Row) -> Tensor:
    """Return the mean squared error over a batch of rows."""
    features, targets = batch
    return functional.mse_loss(model(features).squeeze(1), targets)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam at its usual rate."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def _made_file(rows: int, features: int, seed: int, cache_dir: str | None) -> Path:
    options.whole("rows", rows)
    options.whole("features", features)
    options.whole("seed", seed, low=0)

    def make(folder: Path) -> None:
        write_table(folder / "table.npy", rows=rows, features=features, seed=seed)

    name = f"tabular-v{FORMAT_VERSION}-{rows}x{features}-seed{seed}"
    return made_once(name, make, cache_dir=cache_dir) / "table.npy"


def write_table(path: Path, *, rows: int, features: int, seed: int) -> None:
    """Write float32 [rows, features + 1]: random features, and last a linear function of them with noise."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal(features) / features**0.5).astype(np.float32)
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, features + 1))
    for start in range(0, rows, _CHUNK):
        part = table[start : start + _CHUNK]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32)
        part[:, -1] = part[:, :-1] @ weights + 0.1 * part[:, -1]
    table.flush()


def _columns(table: MappedArray) -> int:
    """Return how many columns the file has, or raise InputError where it is no table of float32."""
    wanted = "give a .npy file that holds float32 [rows, features + 1], the target in the last column"
    try:
        array = table.array
    except (OSError, ValueError, EOFError) as error:
        raise options.refuse("path", str(table.path), f"{wanted} ({error})") from error
    if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] < 2 or array.dtype != np.float32:
        raise options.refuse("path", str(table.path), f"it holds {array.dtype} {list(array.shape)}; {wanted}")
    return int(array.shape[1])
