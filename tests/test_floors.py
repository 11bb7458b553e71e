"""Imports go down: a file imports only from lower floors, and each dependency has one door."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pipetune"

FLOORS = {
    "errors": 1,
    "core": 2,
    "config": 3,
    "hardware": 3,
    "training": 3,
    "trial": 4,
    "storage": 4,
    "integrations": 4,
    "workloads": 4,
    "search": 5,
    "report": 5,
    "api": 6,
    "cli": 7,
    "__main__": 8,
}

# Rooms of the same floor that a room may look into, each with its reason.
NEIGHBOURS = {
    ("trial", "workloads"): "the registry of built-in workloads is a dict of names",
}

DOORS = {
    "optuna": {"storage/study_store.py", "search/sampler.py"},
    "pynvml": {"hardware/nvml.py"},
    "psutil": {"hardware/host.py"},
    "yaml": {"config/yaml.py"},
    "pydantic": {"config/schema.py", "trial/protocol.py", "storage/study_store.py"},
    "typer": {
        "cli/main.py",
        "cli/tune.py",
        "cli/validate.py",
        "cli/show.py",
        "cli/doctor.py",
        "cli/diagnose.py",
        "cli/monitor.py",
    },
    "scipy": {"core/throughput.py", "core/repeats.py", "trial/host.py"},
}

TORCH_ROOMS = {"training", "workloads", "integrations"}
TORCH_FILES = {
    "trial/device.py",
    "trial/facts.py",
    "trial/feed.py",
    "trial/loader.py",
    "trial/probes.py",
    "trial/randomness.py",
    "trial/samples.py",
    "trial/session.py",
    "trial/stages.py",
    "trial/state.py",
    "trial/stream.py",
    "trial/torch_facts.py",
    "trial/watch.py",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "pipetune":
                yield from (f"pipetune.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in sources()} - {"__init__"} == set(FLOORS)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "pipetune" or len(parts) == 1 or parts[1] in {own, "__version__"}:
            continue
        allowed = FLOORS[parts[1]] < FLOORS[own] or (own, parts[1]) in NEIGHBOURS
        assert allowed, f"{path.name} (floor {FLOORS[own]}) imports {module} (floor {FLOORS[parts[1]]})"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_dependency_has_its_doors(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    for module in imports(path):
        top = module.split(".")[0]
        if top in DOORS:
            assert name in DOORS[top], f"{name} imports {top}, whose doors are {sorted(DOORS[top])}"
        if top == "torch":
            assert room(path) in TORCH_ROOMS or name in TORCH_FILES, f"{name} imports torch"


def test_the_rules_would_notice_a_breach(tmp_path: Path) -> None:
    # GIVEN a file that imports upwards in every form
    file = tmp_path / "bad.py"
    file.write_text("import pipetune.cli.main\nfrom pipetune.search import study\nfrom pipetune import api\n")
    # THEN each of them is seen
    assert {"pipetune.cli.main", "pipetune.search", "pipetune.api"} <= set(imports(file))
