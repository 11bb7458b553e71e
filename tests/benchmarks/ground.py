"""The ground that measuring benchmarks stand on: how large a workload is, its study, and the machine."""

import hashlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from plain import EPOCHS, PlainProcess

import pipetune
from pipetune.api import read_config
from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import HardwareProfile
from pipetune.core.space import SearchSpace
from pipetune.core.study import StudyConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.hardware.environment import profile, versions
from pipetune.search.plan import loader_config
from pipetune.search.prepare import READ_AHEAD_S, READ_AHEAD_SHARE
from pipetune.search.terms import measure_limits, resolved_space
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import HostRunner, TrialRunner

BUDGET_S = 240.0
"""Of a study, where nothing else is said: its trials have 4 to 8 seconds of windows."""
COMPARE_S = 0.1
"""What a study finds by comparing samples is for its safety; a contest needs none of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How large a workload is on one kind of device.

    Slower optimizer steps than `step_limit_s` are not asked of the fidelity benchmark. `epoch_samples` are of a study's
    plan: about 5 seconds at the best rate known on 2 CPUs, 8 on an H200, or the whole dataset where that is shorter.
    """

    options: Mapping[str, Any]
    effective_batch_size: int
    step_limit_s: float
    epoch_samples: int


SETTINGS = {
    "cpu": {
        "images": Setting(
            options={
                "images": 300,
                "image_size": [320, 240],
                "virtual_length": 20_000,
                "crop": 64,
                "depth": 10,
                "width": 8,
                "classes": 10,
            },
            effective_batch_size=64,
            step_limit_s=0.4,
            epoch_samples=100 * 64,
        ),
        "tokens": Setting(
            options={
                "tokens": 1_000_000,
                "virtual_length": 100_000,
                "block_size": 64,
                "preset": "nano",
                "vocabulary": 512,
            },
            effective_batch_size=64,
            step_limit_s=0.4,
            epoch_samples=60 * 64,
        ),
        "memory_images": Setting(
            options={"images": 5000, "depth": 10, "width": 8},
            effective_batch_size=128,
            step_limit_s=0.4,
            epoch_samples=39 * 128,
        ),
        "tabular": Setting(
            options={"rows": 200_000, "width": 64, "layers": 2},
            effective_batch_size=1024,
            step_limit_s=0.4,
            epoch_samples=195 * 1024,
        ),
        "synthetic": Setting(
            options={"length": 20_000, "cpu_ms": 0.2, "wait_ms": 1, "wait_ms_max": 4},
            effective_batch_size=64,
            step_limit_s=0.4,
            epoch_samples=240 * 64,
        ),
    },
    "cuda": {
        "images": Setting(
            options={"images": 1000, "virtual_length": 200_000, "crop": 224, "depth": 50, "classes": 1000},
            effective_batch_size=256,
            step_limit_s=0.8,
            epoch_samples=80 * 256,
        ),
        "tokens": Setting(
            options={"virtual_length": 100_000}, effective_batch_size=64, step_limit_s=0.8, epoch_samples=48 * 64
        ),
    },
}


def asked(
    workload: str, device: str, *, budget_s: float = BUDGET_S, seed: int = 0, most_workers: int | None = None
) -> StudyConfig:
    """The study of a workload as its config would say it, with all else left to pipetune.

    Up to `most_workers` are searched; None leaves that to pipetune too.
    """
    setting = SETTINGS[device][workload]
    return read_config(
        {
            "study": f"{device}-{workload}",
            "workload": {"target": f"builtin:{workload}", "options": dict(setting.options)},
            "training": {
                "effective_batch_size": setting.effective_batch_size,
                "epochs": EPOCHS,
                "epoch_samples": setting.epoch_samples,
            },
            "search": {"num_workers": "auto" if most_workers is None else {"min": 0, "max": most_workers}},
            "budget": {"time": budget_s},
            "device": device,
            "seed": seed,
        }
    )


def plan_of(config: StudyConfig) -> TrainingPlan:
    """The planned run of such a study, which says how long its epochs are."""
    assert config.epoch_samples is not None
    return TrainingPlan(
        effective_batch_size=config.effective_batch_size, epochs=config.epochs, epoch_samples=config.epoch_samples
    )


def runner_of(config: StudyConfig, logs: Path) -> HostRunner:
    """Trials as that study runs them, in warm hosts."""
    return HostRunner(
        config.workload,
        device=config.device,
        seed=config.seed,
        log_folder=logs,
        gpu_memory_headroom=config.gpu_memory_headroom,
    )


def plain_process(config: StudyConfig) -> PlainProcess:
    """The plain loop of the same workload; it may still be building it."""
    return PlainProcess(
        {
            "workload": config.workload.target.removeprefix("builtin:"),
            "options": dict(config.workload.options),
            "device": config.device,
            "seed": config.seed,
        }
    )


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What a study of this config would find and work with on this machine."""

    config: StudyConfig
    hardware: HardwareProfile
    facts: WorkloadFacts
    plan: TrainingPlan
    limits: MeasureLimits
    space: SearchSpace

    @classmethod
    def found(cls, config: StudyConfig, runner: TrialRunner) -> "Ground":
        """Start the runner's host and look. Raises WorkloadError where the workload cannot be built."""
        hardware, facts = profile(), runner.describe()
        plan = plan_of(config)
        return cls(
            config=config,
            hardware=hardware,
            facts=facts,
            plan=plan,
            limits=replace(measure_limits(config), epoch_samples=plan.epoch_samples),
            space=resolved_space(config, facts, hardware),
        )

    def read_ahead(self, runner: TrialRunner) -> None:
        """Fill the page cache before the first trial, as a study does and for as long."""
        budget_s = self.config.budget.seconds or BUDGET_S
        workers = max(count for count in self.space.num_workers if count <= self.hardware.cpus_usable)
        runner.prepare(
            loader_config(self.space, workers),
            dataset_samples=self.facts.dataset_samples,
            compare_s=COMPARE_S,
            read_ahead_s=min(READ_AHEAD_S, READ_AHEAD_SHARE * budget_s),
        )


def machine_lines() -> list[str]:
    """What a table says of the machine and the versions on it."""
    hardware = profile()
    gpu = ", ".join(gpu.name for gpu in hardware.gpus) or "no GPU"
    return [
        f"{hardware.cpu_model}, {hardware.cpus_usable} CPUs usable; {gpu}",
        ", ".join(f"{name} {version}" for name, version in versions().items()),
    ]


def source_digest() -> str:
    """What tells one state of the package from another: figures of two are not to be joined."""
    package = Path(pipetune.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, and once: `timeout` sends two, which would break into the end."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's own signature
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
