"""Findings as people and programs get them."""

import pytest
from rich.console import Console

from pipetune.core.findings import Finding, Severity
from pipetune.report.findings import findings_object, findings_view

FINE = Finding(code="torch", severity=Severity.OK, figure="torch 2.13.0", why="everything else runs in it")
SLOW = Finding(
    code="pcie",
    severity=Severity.WARNING,
    figure="8 lanes of 16 [bold]\x1b[31m",
    why="batches cross it",
    remedy="use another slot",
)
DEAD = Finding(
    code="shared_memory", severity=Severity.STOP, figure="64 MiB", why="workers die", remedy="--shm-size=16g"
)


def printed(*findings):
    console = Console(width=80, file=None, record=True, quiet=False)
    with console.capture() as caught:
        console.print(findings_view(findings))
    return caught.get()


def test_a_line_each_with_state_reason_and_remedy():
    lines = [" ".join(line.split()) for line in printed(FINE, DEAD).splitlines()]
    assert lines == [
        "ok torch 2.13.0",
        "everything else runs in it",
        "stop 64 MiB",
        "workers die",
        "-> --shm-size=16g",
        "",
        "1 would stop training, 0 would slow it down",
    ]


@pytest.mark.parametrize(("findings", "words"), [
    ([FINE], "nothing found that would stop training or slow it down"),
    ([FINE, SLOW], "nothing would stop training; 1 would slow it down"),
    ([SLOW, DEAD], "1 would stop training, 1 would slow it down"),
])  # fmt: skip
def test_the_sum_comes_last(findings, words):
    assert printed(*findings).strip().endswith(words)


def test_names_of_others_steer_no_terminal():
    text = printed(SLOW)
    assert "\x1b" not in text
    assert "[bold]" in text


def test_programs_get_everything():
    assert findings_object([FINE, DEAD]) == {
        "worst": "stop",
        "findings": [
            {"code": "torch", "severity": "ok", "figure": "torch 2.13.0", "why": FINE.why, "remedy": None,
             "gain": None},
            {"code": "shared_memory", "severity": "stop", "figure": "64 MiB", "why": DEAD.why,
             "remedy": "--shm-size=16g", "gain": None},
        ],
    }  # fmt: skip
