"""`tune` and `show` on real trials: what they print, what they leave behind, and when they refuse."""

import json
import re
import shutil
import signal
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from commands import JOB, TINY, Running, pipetune

import pipetune as package
from pipetune.storage.folder import StudyFolder

JOB_CONFIG = """\
study: job
workload: {target: job.py:build}
training: {effective_batch_size: 64}
search: {num_workers: 0, pin_memory: false, batch_size: [16, 32, 64], amp: fp32}
budget: {time: 60s, trials: 2}
"""
FAILING = JOB.replace("return model(batch)", "raise RuntimeError('no loss today')\n    return model(batch)")


@pytest.fixture
def job(tmp_path):
    """A folder with job.py, whose loss always fails, and its config."""
    (tmp_path / "job.py").write_text(FAILING)
    (tmp_path / "job.yaml").write_text(JOB_CONFIG)
    return tmp_path


@pytest.fixture
def started():
    """Start a command; whatever the test leaves running is ended."""
    running = []

    def start(*arguments, cwd, **popen):
        running.append(Running(*arguments, cwd=cwd, **popen))
        return running[-1]

    yield start
    for one in running:
        one.clean_up()


# --- a study that ran to its end -------------------------------------------------------------------------------


def test_json_is_one_object_with_the_keys_of_the_contract(finished_study):
    told = json.loads(finished_study.stdout)
    assert told["status"] in {"certified", "no_gain"}
    assert {"dataloader", "training", "measured"} <= set(told["best"])
    assert {"study_dir", "baseline", "speedup", "ceiling", "bottleneck", "seconds"} <= set(told)
    assert [trial["number"] for trial in told["trials"]] == [0, 1, 2, 3]
    assert {trial["state"] for trial in told["trials"]} == {"measured"}


def test_progress_goes_to_standard_error(finished_study):
    lines = finished_study.stderr.splitlines()
    assert "9 configurations" not in finished_study.stdout
    assert len([line for line in lines if "  w=" in line]) == 4
    assert "\x1b" not in finished_study.stderr


def test_each_probe_is_told_with_its_cost(finished_study):
    told = "\n".join(finished_study.stderr.splitlines())
    # a sample and one worker; the step at its largest micro-batch and at a quarter of it
    for probe in ("loader alone, 0 workers", "loader alone, 1 worker", "micro-batch 64 fp32", "micro-batch 16 fp32"):
        assert re.search(rf"{probe}: [\d.e+]+ samples/s \(\d+\.\d s\)", told)


def test_the_baseline_is_trial_0(finished_study):
    first, *others = finished_study.told["trials"]
    assert (first["config"]["num_workers"], first["config"]["batch_size"]) == (0, 32)
    assert first["config"] not in [other["config"] for other in others]


def test_the_file_says_what_the_object_says(finished_study):
    told = finished_study.told
    file = yaml.safe_load((finished_study.folder / "best.yaml").read_text())
    assert file["status"] == told["status"]
    assert file["dataloader"] == told["best"]["dataloader"]
    assert file["training"] == told["best"]["training"]
    assert file["measured"]["speedup"] == pytest.approx(told["speedup"], rel=1e-5)
    assert file["ceiling"] == told["ceiling"]


def test_the_file_says_where_it_came_from(finished_study):
    file = yaml.safe_load((finished_study.folder / "best.yaml").read_text())
    assert {"fingerprint", "gpu", "cpus_usable"} <= set(file["hardware"])
    provenance = file["provenance"]
    assert (provenance["study"], provenance["trials"]) == ("tiny", 4)
    assert provenance["pipetune"] == package.__version__
    assert {"torch", "flags"} <= set(provenance)
    age = datetime.now(UTC) - datetime.fromisoformat(provenance["created"])
    assert timedelta(0) <= age < timedelta(hours=1)


def test_training_code_loads_it_here_without_a_warning(finished_study):
    tuned = package.load(finished_study.folder / "best.yaml")
    assert tuned.batch_size * tuned.accumulation_steps == 64


def test_the_same_command_again_measures_nothing(finished_study, tmp_path):
    # GIVEN a finished study
    folder = shutil.copytree(finished_study.folder, tmp_path / "study")

    # WHEN it is tuned again with the same budget
    run = pipetune("tune", finished_study.config, "--study-dir", folder, "--json", cwd=tmp_path, quick=True)

    # THEN the result is the same, from the record
    assert run.returncode == 0, run.stderr
    again, told = json.loads(run.stdout), finished_study.told
    assert "  w=" not in run.stderr
    for key in ("status", "best", "baseline", "speedup", "ceiling", "bottleneck", "trials"):
        assert again[key] == told[key]


# --- show ------------------------------------------------------------------------------------------------------


def test_show_tells_the_result_in_80_columns(finished_study):
    run = pipetune("show", finished_study.folder, cwd=finished_study.folder.parent)
    assert run.returncode == 0, run.stderr
    assert "4 trials (4 measured) of 9 configurations" in run.stdout
    assert "best.yaml" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_show_prints_the_object_of_tune(finished_study):
    run = pipetune("show", finished_study.folder, "--json", cwd=finished_study.folder.parent)
    told = finished_study.told
    assert json.loads(run.stdout) == {**told, "speedup": pytest.approx(told["speedup"], rel=1e-5)}


def test_show_finds_a_study_by_its_name(finished_study, tmp_path):
    shutil.copytree(finished_study.folder, tmp_path / "studies" / "tiny")
    run = pipetune("show", "tiny", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "4 trials" in run.stdout


@pytest.mark.parametrize("has_folder", [True, False])
def test_show_of_no_study_is_bad_input(tmp_path, has_folder):
    if has_folder:
        (tmp_path / "nothing").mkdir()
    run = pipetune("show", "nothing", cwd=tmp_path)
    assert run.returncode == 2
    assert "nothing holds no study" in run.stderr
    assert run.stdout == ""


def test_show_of_a_damaged_result_names_the_line(finished_study, tmp_path):
    folder = shutil.copytree(finished_study.folder, tmp_path / "study")
    file = folder / "best.yaml"
    file.write_text(file.read_text().replace("amp: fp32", "amp: fp64", 1))
    run = pipetune("show", folder, cwd=tmp_path)
    assert run.returncode == 2
    assert "training.amp" in run.stderr


# --- refusals --------------------------------------------------------------------------------------------------


def test_a_bad_target_stops_before_anything_is_measured(job):
    (job / "job.py").write_text(JOB.replace("def build(**options):", "def build(**options):\n    1 / 0"))
    run = pipetune("tune", "job.yaml", "--json", cwd=job)
    assert run.returncode == 2
    assert f'File "{job / "job.py"}"' in run.stderr
    assert "ZeroDivisionError" in run.stderr
    assert run.stdout == ""
    assert not (job / "studies/job/best.yaml").exists()


def test_nothing_works_is_told_with_reasons_and_leaves_an_older_file_alone(job):
    # GIVEN an older result, and a workload that fails in every configuration
    older = job / "studies/job/best.yaml"
    older.parent.mkdir(parents=True)
    older.write_text("an older result\n")

    # WHEN it is tuned, with no baseline of the user's
    run = pipetune("tune", "job.yaml", "--json", cwd=job, quick=True)

    # THEN there is a table of reasons with a traceback, and no file
    assert run.returncode == 3
    assert "2 x error in " in run.stderr
    assert run.stderr.count("RuntimeError: no loss today") >= 2
    assert f'File "{job / "job.py"}"' in run.stderr
    assert run.stdout == ""
    assert older.read_text() == "an older result\n"


def test_a_users_baseline_that_fails_stops_the_command_and_is_measured_again_once_it_is_repaired(job, started):
    # GIVEN a baseline that failed
    command = ("tune", "job.yaml", "--set", "baseline.batch_size=32")
    run = pipetune(*command, cwd=job, quick=True)
    assert run.returncode == 2
    assert "baseline: your present settings" in run.stderr
    assert "no loss today" in run.stderr
    assert not (job / "studies/job/best.yaml").exists()

    # WHEN the user repairs the loss and runs the same command
    (job / "job.py").write_text(JOB)
    again = started(*command, cwd=job)

    # THEN the old error does not come back
    again.wait_for((job / "studies/job/best.yaml").exists)
    again.end_by(signal.SIGINT)


def test_a_space_that_is_exhausted_before_the_budget_is_certified(job):
    # GIVEN a space of one configuration beside the baseline, and room for more trials
    (job / "job.py").write_text(JOB)
    options = ("--set", "search.batch_size=[32, 64]", "--trials", "5", "--json")

    # WHEN it is tuned
    run = pipetune("tune", "job.yaml", *options, cwd=job, quick=True)

    # THEN it says so, and names a winner
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert len(told["trials"]) == 2
    assert told["status"] in {"certified", "no_gain"}
    assert "every configuration that can work here has been measured" in told["notes"]


def test_a_folder_in_use_is_refused(tmp_path):
    # GIVEN a study folder that another process has
    (tmp_path / "tiny.yaml").write_text(TINY)
    with StudyFolder(tmp_path / "study"):
        # WHEN a second one comes
        run = pipetune("tune", "tiny.yaml", "--study-dir", "study", cwd=tmp_path)

    # THEN it goes away at once
    assert run.returncode == 4
    assert "in use by another pipetune" in run.stderr
    assert "--study-dir" in run.stderr


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("width: 16", "width: 17"), "options: "),
        (("batch_size: [16, 32, 64]", "batch_size: [32, 64]"), "search.batch_size: [16, 32, 64] there, [32, 64] now"),
    ],
    ids=["workload", "space"],
)
def test_a_study_of_something_else_is_refused_and_kept(finished_study, tmp_path, change, part):
    # GIVEN the folder of a finished study, and a config that differs from its own
    folder = shutil.copytree(finished_study.folder, tmp_path / "study")
    before = (folder / "best.yaml").read_bytes()
    (tmp_path / "other.yaml").write_text(TINY.replace(*change))

    # WHEN it is tuned there
    run = pipetune("tune", "other.yaml", "--study-dir", folder, cwd=tmp_path)

    # THEN the difference is named, with the ways out, and the study is untouched
    assert run.returncode == 4
    assert part in run.stderr
    assert "--fresh" in run.stderr
    assert "--study-dir" in run.stderr
    assert (folder / "best.yaml").read_bytes() == before


# --- starting over ---------------------------------------------------------------------------------------------


def test_fresh_forgets_the_earlier_study_and_a_second_signal_changes_nothing(finished_study, tmp_path, started):
    # GIVEN the folder of another workload's study
    folder = shutil.copytree(finished_study.folder, tmp_path / "study")
    (tmp_path / "other.yaml").write_text(TINY.replace("study: tiny", "study: other").replace("width: 16", "width: 17"))

    # WHEN it is tuned there with --fresh, and Ctrl-C is pressed twice
    run = started("tune", "other.yaml", "--study-dir", folder, "--fresh", cwd=tmp_path)
    run.wait_for(run.trial_numbers)
    ended = run.end_by(signal.SIGINT, signal.SIGINT)

    # THEN it began with a baseline of its own, and still ended in order
    assert run.trial_numbers()[0] == 0
    file = yaml.safe_load((folder / "best.yaml").read_text())
    assert (file["provenance"]["study"], file["status"]) == ("other", "provisional")
    assert ended.code == 130
    assert ended.left == []


@pytest.mark.parametrize("target", ["builtin:nonsuch", "nowhere.py:build"])
def test_fresh_with_a_workload_that_cannot_be_built_keeps_the_earlier_result(finished_study, tmp_path, target):
    folder = shutil.copytree(finished_study.folder, tmp_path / "study")
    (tmp_path / "bad.yaml").write_text(TINY.replace("builtin:synthetic", target))
    run = pipetune("tune", "bad.yaml", "--study-dir", folder, "--fresh", cwd=tmp_path)
    assert run.returncode == 2
    assert (folder / "best.yaml").exists()
