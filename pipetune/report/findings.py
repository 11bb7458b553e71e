"""Findings for people and for programs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipetune.core.findings import Finding, Severity, worst
from pipetune.core.text import printable

MOST_GAIN = 10.0
_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.STOP: "bold red"}


def findings_view(findings: Sequence[Finding]) -> RenderableType:
    """A block each: state and figure, why it matters, what to do; then the sum of it."""
    return Group(findings_table(findings), "", Text(_sum(findings), style=_STYLES[worst(findings)]))


def findings_table(findings: Sequence[Finding]) -> Table:
    """A block each."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        state = Text(finding.severity.value, style=_STYLES[finding.severity])
        table.add_row(state, Text(printable(finding.figure)))
        table.add_row("", Text(printable(finding.why), style="dim"))
        if finding.remedy:
            gain = "" if finding.gain is None else f": {_times(finding.gain)}"
            table.add_row("", Text(f"-> {printable(finding.remedy)}{gain}", style="bold"))
    return table


def _times(gain: float) -> str:
    """A great gain is a guess: something else will limit first."""
    return "10 times the rate, or more" if gain >= MOST_GAIN else f"up to {gain:.2g} times the rate"


def findings_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain types only."""
    return {
        "worst": worst(findings).value,
        "findings": [
            {
                "code": finding.code,
                "severity": finding.severity.value,
                "figure": finding.figure,
                "why": finding.why,
                "remedy": finding.remedy or None,
                "gain": None if finding.gain is None else round(finding.gain, 3),
            }
            for finding in findings
        ],
    }


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    stops, warnings = counts[Severity.STOP], counts[Severity.WARNING]
    if stops:
        return f"{stops} would stop training, {warnings} would slow it down"
    if warnings:
        return f"nothing would stop training; {warnings} would slow it down"
    return "nothing found that would stop training or slow it down"
