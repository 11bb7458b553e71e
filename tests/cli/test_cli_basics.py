"""The command before any study: help, version, what it imports, and `validate`."""

import json
import re

import pytest
import typer
from commands import JOB, TINY, pipetune, python

import pipetune as package
from pipetune.cli.main import app

COMMANDS = typer.main.get_command(app).commands


def test_help_names_every_command(tmp_path):
    run = pipetune("--help", cwd=tmp_path)
    assert run.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", run.stdout)


def test_help_of_tune_names_every_option_of_the_contract(tmp_path):
    run = pipetune("tune", "--help", cwd=tmp_path)
    assert run.returncode == 0
    for option in ("--set", "--study-dir", "--time", "--trials", "--device", "--seed", "--storage", "--from", "--json"):
        assert option in run.stdout
    assert "--fresh" in run.stdout


def test_every_command_prints_json_on_request():
    for name, command in COMMANDS.items():
        assert any("--json" in parameter.opts for parameter in command.params), name


def test_version(tmp_path):
    run = pipetune("--version", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, f"pipetune {package.__version__}\n")


def test_the_package_is_a_command_too(tmp_path):
    run = python(
        "import runpy, sys\nsys.argv[1:] = ['--version']\nrunpy.run_module('pipetune', run_name='__main__')",
        cwd=tmp_path,
    )
    assert (run.returncode, run.stdout) == (0, f"pipetune {package.__version__}\n")


@pytest.mark.parametrize("arguments", [["frobnicate"], ["tune"], ["tune", "a.yaml", "--frob"], ["show"]])
def test_a_call_that_makes_no_sense_is_bad_input(tmp_path, arguments):
    run = pipetune(*arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize(
    "code",
    [
        "import pipetune",
        "import pipetune.cli.main",
        "import sys; sys.argv = ['pipetune', '--help']\nfrom pipetune.cli.main import app; app(standalone_mode=False)",
    ],
    ids=["the package", "the command", "its help"],
)
def test_starting_costs_neither_torch_nor_optuna(tmp_path, code):
    run = python(f"{code}\nimport sys\nprint('loaded:', *{{'torch', 'optuna'}} & set(sys.modules))", cwd=tmp_path)
    assert run.stdout.splitlines()[-1].strip() == "loaded:", run.stderr


# --- validate --------------------------------------------------------------------------------------------------


def config_file(folder, text=TINY):
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_a_good_config_is_told_with_its_space(tmp_path):
    # GIVEN a config that a list bounds
    run = pipetune("validate", config_file(tmp_path), cwd=tmp_path)

    # THEN it is valid, its space is shown, and nothing was written
    assert run.returncode == 0, run.stderr
    assert "study.yaml: valid" in run.stdout
    assert re.search(r"num_workers +0, 1 ", run.stdout)
    assert re.search(r"batch_size +16, 32, 64\n", run.stdout)
    assert " 9 configurations" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


def test_validate_prints_one_json_object(tmp_path):
    run = pipetune("validate", config_file(tmp_path), "--set", "search.num_workers=[0, 3]", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["valid"] is True
    assert told["search"]["num_workers"] == [0, 3]
    assert told["dataset_samples"] == 512


@pytest.mark.parametrize("command", ["validate", "tune"])
def test_every_problem_of_a_config_is_listed_with_line_and_key(tmp_path, command):
    # GIVEN a file with five problems
    text = """\
study: tiny
workload: {target: builtin:synthetic}
training: {effective_batch_size: 64, epocs: 2}
search:
  num_workers: -1
  batch_size: [7]
  amp: fp64
objektive: throughput
"""
    path = config_file(tmp_path, text)

    # WHEN a command reads it
    run = pipetune(command, path, cwd=tmp_path)

    # THEN all are told, none is a traceback, and nothing is written
    assert run.returncode == 2
    assert f"{path}: 5 problems" in run.stderr
    for place in (
        "line 3: training.epocs: ",
        "line 5: search.num_workers: ",
        "line 6: search.batch_size[0]: ",
        "line 7: search.amp: ",
        "line 8: objektive: ",
    ):
        assert place in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize("text", ["", "study: [\n", "study: x\nstudy: y\n", "training:\n\teffective_batch_size: 8\n"])
def test_what_is_no_config_is_bad_input(tmp_path, text):
    run = pipetune("validate", config_file(tmp_path, text), cwd=tmp_path)
    assert run.returncode == 2
    assert "study.yaml: " in run.stderr
    assert "Traceback" not in run.stderr


def test_a_file_that_is_not_there_is_named(tmp_path):
    run = pipetune("tune", "missing.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert "missing.yaml" in run.stderr
    assert not (tmp_path / "studies").exists()


def test_options_are_told_as_what_was_typed(tmp_path):
    # A user who typed --trials 0 has no line in a file to look at.
    run = pipetune("tune", config_file(tmp_path), "--trials", "0", cwd=tmp_path)
    assert run.returncode == 2
    assert "budget.trials" in run.stderr
    assert "line " not in run.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("def build(**options):", "def other():"), "job.py has no function 'build'"),
        (("import torch\n", "import torch\nimport nonsuch_module\n"), "No module named 'nonsuch_module'"),
        (("return torch.ones(4)", "raise KeyError('bad row')"), "KeyError: 'bad row'"),
        (("return pipetune.Workload(", "return dict("), "returned a dict; it must return a pipetune.Workload"),
    ],
    ids=["no function", "no import", "no sample", "no workload"],
)
def test_a_workload_that_cannot_be_built_is_named_with_the_users_own_traceback(tmp_path, change, told):
    # GIVEN a job that is broken in one place
    job = JOB.replace(*change)
    assert job != JOB
    (tmp_path / "job.py").write_text(job)
    path = config_file(tmp_path, "study: x\nworkload: {target: job.py:build}\ntraining: {effective_batch_size: 64}\n")

    # WHEN it is validated
    run = pipetune("validate", path, cwd=tmp_path)

    # THEN the error is told, with frames of the user's file and none of ours
    assert run.returncode == 2
    assert told in run.stderr
    assert "pipetune/trial" not in run.stderr


def test_a_target_that_is_not_there_is_named(tmp_path):
    text = TINY.replace("builtin:synthetic", "nowhere.py:build")
    run = pipetune("validate", config_file(tmp_path, text), cwd=tmp_path)
    assert run.returncode == 2
    assert f"workload.target: there is no file {tmp_path / 'nowhere.py'}" in run.stderr
