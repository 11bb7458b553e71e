"""The user's loader with a trial's settings, and with an end that comes when it is asked for."""

import inspect
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pipetune.core.space import TrialConfig
from pipetune.errors import InputError
from pipetune.training.loader import loader_kwargs
from pipetune.training.workload import Workload
from pipetune.trial.guards import WorkerInit
from pipetune.trial.protocol import ReadPart
from pipetune.trial.randomness import seed_on_host, undisturbed

_NO_LIMIT = -1
_KEPT = ("collate_fn", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator")


class EndlessSampler:
    """Iterates the user's (batch) sampler over and over until it is stopped: then the epoch really ends.

    A loader that runs out is what training meets at the end of an epoch. Abandoning an iterator instead would
    also pay for its queued batches.
    """

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner
        self._limit: int | None = None

    def stop(self) -> None:
        """Dispatch nothing more."""
        self._limit = 0

    def restart(self) -> None:
        """Let the next iterator go on for ever again."""
        self._limit = None

    def bound(self, batches: int) -> None:
        """Let each further iterator end after one pass, or after so many batches."""
        self._limit = batches

    def __iter__(self) -> Iterator[Any]:
        """Yield from one pass after another; an empty pass ends it."""
        count = 0
        while True:
            before = count
            for item in self.inner:
                if self._limit is not None and count >= self._limit:
                    return
                count += 1
                yield item
            if self._limit is not None or count == before:
                return


class PartOfOrder:
    """A sampler's items from one to another, in the order of one seed: the same samples in every trial.

    An open part never reads an item again before it has read all others: each iterator goes on where the last one
    ended, round and round.
    """

    def __init__(self, inner: Any, part: ReadPart, samples_per_item: int) -> None:
        self._inner = inner
        self._seed = part.seed
        self._next = part.first // samples_per_item
        self._count = None if part.count is None else -(-part.count // samples_per_item)
        self._items: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield them, a bounded part or what is left of the order."""
        if self._count is None:
            yield from self._going_on()
            return
        if self._items is None:
            self._items = list(islice(self._ordered(self._next), self._count))
        yield from self._items

    def _going_on(self) -> Iterator[Any]:
        before = self._next
        for item in self._ordered(self._next):
            yield item
            # Only now: one that was drawn and not given away will be drawn again.
            self._next += 1
        if self._next > before:
            self._next = 0
            return
        # Beyond the end: earlier trials have read all of it, more than once perhaps.
        length = sum(1 for _ in self._ordered(0))
        self._next = before % length if length else 0
        if length:
            yield from self._going_on()

    def _ordered(self, first: int) -> Iterator[Any]:
        with undisturbed():
            seed_on_host(self._seed)
            for sampler in (self._inner, getattr(self._inner, "sampler", None)):
                if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                    generator.manual_seed(self._seed)
            items = iter(self._inner)
            # Samplers draw from the global state when they begin.
            begun = list(islice(items, 1))
        return islice(chain(begun, items), first, None)


class EndlessStream:
    """The same for an iterable dataset: `dataset` goes into the workers, the handle that ends it stays here."""

    def __init__(self, inner: Any, batch_size: int | None, num_workers: int) -> None:
        self.inner = inner
        self._num_workers = max(1, num_workers)
        self._limit = torch.full((1,), _NO_LIMIT, dtype=torch.int64).share_memory_()
        self.dataset = _EndlessDataset(inner, batch_size or 1, self._limit)

    def stop(self) -> None:
        """Let each worker end after its present batch."""
        self._limit.zero_()

    def restart(self) -> None:
        """Let the next iterator go on for ever again."""
        self._limit.fill_(_NO_LIMIT)

    def bound(self, batches: int) -> None:
        """Let each further iterator end after one pass, or after so many batches, which the workers share."""
        self._limit.fill_(-(-batches // self._num_workers))


class StandIn:
    """Looks like the user's dataset to worker init functions; what is its own has names that nobody else uses."""

    _OWN: frozenset[str]
    _pipetune_inner: Any

    def __getattr__(self, name: str) -> Any:
        """Worker init functions read and set attributes of the user's dataset."""
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._pipetune_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Pass on what a worker init function sets."""
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._pipetune_inner, name, value)


class _EndlessDataset(StandIn, IterableDataset[Any]):
    """Yields the user's samples pass after pass, up to a limit that can be set from outside."""

    _OWN = frozenset({"_pipetune_inner", "_pipetune_batch_size", "_pipetune_limit"})

    def __init__(self, inner: Any, batch_size: int, limit: torch.Tensor) -> None:
        self._pipetune_inner = inner
        self._pipetune_batch_size = batch_size
        self._pipetune_limit = limit

    def __iter__(self) -> Iterator[Any]:
        """Yield from one pass after another, looking for the limit between batches only."""
        yielded = 0
        while True:
            before = yielded
            for item in self._pipetune_inner:
                batches, inside = divmod(yielded, self._pipetune_batch_size)
                if inside == 0 and 0 <= self._pipetune_limit.item() <= batches:
                    return
                yielded += 1
                yield item
            if yielded == before or self._pipetune_limit.item() > 0:
                return


Endless = EndlessSampler | EndlessStream


def build_loader(
    workload: Workload, config: TrialConfig, part: ReadPart | None = None
) -> tuple[DataLoader[Any], Endless]:
    """The workload's loader with the trial's settings, made endless; and the handle that ends its epoch.

    `part` bounds what is read of a map-style dataset; a stream is always read from its start.
    Raises InputError where the user's loader cannot take the settings, with what to do.
    """
    loader = _plain_loader(workload, config)
    loader.worker_init_fn = WorkerInit(loader.worker_init_fn)
    endless: Endless
    if isinstance(loader.dataset, IterableDataset):
        endless = EndlessStream(loader.dataset, loader.batch_size, loader.num_workers)
        _replace(loader, "dataset", endless.dataset)
    elif loader.batch_sampler is not None:
        endless = EndlessSampler(_part_of(loader.batch_sampler, part, config.batch_size))
        _replace(loader, "batch_sampler", endless)
    else:
        endless = EndlessSampler(_part_of(loader.sampler, part, 1))
        _replace(loader, "sampler", endless)
    return loader, endless


def close_iterator(iterator: Any) -> None:
    """Tell the workers of a loader's iterator to end, and wait for them."""
    shut_down = getattr(iterator, "_shutdown_workers", None)  # torch offers no way to close a loader
    if shut_down is not None:
        shut_down()


def _part_of(sampler: Any, part: ReadPart | None, samples_per_item: int) -> Any:
    return sampler if part is None else PartOfOrder(sampler, part, samples_per_item)


def _plain_loader(workload: Workload, config: TrialConfig) -> DataLoader[Any]:
    if workload.make_loader is not None:
        return _made_loader(workload, config)
    if workload.loader is not None:
        return rebuild(workload.loader, config)
    kwargs = loader_kwargs(config)
    kwargs.update({name: getattr(workload, name) for name in _KEPT})
    if workload.batch_sampler is not None:
        for name in ("batch_size", "drop_last"):
            kwargs.pop(name)
        kwargs["batch_sampler"] = workload.batch_sampler
    elif not isinstance(workload.dataset, IterableDataset):
        kwargs["sampler"] = workload.sampler
        kwargs["shuffle"] = workload.shuffle if workload.sampler is None else None
    return DataLoader(workload.dataset, **_without_worker_options(kwargs))


def rebuild(loader: DataLoader[Any], config: TrialConfig) -> DataLoader[Any]:
    """A loader of the same class with every setting kept but those that the trial sets."""
    kwargs = loader_kwargs(config)
    kwargs.update({name: getattr(loader, name) for name in _KEPT})
    kwargs["in_order"] = getattr(loader, "in_order", True)
    if isinstance(loader.worker_init_fn, WorkerInit):
        kwargs["worker_init_fn"] = loader.worker_init_fn.user_function
    if loader.batch_size is None and loader.batch_sampler is None:
        kwargs["batch_size"] = None
        kwargs.pop("drop_last")
        kwargs["sampler"] = loader.sampler
    elif loader.batch_size is None:
        for name in ("batch_size", "drop_last"):
            kwargs.pop(name)
        kwargs["batch_sampler"] = loader.batch_sampler
    else:
        kwargs["sampler"] = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        kwargs.pop("sampler", None)
    kwargs = _without_worker_options(kwargs)
    _refuse_other_constructor(type(loader), kwargs)
    return type(loader)(loader.dataset, **kwargs)


def _made_loader(workload: Workload, config: TrialConfig) -> DataLoader[Any]:
    assert workload.make_loader is not None
    loader = workload.make_loader(config)
    if not isinstance(loader, DataLoader):
        raise InputError(f"make_loader returned a {type(loader).__name__}; it must return a DataLoader")
    for name, wanted in loader_kwargs(config).items():
        given = getattr(loader, name)
        if given != wanted and not (name == "batch_size" and given is None):
            raise InputError(
                f"make_loader(config) returned a loader with {name}={given}; the trial asked for {wanted}: "
                f"pass config.{name} to the DataLoader"
            )
    return loader


def _without_worker_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs["num_workers"] == 0:
        kwargs["multiprocessing_context"] = None
        kwargs["timeout"] = 0
    return kwargs


def _refuse_other_constructor(loader_class: type, kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(loader_class)
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named = {p.name for p in signature.parameters.values() if p.kind not in variadic}
    own = sorted(named - set(inspect.signature(DataLoader).parameters))
    try:
        signature.bind(dataset=None, **kwargs)
        problem = f"takes {', '.join(own)}, of which the loader does not tell" if own else ""
    except TypeError as error:
        problem = f"is another: {error}"
    if problem:
        raise InputError(
            f"{loader_class.__name__} cannot be rebuilt: its constructor {problem}; "
            "give the Workload a make_loader(config) instead of the loader"
        )


def _replace(loader: DataLoader[Any], name: str, value: Any) -> None:
    # DataLoader guards these against change after construction; nothing has been iterated yet.
    object.__setattr__(loader, name, value)
