"""The reference configuration: measured again every few trials, so that a machine that drifts is noticed."""

from collections.abc import Sequence

from pipetune.core.record import TrialRecord
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import Estimate, TrainingPlan

EVERY = 6
"""Trials between two measurements of the reference."""
CHOSEN_FROM = 4
"""It is the fastest of the first so many that ran: slow ones would cost the most and tell the least."""
DRIFT_SHARE = 0.08
"""From this difference between two measurements of it on, the study says that the machine drifts."""


def reference_of(records: Sequence[TrialRecord], plan: TrainingPlan) -> TrialConfig | None:
    """The fastest of the first few; fixed once there are so many."""
    first: dict[TrialConfig, float] = {}
    for record in records:
        if record.measurement is not None and len(first) < CHOSEN_FROM:
            first.setdefault(record.config, record.measurement.effective(plan).value)
    return max(first, key=first.__getitem__) if len(first) == CHOSEN_FROM else None


def due_reference(records: Sequence[TrialRecord], plan: TrainingPlan) -> TrialConfig | None:
    """The reference where its turn has come. Short studies have none."""
    reference = reference_of(records, plan)
    own = [index for index, record in enumerate(records) if record.config == reference]
    since = len(records) if len(own) < 2 else len(records) - 1 - own[-1]
    return reference if since >= EVERY else None


def drift_note(records: Sequence[TrialRecord], again: TrialRecord, plan: TrainingPlan) -> str | None:
    """What to say of a trial that repeats an earlier one at quite another rate; one that was ended early has none."""
    whole = (record for record in records if record.measurement is not None and not record.measurement.censored)
    first = next((record for record in whole if record.config == again.config), again)
    if first is again or first.measurement is None or again.measurement is None:
        return None
    before, now = first.measurement.effective(plan), again.measurement.effective(plan)
    if abs(now.value / before.value - 1) < DRIFT_SHARE or _meet(before, now):
        return None
    return (
        f"the reference {again.config.label()} made {before.value:.4g} samples/s in trial {first.number} and "
        f"{now.value:.4g} ({100 * (now.value / before.value - 1):+.0f} %) in trial {again.number}: this machine is "
        "not steady, and trials that are far apart compare badly"
    )


def _meet(one: Estimate, other: Estimate) -> bool:
    return one.low <= other.high and other.low <= one.high
