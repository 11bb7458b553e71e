"""The configs of the repository can be read, and their options are those of the workload."""

import importlib
import inspect
from pathlib import Path

import pytest

from pipetune.workloads import BUILTIN

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def load(path):
    return pytest.importorskip("pipetune.config.schema").load(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_config_opens_with_the_command_that_runs_it(path):
    assert path.read_text().splitlines()[0] == f"# pipetune tune configs/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_config_is_valid_and_named_after_its_file(path):
    assert load(path).study == path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_options_of_a_config_fit_its_function(path):
    workload = load(path).workload
    place, _, name = workload.target.partition(":")
    if place != "builtin":
        pytest.skip("the function is the user's")
    module, _, function = BUILTIN[name].partition(":")
    inspect.signature(getattr(importlib.import_module(module), function)).bind(**workload.options)


def test_the_reference_gives_the_defaults():
    config = load(FOLDER / "reference.yaml")
    schema = pytest.importorskip("pipetune.config.schema")
    least = schema.from_mapping(
        {
            "study": config.study,
            "workload": {"target": config.workload.target},
            "training": {"effective_batch_size": config.effective_batch_size},
        },
        FOLDER,
    )
    for name in ("epochs", "epoch_samples", "search", "objective", "budget", "device", "seed", "storage"):
        assert getattr(config, name) == getattr(least, name), name
    assert (config.cache, config.isolation) == (least.cache, least.isolation)


def test_there_is_a_config_for_every_built_in_workload():
    assert {f"{name}.yaml" for name in (*BUILTIN, "quickstart", "reference")} <= {p.name for p in FILES}
