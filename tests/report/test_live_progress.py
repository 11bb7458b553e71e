"""A study on the console while it goes on: a line a trial, no more where it is no terminal."""

from io import StringIO

import pytest
from builders import PLAN, facts, failure, space, trial_config, usage
from made_results import RECORDS, record, trial
from rich.console import Console

from pipetune.core.measurement import FailureKind, Phase
from pipetune.core.space import Amp
from pipetune.report.live import LiveProgress


@pytest.fixture
def console():
    return Console(file=StringIO(), width=80)


@pytest.fixture
def progress(console):
    with LiveProgress(console) as live:
        live.ready(facts(), space(), "CPU affinity (4 of 64)", PLAN)
        console.file.seek(0)
        console.file.truncate()
        yield live


def lines(console):
    return console.file.getvalue().splitlines()


def test_what_is_tuned_is_said_in_one_line(console):
    with LiveProgress(console) as live:
        live.ready(facts(), space(), "CPU affinity (4 of 64)", PLAN)
    [line] = lines(console)
    assert line == (
        f"A CPU, torch 2.13.0: {len(space())} configurations; workers 0, 1, 2, 4 (bounded by CPU affinity (4 of 64)); "
        "micro-batch 64, 128, 256; fp32, bf16"
    )


def test_a_trial_is_one_line(console, progress):
    # WHEN a trial begins, goes through its phases and ends
    progress.trial_began(RECORDS[0].config, "baseline", 500.0)
    for phase in Phase:
        progress.phase(phase)
    progress.trial_ended(RECORDS[0], RECORDS[0], 492.0)

    # THEN one line was printed
    [line] = lines(console)
    assert line.startswith("  0  w=0 b=64x4 fp32")
    for part in ("296.1/s", "gpu 18%", "8:12"):
        assert part in line


def test_the_best_so_far_may_be_another_trial(console, progress):
    progress.trial_ended(RECORDS[0], RECORDS[2], None)
    [line] = lines(console)
    assert line.index("296.1/s") < line.index("best") < line.index("2,415/s")


def test_a_failure_is_one_line_with_its_reason(console, progress):
    outcome = failure(kind=FailureKind.ERROR, message="ValueError: [red]x[/red]\nsecond line")
    progress.trial_ended(record(3, trial_config(), outcome), None, 60.0)
    [line] = lines(console)
    assert line.startswith("  3  w=4 p=2 persist b=64x4 fp32")
    assert line.endswith("error in measure: ValueError: [red]x[/red]")


def test_notes_are_shown_as_they_are(console, progress):
    progress.note("stopped: [bold]x[/bold]")
    assert lines(console) == ["stopped: [bold]x[/bold]"]


def test_escape_codes_of_a_users_error_do_not_reach_the_terminal(console, progress):
    outcome = failure(kind=FailureKind.ERROR, message="ValueError: \x1b[31mred")
    progress.trial_ended(record(3, trial_config(), outcome), None, 60.0)
    assert "\x1b" not in console.file.getvalue()


@pytest.mark.parametrize("gpu", [None, usage(99.0)], ids=["cpu", "gpu"])
def test_a_measured_trials_line_fits_80_columns(console, progress, gpu):
    # GIVEN an ordinary large configuration, and a budget of minutes
    config = trial_config(16, batch_size=512, accumulation_steps=2, amp=Amp.BF16, pin_memory=True)
    done = trial(12, config, 12_345.0, gpu=gpu, gpu_reason=None if gpu else "no GPU")

    # WHEN it ends
    progress.trial_ended(done, done, 492.0)

    # THEN its line is not broken
    [line] = lines(console)
    assert len(line.rstrip()) <= 80, line


def test_a_terminal_gets_a_status_line():
    # GIVEN a terminal
    console = Console(file=StringIO(), width=80, force_terminal=True)

    # WHEN a trial is running
    with LiveProgress(console) as live:
        live.ready(facts(), space(), "all CPUs present", PLAN)
        live.trial_began(trial_config(), "search", 75.0)
        live.phase(Phase.WARM_UP)

    # THEN the status says what it does, and how much is left
    shown = console.file.getvalue()
    assert "search: w=4 p=2 persist b=64x4 fp32, 1 min 15 s of the budget left: " in shown


def test_every_phase_has_words(progress):
    for phase in Phase:
        progress.phase(phase)  # a KeyError for one without
