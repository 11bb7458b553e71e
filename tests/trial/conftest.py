import pytest


@pytest.fixture
def begin(folder):
    """Make the workload fail from now on; it is sound again after the test."""
    file = folder / "fault"
    yield file.write_text
    file.unlink(missing_ok=True)
