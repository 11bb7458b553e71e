import pytest
from lab import Lab


@pytest.fixture
def lab(tmp_path):
    """A place for one study."""
    return Lab(tmp_path)
