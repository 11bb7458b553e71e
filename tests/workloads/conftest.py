import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """Keep made-up files out of the user's cache."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home
