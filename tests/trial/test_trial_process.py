"""The line between parent and host: what the user's code may do to it, and what is left when either dies."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from trial_kit import PRELUDE, QUICK, TIMEOUTS, config, family, host_pids, hosts, left_after, lines

from pipetune.core.measurement import FailureKind, Measurement, TrialFailure
from pipetune.trial.process import HostProcess

MESSY = """
def mess():
    print("plain words", flush=True)
    print('{"kind": "measured"}', flush=True)
    os.write(1, b"\\xff\\x00 not a line")
    os.write(2, b"to standard error")
    reply = int(sys.argv[1])
    os.write(reply, b'garbage\\n{"kind": "measured"}\\n[]\\n\\xff\\n')
    os.write(reply, b"garbage without an end")

class Messy(Rows):
    def __getitem__(self, index):
        mess()
        return super().__getitem__(index)

def train_step(model, batch, optimizer, step):
    mess()
    with step.autocast():
        value = loss(model, batch)
    step.backward(value)
    step.update()

def build():
    mess()
    return workload(dataset=Messy(), train_step=train_step)
"""


def test_what_the_user_writes_anywhere_is_no_answer(tmp_path):
    with hosts(tmp_path, MESSY, timeouts=replace(TIMEOUTS, set_up_s=10.0, stall_s=5.0)) as runner:
        assert runner.describe().dataset_samples == 256
        for trial in (config(0), config(2)):
            outcome = runner.run(trial, QUICK)
            assert isinstance(outcome, Measurement), outcome
    log = (tmp_path / "logs" / "host-1.log").read_bytes()
    assert b"plain words" in log
    assert b"to standard error" in log


def test_a_flood_of_garbage_does_not_keep_a_hung_trial_alive(tmp_path):
    code = """
def train_step(model, batch, optimizer, step):
    while True:
        os.write(int(sys.argv[1]), b"garbage\\n" * 1000)

def build():
    return workload(train_step=train_step)
"""
    with hosts(tmp_path, code, timeouts=replace(TIMEOUTS, stall_s=2.0)) as runner, _alarm(15):
        outcome = runner.run(config(0), QUICK)
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind is FailureKind.TIMEOUT


ASKING = """
def train_step(model, batch, optimizer, step):
    if step.optimizer_steps == 0:
        subprocess.run(["cat"], check=True)  # like every ffmpeg that is started without -nostdin
        assert sys.stdin.read() == ""
    with step.autocast():
        value = loss(model, batch)
    step.backward(value)
    step.update()

def build():
    try:
        (HERE / "said").write_text(input("continue? "))
    except EOFError:
        (HERE / "said").write_text("nobody there")
    return workload(train_step=train_step)
"""


def test_the_users_code_finds_an_empty_standard_input(tmp_path):
    """The requests come on it: whoever reads them takes them away."""
    with hosts(tmp_path, ASKING, timeouts=replace(TIMEOUTS, set_up_s=8.0, stall_s=3.0)) as runner:
        for _ in range(2):
            assert isinstance(runner.run(config(0), QUICK), Measurement)
    assert lines(tmp_path / "said") == ["nobody there"]


def test_a_file_in_the_working_folder_does_not_hide_a_library(tmp_path, monkeypatch):
    """The command itself is not troubled by it, so its hosts must not be either."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "random.py").write_text("raise RuntimeError('this is the file of the user')")
    monkeypatch.chdir(tmp_path / "here")
    with hosts(tmp_path, "build = workload") as runner:
        assert runner.describe().dataset_samples == 256


HELPED = """
def train_step(model, batch, optimizer, step):
    subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGKILL)

def build():
    subprocess.Popen(["sleep", "1000"])
    return workload(train_step=train_step)
"""


@pytest.mark.parametrize("ending", ["failure", "close"])
def test_what_the_users_code_started_ends_with_the_host(tmp_path, ending):
    with hosts(tmp_path, HELPED) as runner:
        runner.describe()
        (pid,) = host_pids(runner)
        assert len(family(pid)) == 2
        if ending == "failure":
            assert isinstance(runner.run(config(0), QUICK), TrialFailure)
        else:
            runner.close()
        assert left_after(2, lambda: family(pid)) == []


def test_closing_twice_is_harmless_and_leaves_nothing(tmp_path):
    with hosts(tmp_path, "build = workload") as runner:
        runner.describe()
        pids = host_pids(runner)
        runner.close()
        assert all(family(pid) == [] for pid in pids)
        runner.close()


def test_closing_ends_a_host_that_does_not_listen(tmp_path):
    host = HostProcess(tmp_path / "host.log")
    os.kill(host.pid, signal.SIGSTOP)
    began = time.monotonic()
    host.close()
    assert time.monotonic() - began < 5
    assert family(host.pid) == []


HUNG = """
class Hung(Rows):
    def __getitem__(self, index):
        (HERE / f"hung-{os.getpid()}").touch()
        time.sleep(10**6)

def build(start_method):
    return workload(dataset=Hung(), multiprocessing_context=start_method)
"""

PARENT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from trial_kit import QUICK, config
from pipetune.core.study import WorkloadSpec
from pipetune.trial.runner import HostRunner
folder = Path(sys.argv[1])
spec = WorkloadSpec(target="job.py:build", options={"start_method": sys.argv[2]}, folder=str(folder))
HostRunner(spec, device="cpu", seed=0, log_folder=folder / "logs").run(config(2), QUICK)
"""


@pytest.mark.parametrize(
    ("start_method", "files", "count"),
    [("fork", "logs/host-1.log", 1), ("fork", "hung-*", 2), ("forkserver", "hung-*", 2)],
    ids=["being started", "forked workers hang", "served workers hang"],
)
def test_a_host_dies_with_its_parent(tmp_path, start_method, files, count):
    # GIVEN a parent of its own with a host that has only just been started, or has two workers that hang
    (tmp_path / "job.py").write_text(PRELUDE + textwrap.dedent(HUNG))
    paths = [path for path in sys.path if path.endswith(("tests", "tests/trial"))]
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), start_method, *paths]) as parent:
        assert left_after(20, lambda: count - len(list(tmp_path.glob(files)))) == 0
        assert left_after(5, lambda: not psutil.Process(parent.pid).children()) is False
        (host,) = psutil.Process(parent.pid).children()
        assert len(family(host.pid)) >= count
        # WHEN the parent is killed
        parent.kill()
    # THEN nothing of it remains
    assert left_after(10, lambda: family(host.pid)) == []


@contextmanager
def _alarm(seconds):
    """Raise TimeoutError in the middle of what would otherwise go on for ever."""

    def ring(_number, _frame):
        message = f"still there after {seconds} s"
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, ring)
    left = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(left)
        signal.signal(signal.SIGALRM, before)
