"""Interrupting `tune`: it ends within seconds with all it started, and the same command goes on from there."""

import json
import os
import signal
import time

import pytest
import yaml
from commands import TINY, TRIAL_LINE, Running, pipetune

from pipetune.search.signals import Signals

# Trials of some seconds, so that a signal meets one that is running with workers.
SLOW = TINY.replace("num_workers: [0, 1]", "num_workers: [1, 2]").replace("cpu_ms: 0.05", "cpu_ms: 0.05, wait_ms: 2")
# All four commands spend of one budget.
SLOW = SLOW.replace("time: 60s", "time: 300s")


def status(folder):
    return yaml.safe_load((folder / "best.yaml").read_text())["status"]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """One study: interrupted by Ctrl-C, finished with a budget of one trial, terminated with more, and killed."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "slow.yaml").write_text(SLOW)
    command = ("tune", "slow.yaml", "--study-dir", folder / "study")
    told = {"folder": folder / "study"}

    first = Running(*command, cwd=folder)
    try:
        first.wait_for(first.trial_numbers)
        time.sleep(1.5)  # into the next trial
        told["interrupted"] = first.end_by(signal.SIGINT)
    finally:
        first.clean_up()
    told["status after the interrupt"] = status(folder / "study")

    told["finished"] = pipetune(*command, "--trials", "1", "--json", cwd=folder, quick=True)
    told["status when finished"] = status(folder / "study")

    second = Running(*command, cwd=folder)
    try:
        second.wait_for(second.trial_numbers)
        told["numbers after it was resumed"] = second.trial_numbers()
        told["terminated"] = second.end_by(signal.SIGTERM)
    finally:
        second.clean_up()
    told["status after the termination"] = status(folder / "study")

    third = Running(*command, cwd=folder)
    try:
        third.wait_for(third.trial_numbers)
        time.sleep(0.5)  # into the next trial
        told["killed"] = third.end_by(signal.SIGKILL)
    finally:
        third.clean_up()
    return told


@pytest.mark.parametrize(("how", "code", "name"), [("interrupted", 130, "SIGINT"), ("terminated", 143, "SIGTERM")])
def test_a_signal_ends_the_command_and_all_it_started_within_10_s(story, how, code, name):
    ended = story[how]
    assert ended.code == code
    assert ended.seconds < 10
    assert ended.left == []
    assert name in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_best_so_far_is_there_once_the_baseline_was_measured(story):
    assert story["status after the interrupt"] == "provisional"


def test_the_same_command_goes_on_from_there(story):
    # GIVEN a study whose baseline was measured before the interrupt
    run = story["finished"]

    # WHEN it runs again with a budget of that one trial, THEN nothing is left but to certify
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stderr.splitlines() if TRIAL_LINE.match(line)] == []
    assert [trial["number"] for trial in json.loads(run.stdout)["trials"]] == [0]
    assert story["status when finished"] == "no_gain"


def test_more_budget_goes_on_with_the_next_trial(story):
    assert story["numbers after it was resumed"][0] > 0


def test_an_interrupt_leaves_the_certified_file_alone(story):
    assert story["status after the termination"] == "no_gain"


def test_nothing_outlives_a_command_that_was_killed(story):
    assert story["killed"].code == -signal.SIGKILL
    assert story["killed"].left == []


def test_show_reads_an_interrupted_study(story):
    run = pipetune("show", story["folder"], "--json", cwd=story["folder"])
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["trials"]) >= 2


def test_a_signal_before_the_first_trial_leaves_no_file(tmp_path):
    # GIVEN a command that is still building the workload
    (tmp_path / "slow.yaml").write_text(SLOW)
    run = Running("tune", "slow.yaml", cwd=tmp_path)
    try:
        run.wait_for(lambda: len(run.processes()) > 1)
        time.sleep(0.5)

        # WHEN it is interrupted
        ended = run.end_by(signal.SIGINT)
    finally:
        run.clean_up()

    # THEN it ends in order
    assert ended.code == 130
    assert ended.left == []
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "studies/tiny/best.yaml").exists()


def test_a_workload_is_not_built_for_a_command_that_was_killed(tmp_path):
    # GIVEN a workload that takes long to build, and a trial process that has only just started
    (tmp_path / "job.py").write_text("import time\ntime.sleep(20)\n")
    (tmp_path / "job.yaml").write_text(SLOW.replace("builtin:synthetic", "job.py:build"))
    run = Running("tune", "job.yaml", cwd=tmp_path)
    try:
        run.wait_for(lambda: len(run.processes()) > 1)

        # WHEN the command is killed
        run.end_by(signal.SIGKILL)
    finally:
        run.clean_up()

    # THEN that process ends too, long before its workload is built
    assert run.left(within_s=8) == []


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT], ids=["nohup", "background job"])
def test_a_signal_that_is_ignored_stays_ignored(ignored):
    # `nohup pipetune tune ...` must outlive its terminal.
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with Signals().caught():
            os.kill(os.getpid(), ignored)
            assert signal.getsignal(ignored) is signal.SIG_IGN
    finally:
        signal.signal(ignored, before)
