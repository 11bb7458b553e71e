import os
import signal
import subprocess
import sys
import time

import pytest

from pipetune.errors import InputError
from pipetune.workloads import tabular
from pipetune.workloads.cache import cache_root, made_once

SLOW = """
import sys, time
from pathlib import Path
from pipetune.workloads.cache import made_once

def make(folder):
    (folder / "first").write_text("x")
    with Path(sys.argv[1], "calls").open("a") as calls:
        calls.write("x")
    time.sleep(float(sys.argv[2]))
    (folder / "second").write_text("x")

made_once("entry", make, cache_dir=sys.argv[1])
"""


def start(folder, seconds):
    return subprocess.Popen([sys.executable, "-c", SLOW, str(folder), str(seconds)])


def wait_for(path):
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def visible(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def test_a_second_build_makes_nothing():
    first = tabular.build(rows=20, features=3).data_paths[0]
    stamp = first.stat().st_mtime_ns
    second = tabular.build(rows=20, features=3).data_paths[0]
    assert (second, second.stat().st_mtime_ns) == (first, stamp)


def test_other_options_are_another_entry(cache_home):
    for options in ({"rows": 20}, {"rows": 21}, {"features": 4}, {"seed": 1}):
        tabular.build(**{"rows": 20, "features": 3, **options})
    assert len(visible(cache_home / "pipetune" / "workloads")) == 4


def test_a_killed_generation_leaves_no_entry_and_the_next_one_is_whole(tmp_path):
    child = start(tmp_path, 60)
    wait_for(tmp_path / "calls")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert visible(tmp_path) == ["calls"]
    assert start(tmp_path, 0).wait() == 0
    assert visible(tmp_path / "entry") == ["first", "second"]
    assert not list(tmp_path.glob("*.part")), "what the killed one left is cleared away"


def test_two_at_once_make_it_once(tmp_path):
    children = [start(tmp_path, 0.3) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert (tmp_path / "calls").read_text() == "x"
    assert visible(tmp_path / "entry") == ["first", "second"]


def test_a_failed_generation_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise ValueError("out of ideas")

    with pytest.raises(ValueError, match="out of ideas"):
        made_once("entry", fail, cache_dir=tmp_path)
    assert visible(tmp_path) == []
    assert not list(tmp_path.glob("*.part"))


def test_another_machine_may_be_first(tmp_path):
    def overtaken(folder):
        (folder / "mine").write_text("x")
        (tmp_path / "entry").mkdir()
        (tmp_path / "entry" / "theirs").write_text("x")

    assert visible(made_once("entry", overtaken, cache_dir=tmp_path)) == ["theirs"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write .*set workload\.options\.cache_dir"):
        made_once("entry", lambda _: None, cache_dir=tmp_path / "file")


def test_where_the_cache_is(tmp_path, monkeypatch):
    assert cache_root("~/x").is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "pipetune" / "workloads"
