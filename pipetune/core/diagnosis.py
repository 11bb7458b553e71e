"""What holds a configuration back, decided from its own figures."""

from enum import StrEnum

from pipetune.core.tuned import Ceiling, Measured

COMPUTE_SHARE = 0.95
"""From this share of the compute-only rate on, the step is what limits."""
INPUT_WAIT_PERCENT = 10.0
"""From this share of time waiting for data on, the loader is what limits."""


class Bottleneck(StrEnum):
    """What limits the rate; members are added, never renamed."""

    INPUT = "input"
    COMPUTE = "compute"
    BALANCED = "balanced"


def bottleneck(measured: Measured, ceiling: Ceiling | None) -> Bottleneck:
    """Name what limits: near the compute-only rate the step, else the loader where the main thread waits."""
    if ceiling is not None:
        share = measured.steady_samples_per_sec.value / ceiling.samples_per_sec
        if share >= COMPUTE_SHARE:
            return Bottleneck.COMPUTE
    if measured.data_wait_percent >= INPUT_WAIT_PERCENT:
        return Bottleneck.INPUT
    return Bottleneck.BALANCED
