"""What no loader setting can pass, and what it would take to get there."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipetune.core.costs import Costs
from pipetune.core.probes import LoaderProbe, Probe, StepProbe
from pipetune.core.space import SearchSpace, TrialConfig

CLOSE_SHARE = 0.98
"""From this share of a ceiling on there is nothing left to gain."""
DISTURBED_SHARE = 1.05
"""What training exceeds by so much was no ceiling: the probe was disturbed."""
MOSTLY_WAITING = 0.5
"""From this share of a sample's time on that it waits, storage or the network limits, not the CPUs.

Less may be what other programs took from the CPU.
"""


def is_reached(rate: float, ceiling: float) -> bool:
    """Whether a rate is as near to it as makes no difference."""
    return CLOSE_SHARE <= rate / ceiling <= DISTURBED_SHARE


def step_ceiling(probes: Sequence[Probe], space: SearchSpace) -> float | None:
    """Samples/s of the fastest step alone; None unless every precision of the space was probed."""
    steps = [one for one in probes if isinstance(one, StepProbe) and one.config.batch_size in space.batch_size]
    if not {one.config.amp for one in steps} >= set(space.amp):
        return None
    return max(one.samples_per_sec for one in steps)


def loader_ceiling(probes: Sequence[Probe], cpus: float) -> float | None:
    """Samples/s of CPUs that do nothing but load, at the least that a sample was seen to cost; None where unknown."""
    each_s = [
        max(1, one.config.num_workers) * one.batch_s * one.work_share / one.config.batch_size
        for one in probes
        if isinstance(one, LoaderProbe) and one.work_share
    ]
    return cpus / min(each_s) if each_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderDemand:
    """What loading would have to do to keep up with the step alone.

    `cpus` is how many CPUs its work would keep busy; `wait_share` is the share of a sample's time, 0-1, in which its
    reader waits for storage or a network.
    """

    cpus: float
    wait_share: float


def loader_demand(config: TrialConfig, costs: Costs) -> LoaderDemand:
    """At the rate of this configuration's step."""
    step_s = costs.steps[config.amp].seconds(config.batch_size)
    load, busy = costs.load, max(1, round(costs.cpus))
    # Workers that hold each other up need more of them than one alone would say.
    crowd = load.together(busy, costs.cpus) / load.alone(busy, costs.cpus)
    return LoaderDemand(
        cpus=config.batch_size * load.cpu_s * crowd / step_s,
        wait_share=load.wait_share,
    )
