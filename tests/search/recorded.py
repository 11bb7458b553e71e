"""Machines as they were recorded: every point of a small grid, measured by real trials; a file and a surface of it."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from builders import measurement
from pydantic import TypeAdapter

from pipetune.core.measurement import FailureKind, Measurement, TrialOutcome
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.core.throughput import EpochStart, Estimate, TrainingPlan
from pipetune.trial.protocol import MeasureLimits

SCHEMA_VERSION = 1
DIGITS = 5
UNKNOWN_NOISE_SD = 0.03
"""Where nothing was repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a trial that ran says: samples/s over the planned run and inside an epoch, and where the time went.

    `interference` is what disturbed it from outside, in words.
    """

    effective: Estimate
    steady: Estimate
    settled: bool
    data_wait_percent: float
    data_work_share: float | None
    epoch_start: EpochStart
    interference: tuple[str, ...]

    @classmethod
    def of(cls, trial: Measurement, plan: TrainingPlan) -> "Figures":
        return cls(
            effective=trial.effective(plan),
            steady=trial.steady(),
            settled=trial.settled,
            data_wait_percent=trial.data_wait_percent(),
            data_work_share=trial.data_work_share(),
            epoch_start=trial.epoch_start,
            interference=trial.interference,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrial:
    """One trial of a recording: either figures or a failure. `ended_s` counts from the start of the recording."""

    config: TrialConfig
    seconds: float
    ended_s: float
    figures: Figures | None
    failure: FailureKind | None

    @classmethod
    def of(cls, outcome: TrialOutcome, plan: TrainingPlan, *, seconds: float, ended_s: float) -> "RecordedTrial":
        ran = isinstance(outcome, Measurement)
        return cls(
            config=outcome.config,
            seconds=seconds,
            ended_s=ended_s,
            figures=Figures.of(outcome, plan) if ran else None,
            failure=None if ran else outcome.kind,
        )

    @property
    def rate(self) -> float | None:
        """Samples/s over the planned run; None where it failed."""
        return self.figures.effective.value if self.figures else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A grid of one workload on one machine. `trials` are in the order in which they were made, repeats too.

    `busy_cpus` is how many CPUs' worth of work other programs did before the first.
    """

    schema_version: int = SCHEMA_VERSION
    date: str
    machine: Mapping[str, str | int | None]
    busy_cpus: float
    workload: str
    options: Mapping[str, Any]
    device: str
    seed: int
    plan: TrainingPlan
    limits: MeasureLimits
    space: SearchSpace
    trials: tuple[RecordedTrial, ...] = ()

    def with_trial(self, trial: RecordedTrial) -> "Recording":
        return replace(self, trials=(*self.trials, trial))

    def first_pass(self) -> list[RecordedTrial]:
        """Of each configuration the first trial."""
        firsts: dict[TrialConfig, RecordedTrial] = {}
        for trial in self.trials:
            firsts.setdefault(trial.config, trial)
        return list(firsts.values())


_RECORDING: TypeAdapter[Recording] = TypeAdapter(Recording)


def write(path: Path, recording: Recording) -> None:
    """One trial a line; whoever is interrupted leaves the file as it was."""
    content = _rounded(_RECORDING.dump_python(recording, mode="json"))
    trials = ",\n".join(f"  {json.dumps(trial)}" for trial in content.pop("trials"))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(f'{{\n{head} "trials": [\n{trials}\n ]\n}}\n')
    new.replace(path)


def read(path: Path) -> Recording:
    """Raises ValueError where the file is of another kind or version, or lacks points of its space."""
    recording = _RECORDING.validate_json(path.read_text())
    if recording.schema_version != SCHEMA_VERSION:
        raise ValueError(f"{path.name} has schema version {recording.schema_version}, not {SCHEMA_VERSION}")
    missing = set(recording.space.configs()) - {trial.config for trial in recording.trials}
    if missing:
        raise ValueError(f"{path.name} lacks {len(missing)} of the {len(recording.space)} points of its space")
    return recording


def _rounded(value: Any) -> Any:
    """The same content with DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


class RecordedSurface:
    """A recorded grid as a machine of known truth, like those of surfaces.py: a point's true rate is its trials' mean.

    What its trials had of luck is thereby true of it; the more were repeated, the less.
    """

    def __init__(self, name: str, recording: Recording) -> None:
        self.name = name
        self.space = recording.space
        self.plan = recording.plan
        self.cpus = float(recording.machine["cpus_usable"] or 1)
        self.has_accelerator = recording.device != "cpu"
        self._trials: dict[TrialConfig, list[RecordedTrial]] = {}
        for trial in recording.trials:
            self._trials.setdefault(trial.config, []).append(trial)
        self.noise_sd = _noise_sd(map(_log_rates, self._trials.values()))

    def rate(self, config: TrialConfig) -> float | None:
        """Samples/s over the planned run; None where no trial of it ran."""
        logs = _log_rates(self._trials[config])
        return math.exp(fmean(logs)) if logs else None

    def seconds(self, config: TrialConfig) -> float:
        """What a trial takes."""
        return fmean(trial.seconds for trial in self._trials[config])

    def best(self) -> tuple[TrialConfig, float]:
        rates = ((config, self.rate(config)) for config in self.space.configs())
        return max(((config, rate) for config, rate in rates if rate is not None), key=lambda one: one[1])

    def trial(self, config: TrialConfig, rate: float) -> Measurement:
        """What the recorded trial tells of its parts, at the rate that was measured now."""
        figures = next(trial.figures for trial in self._trials[config] if trial.figures is not None)
        return measurement(
            config,
            rate=rate * figures.steady.value / figures.effective.value,
            wait_share=figures.data_wait_percent / 100,
            work_share=figures.data_work_share,
            epoch_start=figures.epoch_start,
        )


def surface_of(path: Path) -> RecordedSurface:
    """Raises ValueError like `read`."""
    return RecordedSurface(path.stem, read(path))


def _log_rates(trials: Iterable[RecordedTrial]) -> list[float]:
    return [math.log(trial.rate) for trial in trials if trial.rate is not None]


def _noise_sd(groups: Iterable[list[float]]) -> float:
    """What trials of one configuration differ by (standard deviation of logarithms), from all that were repeated."""
    repeated = [logs for logs in groups if len(logs) > 1]
    if not repeated:
        return UNKNOWN_NOISE_SD
    squares = sum((log - fmean(logs)) ** 2 for logs in repeated for log in logs)
    return math.sqrt(squares / sum(len(logs) - 1 for logs in repeated))
