"""pipetune from code: its names, `load`, and `tune` with a function object as the target."""

import functools
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import optuna
import pytest
from commands import JOB, environment, python

import pipetune
from pipetune import api
from pipetune.config.schema import from_mapping
from pipetune.core.tuned import Status
from pipetune.errors import ConfigError, InputError, PipetuneError
from pipetune.search import budget, study
from pipetune.search.study import StudyRun
from pipetune.storage.study_store import StudyKey
from pipetune.trial.protocol import MeasureLimits


def config(target="job.py:build", **changes):
    values = {
        "study": "job",
        "workload": {"target": target},
        "training": {"effective_batch_size": 64},
        "search": {"num_workers": 0, "pin_memory": False, "batch_size": [32, 64], "amp": "fp32"},
        "budget": {"time": 60, "trials": 1},
        "probes": [],
    }
    return values | changes


@pytest.fixture
def job_folder(tmp_path, monkeypatch):
    """An own folder as the current one, with a module of an own name in it."""
    name = f"job_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    yield tmp_path, name
    sys.modules.pop(name, None)


@pytest.fixture
def job_module(job_folder, monkeypatch):
    folder, name = job_folder
    monkeypatch.syspath_prepend(str(folder))
    return __import__(name)


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pipetune.__all__)
def test_every_public_name_is_there(name):
    assert getattr(pipetune, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pipetune' has no attribute 'tunes'"):
        _ = pipetune.tunes
    with pytest.raises(ImportError, match="tunes"):
        exec("from pipetune import tunes", {})


def test_every_error_is_a_pipetune_error():
    with pytest.raises(PipetuneError):
        pipetune.load("missing.yaml")


# --- load ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_a_result_is_loaded_from_a_path_of_either_kind(finished_study, kind):
    tuned = pipetune.load(kind(finished_study.folder / "best.yaml"))
    assert isinstance(tuned, pipetune.Tuned)
    assert tuned.result.provenance["study"] == "tiny"


def test_a_missing_result_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "best.yaml"))):
        pipetune.load(tmp_path / "best.yaml")


# --- tune ------------------------------------------------------------------------------------------------------


def test_a_mapping_with_a_function_is_tuned(job_module, tmp_path, monkeypatch):
    # GIVEN a function of an importable module, and short windows
    monkeypatch.setattr(study, "measure_limits", lambda _: MeasureLimits(min_s=0.4, max_s=0.8, window_s=0.1))
    monkeypatch.setattr(budget, "ROUNDS", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    # WHEN it is tuned
    result = pipetune.tune(config(job_module.build), study_dir=tmp_path / "here")

    # THEN the result is a value, its file is there, and the signals are the caller's again
    assert isinstance(result, pipetune.StudyResult)
    assert result.folder == tmp_path / "here"
    assert [record.number for record in result.records] == [0]
    assert result.tuned.status is Status.NO_GAIN
    assert pipetune.load(tmp_path / "here/best.yaml").result.config == result.tuned.config
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert api.show(tmp_path / "here").tuned.config == result.tuned.config


def test_a_function_of_a_module_outside_of_the_current_folder_is_found(job_module, tmp_path, monkeypatch):
    # GIVEN a module that this process could import, and another current folder: `python /jobs/run.py`
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    # THEN the trial process can import it too
    assert api.validate(config(job_module.build)).facts.dataset_samples == 512


def test_a_file_of_the_current_folder_is_found(job_folder):
    _, name = job_folder
    assert api.validate(config(f"{name}.py:build")).plan.epoch_samples == 512


def test_a_function_of_a_script_is_found(tmp_path):
    # GIVEN a script that tunes its own function
    script = tmp_path / "script.py"
    call = f"print(api.validate({config('X')!r}).facts.dataset_samples)".replace("'X'", "build")
    script.write_text(f"{JOB}\n\nif __name__ == '__main__':\n    from pipetune import api\n    {call}\n")

    # WHEN it is run from elsewhere, THEN the trial process finds the function in the script's file
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.strip() == "512", run.stderr


def module_level(**options):
    raise AssertionError(options)


class Holder:
    def method(self):
        raise AssertionError


def nested():
    def inner():
        raise AssertionError

    return inner


@pytest.mark.parametrize(
    "target",
    [lambda: None, nested(), Holder().method, functools.partial(module_level, width=1)],
    ids=["lambda", "nested", "method", "partial"],
)
def test_a_function_that_has_no_place_is_refused_with_the_remedy(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"workload\.target: .* top level of a file"):
        pipetune.tune(config(target))
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_a_notebook_is_refused_with_the_remedy(tmp_path):
    # GIVEN a function that no file holds
    code = (
        f"import pipetune\ndef build(): ...\ntry:\n    pipetune.tune({config('X')!r})\n".replace("'X'", "build")
        + "except pipetune.PipetuneError as error: print(error)\n"
    )

    # WHEN it is to be tuned, THEN the way out is told
    run = python(code, cwd=tmp_path)
    assert "build was defined in a notebook or an interactive session" in run.stdout, run.stderr
    assert "put it into a file job.py and use 'job.py:build'" in run.stdout


def test_every_problem_of_a_mapping_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        pipetune.tune(config(search={"amp": "fp64"}, seeds=1))
    assert len(caught.value.problems) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_no_file_could_hold_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"workload\.options\.model"):
        pipetune.tune(config(workload={"target": "job.py:build", "options": {"model": object()}}))


def test_overrides_of_a_checked_config_are_not_lost(tmp_path):
    checked = from_mapping(config(), folder=tmp_path)
    assert api.read_config(checked, ()) is checked
    with pytest.raises(InputError, match="overrides"):
        api.read_config(checked, ["budget.trials=3"])


# --- starting over: what is read before anything is forgotten ------------------------------------------------------


@pytest.fixture
def instead_of_running(monkeypatch):
    """Replace the run of a study by a function of it."""
    return lambda function: monkeypatch.setattr(StudyRun, "run", function)


def test_starting_over_from_the_studys_own_result(finished_study, tmp_path, instead_of_running):
    # GIVEN a finished study
    folder = tmp_path / "study"
    folder.mkdir()
    best = folder / "best.yaml"
    best.write_bytes((finished_study.folder / "best.yaml").read_bytes())
    instead_of_running(lambda run: run._start_from)

    # WHEN it is started over from its own result
    start_from = pipetune.tune(config("builtin:synthetic"), study_dir=folder, fresh=True, start_from=best)

    # THEN that was read before it was forgotten
    assert start_from.effective_batch_size == 64


def test_starting_over_from_a_file_that_is_not_there_forgets_nothing(tmp_path, instead_of_running):
    (tmp_path / "best.yaml").write_text("an older result\n")
    instead_of_running(lambda _: None)
    with pytest.raises(ConfigError):
        pipetune.tune(config("builtin:synthetic"), study_dir=tmp_path, fresh=True, start_from=tmp_path / "no.yaml")
    assert (tmp_path / "best.yaml").read_text() == "an older result\n"


def test_starting_over_forgets_the_trials_of_any_storage(tmp_path, instead_of_running):
    # GIVEN a study in a database
    def one_trial_more(run):
        optuna_study = run._open_store(StudyKey(parts={"a": "b"})).study
        optuna_study.add_trial(optuna.trial.create_trial(value=1.0))
        return len(optuna_study.trials)

    instead_of_running(one_trial_more)
    database = config("builtin:synthetic", storage=f"sqlite:///{tmp_path}/study.db")
    assert pipetune.tune(database, study_dir=tmp_path / "study") == 1

    # WHEN it is started over, THEN its trials are gone
    assert pipetune.tune(database, study_dir=tmp_path / "study", fresh=True) == 1
