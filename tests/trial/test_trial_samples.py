import dataclasses
import enum
import random
import time
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from pipetune.core.samples import (
    SampleAgreement,
    SampleComparison,
    SampleDigests,
    compare,
    spread_indices,
)
from pipetune.training.workload import Workload
from pipetune.trial.samples import COUNT, sample_digest, serial_digests, worker_digests

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",  # what forking from pytest itself gives, on 3.12
)

EQUAL, DIFFERENT, SKIPPED = SampleAgreement


class Rows(Dataset):
    """Fine: the sample is its index, in many forms."""

    def __init__(self, length=400):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.full((3,), float(index)), index


class Nested(Rows):
    def __getitem__(self, index):
        image = Image.new("RGB", (4, 4), (index % 256, index // 256, 0))
        return {"image": image, "label": index, "name": f"{index}.jpg", "box": np.array([index, 0.5]), "raw": b"\0"}


class InWorkers(Rows):
    """Another sample at some indices, in workers only."""

    def __init__(self, length=400, wrong=(7,)):
        super().__init__(length)
        self.wrong = wrong

    def __getitem__(self, index):
        shift = 1 if get_worker_info() is not None and index in self.wrong else 0
        return super().__getitem__(index + shift)


class OneHandle(Rows):
    """The classic: a file opened once, its position shared by all who were forked afterwards."""

    SIZE = 64

    def __init__(self, path, length=400):
        super().__init__(length)
        path.write_bytes(b"".join(index.to_bytes(self.SIZE, "little") for index in range(length)))
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, index):
        self.file.seek(index * self.SIZE)
        time.sleep(0.0002)  # as long as it takes to find a record's length
        return self.file.read(self.SIZE)


class Augmented(Rows):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __getitem__(self, index):
        return index, self.draw()


class Drawn(Rows):
    """Draws at random, but so seldom that two readings of each do not show it."""

    def __getitem__(self, index):
        return index, torch.rand(()).item() < 0.0005


class Counting(Rows):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return index, self.reads


class Slow(Rows):
    def __init__(self, sleep_s, length=400):
        super().__init__(length)
        self.sleep_s = sleep_s

    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        return index


class SlowInWorkers(Slow):
    def __getitem__(self, index):
        return super().__getitem__(index) if get_worker_info() is not None else index


class Untouchable(Rows):
    """Cannot be read in the process that forks."""

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return index


class Broken(Rows):
    def __getitem__(self, index):
        if get_worker_info() is not None and index == 0:
            raise FileNotFoundError("sample 0 is on another machine")
        return index


class BrokenAnywhere(Rows):
    def __getitem__(self, index):
        raise ValueError(f"{index} is no picture")


class TooLong(Rows):
    def __len__(self):
        return 2 * self.length


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class Batched(Rows):
    """Read by lists of indices, as torch prefers where it can."""

    def __getitem__(self, index):
        raise NotImplementedError

    def __getitems__(self, indices):
        return [index * 2 for index in indices]


class ByName(Rows):
    def __getitem__(self, name):
        return {"a": 1, "b": 2}[name]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Renamed(Rows):
    """Told by its worker_init_fn what to read."""

    factor = 1

    def __getitem__(self, index):
        return index * self.factor


def double(_worker_id):
    dataset = get_worker_info().dataset
    dataset.factor = 2 * len(dataset) // dataset.length


def workload(dataset=None, **parts):
    if dataset is not None:
        parts["dataset"] = dataset
    return Workload(model=nn.Linear(1, 1), optimizer=make_sgd, loss=mean, **parts)


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean(model, batch):
    return model(batch).mean()


def both(given, limit_s=2.0):
    """What the two hosts would do."""
    serial = serial_digests(given, limit_s=limit_s)
    return compare(serial, worker_digests(given, serial.indices, limit_s) if serial.indices else serial)


@pytest.mark.parametrize("dataset", [Rows(), Nested(), Rows(3), Rows(1), Batched()], ids=lambda d: type(d).__name__)
def test_a_fine_dataset_is_the_same_in_workers(dataset):
    verdict = both(workload(dataset))
    assert verdict.agreement is EQUAL
    assert verdict.compared == min(COUNT, len(dataset))
    assert "the same with workers and without" in verdict.sentence()
    assert not active_children()


def test_one_sample_that_differs_is_found_and_named():
    verdict = both(workload(InWorkers(200)))
    assert verdict == SampleComparison(agreement=DIFFERENT, compared=200, different=1, first_different=7)
    assert "1 of 200" in verdict.sentence()
    assert "index 7" in verdict.sentence()


def test_a_file_handle_that_forked_workers_share_is_found(tmp_path):
    given = workload(OneHandle(tmp_path / "records"))
    with given.dataset.file:
        verdict = both(given, limit_s=1.0)
    assert verdict.agreement is DIFFERENT


def test_a_spawned_worker_has_a_handle_of_its_own():
    # GIVEN a dataset that differs in workers, and the user's own start method
    given = workload(InWorkers(20), multiprocessing_context="spawn")
    # THEN spawned workers are read, and the limit does not run while they import torch
    serial = serial_digests(given)
    verdict = compare(serial, worker_digests(given, serial.indices, limit_s=1.0))
    assert (verdict.agreement, verdict.compared, verdict.first_different) == (DIFFERENT, 20, 7)


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.default_rng().random, lambda: np.random.rand(2), lambda: torch.rand(2)],  # noqa: NPY002
    ids=["random", "its own", "numpy", "torch"],
)
def test_a_dataset_that_augments_at_random_is_skipped(draw):
    given = workload(Augmented(draw))
    serial = serial_digests(given)
    assert serial.is_random
    assert len(serial.indices) == 1  # one is enough
    verdict = compare(serial, serial)
    assert verdict.agreement is SKIPPED
    assert "by design" in verdict.sentence()


def test_what_is_drawn_seldom_from_the_global_generators_does_not_look_like_a_difference():
    assert both(workload(Drawn())).agreement is EQUAL


def test_a_dataset_that_counts_its_reads_is_skipped():
    assert both(workload(Counting())).agreement is SKIPPED


def test_slow_samples_are_read_for_a_bounded_time():
    began = time.monotonic()
    verdict = both(workload(Slow(0.01)), limit_s=0.5)
    assert time.monotonic() - began < 5
    assert verdict.agreement is EQUAL
    assert 8 <= verdict.compared < 60


def test_too_few_samples_in_the_time_say_nothing():
    verdict = both(workload(Slow(0.1)), limit_s=0.3)
    assert verdict.agreement is SKIPPED
    assert "too slow" in verdict.sentence()
    # AND so in workers
    assert "too slow" in both(workload(SlowInWorkers(0.2)), limit_s=0.3).sentence()


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Numbers(), "iterable"),
        (TooLong(), "IndexError"),
        (BrokenAnywhere(), "ValueError: .* is no picture"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_by_index_is_skipped_with_the_reason(dataset, reason):
    serial = serial_digests(workload(dataset))
    assert serial.skipped is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(compare(serial, serial).sentence())


def test_a_dataset_without_a_length_or_with_keys_of_its_own_is_skipped():
    assert "no length" in serial_digests(workload(NoLength(), sampler=[1, 2, 3])).skipped
    assert "KeyError" in serial_digests(workload(ByName(), sampler=["a", "b"])).skipped


def test_an_iterable_dataset_is_not_asked_of_workers_either():
    assert "iterable" in worker_digests(workload(Numbers()), (0, 1)).skipped


def test_the_dataset_is_found_behind_a_loader_and_a_make_loader():
    loader = DataLoader(InWorkers(20), batch_size=4)
    for given in (
        workload(loader=loader),
        workload(
            make_loader=lambda config: DataLoader(loader.dataset, config.batch_size, num_workers=config.num_workers)
        ),
    ):
        assert both(given).first_different == 7


def test_the_process_that_forks_never_reads():
    read = worker_digests(workload(Untouchable()), range(20))
    assert sorted(read.indices) == list(range(20))


def test_the_users_worker_init_fn_runs_and_reaches_the_dataset():
    given = workload(Renamed(), worker_init_fn=double)
    read = worker_digests(given, (3,))
    assert read.digests == (sample_digest(6),)


def test_what_the_dataset_raises_in_a_worker_goes_through_and_leaves_no_worker():
    given = workload(Broken())
    serial = serial_digests(given)
    with pytest.raises(FileNotFoundError, match="on another machine"):
        worker_digests(given, serial.indices)
    assert not active_children()


def test_global_random_state_and_thread_count_stay_as_they_are():
    def states():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    fine, augmented = workload(Rows(20)), workload(Augmented(random.random))
    before, threads = states(), torch.get_num_threads()
    both(fine)
    serial_digests(augmented)
    assert states() == before
    assert torch.get_num_threads() == threads


def test_a_dataset_that_is_another_each_time_it_is_built_is_no_fault_of_workers():
    # GIVEN a forking host that built another dataset than the serial one
    serial, workers = (
        SampleDigests(asked=8, indices=tuple(range(8)), digests=tuple(f"{build}{i}" for i in range(8)))
        for build in ("a", "b")
    )
    assert compare(serial, workers).different == 8
    # THEN another serial host tells which of the two it is
    rebuilt = dataclasses.replace(serial, digests=tuple(f"c{i}" for i in range(8)))
    assert "each time it is built" in compare(serial, workers, rebuilt=rebuilt).reason
    assert compare(serial, workers, rebuilt=serial).agreement is DIFFERENT
    # AND it may be the one that meets a seldom draw of the dataset's own
    assert "by design" in compare(serial, workers, rebuilt=dataclasses.replace(serial, is_random=True)).reason


def test_samples_without_content_are_not_compared():
    nothing = SampleDigests(asked=8, indices=tuple(range(8)), digests=(None,) * 8)
    assert "content" in compare(nothing, nothing).reason


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: object
    y: object


class Opaque:
    pass


DIFFERENT_SAMPLES = [
    None, 0, 1, True, 1.0, float("nan"), "", "1", b"1", "ab", ["a", "b"], ("a", "b"), [["a"], "b"], ["a", ["b"]],
    {"a": 1}, {"a": 2}, {"b": 1}, {1, 2}, {1, 3}, Colour.RED, Colour.BLUE, Point(1, 2), Point(2, 1), Point(1, Opaque()),
    torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16),
    torch.zeros(()), torch.zeros(0), torch.tensor([0.0, 1.0]), torch.tensor([1j]), torch.tensor([True]),
    np.zeros(2), np.zeros(2, dtype=np.float32), np.zeros((1, 2)), np.float32(0), np.array(["a", None], dtype=object),
    Image.new("L", (2, 2)), Image.new("L", (2, 2), 1), Image.new("RGB", (2, 2)), Image.new("L", (4, 1)),
    Image.new("P", (2, 2)),
]  # fmt: skip


def test_different_samples_have_different_digests():
    digests = [sample_digest(sample) for sample in DIFFERENT_SAMPLES]
    assert None not in digests
    assert len(set(digests)) == len(digests)


def test_equal_samples_have_equal_digests():
    assert sample_digest({"a": 1, "b": 2}) == sample_digest({"b": 2, "a": 1})
    assert sample_digest(torch.arange(6).view(2, 3).T) == sample_digest(torch.arange(6).view(2, 3).T.contiguous())
    assert sample_digest(np.arange(6)[::2]) == sample_digest(np.array([0, 2, 4]))
    assert sample_digest(torch.tensor([1j]).conj()) == sample_digest(torch.tensor([complex(0, -1)]))
    assert sample_digest(Image.new("L", (2, 2))) == sample_digest(Image.new("L", (2, 2)))


def test_what_has_no_content_to_compare_has_no_digest():
    loop = []
    loop.append(loop)
    sparse = torch.eye(2).to_sparse()
    for sample in (
        Opaque(),
        [Opaque()],
        {"a": Opaque()},
        Point(Opaque(), Opaque()),
        loop,
        sparse,
        torch.empty(2, device="meta"),
    ):
        assert sample_digest(sample) is None
    # AND beside others it counts with its type
    assert sample_digest([1, Opaque()]) == sample_digest([1, Opaque()]) != sample_digest([2, Opaque()])


@pytest.mark.parametrize(("length", "count"), [(1, 5), (2, 5), (5, 5), (1000, 256), (10**9, 256), (300, 256)])
def test_indices_are_spread_over_the_dataset(length, count):
    indices = spread_indices(length, count)
    assert len(set(indices)) == len(indices) == min(length, count)
    assert {0, length - 1} <= set(indices)
    assert indices == spread_indices(length, count)
    gaps = np.diff(sorted(indices))
    assert len(gaps) == 0 or gaps.max() <= 2 * length / len(indices) + 1


def test_no_samples_have_no_indices():
    assert spread_indices(0, 5) == ()
