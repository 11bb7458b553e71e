from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from pipetune.errors import WorkloadError
from pipetune.training.batch import batch_bytes, count_samples, to_device

# A device that holds no data: whatever arrives there was really moved.
META = torch.device("meta")


class Pair(NamedTuple):
    inputs: object
    labels: torch.Tensor


class Edge(NamedTuple):
    start: torch.Tensor
    to: torch.Tensor


@dataclass(frozen=True)
class Example:
    inputs: torch.Tensor
    name: str = "train"


@dataclass
class Padded:
    inputs: torch.Tensor
    length: int = field(init=False)

    def __post_init__(self):
        self.length = len(self.inputs)


class Encoding(UserDict):
    """As tokenizers give it: a mapping with a `.to` of its own that knows no non_blocking."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()})


class InPlace:
    """A batch that moves its own tensors, as many hand-written ones do, and returns nothing."""

    def __init__(self):
        self.inputs = torch.ones(2, 3)

    def to(self, device):
        self.inputs = self.inputs.to(device)


class Asked:
    def __init__(self):
        self.non_blocking = None

    def to(self, device, non_blocking=False):
        assert device == META
        self.non_blocking = non_blocking
        return self


def rows(count=2):
    return torch.ones(count, 3)


def moved(batch):
    return to_device(batch, META, non_blocking=False)


@pytest.mark.parametrize(
    ("batch", "tensor_of"),
    [
        (rows(), lambda b: b),
        ([rows()], lambda b: b[0]),
        ((1, rows()), lambda b: b[1]),
        ({"x": {"y": [0, (rows(),)]}}, lambda b: b["x"]["y"][1][0]),
        (OrderedDict(x=rows()), lambda b: b["x"]),
        (UserDict({"x": rows()}), lambda b: b["x"]),
        (Encoding({"x": rows()}), lambda b: b["x"]),
        (Pair(rows(), rows()), lambda b: b.labels),
        (Example(rows()), lambda b: b.inputs),
        (Padded(rows()), lambda b: b.inputs),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_moved_and_types_are_kept(batch, tensor_of):
    result = moved(batch)
    assert type(result) is type(batch)
    assert tensor_of(result).device == META
    assert tensor_of(batch).device.type == "cpu"


def test_what_is_no_tensor_comes_through_as_it_is():
    names, marks = ["a", "b"], np.arange(2)
    result = moved({"names": names, "marks": marks, "none": None, "size": torch.Size([2, 3]), "type": torch.Tensor})
    assert result["names"] == names
    assert result["marks"] is marks
    assert result["none"] is None
    assert result["size"] == torch.Size([2, 3])
    assert result["type"] is torch.Tensor


def test_a_dataclass_keeps_its_other_fields():
    assert moved(Example(rows(), name="test")).name == "test"
    assert moved(Padded(rows(5))).length == 5


def test_a_field_called_to_is_not_a_method():
    result = moved(Edge(rows(), rows()))
    assert result.start.device == META
    assert result.to.device == META


def test_a_batch_that_moves_itself_in_place_is_not_lost():
    batch = InPlace()
    assert moved(batch) is batch
    assert batch.inputs.device == META


@pytest.mark.parametrize("non_blocking", [False, True])
def test_non_blocking_reaches_a_to_that_knows_it(non_blocking):
    batch = Asked()
    assert to_device([batch], META, non_blocking=non_blocking) == [batch]
    assert batch.non_blocking is non_blocking


def test_a_packed_sequence_is_moved_by_its_own_to():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    result = to_device(packed, torch.device("cpu"), non_blocking=True)
    assert torch.equal(result.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (rows(5), 5),
        ((rows(5), "label"), 5),
        ({"x": rows(5)}, 5),
        ({"x": {"y": [rows(5), rows(3)]}}, 5),
        (["names", rows(5)], 5),
        (Pair("names", rows(5)), 5),
        (Example(rows(5)), 5),
        (UserDict({"x": rows(5)}), 5),
        (rows(0), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch, samples):
    assert count_samples(batch) == samples


@pytest.mark.parametrize(
    "batch",
    [["a", "b"], {}, torch.tensor(3.0), {"step": torch.tensor(3), "x": rows()}, SimpleNamespace(num_graphs=2), None],
    ids=["strings", "empty", "scalar", "scalar_first", "graph", "none"],
)
def test_where_samples_cannot_be_told_the_remedy_is(batch):
    with pytest.raises(WorkloadError) as error:
        count_samples(batch)
    assert str(error.value) == (
        f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension; "
        "give the Workload a count_samples(batch) -> int"
    )


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 8), 128),
        ({"ids": torch.zeros(4, dtype=torch.int64), "names": ["a"] * 4}, 32),
        ((torch.zeros(4, 8), [torch.zeros(4, dtype=torch.uint8), {"mask": torch.zeros(4, 2, dtype=torch.bool)}]), 140),
        (Pair(torch.zeros(2), torch.zeros(2)), 16),
        (Example(torch.zeros(4, 3, dtype=torch.float64)), 96),
        (UserDict(ids=torch.zeros(3)), 12),
        (torch.zeros(64, 8)[:4], 128),
        ("text", 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_bytes_of_a_batch_are_those_of_all_its_tensors(batch, expected):
    assert batch_bytes(batch) == expected
