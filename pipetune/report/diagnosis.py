"""A diagnosis for people and for programs."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipetune.config.tuned_file import flat_config
from pipetune.core.diagnosis import Account, Evidence, diagnose, verdict
from pipetune.report.console import rate
from pipetune.report.findings import findings_object, findings_table

_STAGES = {
    "data_wait": "waiting for data",
    "copy": "copying to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "everything else",
}
_BAR = 30


def diagnosis_view(evidence: Evidence) -> RenderableType:
    """The verdict, the three rates, where the time goes, and what to change."""
    measurement = evidence.measurement
    parts: list[RenderableType] = [
        Text(verdict(evidence), style="bold"),
        Text(f"present settings: {measurement.config.label()}"),
        "",
        _rates(evidence),
        "",
    ]
    account = evidence.account
    if account is not None:
        parts += [_account(account), ""]
    if measurement.gpu is not None:
        parts += [Text(f"GPU busy {measurement.gpu.mean_percent:.0f} % of the time"), ""]
    findings = diagnose(evidence)
    if findings:
        parts += [Text("what to change, the greatest gain first", style="dim"), findings_table(findings)]
    else:
        parts.append(Text("nothing found that would make it faster", style="green"))
    return Group(*parts)


def diagnosis_object(evidence: Evidence) -> dict[str, Any]:
    """Plain types only."""
    measurement, account = evidence.measurement, evidence.account
    return {
        "verdict": verdict(evidence),
        "config": flat_config(measurement.config),
        "samples_per_sec": {
            "loader_alone": evidence.loader_alone,
            "step_alone": evidence.step_alone,
            "together": evidence.together,
            "effective": measurement.effective(evidence.plan).value,
        },
        "main_thread_percent": None if account is None else {k: round(v, 2) for k, v in asdict(account).items()},
        "gpu_utilization_percent": measurement.gpu.mean_percent if measurement.gpu else None,
        "gpu_utilization_reason": measurement.gpu_reason,
        **findings_object(diagnose(evidence)),
    }


def _rates(evidence: Evidence) -> Table:
    table = _table("", "samples/s")
    rows = (
        ("loader alone", evidence.loader_alone),
        ("step alone", evidence.step_alone),
        ("both together", evidence.together),
        ("over the planned epochs", evidence.measurement.effective(evidence.plan).value),
    )
    for name, value in rows:
        table.add_row(name, "?" if value is None else rate(value))
    return table


def _account(account: Account) -> Table:
    table = _table("the main thread's time", "%", "")
    for stage, share in asdict(account).items():
        table.add_row(_STAGES[stage], f"{share:.1f}", Text("#" * round(_BAR * max(0.0, share) / 100), style="blue"))
    return table


def _table(first: str, second: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column(first)
    table.add_column(second, justify="right")
    for name in others:
        table.add_column(name)
    return table
