import pytest
from lab import Lab

from pipetune.search import guide


@pytest.fixture
def lab(tmp_path):
    """A place for one study."""
    return Lab(tmp_path)


@pytest.fixture
def whole_budget(monkeypatch):
    """For what takes more trials than a quiet surface is worth: the search does not end by itself."""
    monkeypatch.setattr(guide, "LEAST_TRIALS", 10**6)
