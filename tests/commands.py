"""The `pipetune` command as tests run it: without installation, bounded, and watched until nothing of it is left."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
MAIN = "from pipetune.cli.main import main; main()"
# Windows of a tenth of a second, and the least to certify: tests look at what the command says and leaves behind.
QUICK = f"""
from pipetune.search import budget, certify, prepare, probing, study
budget.ROUNDS = 2
certify.MAX_FINALISTS = 1
prepare.COMPARE_S, prepare.READ_AHEAD_S = 0.1, 0.4
probing.PROBE_S = probing.LEAST_S = 0.05
from pipetune.trial.protocol import MeasureLimits
study.measure_limits = lambda config: MeasureLimits(min_s=0.4, max_s=0.8, window_s=0.1, warm_up_s=0.1)
{MAIN}
"""
MARK = "PIPETUNE_TESTED_RUN"
TRIAL_LINE = re.compile(r" *(\d+)  w=")

TINY = """\
study: tiny
workload:
  target: builtin:synthetic
  options: {length: 512, cpu_ms: 0.05, payload_bytes: 256, width: 16, layers: 1}
training: {effective_batch_size: 64, epochs: 2}
baseline: {num_workers: 0, batch_size: 32, amp: fp32}
search:
  num_workers: [0, 1]
  prefetch_factor: [2, 4]
  pin_memory: false
  persistent_workers: true
  batch_size: [16, 32, 64]
  amp: fp32
budget: {time: 60s, trials: 4}
"""
JOB = """\
import torch
from torch import nn
import pipetune


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.ones(4)


def loss(model, batch):
    return model(batch).square().mean()


def build(**options):
    return pipetune.Workload(
        dataset=Rows(),
        model=nn.Linear(4, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loss=loss,
    )
"""


def environment(**extra: str) -> dict[str, str]:
    """One thread a process, so that runs stay short where cores are shared; the package from where it is here."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "80"} | extra


def pipetune(
    *arguments: object, cwd: Path, quick: bool = False, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return _ended([sys.executable, "-c", QUICK if quick else MAIN, *map(str, arguments)], cwd, timeout_s)


def python(code: str, *arguments: object, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, where every warning is an error."""
    return _ended([sys.executable, "-W", "error", "-c", code, *map(str, arguments)], cwd, timeout_s)


def _ended(command: list[str], cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


class Running:
    """A command that goes on while the test looks at it. What it starts inherits a mark and is found by it."""

    def __init__(self, *arguments: object, cwd: Path, **popen: Any) -> None:
        self.mark = uuid.uuid4().hex
        self.error_file = cwd / f"stderr-{self.mark}"
        with self.error_file.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", QUICK, *map(str, arguments)],
                cwd=cwd,
                env=environment(**{MARK: self.mark}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                **popen,
            )

    def stderr(self) -> str:
        return self.error_file.read_text()

    def trial_numbers(self) -> list[int]:
        """Of the trials that were reported so far."""
        return [int(match[1]) for line in self.stderr().splitlines() if (match := TRIAL_LINE.match(line))]

    def wait_for(self, condition: Any, timeout_s: float = 60) -> None:
        """Until the condition holds; an end before that is a failure."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.stderr()}"
            assert time.monotonic() < deadline, f"nothing within {timeout_s} s: {self.stderr()}"
            time.sleep(0.02)

    def end_by(self, *signals: int) -> "Ended":
        """Send the signals and wait for the end."""
        began = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)
        code = self.process.wait(timeout=30)
        return Ended(code=code, seconds=time.monotonic() - began, stderr=self.stderr(), left=self.left())

    def left(self, within_s: float = 1.0) -> list[str]:
        """What still runs, of what the command started, so many seconds after its end."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def processes(self) -> list[str]:
        """The command itself and everything it started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.cmdline()}")
        return found

    def clean_up(self) -> None:
        """End it if a test failed half way."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended after a signal."""

    code: int
    seconds: float
    stderr: str
    left: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class FinishedStudy:
    """A small study that ran to its end with --json."""

    config: Path
    folder: Path
    stdout: str
    stderr: str

    @property
    def told(self) -> Mapping[str, Any]:
        return json.loads(self.stdout)


def finish_study(folder: Path) -> FinishedStudy:
    """Tune the tiny workload: 4 trials and the certification, about 20 s."""
    config = folder / "tiny.yaml"
    config.write_text(TINY)
    run = pipetune("tune", config, "--study-dir", folder / "study", "--json", cwd=folder, quick=True)
    assert run.returncode == 0, run.stderr
    return FinishedStudy(config=config, folder=folder / "study", stdout=run.stdout, stderr=run.stderr)
