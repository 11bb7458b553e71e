"""Record a real grid: every point of a reduced search space of one workload on this machine, each by a trial.

Run: PYTHONPATH=.:tests:tests/search python tests/benchmarks/grids.py --workload images [--device cpu|cuda] --out FILE
     [--repeats 12] [--workers N ...] [--batch-sizes N ...] [--seconds N] [--seed 0]

The grid: no workers, a quarter of the CPUs, half of them and all but one, or where CPUs are few 1, all of them and up
to 8 times as many; the whole effective batch, a quarter and a sixteenth of it; fp32 and bf16; 2 batches prefetched,
pinned on a GPU, workers kept. It has at most 36 points. Trials are those of a study of four minutes, without races: in
a warm host, from a warm page cache, in random order. A second trial of some points tells the noise. Failures are
recorded by their kind.

The file is written after each trial: what was measured is kept whatever ends the command, but search.py and live.py
take whole grids only. It goes to studies/search/grids/NAME.json, where search.py finds it under that name.
"""

import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import recorded
from ground import SETTINGS, Ground, asked, end_on_sigterm, runner_of
from recorded import RecordedTrial, Recording

from pipetune.api import LOAD_CHECK_S
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.hardware.environment import versions
from pipetune.hardware.host import busy_cpus
from pipetune.search.ledger import OTHER_LOAD_CPUS
from pipetune.trial.runner import TrialRunner

MOST_POINTS = 36
FEW_CPUS = 4
PREFETCH = 2
PRECISIONS = 2


def worker_counts(cpus: int) -> tuple[int, ...]:
    """Up to what is usual; where CPUs are few, up to what a loader that waits could use."""
    if cpus <= FEW_CPUS:
        return tuple(sorted({0, 1, cpus, 2 * cpus, 4 * cpus, 8 * cpus}))
    return (0, cpus // 4, cpus // 2, cpus - 1)


def batch_sizes(space: SearchSpace) -> tuple[int, ...]:
    """The largest, about a quarter of it and about a sixteenth."""
    largest = space.batch_size[-1]
    return tuple(sorted({min(space.batch_size, key=lambda b: abs(b - largest / part)) for part in (1, 4, 16)}))


def reduced(ground: Ground, workers: Sequence[int] | None = None, batches: Sequence[int] | None = None) -> SearchSpace:
    """The grid; `workers` and `batches` replace what is chosen. Raises ValueError for what is no grid."""
    unknown = set(batches or ()) - set(ground.space.batch_size)
    if unknown:
        raise ValueError(f"batches of {sorted(unknown)} are none of {ground.space.batch_size}")
    space = replace(
        ground.space,
        num_workers=tuple(sorted(workers or worker_counts(ground.hardware.cpus_usable))),
        prefetch_factor=(PREFETCH,),
        pin_memory=(ground.facts.has_accelerator,),
        persistent_workers=(True,),
        batch_size=tuple(sorted(batches or batch_sizes(ground.space))),
        amp=ground.space.amp[:PRECISIONS],
    )
    if len(space) > MOST_POINTS:
        raise ValueError(f"the grid has {len(space)} points, more than {MOST_POINTS}")
    return space


def begun(ground: Ground, space: SearchSpace, busy: float = 0.0) -> Recording:
    """A recording without trials; other programs kept so many CPUs `busy`."""
    hardware, config = ground.hardware, ground.config
    return Recording(
        date=datetime.now(UTC).date().isoformat(),
        machine={
            "cpu": hardware.cpu_model,
            "cpus_usable": hardware.cpus_usable,
            "gpu": ground.facts.device_name if ground.facts.has_accelerator else None,
            "driver": hardware.driver,
            **versions(),
            "torch": ground.facts.torch_version,
        },
        busy_cpus=busy,
        workload=config.workload.target.removeprefix("builtin:"),
        options=config.workload.options,
        device=config.device,
        seed=config.seed,
        plan=ground.plan,
        limits=ground.limits,
        space=space,
    )


@dataclass(kw_only=True)
class Recorder:
    """Makes one trial after another; `keep` gets the recording after each.

    `began` is when its time began to run; no trial is begun that would not end within `seconds` of it.
    """

    recording: Recording
    runner: TrialRunner
    keep: Callable[[Recording], None] = lambda _: None
    began: float = field(default_factory=time.monotonic)
    seconds: float = math.inf
    planned: int = 0

    def record(self, repeats: int) -> Recording:
        """Every point once in random order, then so many of those that ran again."""
        points = list(self.recording.space.configs())
        rng = random.Random(f"{self.recording.seed} grid")
        self.planned = len(points) + min(repeats, len(points))
        self._measure(rng.sample(points, len(points)))
        ran = [trial.config for trial in self.recording.trials if trial.figures is not None]
        self._measure(rng.sample(ran, min(repeats, len(ran))))
        return self.recording

    def _measure(self, configs: Iterable[TrialConfig]) -> None:
        for config in configs:
            if self._elapsed_s() + self._trial_s() > self.seconds:
                say("no time for another trial")
                return
            began_s = self._elapsed_s()
            outcome = self.runner.run(config, self.recording.limits)
            ended_s = self._elapsed_s()
            trial = RecordedTrial.of(outcome, self.recording.plan, seconds=ended_s - began_s, ended_s=ended_s)
            self.recording = self.recording.with_trial(trial)
            self.keep(self.recording)
            left_s = (self.planned - len(self.recording.trials)) * self._trial_s()
            say(f"{told(self.recording, self.planned)}; {left_s / 60:.1f} min left")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def _trial_s(self) -> float:
        """What a trial takes, as far as is known."""
        return fmean([trial.seconds for trial in self.recording.trials] or [0.0])


def told(recording: Recording, planned: int) -> str:
    """What the last trial gave."""
    last = recording.trials[-1]
    head = f"[{last.ended_s:4.0f} s] {len(recording.trials)} of {planned}: {last.config.label()}"
    if last.figures is None:
        return f"{head}: {last.failure}"
    waiting = f"waiting {last.figures.data_wait_percent:.0f} %"
    return ", ".join([f"{head}: {last.figures.effective.value:,.0f} samples/s", waiting, *last.figures.interference])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Record; 130 where a signal ended it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, choices=list(SETTINGS["cpu"]))
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--repeats", type=int, default=12, help="points that are measured a second time")
    parser.add_argument("--workers", type=int, nargs="+", help="default: by the CPUs")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="default: three, by the effective batch")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial that would not end by then")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.workload not in SETTINGS[given.device]:
        parser.error(f"on {given.device} there is no setting for {given.workload}")
    busy = busy_cpus(LOAD_CHECK_S)
    if busy >= OTHER_LOAD_CPUS:
        say(f"other programs keep {busy:.1f} CPUs busy: what is recorded now is a machine beside them")
    began = time.monotonic()
    config = asked(given.workload, given.device, seed=given.seed)
    end_on_sigterm()
    with TemporaryDirectory() as logs, contextlib.closing(runner_of(config, Path(logs))) as runner:
        try:
            ground = Ground.found(config, runner)
            space = reduced(ground, given.workers, given.batch_sizes)
            ground.read_ahead(runner)
            say(f"set up in {time.monotonic() - began:.0f} s; {len(space)} points, then {given.repeats} of them again")
            Recorder(
                recording=begun(ground, space, busy),
                runner=runner,
                keep=lambda recording: recorded.write(given.out, recording),
                began=began,
                seconds=given.seconds,
            ).record(given.repeats)
        except ValueError as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            say(f"interrupted; what was measured is in {given.out}" if given.out.is_file() else "interrupted")
            return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
