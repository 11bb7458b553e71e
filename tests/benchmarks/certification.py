"""How often a study names the right winner: whole studies of 20 configurations against machines of known noise.

Run: PYTHONPATH=.:tests:tests/search python tests/benchmarks/certification.py [--seeds 200] [--first-seed 0]
     [--only NAME ...] [--processes 1]

Everything is the real code but the runner and the storage, which is in memory: baseline, search with its references,
choosing, verifying. The machine draws a factor for each trial and each fresh process (log-normal) and windows that
follow each other (AR(1) with 0.7). The exit code is 1 where a bound is missed: a false gain in at most 2 % of studies
where all is equal, and the one that is 15 % faster named in at least 90 %.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import optuna
from builders import facts, hardware, space, trial_config
from lab import study_config

from pipetune.core.facts import Preparation, WorkloadFacts
from pipetune.core.measurement import Measurement
from pipetune.core.record import Stage
from pipetune.core.space import Amp, DeclaredSpace, TrialConfig
from pipetune.core.throughput import EpochStart, Window
from pipetune.core.tuned import Status
from pipetune.search import guide
from pipetune.search.progress import Silent
from pipetune.search.signals import Signals
from pipetune.search.study import StudyRun
from pipetune.storage.study_store import StudyStore
from pipetune.trial.protocol import MeasureLimits

DECLARED = DeclaredSpace(
    num_workers=(1, 2, 3, 4, 5),
    prefetch_factor=(2, 4),
    pin_memory=(False, True),
    persistent_workers=(False,),
    batch_size=(64,),
    amp=(Amp.FP32,),
)
CONFIGS = tuple(
    space(num_workers=(1, 2, 3, 4, 5), persistent_workers=(False,), batch_size=(64,), amp=(Amp.FP32,)).configs()
)
BASELINE = trial_config(3, persistent_workers=False)
guide.LEAST_TRIALS = len(CONFIGS) + 1  # every configuration is measured: what is asked is who wins then
REFERENCES = 3
"""Of a study of 20 configurations, one in every 6 trials."""
WINDOWS = 40
WINDOW_S = 0.5
WINDOW_SD = 0.05
CORRELATION = 0.7


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`gain` is what one configuration has over all others, as a share; `process_sd` is of logarithms."""

    name: str
    gain: float
    process_sd: float
    holds: Callable[["Tally"], bool] = lambda _: True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One study: was a gain named, and the right one; what it took."""

    is_certified: bool
    is_right: bool
    arms: int
    choosing_rounds: int
    verifying_rounds: int
    processes: int


@dataclass(kw_only=True)
class NoisyMachine:
    """A TrialRunner whose rates are known but for the noise."""

    rate: Callable[[TrialConfig], float]
    process_sd: float
    seed: int

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def describe(self) -> WorkloadFacts:
        return facts()

    def prepare(self, config: TrialConfig, **_: object) -> Preparation:  # noqa: ARG002
        return Preparation()

    def close_hosts(self) -> None:
        pass

    def run(
        self,
        config: TrialConfig,
        limits: MeasureLimits,  # noqa: ARG002
        *,
        fresh: bool = False,  # noqa: ARG002
        compute_only: bool = False,  # noqa: ARG002
    ) -> Measurement:
        rate = self.rate(config) * math.exp(self._random.gauss(0.0, self.process_sd))
        return Measurement(
            config=config,
            windows=tuple(self._windows(config, rate)),
            epoch_start=EpochStart(fresh_s=0.0, refill_s=None),
            settled=True,
            gpu=None,
            gpu_reason="no GPU",
            peak_gpu_memory_bytes=None,
            host_memory_bytes=2**30,
            compute_only_samples_per_sec=None,
            seconds=WINDOWS * WINDOW_S,
            phase_seconds={},
        )

    def _windows(self, config: TrialConfig, rate: float) -> Iterable[Window]:
        samples = config.effective_batch_size * max(1, round(rate * WINDOW_S / config.effective_batch_size))
        level = self._random.gauss(0.0, WINDOW_SD)
        for number in range(WINDOWS):
            seconds = samples / (rate * math.exp(level))
            yield Window(samples=samples, seconds=seconds, data_wait_s=0.0, began_s=1000.0 + number * WINDOW_S)
            own = math.sqrt(1 - CORRELATION**2) * WINDOW_SD
            level = CORRELATION * level + self._random.gauss(0.0, own)


def studied(scenario: Scenario, seed: int) -> Outcome:
    """One whole study."""
    best = random.Random(f"best {seed}").choice([config for config in CONFIGS if config != BASELINE])
    machine = NoisyMachine(
        rate=lambda config: 10_000.0 * (1 + scenario.gain * (config == best)), process_sd=scenario.process_sd, seed=seed
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    store = StudyStore(optuna.create_study(direction="maximize"))
    result = StudyRun(
        study_config(trials=len(CONFIGS) + REFERENCES, baseline=BASELINE, search=DECLARED, seed=seed),
        runner=machine,
        hardware=hardware(),
        versions={},
        open_store=lambda _: store,
        write=lambda _: None,
        folder=Path(),
        progress=Silent(),
        signals=Signals(),
    ).run()
    assert len({record.config for record in result.records}) == len(CONFIGS)
    kept = store.certification()
    assert kept is not None
    choosing = [one for one in kept.rounds if one.stage is Stage.CHOOSING]
    return Outcome(
        is_certified=result.tuned.status is Status.CERTIFIED,
        is_right=result.tuned.config == best,
        arms=len(choosing[0].outcomes) if choosing else 1,
        choosing_rounds=len(choosing),
        verifying_rounds=len(kept.rounds) - len(choosing),
        processes=sum(len(one.outcomes) for one in kept.rounds),
    )


@dataclass(frozen=True, kw_only=True)
class Tally:
    """All studies of a scenario."""

    outcomes: Sequence[Outcome]
    seconds: float

    @property
    def certified(self) -> int:
        return sum(one.is_certified for one in self.outcomes)

    @property
    def right(self) -> int:
        """Named and certified."""
        return sum(one.is_certified and one.is_right for one in self.outcomes)

    def share(self, count: int) -> float:
        return count / len(self.outcomes)


def wilson(count: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927)."""
    z = 1.96
    share = count / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2)) / (1 + z**2 / total)
    return middle - half, middle + half


SCENARIOS = (
    Scenario(name="equal", gain=0.0, process_sd=0.08, holds=lambda tally: tally.share(tally.certified) <= 0.02),
    Scenario(name="15 % faster", gain=0.15, process_sd=0.08, holds=lambda tally: tally.share(tally.right) >= 0.9),
    Scenario(name="equal, quiet", gain=0.0, process_sd=0.01),
    Scenario(name="15 % faster, quiet", gain=0.15, process_sd=0.01),
    Scenario(name="8 times faster", gain=7.0, process_sd=0.08),
)


def row(scenario: Scenario, tally: Tally) -> str:
    total = len(tally.outcomes)

    def percent(count: int) -> str:
        low, high = wilson(count, total)
        return f"{100 * count / total:5.1f} % ({100 * abs(low):4.1f}-{100 * high:5.1f})"

    def middle(name: str) -> str:
        values = [getattr(one, name) for one in tally.outcomes]
        return f"{median(values):5.0f} {max(values):4d}"

    return "  ".join(
        [
            f"{scenario.name:<20}{100 * scenario.process_sd:3.0f} %",
            percent(tally.certified),
            percent(tally.right),
            *(middle(name) for name in ("arms", "choosing_rounds", "verifying_rounds", "processes")),
            f"{tally.seconds:5.0f} s",
            "" if scenario.holds(tally) else "MISSED",
        ]
    )


def main() -> int:
    """Print the table; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of scenarios")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    print(f"{given.seeds} studies of {len(CONFIGS)} configurations each, seeds from {given.first_seed} on")
    print(f"{'':<26}gain named (95 %)     the right one (95 %)  arms  max  choosing    verifying   processes")
    missed = False
    with ProcessPoolExecutor(given.processes) as pool:
        for scenario in SCENARIOS:
            if given.only and scenario.name not in given.only:
                continue
            began = time.monotonic()
            seeds = range(given.first_seed, given.first_seed + given.seeds)
            outcomes = list(pool.map(studied_by_name, [scenario.name] * len(seeds), seeds, chunksize=5))
            tally = Tally(outcomes=outcomes, seconds=time.monotonic() - began)
            missed = missed or not scenario.holds(tally)
            print(row(scenario, tally), flush=True)
    return int(missed)


def studied_by_name(name: str, seed: int) -> Outcome:
    """For a pool of processes, which cannot be sent a scenario."""
    return studied(next(one for one in SCENARIOS if one.name == name), seed)


if __name__ == "__main__":
    raise SystemExit(main())
