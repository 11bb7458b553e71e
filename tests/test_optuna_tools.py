"""A study opens in Optuna's own tools without a word from us."""

import io
import json
import shutil
from wsgiref.util import setup_testing_defaults

import optuna
import optuna_dashboard
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


@pytest.fixture(scope="module")
def journal(finished_study, tmp_path_factory):
    """A copy: the dashboard may write."""
    return shutil.copy(finished_study.folder / "study.journal", tmp_path_factory.mktemp("optuna"))


@pytest.fixture
def study(journal):
    storage = JournalStorage(JournalFileBackend(str(journal)))
    [summary] = optuna.study.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)


def get(app, path):
    """What the dashboard answers, read as a browser does: without NaN and infinities."""
    environ = {"PATH_INFO": path, "QUERY_STRING": "", "wsgi.input": io.BytesIO()}
    setup_testing_defaults(environ)
    status = []
    body = b"".join(app(environ, lambda line, *_: status.append(line)))
    assert status == ["200 OK"], body

    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refused)


def test_the_study_loads_with_its_real_values(study, finished_study):
    # GIVEN what tune told
    told = finished_study.told["trials"]

    # THEN Optuna has the same trials, by number, with parameters that are the settings
    assert [trial.number for trial in study.trials] == [trial["number"] for trial in told]
    for trial, expected in zip(study.trials, told, strict=True):
        assert trial.state is optuna.trial.TrialState.COMPLETE
        assert trial.value == pytest.approx(expected["effective_samples_per_sec"])
        for name in ("num_workers", "batch_size", "amp", "pin_memory"):
            assert trial.params[name] == expected["config"][name]


def test_the_name_is_the_studys(study):
    assert study.study_name.startswith("tiny-")
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE


def test_the_best_trial_is_the_fastest(study, finished_study):
    rates = {trial["number"]: trial["effective_samples_per_sec"] for trial in finished_study.told["trials"]}
    assert study.best_trial.number == max(rates, key=rates.get)


def test_figures_are_flat_attributes(study):
    attributes = study.trials[0].user_attrs
    assert attributes["steady_samples_per_sec"] > 0
    assert 0 <= attributes["data_wait_percent"] <= 100


@pytest.mark.filterwarnings("ignore:Some regimes for parameter:UserWarning")  # four trials are few
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_importances_compute(study):
    importances = optuna.importance.get_param_importances(study)
    assert {"num_workers", "batch_size"} <= set(importances)
    assert all(share >= 0 for share in importances.values())


def test_the_dashboard_serves_the_study(journal, study):
    # GIVEN the dashboard on the journal, opened by its path as its command does
    app = optuna_dashboard.wsgi(str(journal))

    # WHEN its page asks for the studies and for this one
    [summary] = get(app, "/api/studies")["study_summaries"]
    detail = get(app, f"/api/studies/{summary['study_id']}")

    # THEN it gets them
    assert summary["study_name"] == study.study_name
    assert [trial["number"] for trial in detail["trials"]] == [0, 1, 2, 3]
    assert {parameter["name"] for parameter in detail["union_search_space"]} >= {"num_workers", "batch_size"}
