"""The report for people, as exact text in 80 columns; tests/report/golden holds what it must be."""

from dataclasses import replace
from pathlib import Path

import pytest
from builders import PLAN, facts, measurement, space, trial_config, windows
from made_results import (
    RECORDS,
    certified,
    failed,
    failures,
    no_gain,
    provisional,
    rendered,
    result,
    shown,
    summary,
    trial,
    tuned_config,
    widest,
)

from pipetune.core.ceilings import LoaderDemand
from pipetune.core.measurement import FailureKind
from pipetune.core.record import TrialRecord, Validation
from pipetune.report.console import MAX_REMARKS, duration, rate, remark_lines, trials_table, validation_text

GOLDEN = Path(__file__).parent / "golden"
ESCAPE = "\x1b[31m\x1b]0;owned\x07red\x1b[0m"


def validation(**knobs):
    return Validation(facts=facts(), plan=PLAN, space=space(**knobs), workers_limit="CPU affinity (4 of 64)")


@pytest.mark.parametrize("made", [certified, no_gain, provisional, failures], ids=lambda made: made.__name__)
def test_the_report_is_word_for_word(made):
    assert shown(made()) == (GOLDEN / f"{made.__name__}.txt").read_text()


def test_the_validation_is_word_for_word():
    text = validation_text(validation(num_workers=tuple(range(9))))
    assert text + "\n" == (GOLDEN / "validation.txt").read_text()


@pytest.mark.parametrize("made", [certified, no_gain, provisional, failures, widest], ids=lambda made: made.__name__)
def test_nothing_is_wider_than_80_columns_or_cut(made):
    text = shown(made())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize(("demand", "told"), [
    (LoaderDemand(cpus=22.1, wait_share=0.0), "loading would need 23 CPUs; 16 are usable"),
    (LoaderDemand(cpus=16.0, wait_share=0.9), "storage-bound: reading a sample is waiting for 90% of its time"),
    (LoaderDemand(cpus=3.24, wait_share=0.1), "loading would need the work of 3.2 CPUs"),
])  # fmt: skip
def test_what_the_loader_lacks_is_told(demand, told):
    text = " ".join(shown(result(summary=summary(demand=demand))).split())
    assert told in text
    assert told not in " ".join(shown(certified()).split())


def test_importances_stand_beside_the_alternatives_most_important_first():
    text = " ".join(shown(result(summary=summary(importances={"amp": 0.204, "num_workers": 0.796}))).split())
    assert (
        "what set the best trials apart (importances by Optuna, rough with 3 trials): num_workers 80%, amp 20%" in text
    )
    assert "importances" not in shown(certified())


def test_what_probes_cost_is_told():
    assert "probes 31 s of it" in " ".join(shown(result(summary=summary(probes_s=31.2))).split())
    assert "probes" not in shown(certified())


def test_the_longest_configuration_keeps_its_line_in_the_table_of_trials():
    assert "*123  w=128 p=16 pin persist b=4096x16 bf16  12,345,679 " in shown(widest())


def test_every_failure_kind_is_told():
    text = shown(failures())
    assert [kind for kind in FailureKind if kind not in text] == []


def test_each_fact_of_a_certified_result_is_there():
    # GIVEN a result with a note
    text = shown(result(notes=("two rounds were all that the budget allowed",)))

    # THEN the verdict, both figures with their intervals, the ceiling, what it changes and the file are told
    for fact in (
        "8.15 times the baseline",
        "2,390 - 2,418",
        "291.8 - 298.4",
        "97 % of the 2,488 samples/s",
        "changes training: the forward pass runs in bf16",
        "note: two rounds",
        "result: studies/photos/best.yaml",
    ):
        assert fact in text


def test_no_gain_shows_no_winner():
    text = shown(no_gain())
    assert "No gain" in text
    assert "\n tuned" not in text


def test_a_provisional_result_says_so():
    assert "(provisional: not measured again)" in shown(provisional())


@pytest.mark.parametrize("nasty", ["[red]x[/red]", "[/]", "[link=file:///]y[/link]", "\\[bold]z"])
def test_markup_in_what_users_name_is_shown_as_it_is(nasty):
    # GIVEN markup in every text that comes from the user's machine or code
    made = result(
        folder=Path(nasty),
        tuned=tuned_config(changes_training=(f"changed {nasty}",)),
        records=(*RECORDS, failed(3, RECORDS[0].config, FailureKind.ERROR, f"Error: {nasty}")),
        notes=(f"noted {nasty}",),
    )

    # THEN it is shown, not obeyed
    text = " ".join(shown(made).split())
    for part in (f"changed {nasty}", f"noted {nasty}", f"Error: {nasty}", f"result: {Path(nasty)}"):
        assert part in text


@pytest.mark.parametrize(
    "made",
    [
        result(records=(failed(0, RECORDS[0].config, FailureKind.ERROR, f"Error: {ESCAPE}"),)),
        result(notes=(f"noted {ESCAPE}",)),
    ],
    ids=["failure", "note"],
)
def test_escape_codes_in_what_users_name_do_not_reach_the_terminal(made):
    text = shown(made)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "red" in text


def test_a_failure_is_told_in_its_first_line():
    row = failed(0, RECORDS[0].config, FailureKind.ERROR, "ValueError: first\nsecond")
    text = rendered(trials_table((row,), PLAN, RECORDS[0].config))
    assert "ValueError: first" in text
    assert "second" not in text


def test_a_workers_exception_is_told_in_its_last_line():
    # A loader worker's exception arrives as the text of its whole traceback.
    message = (
        "ValueError: Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n  x\nValueError: bad row"
    )
    text = rendered(trials_table((failed(0, RECORDS[0].config, FailureKind.ERROR, message),), PLAN, RECORDS[0].config))
    assert "ValueError: bad row" in text
    assert "Caught" not in text


def test_an_unknown_spread_is_a_question_mark():
    [row] = rendered(
        trials_table(
            (trial(0, RECORDS[0].config, 100.0, windows=RECORDS[0].measurement.windows[:1]),), PLAN, RECORDS[0].config
        )
    ).splitlines()[1:]
    assert " ? " in row


def remarkable(number, **changes):
    config = trial_config(number)
    return TrialRecord(number=number, config=config, outcome=measurement(config, **changes), seconds=9.0)


def test_what_should_be_known_of_trials_stands_below_them():
    records = [
        remarkable(0),
        remarkable(1, settled=False),
        remarkable(2, settled=False, interference=("other processes used 1.2 of 2 CPUs",)),
        remarkable(3, allocation_retries=4, drained_samples=100.0),
    ]
    lines = remark_lines(records)
    assert lines[0] == "trials 1, 2: unstable: the rate did not settle in the time for it"
    assert lines[1] == "trial 2: other processes used 1.2 of 2 CPUs"
    assert lines[2].startswith("trial 3: ready batches were still falling, which would have flattered the rate by ")
    assert lines[3] == "trial 3: the GPU's memory was so full that it had to be cleared 4 times"


def test_many_remarks_are_cut_and_counted():
    lines = remark_lines([remarkable(number, interference=(f"cause {number}",)) for number in range(20)])
    assert len(lines) == MAX_REMARKS
    assert lines[-1] == f"and {20 - MAX_REMARKS + 1} more remarks, which --json tells"


def test_cold_trials_are_called_so():
    cold = tuple(replace(window, read_bytes=2**30) for window in windows([1000.0] * 8))
    assert remark_lines([remarkable(1, windows=cold)]) == ["trial 1: cold: its data came from storage"]


def test_one_trial_is_not_plural():
    text = shown(result(records=RECORDS[:1]))
    assert "\n1 trial (1 measured)" in text


def test_a_list_of_worker_counts_is_not_shown_as_a_range():
    text = validation_text(validation(num_workers=(0, 4, 16)))
    assert "0, 4, 16" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(98.764, "98.76"), (999.94, "999.9"), (1000.4, "1,000"), (12_345.6, "12,346"), (0.0123456, "0.01235")],
)
def test_rates_have_four_digits(value, text):
    assert rate(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text
