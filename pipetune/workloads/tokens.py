"""Rows of token ids from a memory-mapped file, and a GPT that predicts the next id."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from pipetune.training.workload import Workload
from pipetune.workloads import options
from pipetune.workloads.cache import made_once
from pipetune.workloads.gpt import SIZES, Gpt, GptSize
from pipetune.workloads.mapped import MappedArray

FORMAT_VERSION = 1
"""Raised whenever the same options give another file; part of the cache folder's name."""

_ID_TYPE = "<u2"
_LARGEST_VOCABULARY = 2**16
_CHUNK = 2**20
_CHECKED_IDS = 2**20  # enough to notice another tokenizer, without reading a file of gigabytes


class TokenRows(Dataset[Tensor]):
    """Consecutive rows of a token file: int64 [block_size + 1], so that every position has a next id.

    `length` may exceed the number of rows; an index beyond them starts over.
    """

    def __init__(self, ids: MappedArray, *, block_size: int, rows: int, length: int) -> None:
        self._ids = ids
        self._block_size = block_size
        self._rows = rows
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._length:
            raise IndexError(index)
        start = index % self._rows * self._block_size
        row = self._ids.array[start : start + self._block_size + 1]
        return torch.from_numpy(row.astype(np.int64))


def build(
    *,
    path: str | None = None,
    block_size: int = 1024,
    preset: str = "small",
    layers: int | None = None,
    heads: int | None = None,
    width: int | None = None,
    vocabulary: int = 50304,
    tokens: int = 10_000_000,
    virtual_length: int | None = None,
    cache_dir: str | None = None,
    seed: int = 0,
) -> Workload:
    """Return the workload; a batch is int64 [n, block_size + 1], a sample is one row.

    path            the user's own: a file of little-endian uint16 ids; otherwise random ids are written once
    tokens, cache_dir, seed
                    of the file that is made: how many ids, where, from which seed
    preset          `nano` or `small`; layers, heads and width replace single sizes of it
    virtual_length  length of the dataset where it is to be more than the rows, which are then read again
    """
    options.whole("block_size", block_size)
    options.whole("vocabulary", vocabulary, low=2, high=_LARGEST_VOCABULARY)
    size = _size(preset, layers, heads, width)
    file = _made_file(tokens, vocabulary, seed, cache_dir) if path is None else options.existing_file("path", path)
    ids = MappedArray(file, _ID_TYPE)
    rows = _rows(ids, block_size, vocabulary, option="tokens" if path is None else "path")
    length = rows if virtual_length is None else options.whole("virtual_length", virtual_length)
    return Workload(
        dataset=TokenRows(ids, block_size=block_size, rows=rows, length=length),
        model=Gpt(size, vocabulary=vocabulary, block_size=block_size),
        optimizer=make_optimizer,
        loss=next_token_loss,
        data_paths=[file],
    )


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy over every position of a batch of rows."""
    logits: Tensor = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only: shrinking norms and biases does not regularise."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))


def _size(preset: str, layers: int | None, heads: int | None, width: int | None) -> GptSize:
    base: GptSize = SIZES[options.one_of("preset", preset, SIZES)]
    size = GptSize(
        layers=base.layers if layers is None else options.whole("layers", layers),
        heads=base.heads if heads is None else options.whole("heads", heads),
        width=base.width if width is None else options.whole("width", width),
    )
    if size.width % size.heads:
        raise options.refuse("width", size.width, f"give a multiple of the {size.heads} heads")
    return size


def _made_file(tokens: int, vocabulary: int, seed: int, cache_dir: str | None) -> Path:
    options.whole("tokens", tokens, low=2)
    options.whole("seed", seed, low=0)

    def make(folder: Path) -> None:
        write_tokens(folder / "tokens.bin", tokens=tokens, vocabulary=vocabulary, seed=seed)

    name = f"tokens-v{FORMAT_VERSION}-{tokens}-vocabulary{vocabulary}-seed{seed}"
    return made_once(name, make, cache_dir=cache_dir) / "tokens.bin"


def write_tokens(path: Path, *, tokens: int, vocabulary: int, seed: int) -> None:
    """Write random ids whose frequency falls as 1 / rank, as that of words does (Zipf's law)."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, tokens, _CHUNK):
            draws = rng.random(min(_CHUNK, tokens - start))
            # A rank whose logarithm is uniform has a density of 1 / rank.
            ranks = np.exp(draws * math.log(vocabulary + 1)).astype(np.int64)
            file.write((np.minimum(ranks, vocabulary) - 1).astype(_ID_TYPE).tobytes())


def _rows(ids: MappedArray, block_size: int, vocabulary: int, *, option: str) -> int:
    """Return how many rows a file holds, or raise InputError where it holds none or another vocabulary."""
    number_of_bytes = ids.path.stat().st_size
    if number_of_bytes % 2:
        raise options.refuse(option, str(ids.path), "a file of uint16 ids has an even number of bytes")
    rows = (number_of_bytes // 2 - 1) // block_size
    if rows < 1:
        raise options.refuse(
            option,
            str(ids.path),
            f"its {number_of_bytes // 2} ids give no row of {block_size} + 1; lower block_size",
        )
    largest = int(ids.array[:_CHECKED_IDS].max())
    if largest >= vocabulary:
        raise options.refuse("vocabulary", vocabulary, f"{ids.path} holds the id {largest}; give more")
    return rows
