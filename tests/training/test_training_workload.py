import pytest
from torch import nn
from torch.utils.data import DataLoader

from pipetune.errors import InputError
from pipetune.training.workload import Workload


def loss(_model, _batch):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"dataset": [1]}, "exactly one of loss and train_step"),
        ({"dataset": [1], "loss": loss, "train_step": loss}, "exactly one of loss and train_step"),
        ({"loss": loss}, "a dataset, a loader or make_loader"),
        ({"loss": loss, "dataset": [1], "loader": DataLoader([1])}, "takes neither dataset nor make_loader"),
        ({"loss": loss, "loader": DataLoader([1]), "make_loader": DataLoader}, "takes neither dataset nor make_loader"),
        ({"loss": loss, "dataset": [1], "sampler": [0], "batch_sampler": [[0]]}, "not both"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(parts, named):
    with pytest.raises(InputError, match=named):
        Workload(model=nn.Identity(), optimizer=lambda _: None, **parts)


@pytest.mark.parametrize(
    "parts",
    [
        {"loss": loss, "dataset": [1]},
        {"train_step": loss, "loader": DataLoader([1])},
        {"loss": loss, "make_loader": DataLoader},
        {"loss": loss, "make_loader": DataLoader, "dataset": [1]},
    ],
)
def test_what_belongs_together_is_taken(parts):
    assert Workload(model=nn.Identity(), optimizer=lambda _: None, **parts).shuffle
