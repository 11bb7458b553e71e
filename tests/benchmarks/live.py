"""Who finds the fastest settings on a real machine: a study of ours, plain Optuna, or everything in a reduced grid.

Run: PYTHONPATH=.:tests:tests/search python tests/benchmarks/live.py --workload images [--device cpu|cuda]
     [--budget-seconds 240] [--grid FILE] [--repeats 3] [--seed 0] [--out FILE.txt]

Three contestants measure with the same trials, for the same planned run of 3 epochs, in the same space: what a study
would search, with as many workers as the CPUs or the grid's, whichever are more:

- study: what `pipetune tune` does with that budget, certification included, but for one rule: it does not stop because
  further trials would cost more than they save of a planned run that is made short for the plain loop;
- TPE: Optuna's default sampler, the baseline first, each trial as a study would make it but never ended early, for that
  budget, or as long as the study took where that was longer; its winner is its fastest trial;
- grid: each point of the reduced grid of grids.py once, from its file or measured now, however long that takes.

Their winners and the baseline (torch's defaults) are then timed by a plain training loop that shares no code with
pipetune (plain.py): in mid-epoch, and over the planned run itself. One process for each repeat times all of them in
random order. Where the run would take longer than 30 seconds its epochs are shortened, and the line says so.

`first tried` is when the trial that made the final winner known had ended, counted from the contestant's start; `claim`
is its own figure for the planned run, `off` by how much the claim is above what the plain loop says, and `share` that
of the best of all contestants. With --out what is known is kept beside it as JSON after each step, and the same command
goes on from there: on a machine that ends commands early, repeat it until it prints the table.
"""

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from contestants import Claim, by_grid, by_study, by_tpe, read_grid, recorded_now
from grids import say, worker_counts
from ground import (
    BUDGET_S,
    SETTINGS,
    asked,
    end_on_sigterm,
    machine_lines,
    plain_process,
    plan_of,
    runner_of,
    source_digest,
)
from plain import EPOCHS, PlainProcess, PlainRates, spread_percent
from pydantic import TypeAdapter
from recorded import Recording

from pipetune.core.space import TrialConfig
from pipetune.core.study import StudyConfig
from pipetune.core.throughput import TrainingPlan
from pipetune.errors import InterruptedStudyError
from pipetune.hardware.environment import profile
from pipetune.trial.runner import TrialRunner

STEADY_S = 2.0
LONGEST_S = 30.0
"""Of the planned run in the plain loop."""
LEAST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the plain loop says of a configuration in one repeat."""

    config: TrialConfig
    rates: PlainRates


@dataclass(kw_only=True)
class Contest:
    """What is known so far; `terms` say what it is about."""

    terms: Mapping[str, Any]
    claims: list[Claim] = field(default_factory=list)
    rounds: list[list[Verdict]] = field(default_factory=list)

    def rates(self, config: TrialConfig, kind: str) -> list[float]:
        """One for each repeat."""
        return [getattr(one.rates, kind) for verdicts in self.rounds for one in verdicts if one.config == config]

    def best(self, kind: str) -> float:
        """The highest median of all that were timed."""
        return max(median(self.rates(claim.config, kind)) for claim in self.claims)


_CONTEST: TypeAdapter[Contest] = TypeAdapter(Contest)


def judged(contest: Contest, process: PlainProcess, plan: TrainingPlan, rng: random.Random) -> list[Verdict]:
    """One repeat: each configuration once. Raises RuntimeError where one does not run."""
    configs = list(dict.fromkeys(claim.config for claim in contest.claims))
    process.wait_until_ready()
    verdicts = []
    for config in rng.sample(configs, len(configs)):
        samples = epoch_samples(contest.claims, config, plan)
        rates = process.measure(config, seconds=STEADY_S, epoch_samples=samples)
        say(f"plain, {config.label()}: steady {rates.steady:,.0f}, whole epochs {rates.effective:,.0f} samples/s")
        verdicts.append(Verdict(config=config, rates=rates))
    return verdicts


def epoch_samples(claims: Sequence[Claim], config: TrialConfig, plan: TrainingPlan) -> int:
    """Of the plan, or less where by what is claimed that would take too long; whole optimizer steps."""
    rate = max(claim.rate for claim in claims if claim.config == config)
    steps = int(LONGEST_S * rate / EPOCHS / plan.effective_batch_size)
    return min(plan.epoch_samples, max(LEAST_STEPS, steps) * plan.effective_batch_size)


def header(contest: Contest, config: StudyConfig) -> list[str]:
    workload, plan = contest.terms["workload"], plan_of(config)
    options = ", ".join(f"{name} {value}" for name, value in config.workload.options.items())
    return [
        f"contest, {time.strftime('%Y-%m-%d %H:%M')}, {workload} on {config.device}, seed {config.seed}",
        *machine_lines(),
        f"{workload}: {options}",
        f"planned run: {plan.epochs} epochs of {plan.epoch_samples} samples, {plan.effective_batch_size} a step",
        f"searched: up to {contest.terms['most_workers']} workers, all else as a study would search it",
        f"budget of the study and of TPE: {config.budget.seconds:g} s each, set-up included",
        "the study does not stop because the short planned run could gain too little",
        f"plain loop: {len(contest.rounds)} repeats in new processes, {STEADY_S:g} s in mid-epoch and the planned run",
        "claim: the contestant's own rate for the planned run; off: by how much that is above the plain loop's",
        "share: of the best of this column; spread: half the range over the median",
        "",
    ]


def table(contest: Contest, plan: TrainingPlan) -> list[str]:
    rates = f"{'samples/s':>12}{'spread %':>9}{'share %':>8}"
    head = f"{'':<10}{'winner':<36}{'trials':>7}{'tried s':>9}{'total s':>8}{'claim':>11}{rates}{'off %':>7}{rates}"
    above = f"{'':<53}{'first':>9}{'':>19}{'plain loop, planned run':>29}{'':>7}{'in mid-epoch':>29}"
    return [above, head, *(row(contest, claim, plan) for claim in contest.claims), ""]


def row(contest: Contest, claim: Claim, plan: TrainingPlan) -> str:
    off = 100 * (claim.rate / median(contest.rates(claim.config, "effective")) - 1)
    is_short = epoch_samples(contest.claims, claim.config, plan) < plan.epoch_samples
    return (
        f"{claim.contestant:<10}{claim.config.label():<36}{claim.trials:>7}{claim.first_s:>9.0f}{claim.total_s:>8.0f}"
        f"{claim.rate:>11,.1f}{cells(contest, claim, 'effective')}{off:>+7.1f}{cells(contest, claim, 'steady')}"
        f"{'  shortened epochs' if is_short else ''}"
    )


def cells(contest: Contest, claim: Claim, kind: str) -> str:
    rates = contest.rates(claim.config, kind)
    share = 100 * median(rates) / contest.best(kind)
    return f"{median(rates):>12,.1f}{spread_percent(rates):>9.1f}{share:>8.1f}"


def details(contest: Contest) -> list[str]:
    lines = [f"{claim.contestant}: {claim.remark}" for claim in contest.claims if claim.remark]
    lines += ["", "repeats, samples/s: planned run / in mid-epoch"]
    for config in dict.fromkeys(claim.config for claim in contest.claims):
        sides = (contest.rates(config, kind) for kind in ("effective", "steady"))
        lines.append(f"{config.label()}: " + " / ".join(" ".join(f"{rate:.1f}" for rate in side) for side in sides))
    return lines


@dataclass(kw_only=True)
class Course:
    """The steps that a contest still lacks; `keep` gets it after each. Without a `grid` one is measured."""

    contest: Contest
    config: StudyConfig
    grid: Recording | None
    keep: Callable[[Contest], None]

    def run(self, repeats: int) -> None:
        self._claim("study", lambda: by_study(self.config))
        self._claim("TPE", lambda: [self._with_runner(partial(by_tpe, limit_s=self._tpe_s()))])
        self._claim("grid", lambda: [by_grid(self.grid or self._with_runner(recorded_now))])
        while len(self.contest.rounds) < repeats:
            began = time.monotonic()
            self._judge()
            left = repeats - len(self.contest.rounds)
            say(f"{left} repeats left, {left * (time.monotonic() - began) / 60:.1f} min")

    def _claim(self, name: str, make: Callable[[], list[Claim]]) -> None:
        if any(claim.contestant == name for claim in self.contest.claims):
            return
        say(name)
        self.contest.claims += make()
        self.keep(self.contest)

    def _tpe_s(self) -> float:
        """The budget, or what the study took where that was more."""
        assert self.config.budget.seconds is not None
        return max(self.config.budget.seconds, *(claim.total_s for claim in self.contest.claims))

    def _judge(self) -> None:
        rng = random.Random(f"{self.config.seed} {len(self.contest.rounds)} plain")
        with contextlib.closing(plain_process(self.config)) as process:
            self.contest.rounds.append(judged(self.contest, process, plan_of(self.config), rng))
        self.keep(self.contest)

    def _with_runner(self, work: Callable[[StudyConfig, TrialRunner], Any]) -> Any:
        with TemporaryDirectory() as logs, contextlib.closing(runner_of(self.config, Path(logs))) as runner:
            return work(self.config, runner)


def known(path: Path | None, terms: Mapping[str, Any]) -> Contest:
    """What an earlier command kept. Raises ValueError where it was about something else."""
    if path is None or not path.is_file():
        return Contest(terms=terms)
    contest = _CONTEST.validate_json(path.read_text())
    if contest.terms != terms:
        raise ValueError(f"{path.name} is of another contest: {contest.terms}; remove it, or give another --out")
    return contest


def keeper(path: Path | None) -> Callable[[Contest], None]:
    def keep(contest: Contest) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_CONTEST.dump_json(contest, indent=1))

    return keep


def main() -> int:
    """Print the table; 130 where a signal ended it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, choices=list(SETTINGS["cpu"]))
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_S, help="of the study and of TPE, each")
    parser.add_argument("--grid", type=Path, help="file of grids.py; default: the grid is measured now")
    parser.add_argument("--repeats", type=int, default=3, help="of the plain loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the table")
    given = parser.parse_args()
    if given.workload not in SETTINGS[given.device]:
        parser.error(f"on {given.device} there is no setting for {given.workload}")
    cpus = profile().cpus_usable
    most_workers = max(cpus, worker_counts(cpus)[-1])
    config = asked(
        given.workload, given.device, budget_s=given.budget_seconds, seed=given.seed, most_workers=most_workers
    )
    memory = given.out.with_suffix(".json") if given.out else None
    terms = {
        "workload": given.workload,
        "device": given.device,
        "budget_s": given.budget_seconds,
        "most_workers": most_workers,
        "epoch_samples": config.epoch_samples,
        "seed": given.seed,
        "machine": machine_lines(),
        "sources": source_digest(),
    }
    try:
        grid = read_grid(given.grid, config) if given.grid else None
        contest = known(memory, terms)
    except ValueError as error:
        parser.error(str(error))
    end_on_sigterm()
    try:
        Course(contest=contest, config=config, grid=grid, keep=keeper(memory)).run(given.repeats)
    except (KeyboardInterrupt, InterruptedStudyError):
        is_kept = memory is not None and memory.is_file()
        say("interrupted" + (f"; the same command goes on with what is in {memory}" if is_kept else ""))
        return 130
    plan = plan_of(config)
    text = "\n".join([*header(contest, config), *table(contest, plan), *details(contest)])
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
