"""What was found out, and what to do about it: the form in which every command gives advice."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters; members are added, never renamed."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at: the `figure` that was found, `why` it matters and the `remedy`, which only ills have.

    `code` is for programs and stays the same from version to version. `gain` is by how much the rate would grow with
    the remedy, as a factor, measured or predicted; None where nobody can tell.
    """

    code: str
    severity: Severity
    figure: str
    why: str
    remedy: str = ""
    gain: float | None = None


def worst(findings: Sequence[Finding]) -> Severity:
    """The gravest of them; OK where there are none."""
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.OK)
