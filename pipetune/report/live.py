"""A study on the terminal while it goes on: a line a finished trial, and a status line where it is a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import Phase, TrialFailure
from pipetune.core.record import TrialRecord
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.core.text import printable
from pipetune.core.throughput import TrainingPlan
from pipetune.report.console import duration, minutes, rate, whole_numbers

_PHASES = {
    Phase.START: "starting a trial process",
    Phase.BUILD: "building the workload",
    Phase.FIRST_SAMPLE: "reading a first sample",
    Phase.COMPARE_SAMPLES: "comparing samples with and without workers",
    Phase.READ_AHEAD: "reading ahead into the page cache",
    Phase.PROBE: "timing single costs",
    Phase.PREPARE: "restoring the model",
    Phase.WORKER_START: "starting workers",
    Phase.WARM_UP: "warming up",
    Phase.MEASURE: "measuring",
    Phase.EPOCH_END: "crossing an epoch end",
    Phase.COMPUTE_ONLY: "timing the step alone",
    Phase.CLOSE: "closing the loader",
}


class LiveProgress:
    """Follows a study on a console; use it as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._plan: TrainingPlan | None = None
        self._headline = "starting"
        self._best = ""
        self._phase = _PHASES[Phase.START]

    def __enter__(self) -> Self:
        """Show a status line where the console is a terminal."""
        if self._console.is_terminal:
            self._status = self._console.status("starting", refresh_per_second=4)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the status line away."""
        if self._status is not None:
            self._status.stop()

    def ready(self, facts: WorkloadFacts, space: SearchSpace, workers_limit: str, plan: TrainingPlan) -> None:
        """Say what is tuned, on what, and within which bounds."""
        self._plan = plan
        bounds = f"workers {whole_numbers(space.num_workers)}"
        if len(space.num_workers) > 1:
            bounds += f" (bounded by {workers_limit})"
        self._print(
            f"{facts.device_name}, torch {facts.torch_version}: {len(space)} configurations; {bounds}; "
            f"micro-batch {', '.join(map(str, space.batch_size))}; {', '.join(space.amp)}"
        )

    def trial_began(self, config: TrialConfig, purpose: str, seconds_left: float | None) -> None:
        """Show it in the status line."""
        left = f", {duration(seconds_left)} of the budget left" if seconds_left is not None else ""
        self._headline = f"{purpose}: {config.label()}{left}"
        self._show()

    def phase(self, phase: Phase) -> None:
        """Show it in the status line."""
        self._phase = _PHASES[phase]
        self._show()

    def trial_ended(self, record: TrialRecord, best: TrialRecord | None, seconds_left: float | None) -> None:
        """Print one line."""
        assert self._plan is not None
        name = f"{record.number:>3}  {record.config.label():<34}"
        if isinstance(record.outcome, TrialFailure):
            reason = record.outcome.headline()
            self._print(f"{name} {reason}", style="red")
            return
        gpu = record.outcome.gpu
        usage = f" gpu{gpu.mean_percent:3.0f}%" if gpu else ""
        is_best = best is not None and best.number == record.number
        if best is not None and best.measurement is not None:
            self._best = f"best {rate(best.measurement.effective(self._plan).value)}/s"
        told = "best so far" if is_best else self._best
        value = rate(record.outcome.effective(self._plan).value)
        left = f"  {minutes(seconds_left)}" if seconds_left is not None else ""
        self._print(f"{name} {value:>7}/s{usage}  {told:<13}{left}", style="bold" if is_best else None)

    def probed(self, text: str, seconds: float) -> None:
        """Print it, with what it cost."""
        self._print(f"     {text} ({seconds:.1f} s)", style="dim")

    def note(self, text: str) -> None:
        """Print it."""
        self._print(text, style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(printable(text), style=style or ""), soft_wrap=True)

    def _show(self) -> None:
        if self._status is not None:
            self._status.update(
                Text(
                    f"{self._best}; {self._headline}: {self._phase}"
                    if self._best
                    else f"{self._headline}: {self._phase}"
                )
            )
