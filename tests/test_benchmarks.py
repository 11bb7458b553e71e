"""Benchmarks are run by hand; here they only have to start, and one of them to come to its end."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from builders import facts, hardware
from commands import ROOT
from scripted import ScriptedRunner, fails_with

from pipetune.core.measurement import FailureKind
from pipetune.core.space import Amp
from pipetune.search.signals import Signals
from pipetune.search.study import StudyRun
from pipetune.storage.study_store import StudyStore

FOLDER = ROOT / "tests/benchmarks"
BENCHMARKS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
sys.path.append(str(FOLDER))
PATHS = os.pathsep.join(str(ROOT / part) for part in (".", "tests", "tests/search"))


def ran(script, *arguments):
    return subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_starts_and_says_what_it_is(script):
    done = ran(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "Run:" in done.stdout


def test_a_simulated_study_comes_to_its_end():
    done = ran(FOLDER / "certification.py", "--seeds", "1")
    assert "Traceback" not in done.stderr
    assert "8 times faster" in done.stdout, done.stdout + done.stderr


def waiting_rate(config):
    """Samples that wait: each worker adds as much again, until the step limits; small batches cost launches."""
    step = 4000.0 if config.amp is Amp.BF16 else 3000.0
    loading = 200.0 * max(1, config.num_workers)
    return min(loading, step) * config.batch_size / (config.batch_size + 4)


def has_no_room(config):
    return config.num_workers == 16 and config.batch_size == 64


def scripted():
    """A machine whose fastest configuration is known, and where the largest does not run."""
    return ScriptedRunner(
        rate=waiting_rate,
        waits=lambda config: 90.0 if config.num_workers == 0 else 20.0,
        works=0.1,
        facts=facts(amps=(Amp.FP32, Amp.BF16)),
        fails=fails_with(FailureKind.HOST_OUT_OF_MEMORY, where=has_no_room),
    )


@pytest.fixture
def ground(monkeypatch):
    import ground

    monkeypatch.setattr(ground, "profile", lambda: hardware(cpus_usable=2))
    return ground


@pytest.fixture
def grid(ground):
    """The reduced grid of the scripted machine, and what was kept of it after each trial."""
    import grids

    found = ground.Ground.found(ground.asked("images", "cpu"), scripted())
    kept = []
    begun = grids.begun(found, grids.reduced(found))
    recording = grids.Recorder(recording=begun, runner=scripted(), keep=kept.append).record(12)
    assert [len(one.trials) for one in kept] == list(range(1, len(recording.trials) + 1))
    return recording


def test_a_grid_is_recorded_and_searched(grid, tmp_path):
    # GIVEN the recorded grid of a machine: 36 points, 12 of them twice, 2 of which do not run
    import recorded

    assert len(grid.space) == 36
    assert len(grid.trials) == 36 + 12
    assert {trial.config for trial in grid.trials if trial.failure} == set(filter(has_no_room, grid.space.configs()))
    recorded.write(tmp_path / "toy.json", grid)
    surface = recorded.surface_of(tmp_path / "toy.json")
    best, _ = surface.best()
    assert (best.num_workers, best.batch_size, best.amp) == (16, 16, Amp.BF16)
    # WHEN search orders are run on it
    methods = ("random", "TPE", "pipetune", "pipetune, probed")
    done = ran(FOLDER / "search.py", "--surfaces", "toy", "--seeds", "3", "--grids", tmp_path, "--methods", *methods)
    # THEN it has its own group, every order that needs no probes a row, and ours finds the best within the grid
    assert "Traceback" not in done.stderr, done.stderr
    assert "recorded grids" in done.stdout
    assert "all surfaces" not in done.stdout
    rows = {line[:20].strip(): line for line in done.stdout.splitlines()}
    assert set(methods) & set(rows) == {"random", "TPE", "pipetune"}
    median_trials = int(rows["pipetune"][50:62].split("/")[0])
    assert 1 < median_trials <= 15, rows["pipetune"]


def test_a_recording_ends_in_time(ground):
    import grids

    found = ground.Ground.found(ground.asked("images", "cpu"), scripted())
    begun = grids.begun(found, grids.reduced(found, workers=[0, 1], batches=[64]))
    recording = grids.Recorder(recording=begun, runner=scripted(), seconds=-1).record(12)
    assert recording.trials == ()


def test_a_grid_fits_the_machine_and_stays_small(ground):
    import grids

    found = ground.Ground.found(ground.asked("images", "cpu"), scripted())
    assert grids.worker_counts(2) == (0, 1, 2, 4, 8, 16)
    assert grids.worker_counts(16) == (0, 4, 8, 15)
    with pytest.raises(ValueError, match="the grid has 72 points, more than 36"):
        grids.reduced(found, workers=range(12))
    with pytest.raises(ValueError, match=r"batches of \[10\] are none of"):
        grids.reduced(found, batches=[10, 64])


class PlainMachine:
    """Stands in for the plain loop: tells the scripted machine's rates, and what it was asked."""

    def __init__(self):
        self.asked = {}

    def wait_until_ready(self):
        pass

    def measure(self, config, *, seconds, epoch_samples):
        from plain import PlainRates

        assert seconds > 0
        self.asked[config] = epoch_samples
        return PlainRates(steady=waiting_rate(config), effective=0.9 * waiting_rate(config))


def scripted_tune(config, *, study_dir, progress):
    """A study as the command runs it, on the scripted machine."""
    return StudyRun(
        config,
        runner=scripted(),
        hardware=hardware(cpus_usable=2),
        versions={},
        open_store=lambda key: StudyStore.open(
            None, Path(study_dir) / "study.journal", study=config.study, key=key, directions=1
        ),
        write=lambda _: None,
        folder=Path(study_dir),
        progress=progress,
        signals=Signals(),
    ).run()


def test_a_contest_names_its_winner(ground, grid, tmp_path):
    import contestants
    import live

    # GIVEN what three contestants and the baseline claim on a machine of known rates
    config = ground.asked("images", "cpu", most_workers=16)
    tpe = contestants.by_tpe(config, scripted(), limit_s=1.0)
    claims = [*contestants.by_study(config, scripted_tune), tpe, contestants.by_grid(grid)]
    assert [claim.contestant for claim in claims] == ["baseline", "study", "TPE", "grid"]
    assert all(0 < claim.first_s <= claim.total_s for claim in claims)
    # WHEN a plain loop judges them, and what is known is kept for a command that goes on
    contest, machine = live.Contest(terms={"workload": "images", "most_workers": 16}, claims=claims), PlainMachine()
    plan = ground.plan_of(config)
    contest.rounds.append(live.judged(contest, machine, plan, random.Random(0)))
    live.keeper(tmp_path / "a.json")(contest)
    assert live.known(tmp_path / "a.json", contest.terms) == contest
    with pytest.raises(ValueError, match=r"a\.json is of another contest"):
        live.known(tmp_path / "a.json", {"workload": "tokens"})
    # THEN each stands in the table with its share of the best, and the slow baseline ran shortened epochs
    rows = {line.split()[0]: line for line in live.table(contest, plan) if line[:1].strip()}
    fastest = max(claims, key=lambda claim: waiting_rate(claim.config))
    for claim in claims:
        share = 100 * waiting_rate(claim.config) / waiting_rate(fastest.config)
        assert rows[claim.contestant].count(f" {share:.1f} ") + rows[claim.contestant].endswith(f" {share:.1f}") == 2
    assert waiting_rate(claims[1].config) > 0.9 * waiting_rate(fastest.config)
    assert "shortened epochs" in rows["baseline"]
    assert machine.asked[claims[0].config] < plan.epoch_samples == machine.asked[fastest.config]
    assert live.header(contest, config)


def test_a_grid_of_something_else_is_no_contestant(ground, grid, tmp_path, monkeypatch):
    import contestants
    import recorded

    monkeypatch.setattr(contestants, "profile", lambda: hardware(cpus_usable=2))
    recorded.write(tmp_path / "a.json", grid)
    assert contestants.read_grid(tmp_path / "a.json", ground.asked("images", "cpu")).space == grid.space
    with pytest.raises(ValueError, match=r"a\.json is of another workload: images there, tokens here"):
        contestants.read_grid(tmp_path / "a.json", ground.asked("tokens", "cpu"))
