"""What holds a configuration back, decided from its own figures."""

from enum import StrEnum

from pipetune.core.tuned import Ceiling, Measured

COMPUTE_SHARE = 0.95
"""From this share of the compute-only rate on, the step is what limits."""
LITTLE_WAIT_PERCENT = 2.0
"""A step that waits less than this for data is what limits, whatever a noisy ceiling says."""
INPUT_WAIT_PERCENT = 10.0
"""From this share of time waiting for data on, the loader is what limits."""


class Bottleneck(StrEnum):
    """What limits the rate; members are added, never renamed."""

    INPUT = "input"
    COMPUTE = "compute"
    BALANCED = "balanced"


def bottleneck(measured: Measured, ceiling: Ceiling | None) -> Bottleneck:
    """Name what limits: the step near its own rate, or where it hardly waits; the loader where it is waited for."""
    if ceiling is not None:
        share = measured.steady_samples_per_sec.value / ceiling.samples_per_sec
        if share >= COMPUTE_SHARE:
            return Bottleneck.COMPUTE
    if measured.data_wait_percent < LITTLE_WAIT_PERCENT:
        return Bottleneck.COMPUTE
    return Bottleneck.INPUT if measured.data_wait_percent >= INPUT_WAIT_PERCENT else Bottleneck.BALANCED
