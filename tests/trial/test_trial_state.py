"""The kept first state: equal, independent, and in memory that forks share."""

import copy
import os
from collections import OrderedDict

import pytest
import torch

from pipetune.trial.state import put_aside

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 1, 7)])
def test_a_copy_equals_its_tensor_and_is_its_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # GIVEN a state with a tensor
    tensor = (torch.rand(shape) * 9).to(dtype)
    expected = tensor.clone()
    # WHEN it is put aside and then changed
    kept = put_aside({"a": tensor, "b": {0: [tensor, 3]}, "c": (tensor, "x")})
    tensor.zero_()
    # THEN each copy holds what it held
    for found in (kept["a"], kept["b"][0][0], kept["c"][0]):
        assert found.dtype is dtype
        assert found.shape == expected.shape
        assert torch.equal(found.to(torch.complex64), expected.to(torch.complex64))
    assert (kept["b"][0][1], kept["c"][1]) == (3, "x")


def test_copies_do_not_overlap() -> None:
    # GIVEN tensors whose sizes are no multiple of a cache line
    tensors = {str(n): torch.full((n,), n, dtype=torch.uint8) for n in range(1, 200)}
    kept = put_aside(tensors)
    # WHEN one is overwritten
    kept["100"].fill_(255)
    # THEN its neighbours are as they were
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items() if name != "100")


def test_a_copy_of_one_does_not_carry_all_the_others() -> None:
    kept = put_aside({"small": torch.ones(4), "large": torch.ones(100_000)})
    assert copy.deepcopy(kept["small"]).untyped_storage().nbytes() == 16


def test_views_strides_and_parameters_are_copied_by_value() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    kept = put_aside({"t": base.t(), "row": base[1], "p": torch.nn.Parameter(base), "conj": torch.ones(2) * 1j})
    assert torch.equal(kept["t"], base.t())
    assert torch.equal(kept["row"], base[1])
    assert torch.equal(kept["p"], base)
    assert not kept["p"].requires_grad


def test_sparse_tensors_are_kept_too() -> None:
    tensor = torch.eye(3).to_sparse()
    kept = put_aside({"s": tensor})
    assert torch.equal(kept["s"].to_dense(), torch.eye(3))


def test_an_empty_state_is_empty() -> None:
    assert put_aside(OrderedDict()) == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_shares_the_memory_instead_of_copying_its_pages() -> None:
    # GIVEN a tensor put aside
    kept = put_aside({"a": torch.zeros(1000)})
    # WHEN a forked child writes into it
    child = os.fork()
    if child == 0:
        kept["a"].numpy()[:] = 7  # no torch call: its threads are not there
        os._exit(0)
    os.waitpid(child, 0)
    # THEN it was the same memory: nothing that a fork would have to copy
    assert torch.equal(kept["a"], torch.full((1000,), 7.0))
