import pytest
from builders import trial_config
from torch.utils.data import DataLoader

from pipetune.training.loader import loader_kwargs


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_without_workers_torch_accepts_what_is_left():
    kwargs = loader_kwargs(trial_config(0, batch_size=3, pin_memory=True))
    assert kwargs == {"batch_size": 3, "num_workers": 0, "pin_memory": True}
    loader = DataLoader(range(6), **kwargs)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_with_workers_every_knob_reaches_torch():
    kwargs = loader_kwargs(trial_config(2, batch_size=3, prefetch_factor=5, persistent_workers=True))
    loader = DataLoader(range(6), **kwargs)
    assert kwargs == {name: getattr(loader, name) for name in kwargs}
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 5, True)
