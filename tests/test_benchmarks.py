"""Benchmarks are run by hand; here they only have to start, and one of them to come to its end."""

import os
import subprocess
import sys

import pytest
from commands import ROOT

FOLDER = ROOT / "tests/benchmarks"
BENCHMARKS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
PATHS = os.pathsep.join(str(ROOT / part) for part in (".", "tests", "tests/search"))


def ran(script, *arguments):
    return subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_starts_and_says_what_it_is(script):
    done = ran(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "Run:" in done.stdout


def test_a_simulated_study_comes_to_its_end():
    done = ran(FOLDER / "certification.py", "--seeds", "1")
    assert "Traceback" not in done.stderr
    assert "8 times faster" in done.stdout, done.stdout + done.stderr
