"""A result for people, in 80 columns: the verdict, what to do with it, and the trials behind it."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipetune.core.ceilings import MOSTLY_WAITING, LoaderDemand
from pipetune.core.diagnosis import Bottleneck
from pipetune.core.measurement import Measurement, TrialFailure
from pipetune.core.record import StudyResult, TrialRecord, Validation
from pipetune.core.space import TrialConfig
from pipetune.core.text import printable
from pipetune.core.throughput import Estimate, TrainingPlan
from pipetune.core.tuned import Ceiling, Measured, Status, TunedConfig

MAX_REMARKS = 8
"""Lines below the table of trials."""
_VERDICTS = {
    Bottleneck.COMPUTE: "the step itself limits: the loader keeps up",
    Bottleneck.INPUT: "the loader limits: the step waits for data",
    Bottleneck.BALANCED: "loader and step limit each other",
}


def result_view(result: StudyResult) -> RenderableType:
    """The verdict, before and after, the trials, and where the file is."""
    parts: list[RenderableType] = [
        Text(_headline(result), style="bold"),
        "",
        _before_and_after(result.tuned),
        "",
        Text(_limit(result.bottleneck, result.tuned.ceiling, result.tuned.measured)),
    ]
    if result.summary.demand is not None:
        parts.append(Text(_demand(result.summary.demand, result.tuned)))
    parts += [
        Text(f"changes training: {printable(change)}", style="yellow") for change in result.tuned.changes_training
    ]
    parts += [Text(f"note: {printable(note)}", style="yellow") for note in result.summary.notes]
    parts += ["", trials_table(result.records, result.summary.plan, result.tuned.config), ""]
    if result.summary.alternatives:
        parts += [_alternatives_table(result), ""]
    measured = sum(1 for record in result.records if record.measurement is not None)
    if result.summary.importances:
        parts += [Text(_importances(result.summary.importances, measured)), ""]
    if remarks := remark_lines(result.records):
        parts += [*(Text(line, style="yellow") for line in remarks), ""]
    parts.append(
        Text(
            f"{_counted(len(result.records), 'trial')} ({measured} measured) of "
            f"{_counted(result.summary.space_size, 'configuration')} in {duration(result.summary.seconds)}"
            f"{_probes(result.summary.probes_s)}; workers bounded by {result.summary.workers_limit}"
        )
    )
    if result.pays_off_s is not None:
        parts.append(Text(f"the study has paid for itself after {duration(result.pays_off_s)} of training"))
    parts.append(Text(f"result: {result.folder / 'best.yaml'}", style="green"))
    return Group(*parts)


def _headline(result: StudyResult) -> str:
    measured = {record.config for record in result.records if record.measurement is not None}
    if len(measured) > 1 or result.tuned.status is Status.PROVISIONAL:
        return verdict(result.tuned)
    others = "nothing else ran to its end" if len(result.records) > 1 else "there was no time for others"
    return f"Only the baseline was measured: {others}."


def verdict(tuned: TunedConfig) -> str:
    """One sentence."""
    if tuned.status is Status.NO_GAIN:
        return "No gain was proved: the baseline stays."
    kind = "" if tuned.status is Status.CERTIFIED else " so far (provisional: not measured again)"
    return f"{tuned.speedup:.2f} times the baseline{kind}: {tuned.config.label()}"


def validation_text(validation: Validation) -> str:
    """The search space as found, a line a knob."""
    space = validation.space
    return "\n".join(
        [
            f"  device              {validation.facts.device_name}",
            f"  epoch               {validation.plan.epoch_samples:,} samples",
            f"  num_workers         {whole_numbers(space.num_workers)} (bounded by {validation.workers_limit})",
            f"  prefetch_factor     {', '.join(map(str, space.prefetch_factor))}",
            f"  pin_memory          {_flags(space.pin_memory)}",
            f"  persistent_workers  {_flags(space.persistent_workers)}",
            f"  batch_size          {', '.join(map(str, space.batch_size))}",
            f"  amp                 {', '.join(space.amp)}",
            f"  {len(space):,} configurations",
        ]
    )


def _flags(values: Sequence[bool]) -> str:
    return ", ".join(str(value).lower() for value in values)


def trials_table(records: Sequence[TrialRecord], plan: TrainingPlan, chosen: TrialConfig) -> Table:
    """One line a trial, the chosen configuration's marked."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name, justify in (
        ("#", "right"),
        ("configuration", "left"),
        ("samples/s", "right"),
        ("±%", "right"),
        ("wait%", "right"),
        ("gpu%", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "configuration")  # type: ignore[arg-type]
    for record in records:
        is_chosen = record.config == chosen
        style = "bold green" if is_chosen else None
        if isinstance(record.outcome, TrialFailure):
            reason = record.outcome.headline()
            table.add_row(str(record.number), f"{record.config.label()}\n[red]{escape(printable(reason))}[/red]")
        else:
            number = f"*{record.number}" if is_chosen else str(record.number)
            table.add_row(number, record.config.label(), *_figures(record.outcome, plan), style=style)
    return table


def _alternatives_table(result: StudyResult) -> Table:
    """What each knob is worth, one changed at a time."""
    tuned = result.tuned
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("one knob changed", justify="left")
    for name in ("samples/s", "", "known from"):
        table.add_column(name, justify="right")
    chosen_rate = tuned.measured.effective_samples_per_sec.value
    for one in result.summary.alternatives:
        before, after = (_knob_value(config, one.knob) for config in (tuned.config, one.config))
        source = "prediction" if one.trial is None else f"trial {one.trial}"
        change = f"{100 * (one.samples_per_sec / chosen_rate - 1):+.0f} %"
        table.add_row(f"{one.knob} {before} -> {after}", rate(one.samples_per_sec), change, source)
    return table


def _importances(importances: Mapping[str, float], trials: int) -> str:
    """Optuna's opinion beside ours: over all trials, not around the chosen one."""
    shares = sorted(importances.items(), key=lambda item: -item[1])
    knobs = ", ".join(f"{knob} {share:.0%}" for knob, share in shares)
    return f"what set the best trials apart (importances by Optuna, rough with {_counted(trials, 'trial')}): {knobs}"


def _knob_value(config: TrialConfig, knob: str) -> str:
    value = getattr(config, knob)
    return str(value).lower() if isinstance(value, bool) else str(value)


def remark_lines(records: Sequence[TrialRecord]) -> list[str]:
    """What should be known of single trials, those with the same remark together."""
    trials: dict[str, list[str]] = {}
    for record in records:
        for remark in record.measurement.remarks() if record.measurement else ():
            trials.setdefault(remark, []).append(str(record.number))
    lines = [
        f"{'trial' if len(numbers) == 1 else 'trials'} {', '.join(numbers)}: {printable(remark)}"
        for remark, numbers in trials.items()
    ]
    if len(lines) <= MAX_REMARKS:
        return lines
    return [*lines[: MAX_REMARKS - 1], f"and {len(lines) - MAX_REMARKS + 1} more remarks, which --json tells"]


def whole_numbers(values: Sequence[int]) -> str:
    """`0-16` for a run of them, `0, 4, 16` for others."""
    is_run = len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1))
    return f"{values[0]}-{values[-1]}" if is_run else ", ".join(map(str, values))


def rate(value: float) -> str:
    """Four digits: 12,340 or 98.76."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def minutes(seconds: float) -> str:
    """`4:58`, for a column."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _figures(measurement: Measurement, plan: TrainingPlan) -> tuple[str, str, str, str]:
    effective = measurement.effective(plan)
    return (
        rate(effective.value),
        _half_width_percent(effective),
        f"{measurement.data_wait_percent():.0f}",
        f"{measurement.gpu.mean_percent:.0f}" if measurement.gpu else "-",
    )


def _half_width_percent(estimate: Estimate) -> str:
    half = max(estimate.high - estimate.value, estimate.value - estimate.low)
    return f"{100 * half / estimate.value:.1f}" if half < estimate.value else "?"


def _before_and_after(tuned: TunedConfig) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("", "samples/s", "95 % interval", "in an epoch", "gpu%", "settings"):
        table.add_column(name, justify="left" if name in {"", "settings"} else "right")
    rows = [("baseline", tuned.baseline_measured, tuned.baseline_config)]
    if tuned.status is not Status.NO_GAIN:
        rows.append(("tuned", tuned.measured, tuned.config))
    for name, measured, config in rows:
        effective, utilization = measured.effective_samples_per_sec, measured.gpu_utilization_percent
        table.add_row(
            name,
            rate(effective.value),
            f"{rate(effective.low)} - {rate(effective.high)}",
            rate(measured.steady_samples_per_sec.value),
            f"{utilization.value:.0f}" if utilization else "-",
            config.label(),
        )
    return table


def _limit(bottleneck: Bottleneck, ceiling: Ceiling | None, measured: Measured) -> str:
    text = f"limit: {_VERDICTS[bottleneck]} (waiting for data {measured.data_wait_percent:.0f} % of the time"
    if ceiling is None:
        return f"{text})"
    share = 100 * measured.steady_samples_per_sec.value / ceiling.samples_per_sec
    return f"{text}, {share:.0f} % of the {rate(ceiling.samples_per_sec)} samples/s that the step alone reaches)"


def _demand(demand: LoaderDemand, tuned: TunedConfig) -> str:
    """What the loader lacks to keep up with the step: CPUs, or faster storage."""
    cpus = tuned.hardware.get("cpus_usable")
    if isinstance(cpus, int) and demand.cpus > cpus:
        return (
            f"CPU-bound: to keep up with the step, loading would need {math.ceil(demand.cpus)} CPUs; {cpus} are usable"
        )
    if demand.wait_share >= MOSTLY_WAITING:
        return f"storage-bound: reading a sample is waiting for {demand.wait_share:.0%} of its time"
    return f"to keep up with the step, loading would need the work of {demand.cpus:.1f} CPUs"


def _probes(seconds: float) -> str:
    return f", probes {duration(seconds)} of it" if seconds > 0 else ""
