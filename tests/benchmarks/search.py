"""How soon a search is near the optimum: search orders on machines of known truth, over whole spaces.

Run: PYTHONPATH=.:tests:tests/search python tests/benchmarks/search.py [--seeds 50] [--surfaces NAME ...]
     [--methods NAME ...] [--grids studies/search/grids] [--processes 2] [--out FILE]

Each seed draws a machine of each kind (tests/search/surfaces.py, which imports nothing of the prediction) and noise
from trial to trial that follows itself (AR(1), 0.5). Every method begins with the baseline: torch's defaults at the
largest batch that fits. `pipetune` is the order in which the search proposes, knowing what the baseline's trial tells;
beside it stands what it would be with probes of each part, 10-30 % wrong. The others are what people use: no rule, and
repeats where they come. Races, the end of a search and certification are not simulated.

Recorded grids (those that grids.py wrote) are machines whose truth is what real trials measured, with the noise that
their repeats showed. They hold at most 36 points and nothing between them, so that each counts for more, and nobody
measured what probes would have said; their baseline is pinned where the whole grid is.

Counted is until the first trial whose TRUE rate is within 10, 5 or 3 % of the optimum, in trials and in seconds; loss
is what the fastest of the first 15 trials truly lacks. A method that does not get there in time counts as having needed
all of its trials.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import surfaces
from builders import failure, trial_config
from recorded import RecordedSurface, surface_of
from surfaces import Surface
from tpe import Tpe

from pipetune.core.costs import Costs, costs_of_probes, costs_of_trial
from pipetune.core.measurement import FailureKind
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp, TrialConfig
from pipetune.search.belief import Belief, Seen, expected_gains, trial_seconds
from pipetune.search.failures import is_beyond
from pipetune.search.guide import THRIFT
from pipetune.search.plan import default_baseline, usual_rule

MOST_TRIALS = 60
LOSS_AT = 15
NEAR = (0.90, 0.95, 0.97)
CORRELATION = 0.5
PROBES_S = 30.0
OVERHEAD_S = 7.0
HOST_S = 10.0
"""What a host costs that ran out of memory: another is started, and the workload built anew."""
GRIDS = Path(__file__).parents[2] / "studies/search/grids"


@dataclass(kw_only=True)
class Machine:
    """A surface with its noise; keeps account of what was tried."""

    surface: Surface | RecordedSurface
    rng: random.Random
    tried: dict[TrialConfig, float | None] = field(default_factory=dict)
    largest: dict[Amp, int] = field(default_factory=dict)
    """Batches that are known to fit before any trial."""
    true_rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    _drift: float = 0.0

    def measure(self, config: TrialConfig) -> float | None:
        rate = self.surface.rate(config)
        self.spent_s += self.surface.seconds(config)
        sd = self.surface.noise_sd
        self._drift = CORRELATION * self._drift + math.sqrt(1 - CORRELATION**2) * self.rng.gauss(0, sd)
        self.true_rates.append(rate or 0.0)
        self.seconds.append(self.spent_s)
        measured = None if rate is None else rate * math.exp(self._drift)
        self.tried.setdefault(config, measured)
        return measured

    def baseline(self) -> None:
        """Torch's defaults as far as the space has them, with the largest batch that fits."""
        space = self.surface.space
        for config in default_baseline(space.batch_size, space.effective_batch_size):
            if self.measure(replace(config, pin_memory=space.pin_memory[0])) is not None:
                return

    def find_largest(self) -> None:
        """What a probe of the step finds out on its way down, a host for each size that does not fit.

        bf16 and fp16 share what did not fit, and fp32 what the baseline met.
        """
        sizes = self.surface.space.batch_size
        self.largest = dict(self.surface.effects.memory)
        reduced = self.largest.get(Amp.BF16, sizes[-1])
        self.spent_s += HOST_S * sum(size > reduced for size in sizes)

    @property
    def trials(self) -> int:
        return len(self.true_rates)

    def is_beyond(self, config: TrialConfig) -> bool:
        """Whether what did not fit tells that this will not."""
        if config.batch_size > self.largest.get(config.amp, config.batch_size):
            return True
        return any(
            rate is None and is_beyond(config, failure(met, FailureKind.GPU_OUT_OF_MEMORY))
            for met, rate in self.tried.items()
        )


# Methods: each yields the configuration to measure next, and is told what came of it.

Method = Callable[[Machine, int], Iterator[TrialConfig]]


def random_order(machine: Machine, seed: int) -> Iterator[TrialConfig]:
    configs = list(machine.surface.space.configs())
    random.Random(seed).shuffle(configs)
    yield from configs


def grid_order(machine: Machine, seed: int) -> Iterator[TrialConfig]:  # noqa: ARG001
    yield from machine.surface.space.configs()


def tpe(machine: Machine, seed: int, *, multivariate: bool) -> Iterator[TrialConfig]:
    learner = Tpe(machine.surface.space, seed=seed, multivariate=multivariate)
    for config, rate in machine.tried.items():
        if rate is not None:
            learner.know(config, rate)
    while True:
        config = learner.ask()
        yield config
        learner.tell(machine.tried[config])


def believed(machine: Machine, seed: int, *, probed: bool) -> Iterator[TrialConfig]:
    """Ours: the prediction corrected by a Gaussian process, and the greatest expected gain next."""
    if probed:
        costs = probed_costs(machine, random.Random(f"probes {seed}"))
        machine.find_largest()
        machine.spent_s += PROBES_S
    else:
        costs = baseline_costs(machine)
        rule = usual_rule(machine.surface.space, cpus_usable=machine.surface.cpus)
        if rule not in machine.tried and not machine.is_beyond(rule):
            yield rule
    belief = Belief(tuple(machine.surface.space.configs()), costs, machine.surface.plan)
    while True:
        seen = [Seen(config=config, rate=rate) for config, rate in machine.tried.items() if rate is not None]
        mean, sd = belief.about(seen)
        ran = {one.config for one in seen}
        best = max(value for value, config in zip(mean, belief.configs, strict=True) if config in ran)
        gains = expected_gains(mean, sd, best) / trial_seconds(belief.configs, mean, OVERHEAD_S) ** THRIFT
        for index in np.argsort(-gains):
            config = belief.configs[index]
            if config not in machine.tried and not machine.is_beyond(config):
                break
        else:
            return
        yield config


def baseline_costs(machine: Machine) -> Costs:
    """What the baseline's own trial says."""
    surface = machine.surface
    config, rate = next((config, rate) for config, rate in machine.tried.items() if rate is not None)
    return costs_of_trial(
        surface.trial(config, rate),
        cpus=surface.cpus,
        amps=surface.space.amp,
        has_accelerator=surface.has_accelerator,
    )


def probed_costs(machine: Machine, rng: random.Random) -> Costs:
    """What probes would say of the surface, each figure 10-30 % wrong, beside what the baseline's trial says."""
    probes = [*loader_probes(machine.surface, rng), *step_probes(machine.surface, rng)]
    return costs_of_probes(probes, baseline_costs(machine))


def wrong(rng: random.Random) -> float:
    return math.exp(rng.choice((-1, 1)) * rng.uniform(0.1, 0.3))


def loader_probes(surface: Surface, rng: random.Random) -> Iterator[LoaderProbe]:
    """A sample in the main process, then the loader alone with few workers and with many."""
    parts, batch = surface.parts, 32
    sample = wrong(rng)
    making_s = batch * (parts.sample_cpu_s + parts.sample_wait_s)
    as_cpus = min(surface.space.num_workers, key=lambda count: abs(count - parts.cpus))
    for workers in dict.fromkeys((0, 2, as_cpus)):
        pin = workers == as_cpus
        own = sample if workers == 0 else wrong(rng)
        start_s = (parts.start_s + parts.worker_start_s * workers) if workers else 0.0
        yield LoaderProbe(
            config=trial_config(
                workers, pin_memory=pin, batch_size=batch, accumulation_steps=surfaces.EFFECTIVE // batch
            ),
            first_batch_s=(start_s + making_s) * wrong(rng),
            batch_s=own * surface.loader_alone_s(batch, workers, pin_memory=pin),
            receive_s=surface.receive_s(batch, pin_memory=pin) * wrong(rng) if workers else 0.0,
            work_share=parts.sample_cpu_s / (parts.sample_cpu_s + parts.sample_wait_s),
            spread=None,
            batches=10,
            batch_bytes=0,
            worker_memory_bytes=None,
            seconds=PROBES_S / 8,
        )


def step_probes(surface: Surface, rng: random.Random) -> Iterator[StepProbe]:
    """The step alone at the largest batch that fits, and at a smaller one, in each precision."""
    for amp in surface.space.amp:
        fits = [batch for batch in surface.space.batch_size if batch <= surface.effects.memory.get(amp, batch)]
        for batch in {fits[-1], fits[max(0, len(fits) - 3)]}:
            config = trial_config(0, batch_size=batch, accumulation_steps=surfaces.EFFECTIVE // batch, amp=amp)
            yield StepProbe(
                config=config,
                batch_s=surface.step_alone_s(config) * wrong(rng),
                copy_s=0.0,
                pinned_copy_s=0.0,
                peak_gpu_memory_bytes=None,
                batch_bytes=0,
                seconds=PROBES_S / 8,
            )


METHODS: dict[str, Method] = {
    "random": random_order,
    "grid order": grid_order,
    "TPE": lambda machine, seed: tpe(machine, seed, multivariate=False),
    "TPE multivariate": lambda machine, seed: tpe(machine, seed, multivariate=True),
    "pipetune": lambda machine, seed: believed(machine, seed, probed=False),
    "pipetune, probed": lambda machine, seed: believed(machine, seed, probed=True),
}
NEED_PARTS = {"pipetune, probed"}
"""Methods that are for simulated surfaces only."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one study: trials and seconds to each nearness, and the true loss of what led after LOSS_AT trials."""

    surface: str
    method: str
    trials: tuple[int, ...]
    seconds: tuple[float, ...]
    loss: float
    below_baseline: bool


SIMULATED = {make.__name__: make for make in surfaces.SURFACES}


def drawn(name: str, seed: int, grids: Path) -> Surface | RecordedSurface:
    """The machine of this name; a recorded one is the same for every seed."""
    if name not in SIMULATED:
        return surface_of(grids / f"{name}.json")
    return SIMULATED[name](random.Random(f"{name} {seed}"))


def study(name: str, method: str, seed: int, grids: Path) -> Outcome:
    surface = drawn(name, seed, grids)
    machine = Machine(surface=surface, rng=random.Random(f"noise {seed} {method}"))
    _, optimum = surface.best()
    machine.baseline()
    baseline = machine.true_rates[-1]
    loss = 1.0
    proposals = METHODS[method](machine, seed)
    while machine.trials < MOST_TRIALS and (machine.trials < LOSS_AT or max(machine.true_rates) < max(NEAR) * optimum):
        config = next(proposals, None)
        if config is None:
            break
        machine.measure(config)
        if machine.trials <= LOSS_AT:
            loss = 1 - (surface.rate(leader(machine)) or 0.0) / optimum
    first = [next((i for i, rate in enumerate(machine.true_rates) if rate >= near * optimum), None) for near in NEAR]
    return Outcome(
        surface=surface.name,
        method=method,
        trials=tuple(MOST_TRIALS if index is None else index + 1 for index in first),
        seconds=tuple(machine.seconds[-1 if index is None else index] for index in first),
        loss=loss,
        below_baseline=1 - loss < 0.97 * baseline / optimum,
    )


def leader(machine: Machine) -> TrialConfig:
    """The fastest trial."""
    return max(machine.tried, key=lambda config: machine.tried[config] or 0.0)


def table(outcomes: list[Outcome], title: str) -> list[str]:
    lines = [
        title,
        f"{'method':<20}{'trials to 90 %':>18}{'95 %':>12}{'97 %':>12}{'seconds to 97 %':>20}{'loss at 15':>20}",
    ]
    lines[1] += f"{'below baseline':>16}"
    for method in METHODS:
        own = [one for one in outcomes if one.method == method]
        if not own:
            continue
        cells = [both([one.trials[i] for one in own]) for i in range(len(NEAR))]
        seconds = both([one.seconds[-1] for one in own])
        losses = [100 * one.loss for one in own]
        loss = f"{statistics.fmean(losses):.1f} / {quantile(losses, 0.9):.1f} %"
        below = f"{100 * sum(one.below_baseline for one in own) / len(own):.0f} %"
        lines.append(f"{method:<20}{cells[0]:>18}{cells[1]:>12}{cells[2]:>12}{seconds:>20}{loss:>20}{below:>16}")
    return [*lines, ""]


def both(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} / {quantile(values, 0.9):.0f}"


def quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share))


def groups(outcomes: list[Outcome], recorded: set[str]) -> list[str]:
    """A table of all simulated surfaces, one of all recorded grids, and one of each."""
    simulated = [one for one in outcomes if one.surface not in recorded]
    real = [one for one in outcomes if one.surface in recorded]
    lines = table(simulated, "all surfaces") if simulated else []
    lines += table(real, "recorded grids") if real else []
    for surface in dict.fromkeys(one.surface for one in outcomes):
        lines += table([one for one in outcomes if one.surface == surface], surface)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--surfaces", nargs="+", help="names of simulated surfaces and of recorded grids; default: all")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--grids", type=Path, default=GRIDS, help="folder of recorded grids")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the tables")
    given = parser.parse_args()
    recorded = sorted(path.stem for path in given.grids.glob("*.json"))
    names = given.surfaces or [*SIMULATED, *recorded]
    unknown = set(names) - {*SIMULATED, *recorded}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join([*SIMULATED, *recorded])}")
    began = time.monotonic()
    jobs = [
        (name, method, seed, given.grids)
        for name in names
        for method in given.methods
        if name in SIMULATED or method not in NEED_PARTS
        for seed in range(given.seeds)
    ]
    with ProcessPoolExecutor(given.processes) as pool:
        outcomes = list(pool.map(study, *zip(*jobs, strict=True), chunksize=5))
    lines = [
        f"{given.seeds} seeds, at most {MOST_TRIALS} trials each",
        "trials and seconds: median / 90th percentile; loss: mean / 90th percentile",
        "",
        *groups(outcomes, set(recorded)),
    ]
    text = "\n".join([*lines, f"it took {time.monotonic() - began:.0f} s"])
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
