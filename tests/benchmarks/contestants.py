"""Who competes in live.py for the fastest settings: a study, plain Optuna, a whole grid; and what each claims."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import grids
import recorded
from grids import say
from ground import Ground, plan_of
from recorded import Recording
from tpe import Tpe

from pipetune import api
from pipetune.core.measurement import Measurement
from pipetune.core.record import StudyResult, TrialRecord
from pipetune.core.space import TrialConfig
from pipetune.core.study import StudyConfig
from pipetune.hardware.environment import profile
from pipetune.search import guide
from pipetune.search.plan import default_baseline
from pipetune.search.progress import Silent
from pipetune.trial.runner import TrialRunner

NEVER = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a contestant found: seconds from its own start, its rate in samples/s over the planned run.

    `first_s` is when the trial that made its winner known had ended.
    """

    contestant: str
    config: TrialConfig
    trials: int
    first_s: float
    total_s: float
    rate: float
    remark: str = ""


class FirstTried(Silent):
    """Notes when the first trial of each configuration had ended."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.ended_s: dict[TrialConfig, float] = {}

    def trial_ended(self, record: TrialRecord, best: TrialRecord | None, seconds_left: float | None) -> None:
        self.ended_s.setdefault(record.config, time.monotonic() - self._began)
        leads = best.config.label() if best else "nothing"
        say(f"{seconds_left or 0:.0f} s left: {record.config.label()}: {record.state}; {leads} leads")


def tune_in_full(config: StudyConfig, **how: Any) -> StudyResult:
    """A study that goes on while the best is not at its ceiling and there is time.

    The planned run takes seconds, so that the plain loop can time it, and for that no further trial would be worth its
    time.
    """
    with patch.object(guide, "LEAST_TRIALS", NEVER):
        return api.tune(config, **how)


def by_study(config: StudyConfig, tune: Callable[..., StudyResult] = tune_in_full) -> list[Claim]:
    """The baseline, and what the study says of its winner."""
    tried, began = FirstTried(), time.monotonic()
    with TemporaryDirectory() as folder:
        result = tune(config, study_dir=folder, progress=tried)
    total_s, tuned = time.monotonic() - began, result.tuned
    baseline_s = tried.ended_s[tuned.baseline_config]
    return [
        Claim(
            contestant="baseline",
            config=tuned.baseline_config,
            trials=1,
            first_s=baseline_s,
            total_s=baseline_s,
            rate=tuned.baseline_measured.effective_samples_per_sec.value,
        ),
        Claim(
            contestant="study",
            config=tuned.config,
            trials=len(result.records),
            first_s=tried.ended_s[tuned.config],
            total_s=total_s,
            rate=tuned.measured.effective_samples_per_sec.value,
            remark="; ".join([str(tuned.status), *result.summary.notes]),
        ),
    ]


@dataclass(kw_only=True)
class Clocked:
    """Trials of one contestant within `limit_s`, and the best of them with when it had ended."""

    ground: Ground
    runner: TrialRunner
    began: float
    limit_s: float
    seconds: list[float] = field(default_factory=list)
    best: tuple[float, TrialConfig, float] | None = None

    def rate(self, config: TrialConfig) -> float | None:
        """Samples/s over the planned run; None where the trial failed."""
        trial_began_s = self.elapsed_s()
        outcome = self.runner.run(config, self.ground.limits)
        ended_s = self.elapsed_s()
        self.seconds.append(ended_s - trial_began_s)
        rate = outcome.effective(self.ground.plan).value if isinstance(outcome, Measurement) else None
        if rate is not None and (self.best is None or rate > self.best[0]):
            self.best = (rate, config, ended_s)
        say(f"[{ended_s:4.0f} s] {config.label()}: {'failed' if rate is None else f'{rate:,.0f} samples/s'}")
        return rate

    def has_time(self) -> bool:
        """Whether one more trial would end within the limit, if it takes what the others took."""
        return self.elapsed_s() + fmean(self.seconds) <= self.limit_s

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began


def by_tpe(config: StudyConfig, runner: TrialRunner, *, limit_s: float) -> Claim:
    """Plain Optuna, with the set-up within its seconds as it is within a study's."""
    began = time.monotonic()
    ground = Ground.found(config, runner)
    ground.read_ahead(runner)
    trials = Clocked(ground=ground, runner=runner, began=began, limit_s=limit_s)
    learner = Tpe(ground.space, seed=config.seed)
    for baseline in default_baseline(ground.space.batch_size, ground.space.effective_batch_size):
        rate = trials.rate(baseline)
        if rate is not None:
            learner.know(baseline, rate)
            break
    while trials.has_time():
        learner.tell(trials.rate(learner.ask()))
    if trials.best is None:
        raise SystemExit("no trial of TPE's ran to its end")
    rate, winner, first_s = trials.best
    return Claim(
        contestant="TPE",
        config=winner,
        trials=len(trials.seconds),
        first_s=first_s,
        total_s=trials.elapsed_s(),
        rate=rate,
        remark=f"of {len(ground.space)} points",
    )


def by_grid(recording: Recording) -> Claim:
    """The fastest of the first trials of all points."""
    trials = recording.first_pass()
    best = max((trial for trial in trials if trial.rate is not None), key=lambda trial: trial.rate or 0.0)
    failed = sum(trial.figures is None for trial in trials)
    return Claim(
        contestant="grid",
        config=best.config,
        trials=len(trials),
        first_s=best.ended_s,
        total_s=trials[-1].ended_s,
        rate=best.rate or 0.0,
        remark=f"recorded {recording.date}; {failed} of its points failed",
    )


def recorded_now(config: StudyConfig, runner: TrialRunner) -> Recording:
    """The reduced grid, without repeats."""
    began = time.monotonic()
    ground = Ground.found(config, runner)
    ground.read_ahead(runner)
    recording = grids.begun(ground, grids.reduced(ground))
    return grids.Recorder(recording=recording, runner=runner, began=began).record(0)


def read_grid(path: Path, config: StudyConfig) -> Recording:
    """A grid of the same thing. Raises ValueError where it is of another workload, plan, CPU or number of them."""
    found, hardware = recorded.read(path), profile()
    pairs = {
        "workload": (found.workload, config.workload.target.removeprefix("builtin:")),
        "options": (dict(found.options), dict(config.workload.options)),
        "device": (found.device, config.device),
        "planned run": (found.plan, plan_of(config)),
        "CPU": (found.machine["cpu"], hardware.cpu_model),
        "number of CPUs": (found.machine["cpus_usable"], hardware.cpus_usable),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise ValueError(f"{path.name} is of another {name}: {theirs} there, {ours} here")
    return found
