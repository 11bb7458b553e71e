import math
from collections import Counter
from itertools import islice

import pytest
import torch
from builders import trial_config
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pipetune.errors import InputError
from pipetune.training.workload import Workload
from pipetune.trial.loader import EndlessSampler, build_loader, rebuild
from pipetune.trial.protocol import ReadPart

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory:UserWarning",
    "ignore:This DataLoader will create:UserWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",  # what forking from pytest itself gives, on 3.12
)


class Squares(Dataset):
    def __init__(self, length=16):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Span(IterableDataset):
    """A stream of numbers that a worker_init_fn narrows, as torch's documentation shows."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        return iter(range(self.start, self.end))


class Likely(IterableDataset):
    """The same under names that anybody may choose, a handle that ends the stream among them."""

    def __init__(self, start, stop):
        self.start, self.stop = start, stop
        self.inner, self.batch_size, self.restart = "core", 3, True

    def __iter__(self):
        return iter(range(self.start, self.stop))


class SelfSharding(IterableDataset):
    """Torch's first pattern; the third worker gets nothing."""

    def __iter__(self):
        info = get_worker_info()
        shards = range(2)
        mine = shards if info is None else shards[info.id :: info.num_workers]
        for shard in mine:
            yield from range(4 * shard, 4 * shard + 4)


class Once(IterableDataset):
    def __init__(self):
        self.items = iter(range(8))

    def __iter__(self):
        return self.items


def narrow(_worker_id):
    info = get_worker_info()
    stream = info.dataset
    first, last = stream.start, stream.end
    share = math.ceil((last - first) / info.num_workers)
    stream.start = first + info.id * share
    stream.end = min(stream.start + share, last)


def narrow_likely(_worker_id):
    info = get_worker_info()
    stream = info.dataset
    assert (stream.inner, stream.batch_size, stream.restart) == ("core", 3, True)
    stream.batch_size, stream.inner, stream.restart = 5, "shell", False
    share = (stream.stop - stream.start) // info.num_workers
    stream.start += info.id * share
    stream.stop = stream.start + share


def do_nothing(_worker_id):
    pass


def to_tensor(items):
    return torch.tensor(items)


class Renamed(DataLoader):
    """Takes DataLoader's own arguments: it can be rebuilt."""


class FromFolder(DataLoader):
    def __init__(self, folder, num_workers=0):
        super().__init__(Squares(), num_workers=num_workers)
        self.folder = folder


class FromFolderAndMore(DataLoader):
    def __init__(self, folder, **kwargs):
        if not isinstance(folder, str):
            message = "folder must be a path"
            raise TypeError(message)
        super().__init__(Squares(), **kwargs)


class WithTokenizer(DataLoader):
    def __init__(self, dataset, tokenizer, **kwargs):
        super().__init__(dataset, **kwargs)
        self.tokenizer = tokenizer


class Scaled(DataLoader):
    def __init__(self, dataset, *, scale=1.0, **kwargs):
        super().__init__(dataset, **kwargs)
        self.scale = scale


def workload(**parts):
    values = {"model": nn.Identity(), "optimizer": lambda _: None, "loss": lambda _model, batch: batch}
    if not {"loader", "make_loader"} & set(parts):
        values |= {"dataset": Squares(), "shuffle": False, "multiprocessing_context": "fork"}
    return Workload(**values | parts)


def config(num_workers=0, batch_size=4, **changes):
    return trial_config(num_workers, batch_size=batch_size, accumulation_steps=1, **changes)


def numbers(batches):
    return [number for batch in batches for number in batch.tolist()]


def remaining(iterator):
    """Batches until the genuine end."""
    return sum(1 for _ in iterator)


# --- EndlessSampler


def test_a_sampler_goes_on_pass_after_pass():
    assert list(islice(EndlessSampler([1, 2, 3]), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_stopped_sampler_ends_and_a_restarted_one_begins_anew():
    sampler = EndlessSampler([1, 2, 3])
    items = iter(sampler)
    assert list(islice(items, 4)) == [1, 2, 3, 1]
    sampler.stop()
    assert list(items) == []
    assert list(sampler) == []
    sampler.restart()
    assert list(islice(sampler, 4)) == [1, 2, 3, 1]


def test_a_sampler_without_items_ends_by_itself():
    assert list(EndlessSampler([])) == []


def test_a_sampler_that_reshuffles_does_so_in_each_pass():
    loader, _ = build_loader(workload(shuffle=True), config(batch_size=16))
    passes = [batch.tolist() for batch in islice(loader, 3)]
    assert [sorted(one) for one in passes] == [list(range(16))] * 3
    assert len({tuple(one) for one in passes}) == 3


def test_a_bounded_sampler_ends_after_one_pass_or_sooner():
    sampler = EndlessSampler([1, 2, 3])
    sampler.bound(2)
    assert [list(sampler), list(sampler)] == [[1, 2], [1, 2]]
    sampler.bound(10)
    assert list(sampler) == [1, 2, 3]
    sampler.restart()
    assert list(islice(sampler, 5)) == [1, 2, 3, 1, 2]


# --- a part of the order


def indices_read(part, *, batch_size=4, batches=4, **parts):
    """What a trial without workers reads of a shuffled dataset."""
    loader, _ = build_loader(workload(shuffle=True, **parts), config(batch_size=batch_size), part)
    return numbers(islice(loader, batches))


def test_a_part_is_the_same_samples_over_and_over():
    part = ReadPart(first=0, count=8, seed=3)
    read = indices_read(part, batches=6)
    assert read[:8] == read[8:16] == read[16:24]
    assert len(set(read)) == 8


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_every_micro_batch_reads_the_same_part(batch_size):
    part = ReadPart(first=0, count=8, seed=3)
    assert indices_read(part, batch_size=batch_size, batches=8 // batch_size) == indices_read(part, batches=2)


def test_the_order_of_a_part_does_not_hang_on_what_was_drawn_before():
    part = ReadPart(first=0, count=8, seed=3)
    first = indices_read(part)
    torch.manual_seed(99)
    assert indices_read(part) == first
    generator = torch.Generator().manual_seed(5)
    assert indices_read(part, generator=generator) == indices_read(part, generator=generator)
    loader, _ = build_loader(workload(shuffle=True), config(), part)
    random_state = torch.get_rng_state()
    list(islice(iter(loader.batch_sampler), 2))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_open_part_goes_on_where_the_last_trial_ended_and_round():
    whole = indices_read(ReadPart(first=0, count=None, seed=3))
    assert sorted(whole) == list(range(16))
    assert indices_read(ReadPart(first=8, count=None, seed=3)) == whole[8:] + whole[:8]


def test_an_open_part_goes_on_in_the_next_epoch_and_beyond_its_end():
    part = ReadPart(first=100 + 4, count=None, seed=3)
    whole = indices_read(ReadPart(first=0, count=None, seed=3))
    loader, endless = build_loader(workload(shuffle=True), config(), part)
    # 104 samples into an order of 16 is 8 into it
    first = iter(loader)
    read = numbers(islice(first, 1))
    endless.stop()
    assert list(first) == []
    endless.restart()
    read += numbers(islice(loader, 3))
    assert read == whole[8:] + whole[:8]


# --- the epoch's end


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_ends_after_all_dispatched_batches(persistent):
    loader, endless = build_loader(
        workload(), config(2, batch_size=2, prefetch_factor=3, persistent_workers=persistent)
    )
    iterator = iter(loader)
    assert numbers(islice(iterator, 10)) == [*range(16), *range(4)]
    endless.stop()
    assert remaining(iterator) == 2 * 3
    with pytest.raises(StopIteration):
        next(iterator)
    endless.restart()
    again = iter(loader)
    assert (again is iterator) is persistent
    assert numbers(islice(again, 9)) == [*range(16), 0, 1]
    again._shutdown_workers()


def test_without_workers_the_epoch_ends_at_once():
    loader, endless = build_loader(workload(), config())
    iterator = iter(loader)
    assert numbers(islice(iterator, 6)) == [*range(16), *range(8)]
    endless.stop()
    assert remaining(iterator) == 0
    endless.restart()
    assert numbers(islice(loader, 1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_ends_after_its_present_batches(persistent):
    parts = workload(dataset=Span(0, 16), worker_init_fn=narrow)
    loader, endless = build_loader(parts, config(2, persistent_workers=persistent))
    iterator = iter(loader)
    list(islice(iterator, 5))
    endless.stop()
    left = list(iterator)
    assert len(left) <= 2 * 2 + 2
    assert all(len(batch) == 4 for batch in left)
    with pytest.raises(StopIteration):
        next(iterator)
    endless.restart()
    again = iter(loader)
    assert len(list(islice(again, 5))) == 5
    again._shutdown_workers()


# --- EndlessStream


def test_a_stream_without_workers_goes_on_until_it_is_stopped():
    loader, endless = build_loader(workload(dataset=Span(0, 3)), config(batch_size=2))
    batches = iter(loader)
    assert numbers(islice(batches, 3)) == [0, 1, 2, 0, 1, 2]
    endless.stop()
    assert list(batches) == []
    endless.restart()
    assert numbers(islice(loader, 2)) == [0, 1, 2, 0]


def test_a_batch_that_was_begun_is_filled():
    loader, endless = build_loader(workload(dataset=Span(0, 3)), config(batch_size=2))
    items = iter(loader.dataset)
    assert next(items) == 0
    endless.stop()
    assert list(items) == [1]


def test_a_bounded_stream_ends_after_one_pass():
    loader, endless = build_loader(workload(dataset=Span(0, 6)), config(batch_size=2))
    endless.bound(100)
    assert numbers(loader) == list(range(6))
    endless.bound(2)
    assert numbers(loader) == list(range(4))


def test_the_workers_share_the_batches_of_a_bounded_stream():
    loader, endless = build_loader(workload(dataset=Span(0, 16), worker_init_fn=narrow), config(2, batch_size=2))
    endless.bound(4)
    iterator = iter(loader)
    assert remaining(iterator) == 4
    iterator._shutdown_workers()


def test_a_stream_that_can_be_read_once_ends():
    loader, _ = build_loader(workload(dataset=Once()), config(batch_size=2))
    assert numbers(loader) == list(range(8))


@pytest.mark.parametrize(
    ("stream", "init"),
    [(Span(0, 16), narrow), (Likely(0, 16), narrow_likely)],
    ids=["plain names", "likely names"],
)
def test_a_worker_init_fn_shards_the_stream_through_its_attributes(stream, init):
    loader, _ = build_loader(workload(dataset=stream, worker_init_fn=init), config(2))
    iterator = iter(loader)
    one_pass = Counter(numbers(islice(iterator, 4)))
    iterator._shutdown_workers()
    assert one_pass == Counter(range(16))


def test_workers_without_a_shard_do_no_harm():
    loader, _ = build_loader(workload(dataset=SelfSharding()), config(3))
    iterator = iter(loader)
    seen = numbers(islice(iterator, 10))
    iterator._shutdown_workers()
    assert len(seen) == 40
    assert set(seen) == set(range(8))


def test_the_stream_looks_like_the_users():
    stream = Span(3, 9)
    loader, _ = build_loader(workload(dataset=stream), config())
    assert (loader.dataset.start, loader.dataset.end) == (3, 9)
    loader.dataset.end = 5
    assert stream.end == 5
    assert not hasattr(loader.dataset, "set_epoch")


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_loader_of_a_stream_keeps_its_batching(batch_size):
    loader, _ = build_loader(
        workload(loader=DataLoader(Span(0, 8), batch_size=batch_size, drop_last=False)), config(batch_size=2)
    )
    first = next(iter(loader))
    assert first == 0 if batch_size is None else first.tolist() == [0, 1]


# --- rebuilding a loader


def test_every_setting_of_a_loader_is_kept():
    generator = torch.Generator().manual_seed(7)
    source = Renamed(
        Squares(),
        batch_size=8,
        sampler=WeightedRandomSampler([1.0] * 16, 12, generator=generator),
        collate_fn=to_tensor,
        worker_init_fn=do_nothing,
        drop_last=True,
        generator=generator,
        timeout=30,
        num_workers=1,
        multiprocessing_context="fork",
        in_order=False,
    )
    new = rebuild(source, config(2, batch_size=2, prefetch_factor=4, persistent_workers=True))
    assert type(new) is Renamed
    kept = ("dataset", "sampler", "collate_fn", "worker_init_fn", "drop_last", "generator", "timeout", "in_order")
    assert {name: getattr(new, name) for name in kept} == {name: getattr(source, name) for name in kept}
    assert new.multiprocessing_context.get_start_method() == "fork"
    assert (new.num_workers, new.batch_size, new.prefetch_factor, new.persistent_workers) == (2, 2, 4, True)
    assert (source.num_workers, source.batch_size, source.prefetch_factor) == (1, 8, 2)


def test_a_loader_that_shuffles_still_shuffles():
    generator = torch.Generator().manual_seed(7)
    new = rebuild(DataLoader(Squares(), batch_size=16, shuffle=True, generator=generator), config(batch_size=16))
    assert new.sampler.generator is generator
    (batch,) = list(new)
    assert sorted(batch.tolist()) == list(range(16))
    assert batch.tolist() != list(range(16))


def test_a_batch_sampler_of_a_loader_is_kept():
    batches = BatchSampler(SequentialSampler(range(16)), batch_size=5, drop_last=False)
    new = rebuild(DataLoader(Squares(), batch_sampler=batches), config(batch_size=2))
    assert new.batch_sampler is batches
    assert [len(batch) for batch in new] == [5, 5, 5, 1]


def test_a_loader_without_batching_is_kept_so():
    new = rebuild(DataLoader(Squares(), batch_size=None, sampler=[3, 5]), config(batch_size=2))
    assert [item.item() for item in new] == [3, 5]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_takes_no_sampler(num_workers):
    new = rebuild(DataLoader(Span(0, 8), batch_size=4, drop_last=True), config(num_workers, batch_size=2))
    assert new.drop_last
    assert isinstance(new.dataset, Span)


@pytest.mark.parametrize("source", ["loader", "dataset"])
def test_options_that_are_illegal_without_workers_are_dropped(source):
    options = {"timeout": 30, "multiprocessing_context": "spawn"}
    parts = (
        {"loader": DataLoader(Squares(), num_workers=2, persistent_workers=True, prefetch_factor=4, **options)}
        if source == "loader"
        else options
    )
    loader, _ = build_loader(workload(**parts), config(0))
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert (loader.num_workers, loader.timeout, loader.multiprocessing_context) == (0, 0, None)
    assert (loader.prefetch_factor, loader.persistent_workers) == (None, False)


@pytest.mark.parametrize(
    "source",
    [
        FromFolder("photos"),
        FromFolderAndMore("photos"),
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_a_constructor_of_another_kind_is_refused(source):
    with pytest.raises(InputError, match="make_loader") as error:
        rebuild(source, config())
    assert type(source).__name__ in str(error.value)


@pytest.mark.parametrize(
    ("source", "name"),
    [(Scaled(Squares(), scale=3.0), "scale"), (WithTokenizer(Squares(), "bert"), "tokenizer")],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_of_the_subclass_is_not_lost_in_silence(source, name):
    """It is kept, or the loader is refused: either answer is honest."""
    try:
        rebuilt = rebuild(source, config())
    except InputError as error:
        rebuilt = None
        refusal = str(error)
    assert "make_loader" in refusal if rebuilt is None else getattr(rebuilt, name) == getattr(source, name)


def test_a_loader_that_was_made_endless_can_be_rebuilt():
    made, _ = build_loader(workload(worker_init_fn=do_nothing), config())
    assert rebuild(made, config()).worker_init_fn is do_nothing


# --- loaders from a dataset, and from make_loader


def test_a_datasets_own_arguments_reach_the_loader():
    generator = torch.Generator().manual_seed(3)
    parts = workload(
        shuffle=True, generator=generator, collate_fn=to_tensor, worker_init_fn=do_nothing, timeout=20, drop_last=False
    )
    loader, _ = build_loader(parts, config(2, batch_size=5, pin_memory=True))
    assert loader.generator is generator
    assert loader.batch_sampler.inner.sampler.generator is generator
    assert loader.collate_fn is to_tensor
    assert loader.worker_init_fn.user_function is do_nothing
    assert loader.timeout == 20
    assert [len(batch) for batch in loader.batch_sampler.inner] == [5, 5, 5, 1]
    assert (loader.num_workers, loader.pin_memory) == (2, True)


def test_a_sampler_takes_the_place_of_shuffle():
    loader, _ = build_loader(workload(sampler=[5, 6, 7, 8], shuffle=True), config())
    assert next(iter(loader)).tolist() == [5, 6, 7, 8]


def test_a_batch_sampler_decides_the_batch():
    loader, endless = build_loader(workload(batch_sampler=[[0, 1, 2], [3]]), config(batch_size=8))
    assert loader.batch_size is None
    assert [batch.tolist() for batch in islice(loader, 3)] == [[0, 1, 2], [3], [0, 1, 2]]
    endless.stop()
    assert list(loader) == []


def test_a_made_loader_is_made_endless_too():
    def make(wanted):
        return DataLoader(Squares(4), batch_size=wanted.batch_size, num_workers=wanted.num_workers)

    loader, _ = build_loader(workload(make_loader=make), config())
    assert numbers(islice(loader, 3)) == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda c: DataLoader(Squares(), batch_size=c.batch_size, num_workers=2), "num_workers=2"),
        (lambda _: DataLoader(Squares(), batch_size=3), "batch_size=3"),
        (lambda c: DataLoader(Squares(), batch_size=c.batch_size, pin_memory=True), "pin_memory=True"),
        (lambda _: [1, 2], "returned a list"),
    ],
    ids=["workers", "batch", "pin", "no_loader"],
)
def test_a_made_loader_that_ignores_the_trial_is_refused(make, named):
    with pytest.raises(InputError, match="make_loader") as error:
        build_loader(workload(make_loader=make), config())
    assert named in str(error.value)


def test_a_made_loader_may_leave_the_batch_to_its_batch_sampler():
    loader, _ = build_loader(workload(make_loader=lambda _: DataLoader(Squares(), batch_sampler=[[1, 2]])), config())
    assert next(iter(loader)).tolist() == [1, 2]
