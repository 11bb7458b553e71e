"""The global random state: seeded for each trial, and left as it was by whatever only looks."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, which users' augmentations draw from."""
    seed_on_host(seed)
    torch.manual_seed(seed)


def seed_on_host(seed: int) -> None:
    """The same without reaching for a GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global one is meant
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put the host's global random state back on the way out."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as above
        torch.set_rng_state(torch_state)
