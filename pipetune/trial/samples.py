"""Samples read without workers and in workers, as digests that a few hundred of them can be compared by.

`serial_digests` reads in this very process: for a serial host. `worker_digests` leaves the dataset to two workers:
for a forking one.
"""

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import hashlib
import pathlib
import random
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipetune.core.samples import SampleDigests, spread_indices
from pipetune.core.space import Amp, TrialConfig
from pipetune.training.workload import Workload
from pipetune.trial.loader import StandIn, build_loader, close_iterator
from pipetune.trial.randomness import seed_on_host, undisturbed

COUNT = 256
"""Samples compared at most."""
ROUNDS = 32
"""How often each is read, time permitting: two workers that share a position in a file meet by chance."""
LIMIT_S = 2.0
"""Seconds of reading on each side."""
WORKERS = 2
BATCH_SIZE = 8
_PREFETCH_FACTOR = 4
_SEEDS = (1, 2)
"""Two, so that a dataset which draws at random shows it. Workers use the first, so that rare draws agree too."""
_MAX_DEPTH = 32

_PLAIN = (
    type(None),
    type(...),
    bool,
    int,
    float,
    complex,
    str,
    range,
    slice,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    dt.date,
    dt.time,
    dt.timedelta,
    pathlib.PurePath,
    torch.dtype,
    torch.device,
    np.dtype,
)
"""Types whose repr tells all of their content."""

Reading = tuple[int, str | None, bool]
"""Index, digest, and whether it was read at all."""


def serial_digests(
    workload: Workload, indices: Sequence[int] | None = None, limit_s: float = LIMIT_S, *, one_thread: bool = False
) -> SampleDigests:
    """Read each index in this process, under two seeds; without indices, up to COUNT spread over the dataset.

    Stops at the first index that gives two different samples, after `limit_s`, or after ROUNDS rounds. What cannot
    be read is no error: the result says why. Global random state is put back. `one_thread` leaves torch only one,
    as a worker has: the order of a long sum depends on it, and so does its last bit.
    """
    if one_thread:
        torch.set_num_threads(1)
    with undisturbed():
        loader, _ = build_loader(workload, _config(num_workers=0))
        length, skipped = _samples(loader.dataset)
        if skipped is not None:
            return SampleDigests(asked=0, skipped=skipped)
        return _read_in_process(loader.dataset, spread_indices(length, COUNT) if indices is None else indices, limit_s)


def worker_digests(workload: Workload, indices: Sequence[int], limit_s: float = LIMIT_S) -> SampleDigests:
    """Read the indices in two workers at once, started and initialised as the user's loader does it.

    Only digests come back. Each worker reads for `limit_s` at most, from its first sample on. What the dataset
    raises in a worker is raised here, as a loader does. The workers have ended on return.
    """
    with undisturbed():
        user, _ = build_loader(workload, _config(num_workers=WORKERS))
        # Looks at the type only: a process that forks never touches the dataset.
        if isinstance(user.dataset, IterableDataset):
            return SampleDigests(asked=0, skipped=_ITERABLE)
        loader: DataLoader[Any] = DataLoader(
            _DigestedSamples(user.dataset, limit_s),
            batch_size=BATCH_SIZE,
            sampler=_shuffled_rounds(indices),
            num_workers=WORKERS,
            prefetch_factor=_PREFETCH_FACTOR,
            collate_fn=_as_they_are,
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context,
            timeout=user.timeout,
            generator=torch.Generator().manual_seed(0),
        )
        return _gathered(_batches_of(loader), len(set(indices)))


def sample_digest(sample: Any) -> str | None:
    """A hash of all content, dtypes and shapes included; None where nothing in it has content to compare.

    A part of an unknown type counts with its type's name only. Dictionaries and sets count without their order.
    """
    digest = _Digest()
    digest.add(sample)
    return digest.hexdigest() if digest.has_content else None


_ITERABLE = "the dataset is iterable: its samples have no indices"


def _config(*, num_workers: int) -> TrialConfig:
    return TrialConfig(
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        pin_memory=False,
        persistent_workers=False,
        batch_size=2,
        accumulation_steps=1,
        amp=Amp.FP32,
    )


def _samples(dataset: Any) -> tuple[int, str | None]:
    """How many samples a dataset has, and why none of them can be asked for by its index."""
    if isinstance(dataset, IterableDataset):
        return 0, _ITERABLE
    if not hasattr(type(dataset), "__getitem__"):
        return 0, f"the loader reads from a {type(dataset).__name__}, which gives no sample by index"
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        return 0, "the dataset has no length"
    return length, None if length > 0 else "the dataset is empty"


def _read_in_process(dataset: Any, indices: Sequence[int], limit_s: float) -> SampleDigests:
    digests: dict[int, str | None] = {}
    is_random = False
    deadline = time.monotonic() + limit_s
    for index in [*indices] * ROUNDS:
        try:
            found = {_read(dataset, index, seed) for seed in _SEEDS}
        except Exception as error:  # noqa: BLE001 - the user's own keys, a wrong length, a broken file: told, not raised
            reason = f"sample {index} could not be read: {type(error).__name__}: {error}"
            return SampleDigests(asked=len(indices), skipped=reason)
        found.add(digests.setdefault(index, next(iter(found))))
        is_random = len(found) > 1
        if is_random or time.monotonic() > deadline:
            break
    return SampleDigests(
        asked=len(indices), indices=tuple(digests), digests=tuple(digests.values()), is_random=is_random
    )


def _shuffled_rounds(indices: Sequence[int]) -> list[int]:
    """Each round in another order: every index comes to both workers, beside others."""
    generator = random.Random(0)  # noqa: S311 - it only mixes them
    return [index for _ in range(ROUNDS) for index in generator.sample(indices, len(indices))]


def _gathered(readings: Iterator[Reading], asked: int) -> SampleDigests:
    """One digest an index; where its readings differ, one that equals no other."""
    found: dict[int, dict[str | None, None]] = {}
    for index, digest, was_read in readings:
        if was_read:
            found.setdefault(index, {})[digest] = None
    digests = tuple(next(iter(one)) if len(one) == 1 else " or ".join(map(str, one)) for one in found.values())
    return SampleDigests(asked=asked, indices=tuple(found), digests=digests)


def _read(dataset: Any, index: int, seed: int) -> str | None:
    """Digest of one sample, read as a loader reads it, from a given state of the random generators."""
    seed_on_host(seed)
    if getattr(dataset, "__getitems__", None):
        return sample_digest(dataset.__getitems__([index])[0])
    return sample_digest(dataset[index])


def _batches_of(loader: DataLoader[Any]) -> Iterator[Reading]:
    """All readings; the workers are told to end, and waited for, whatever happens."""
    iterator = iter(loader)
    try:
        for batch in iterator:
            yield from batch
    finally:
        close_iterator(iterator)


def _as_they_are(batch: list[Reading]) -> list[Reading]:
    """Collate nothing; a function with a name, since spawned workers look it up."""
    return batch


class _DigestedSamples(StandIn, Dataset[Reading]):
    """Goes into the workers in the dataset's place and lets only digests out."""

    _OWN = frozenset({"_pipetune_inner", "_pipetune_limit_s", "_pipetune_deadline_s"})

    def __init__(self, inner: Any, limit_s: float) -> None:
        self._pipetune_inner = inner
        self._pipetune_limit_s = limit_s
        self._pipetune_deadline_s: float | None = None

    def __len__(self) -> int:
        return len(self._pipetune_inner)

    def __getitem__(self, index: int) -> Reading:
        # From the first read on, not from the start: a spawned worker takes seconds to come up.
        if self._pipetune_deadline_s is None:
            self._pipetune_deadline_s = time.monotonic() + self._pipetune_limit_s
        elif time.monotonic() > self._pipetune_deadline_s:
            return index, None, False
        return index, _read(self._pipetune_inner, index, _SEEDS[0]), True


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    """A value under its key or field name."""

    name: Any
    value: Any


class _Digest:
    """Feeds a hash with nested values; each part is framed by its type and length, so that no two run together."""

    def __init__(self, depth: int = 0) -> None:
        self.has_content = False
        self._hash = hashlib.blake2b(digest_size=16)
        self._depth = depth

    def hexdigest(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Add a value with all that is inside of it."""
        if isinstance(value, _Named):
            self._add_named(value)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._add_content("bytes", bytes(value))
        elif isinstance(value, enum.Enum):
            self._add_content(type(value).__qualname__, value.name.encode())
        elif isinstance(value, _PLAIN):
            self._add_content(type(value).__name__, repr(value).encode(errors="surrogatepass"))
        elif _is_image(value):
            self._add_image(value)
        else:
            self._add_nested(value)

    def _add_nested(self, value: Any) -> None:
        name = type(value).__qualname__
        if self._depth >= _MAX_DEPTH:
            self._frame("deep", name)
        elif isinstance(value, Mapping):
            self._add_unordered(name, [_Named(key, value[key]) for key in value])
        elif isinstance(value, AbstractSet):
            self._add_unordered(name, list(value))
        elif isinstance(value, list | tuple | deque):
            self._add_parts(name, list(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [_Named(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
            self._add_parts(name, fields)
        else:
            self._frame("opaque", name)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            self._frame("opaque tensor", str(tensor.dtype))
            return
        plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
        values = torch.view_as_real(plain) if plain.is_complex() else plain
        raw = values.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._add_content(f"tensor {tensor.dtype} {tuple(tensor.shape)}", raw.tobytes())

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject:
            self._add_parts(f"array {array.dtype} {array.shape}", array.reshape(-1).tolist())
        else:
            self._add_content(f"array {array.dtype} {array.shape}", array.tobytes())

    def _add_image(self, image: Any) -> None:
        palette = image.getpalette() if image.mode in {"P", "PA"} else None
        self._add_content(f"image {image.mode} {image.size} {palette}", image.tobytes())

    def _add_parts(self, name: str, parts: Sequence[Any]) -> None:
        self._frame(name, str(len(parts)))
        self._depth += 1
        for part in parts:
            self.add(part)
        self._depth -= 1

    def _add_unordered(self, name: str, parts: Sequence[Any]) -> None:
        self._frame(name, str(len(parts)))
        found = []
        for part in parts:
            inner = _Digest(self._depth + 1)
            inner.add(part)
            self.has_content = self.has_content or inner.has_content
            found.append(inner.hexdigest())
        self._hash.update("".join(sorted(found)).encode())

    def _add_named(self, named: "_Named") -> None:
        """A name alone is no content: every dictionary has some."""
        had_content = self.has_content
        self.add(named.name)
        self.has_content = had_content
        self.add(named.value)

    def _add_content(self, name: str, content: bytes) -> None:
        self.has_content = True
        self._frame(name, str(len(content)))
        self._hash.update(content)

    def _frame(self, name: str, detail: str) -> None:
        self._hash.update(f"<{name}:{detail}>".encode())


def _is_image(value: Any) -> bool:
    """Whether it is a PIL image; Pillow is looked up, not imported: who has images has imported it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
