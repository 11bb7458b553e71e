"""Whether a trial's rates are what training delivers: real trials beside a plain training loop, in turns.

Run: python tests/benchmarks/fidelity.py [--workloads images tokens] [--configs 6] [--repeats 3] [--device cpu|cuda]
     [--seconds 2] [--epoch-seconds 1.5] [--plain-loops 2] [--threads N] [--seed 0] [--only LABEL ...] [--out FILE]

Random points of each built-in workload's search space on this machine. A repeat of a point is one trial (in a warm
host, as a study runs it) and each plain loop once, in random order. Each repeat has a host and plain processes of
its own, since processes differ; plain.py says what the plain loop is and what it times: the rate in mid-epoch and that
of 3 whole epochs. The trial's effective rate is reckoned for the same 3 epochs; how many samples they have follows from
the time that a step was foretold.

Error is the median over the repeats of the trial against the plain loops of the same repeat, since machines drift;
spread is half the range of all plain rates over their median; a point is within where |error| is at most 2 % or the
spread, whichever is larger. The +- beside an error is the 95 % half-width of the mean of the repeats' errors (t): an
error inside it may be none at all, which more repeats of that point (--only) decide. With two plain loops the second
is judged against the first alone by the same rule, which shows what this machine's noise does to a comparison without
any error. Where commands are ended early, run one workload a command.
"""

import argparse
import contextlib
import functools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from ground import SETTINGS, Ground, Setting, asked, machine_lines, plain_process, runner_of
from plain import EPOCHS, LEAST_STEPS, WARM_UP_S, PlainProcess, spread_percent
from scipy.stats import t

from pipetune.core.measurement import TrialFailure
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.core.study import StudyConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import HostRunner

TOLERANCE_PERCENT = 2.0
MOST_S = 8.0
"""Windows of a trial that does not settle; all else is as in a study of four minutes."""
LEAST_EPOCH_STEPS = 2
DRAWS = 500


@dataclass(slots=True, kw_only=True)
class Case:
    """One point, and what both sides said of it: of the plain loops a list for each, one rate a repeat."""

    workload: str
    config: TrialConfig
    step_s: float
    epoch_samples: int
    trials: list[Any] = field(default_factory=list)
    plain_steady: list[list[float]] = field(default_factory=list)
    plain_effective: list[list[float]] = field(default_factory=list)
    failure: str | None = None

    def trial_rates(self, kind: str) -> list[float]:
        if kind == "steady":
            return [trial.steady().value for trial in self.trials]
        plan = TrainingPlan(
            effective_batch_size=self.config.effective_batch_size,
            epochs=EPOCHS,
            epoch_samples=self.epoch_samples,
        )
        return [trial.effective(plan).value for trial in self.trials]

    def plain_rates(self, kind: str) -> list[list[float]]:
        return self.plain_steady if kind == "steady" else self.plain_effective

    def repeats(self) -> int:
        """Whole ones."""
        return min(len(rates) for rates in (self.trials, *self.plain_steady))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the whole run has in common."""

    device: str
    seconds: float
    epoch_seconds: float
    seed: int
    repeats: int
    plain_loops: int

    def setting(self, workload: str) -> Setting:
        return SETTINGS[self.device][workload]

    def study(self, workload: str) -> StudyConfig:
        return asked(workload, self.device, seed=self.seed)

    def runner(self, workload: str, logs: Path) -> HostRunner:
        return runner_of(self.study(workload), logs)

    def plain(self, workload: str) -> PlainProcess:
        return plain_process(self.study(workload))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def space_of(bench: Bench, workload: str, logs: Path) -> SearchSpace:
    """The search space that a study of this workload has on this machine."""
    with contextlib.closing(bench.runner(workload, logs)) as runner:
        return Ground.found(bench.study(workload), runner).space


def drawn(space: SearchSpace, rng: random.Random) -> TrialConfig:
    """A point, knob by knob: drawing among all points would hardly ever give 0 workers."""
    workers, batch = rng.choice(space.num_workers), rng.choice(space.batch_size)
    return TrialConfig(
        num_workers=workers,
        prefetch_factor=rng.choice(space.prefetch_factor) if workers else None,
        pin_memory=rng.choice(space.pin_memory),
        persistent_workers=bool(workers) and rng.choice(space.persistent_workers),
        batch_size=batch,
        accumulation_steps=space.effective_batch_size // batch,
        amp=rng.choice(space.amp),
    )


def asked_points(space: SearchSpace, labels: Sequence[str]) -> list[TrialConfig]:
    """Raises SystemExit for a label that no point of the space has."""
    named = {config.label(): config for config in space.configs()}
    for label in labels:
        if label not in named:
            raise SystemExit(f"the search space has no point {label!r}")
    return [named[label] for label in labels]


def predicted_step_s(config: TrialConfig, costs: dict[str, Any], *, on_cpu: bool) -> float:
    """Seconds of an optimizer step, on the safe side: on a CPU nothing overlaps."""
    (small, small_s), (large, large_s) = costs["steps_s"][config.amp.value]
    slope = (large_s - small_s) / (large - small) if large > small else 0.0
    compute = config.accumulation_steps * (small_s + slope * (config.batch_size - small))
    data = config.effective_batch_size * costs["sample_s"] / max(1, config.num_workers)
    return data + compute if on_cpu or config.num_workers == 0 else max(data, compute)


def choose(bench: Bench, workload: str, count: int, only: Sequence[str], logs: Path) -> tuple[list[Case], float]:
    """Affordable points, and what it takes to start a plain process; says which were left out and why."""
    say(f"{workload}: building it, timing a sample and a step")
    space = space_of(bench, workload, logs)
    began = time.monotonic()
    ends = (space.batch_size[0], space.batch_size[-1])
    with contextlib.closing(bench.plain(workload)) as process:
        process.wait_until_ready()
        costs = process.ask(task="probe", amps=[amp.value for amp in space.amp], batch_sizes=ends)
    start_s = time.monotonic() - began - costs["probe_s"]
    rng = random.Random(f"{bench.seed} {workload}")
    if only:
        points, count, limit_s = asked_points(space, only), len(only), inf
    else:
        points, limit_s = (drawn(space, rng) for _ in range(DRAWS)), bench.setting(workload).step_limit_s
    chosen: dict[TrialConfig, Case] = {}
    rejected: dict[TrialConfig, float] = {}
    for config in points:
        step_s = predicted_step_s(config, costs, on_cpu=bench.device == "cpu")
        if step_s > limit_s:
            rejected[config] = step_s
        else:
            steps = max(LEAST_EPOCH_STEPS, round(bench.epoch_seconds / step_s))
            epoch_samples = steps * config.effective_batch_size
            chosen.setdefault(
                config, Case(workload=workload, config=config, step_s=step_s, epoch_samples=epoch_samples)
            )
        if len(chosen) == count:
            break
    say(f"  {len(space)} points; a sample {1000 * costs['sample_s']:.2f} ms, a process {start_s:.1f} s")
    for config, step_s in rejected.items():
        say(f"  rejected {config.label()}: too slow, an optimizer step would take {step_s:.2f} s (limit {limit_s:g})")
    for config in chosen:
        say(f"  chosen   {config.label()}")
    return list(chosen.values()), start_s


def estimated_s(bench: Bench, case: Case) -> float:
    """Seconds of one repeat: a trial, then the plain loops."""
    epoch_start_s = 0.3 if bench.device == "cpu" else 1.5
    trial = 1.0 + max(MOST_S, 2 * case.step_s) + 4 * case.step_s + 2 * epoch_start_s
    epochs = EPOCHS * (max(bench.epoch_seconds, LEAST_EPOCH_STEPS * case.step_s) + epoch_start_s)
    plain_s = WARM_UP_S + 2 * case.step_s + max(bench.seconds, LEAST_STEPS * case.step_s) + epochs
    return trial + bench.plain_loops * plain_s


def measure_trial(runner: HostRunner, case: Case) -> None:
    limits = MeasureLimits(max_s=MOST_S, epoch_samples=case.epoch_samples)
    outcome = runner.run(case.config, limits)
    if isinstance(outcome, TrialFailure):
        case.failure = outcome.headline()
    else:
        case.trials.append(outcome)


def measure_plain(bench: Bench, process: PlainProcess, case: Case, index: int) -> None:
    try:
        rates = process.measure(case.config, seconds=bench.seconds, epoch_samples=case.epoch_samples)
    except RuntimeError as error:
        case.failure = str(error).splitlines()[-1]
        return
    case.plain_steady[index].append(rates.steady)
    case.plain_effective[index].append(rates.effective)


def measure_workload(bench: Bench, cases: list[Case], logs: Path, began: float) -> Iterator[int]:
    """One repeat after another, with points and sides in random order; yields after each point."""
    workload = cases[0].workload
    rng = random.Random(f"{bench.seed} order {workload}")
    for case in cases:
        case.plain_steady = [[] for _ in range(bench.plain_loops)]
        case.plain_effective = [[] for _ in range(bench.plain_loops)]
    for repeat in range(1, bench.repeats + 1):
        with contextlib.ExitStack() as open_processes:
            runner = open_processes.enter_context(contextlib.closing(bench.runner(workload, logs)))
            plains = [
                open_processes.enter_context(contextlib.closing(bench.plain(workload)))
                for _ in range(bench.plain_loops)
            ]
            for process in plains:
                process.wait_until_ready()
            for case in rng.sample(cases, len(cases)):
                sides = [
                    functools.partial(measure_trial, runner, case),
                    *(functools.partial(measure_plain, bench, plain, case, i) for i, plain in enumerate(plains)),
                ]
                for side in rng.sample(sides, len(sides)):
                    if case.failure is None:
                        side()
                say(f"[{time.monotonic() - began:5.0f} s] {told(case, repeat)}")
                yield repeat


def told(case: Case, repeat: int) -> str:
    name = f"repeat {repeat}: {case.workload} {case.config.label()}"
    if case.failure is not None:
        return f"{name}: {case.failure}"
    ratios = ", ".join(
        f"{kind} {case.trial_rates(kind)[-1]:,.0f} / "
        + " ".join(f"{rates[-1]:,.0f}" for rates in case.plain_rates(kind))
        for kind in ("steady", "effective")
    )
    return f"{name}: {ratios}"


def plain_spread_percent(case: Case, kind: str) -> float:
    return spread_percent([rate for rates in case.plain_rates(kind) for rate in rates])


def median_difference_percent(judged: list[float], against: list[float]) -> float:
    """Repeat by repeat: what drifts between them is in both."""
    return 100 * (median(one / other for one, other in zip(judged, against, strict=False)) - 1)


def plain_means(case: Case, kind: str) -> list[float]:
    return [fmean(rates) for rates in zip(*case.plain_rates(kind), strict=False)]


def error_percent(case: Case, kind: str) -> float:
    return median_difference_percent(case.trial_rates(kind), plain_means(case, kind))


def error_half_width_percent(case: Case, kind: str) -> float | None:
    """Of the mean of the repeats' errors, as ratios; None for a single repeat."""
    pairs = zip(case.trial_rates(kind), plain_means(case, kind), strict=False)
    errors = [100 * log(ours / theirs) for ours, theirs in pairs]
    if len(errors) < 2:
        return None
    return float(t.ppf(0.975, len(errors) - 1)) * stdev(errors) / sqrt(len(errors))


def control_percent(case: Case, kind: str) -> float | None:
    """The second plain loop against the first."""
    loops = case.plain_rates(kind)
    return median_difference_percent(loops[1], loops[0]) if len(loops) > 1 else None


def is_within(case: Case, kind: str, error: float | None) -> bool:
    if case.failure is not None or error is None:
        return False
    return abs(error) <= max(TOLERANCE_PERCENT, plain_spread_percent(case, kind))


def count_within(cases: list[Case], kinds: tuple[str, ...]) -> str:
    """How many are within, and how many a second plain loop would have had."""
    sound = [(case, kind) for case in cases for kind in kinds if case.failure is None]
    ours = sum(is_within(case, kind, error_percent(case, kind)) for case, kind in sound)
    again = [control_percent(case, kind) for case, kind in sound]
    text = f"{ours} of {len(cases) * len(kinds)} within"
    if None in again:
        return text
    second = sum(is_within(case, kind, error) for (case, kind), error in zip(sound, again, strict=True))
    return f"{text}; the second plain loop, judged against the first: {second}"


def table(cases: list[Case], kind: str) -> list[str]:
    head = f"{'workload':<15}{'configuration':<34}{'pipetune':>11}{'plain':>11}{'error %':>9}{'+- %':>8}"
    head += f"{'control %':>11}{'spread %':>10}{'(trials)':>10}  verdict"
    lines = [f"{kind} rate, samples/s", head]
    for case in cases:
        name = f"{case.workload:<15}{case.config.label():<34}"
        if case.failure is not None:
            lines.append(f"{name}failed: {case.failure}")
            continue
        ours = case.trial_rates(kind)
        theirs = [rate for rates in case.plain_rates(kind) for rate in rates]
        error, control = error_percent(case, kind), control_percent(case, kind)
        half_width = error_half_width_percent(case, kind)
        lines.append(
            f"{name}{median(ours):>11,.1f}{median(theirs):>11,.1f}{error:>+9.1f}"
            f"{'-' if half_width is None else f'{half_width:.1f}':>8}"
            f"{'-' if control is None else f'{control:+.1f}':>11}"
            f"{plain_spread_percent(case, kind):>10.1f}{spread_percent(ours):>10.1f}"
            f"  {'within' if is_within(case, kind, error) else 'OUTSIDE'}"
        )
    return [*lines, count_within(cases, (kind,)), ""]


def repeats(cases: list[Case]) -> list[str]:
    lines = ["repeats, samples/s: pipetune / each plain loop"]
    for case in cases:
        for kind in ("steady", "effective"):
            sides = [case.trial_rates(kind), *case.plain_rates(kind)]
            rates = " / ".join(" ".join(f"{rate:.1f}" for rate in side) for side in sides)
            samples = f" ({EPOCHS} epochs of {case.epoch_samples})" if kind == "effective" else ""
            lines.append(f"{case.workload} {case.config.label()}, {kind}{samples}: {rates}")
    return [*lines, ""]


def header(bench: Bench) -> list[str]:
    threads = os.environ.get("OMP_NUM_THREADS", "as torch sets them")
    return [
        f"fidelity of trials, {time.strftime('%Y-%m-%d %H:%M')}, {bench.device}, seed {bench.seed}",
        *machine_lines(),
        f"{bench.repeats} repeats of a trial and {bench.plain_loops} plain loop(s); threads: {threads}",
        f"plain: {bench.seconds:g} s steady, {EPOCHS} epochs of {bench.epoch_seconds:g} s",
        "error: median over the repeats, the trial against the plain loops of its repeat",
        "control: the same for the second plain loop against the first",
        "+-: 95 % half-width of the mean of the repeats' errors (t)",
        "spread: half the range of the rates over their median",
        f"within: |error| is at most {TOLERANCE_PERCENT:g} % or the plain loops' spread, whichever is larger",
        "",
    ]


def run(bench: Bench, workloads: list[str], count: int, only: Sequence[str], keep: Callable[[str], None]) -> str:
    """The tables; `keep` gets them after each repeat, as far as they have come."""
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        logs = Path(folder)
        chosen = {workload: choose(bench, workload, count, only, logs) for workload in workloads}
        estimate = sum(
            2 * start_s + bench.repeats * (start_s + sum(estimated_s(bench, case) for case in cases))
            for cases, start_s in chosen.values()
        )
        say(f"estimate: {estimate / 60:.1f} min from here on, besides {time.monotonic() - began:.0f} s so far")
        cases = [case for cases, _ in chosen.values() for case in cases]
        for own in (own for own, _ in chosen.values() if own):
            for _ in measure_workload(bench, own, logs, began):
                keep(tables(bench, cases, began))
    return tables(bench, cases, began)


def tables(bench: Bench, cases: list[Case], began: float) -> str:
    cases = [case for case in cases if case.failure is not None or (case.plain_steady and case.repeats())]
    lines = [*header(bench), *table(cases, "steady"), *table(cases, "effective"), *repeats(cases)]
    return "\n".join(
        [
            *lines,
            f"{count_within(cases, ('steady', 'effective'))}; it took {(time.monotonic() - began) / 60:.1f} min",
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=list(SETTINGS["cpu"]), help="default: all that the device has"
    )
    parser.add_argument("--configs", type=int, default=6, help="points of each workload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the plain loop's steady measuring")
    parser.add_argument("--epoch-seconds", type=float, default=1.5, help="of an epoch, without its start")
    parser.add_argument("--plain-loops", type=int, choices=(1, 2), default=2, help="2: the second is a control")
    parser.add_argument("--threads", type=int, help="of torch, on both sides; default: as torch sets them")
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=(), metavar="LABEL", help="these points in place of drawn ones")
    parser.add_argument("--out", type=Path, help="file for the tables")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.threads is not None:
        # Inherited by trial hosts and plain processes alike.
        os.environ |= {"OMP_NUM_THREADS": str(given.threads), "MKL_NUM_THREADS": str(given.threads)}
    bench = Bench(
        device=given.device,
        seconds=given.seconds,
        epoch_seconds=given.epoch_seconds,
        seed=given.seed,
        repeats=given.repeats,
        plain_loops=given.plain_loops,
    )
    unknown = set(given.workloads or ()) - set(SETTINGS[given.device])
    if unknown:
        raise SystemExit(f"on {given.device} there is no setting for {', '.join(sorted(unknown))}")

    def keep(text: str) -> None:
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(text + "\n")

    text = run(bench, given.workloads or list(SETTINGS[given.device]), given.configs, given.only, keep)
    keep(text)
    print(text)


if __name__ == "__main__":
    main()
