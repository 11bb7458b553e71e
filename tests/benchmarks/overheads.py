"""What pipetune itself costs: the parent's CPU, the measuring loop, a warm trial's own time, start-up times.

Run: python tests/benchmarks/overheads.py [--rounds 7] [--loop-rounds 201] [--loop-seconds 0.5]

The measuring loop is compared with the same loop written out plainly, in one process, in turns; medians with
their interval and the smallest and the largest round beside them.
"""

import argparse
import io
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from scipy.stats import quantile_test

from pipetune.core.measurement import Measurement
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.study import WorkloadSpec
from pipetune.report.live import LiveProgress
from pipetune.trial.device import resolve_device, synchronize
from pipetune.trial.loader import build_loader
from pipetune.trial.loop import timed_window
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import HostRunner
from pipetune.trial.session import Session, Training
from pipetune.trial.stream import Stream
from pipetune.trial.target import build_workload

WORKLOADS = {
    "tabular": {"rows": 200_000},
    "memory_images": {"depth": 10, "width": 8, "images": 5000},
}
BATCH = 256


def config(workers: int = 0) -> TrialConfig:
    return TrialConfig(
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=False,
        persistent_workers=False,
        batch_size=BATCH,
        accumulation_steps=1,
        amp=Amp.FP32,
    )


def spec(name: str) -> WorkloadSpec:
    return WorkloadSpec(target=f"builtin:{name}", options=WORKLOADS[name], folder=".")


def measured_rates(session: Session, seconds: float) -> Iterator[float]:
    """One timed window of a trial's own loop after another."""
    loader, _ = build_loader(session.workload, config())
    stream = Stream(loader, Training(session, config()))
    stream.start_epoch()
    while True:
        window = timed_window(stream, config(), seconds, time.monotonic())
        yield window.samples / window.seconds


def plain_rates(session: Session, seconds: float) -> Iterator[float]:
    """The same stretches of a loop as people write it."""
    workload, model, optimizer = session.workload, session.model, session.optimizer
    loader = torch.utils.data.DataLoader(
        workload.dataset, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=workload.collate_fn
    )
    samples, began = 0, time.perf_counter()
    while True:
        for batch in loader:
            batch = tuple(part.to(session.device) for part in batch)  # noqa: PLW2901 - as people write it
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            samples += BATCH
            if time.perf_counter() - began >= seconds:
                synchronize(session.device)
                yield samples / (time.perf_counter() - began)
                samples, began = 0, time.perf_counter()


def loop_overhead(rounds: int, seconds: float) -> None:
    # More threads than idle cores make every step wait for the slowest, and nothing of a per cent can be seen.
    torch.set_num_threads(1)
    print(f"\nmeasuring loop against the plain loop, {rounds} rounds of {seconds:g} s, 1 thread, random order")
    print(f"{'workload':<16}{'against plain':<16}{'median ratio':>14}{'interval':>16}{'least':>8}{'most':>8}")
    order = random.Random(0)  # fixed turns keep step with what else the machine does
    for name in WORKLOADS:
        session = Session(build_workload(spec(name)), resolve_device("auto"), seed=0)
        session.begin(config())
        # The plain loop twice: what it differs from itself by is no overhead.
        loops = {
            "measured": measured_rates(session, seconds),
            "plain": plain_rates(session, seconds),
            "plain again": plain_rates(session, seconds),
        }
        rates = [{key: next(loops[key]) for key in order.sample(list(loops), 3)} for _ in range(rounds + 1)][1:]
        for key in ("measured", "plain again"):
            ratios = [one[key] / one["plain"] for one in rates]
            interval = quantile_test(ratios, p=0.5).confidence_interval(0.95)
            print(
                f"{name:<16}{key:<16}{median(ratios):>14.3f}{f'{interval.low:.3f}-{interval.high:.3f}':>16}"
                f"{min(ratios):>8.3f}{max(ratios):>8.3f}"
            )


def trial_overhead(rounds: int) -> None:
    """A warm trial's time beside worker start, warm-up, drain, windows, epoch end and loader close."""
    progress = LiveProgress(Console(file=io.StringIO(), force_terminal=True))
    with TemporaryDirectory() as folder, progress:
        runner = HostRunner(
            spec("memory_images"), device="auto", seed=0, log_folder=Path(folder), on_phase=progress.phase
        )
        runner.describe()
        own, cpu = [], []
        for _ in range(rounds + 1):
            began, began_cpu = time.monotonic(), time.process_time()
            outcome = runner.run(config(workers=1), MeasureLimits(min_s=4, max_s=4))
            seconds = time.monotonic() - began
            assert isinstance(outcome, Measurement), outcome
            user = sum(
                outcome.phase_seconds.get(phase, 0.0)
                for phase in ("worker_start", "warm_up", "measure", "epoch_end", "close")
            )
            own.append(seconds - user)
            cpu.append(100 * (time.process_time() - began_cpu) / seconds)
        runner.close()
    # The first trial starts the host.
    own, cpu = own[1:], cpu[1:]
    print(f"\nwarm trial, {rounds} rounds: own time {median(own):.2f} s ({min(own):.2f}-{max(own):.2f})")
    print(f"parent process: {median(cpu):.2f} % of one core ({min(cpu):.2f}-{max(cpu):.2f})")


def start_up(rounds: int) -> None:
    print(f"\nstart-up, seconds, {rounds} rounds")
    commands = {
        "bare python": "pass",
        "import pipetune": "import pipetune",
        "pipetune --help": "import sys; sys.argv = ['pipetune', '--help']; from pipetune.cli.main import main; main()",
    }
    for name, code in commands.items():
        seconds = []
        for _ in range(rounds):
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.monotonic() - began)
        print(f"{name:<20}{median(seconds):>8.3f} ({min(seconds):.3f}-{max(seconds):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loop-rounds", type=int, default=201)
    parser.add_argument("--loop-seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    start_up(arguments.rounds)
    trial_overhead(arguments.rounds)
    loop_overhead(arguments.loop_rounds, arguments.loop_seconds)


if __name__ == "__main__":
    main()
