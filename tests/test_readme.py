"""The README's own example is tuned and trained with, and its tables list what there is."""

import re
import subprocess
import sys

import pytest
import typer
from commands import MAIN, ROOT, environment, pipetune

from pipetune.cli.main import app

README = (ROOT / "README.md").read_text()
COMMANDS = typer.main.get_command(app).commands
OPTIONS = [option for parameter in COMMANDS["tune"].params for option in parameter.opts if option.startswith("--")]


def block(marker: str) -> str:
    """The fenced block after `<!-- marker -->`."""
    match = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```\n", README, re.DOTALL)
    assert match is not None, marker
    return match[1]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's three files, in a folder of their own."""
    folder = tmp_path_factory.mktemp("example")
    for name in ("job.py", "study.yaml", "train.py"):
        (folder / name).write_text(block(name))
    return folder


@pytest.fixture(scope="module")
def tuned(example):
    """The example, tuned within a small space."""
    small = ("search.num_workers=1", "search.batch_size=256", "search.amp=fp32")
    options = [part for override in small for part in ("--set", override)]
    run = pipetune("tune", "study.yaml", "--trials", "2", "--time", "60s", *options, cwd=example, quick=True)
    assert run.returncode == 0, run.stderr
    return example


def test_the_studys_file_is_valid(example):
    run = pipetune("validate", "study.yaml", cwd=example)
    assert run.returncode == 0, run.stderr
    assert "4,096 samples" in run.stdout


def test_the_training_script_trains_with_what_was_tuned(tuned):
    # GIVEN the result of tuning the example, WHEN the script is run as it stands
    run = subprocess.run(
        [sys.executable, "-W", "error", "train.py"],
        cwd=tuned,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    # THEN it trains two epochs of whole optimizer steps, without a warning
    assert (run.returncode, run.stderr) == (0, "")
    lines = [re.fullmatch(r"epoch (\d): loss (\d+\.\d{3}), (\d+) optimizer steps", x) for x in run.stdout.splitlines()]
    assert [(line[1], line[3]) for line in lines if line] == [("0", "16"), ("1", "32")]
    assert all(0 < float(line[2]) < 10 for line in lines if line)


def test_the_training_script_has_the_25_lines_it_promises():
    lines = [line for line in block("train.py").splitlines() if line.strip()]
    assert len(lines) <= 25


def test_the_table_of_commands_is_complete():
    listed = re.findall(r"^\| `pipetune (\w+)[^`]*` \|", README, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_tune_is_told(option):
    assert re.search(rf"`{option}[` =]", README)


def test_the_table_of_exit_codes_is_the_programs():
    from pipetune.cli.exits import _CODES

    listed = {
        int(code) for row in re.findall(r"^\| (\d+(?:, \d+)*) \|", README, re.MULTILINE) for code in row.split(",")
    }
    assert listed == {0, 1, 130, 143} | {code for _, code in _CODES}


def test_the_console_script_is_what_tests_call():
    script = re.search(r"pipetune = \"(\S+):(\w+)\"", (ROOT / "pyproject.toml").read_text())
    assert script is not None
    assert f"from {script[1]} import {script[2]}; {script[2]}()" == MAIN


def test_every_config_that_is_named_is_there():
    named = set(re.findall(r"configs/\w+\.yaml", README))
    assert named
    assert all((ROOT / name).is_file() for name in named)
