"""What a configuration will do, reckoned from a few costs that were measured apart: to choose, never to score.

An input pipeline is a producer and a consumer with a buffer between them. With workers the interval between batches is
that of the slower side, and a little more where the buffer runs empty now and then; without workers it is the sum.
"""

import math
from dataclasses import dataclass, replace

from pipetune.core.costs import Costs
from pipetune.core.space import TrialConfig
from pipetune.core.throughput import EpochStart, Estimate, TrainingPlan, effective_rate

LEAST_VARIATION = 0.2
"""Squared coefficient of variation of even the most regular batches: machines are never that regular."""
NUDGE = 1.1
"""Costs are raised by this factor to see how much a rate depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A foretold rate: samples/s over the planned run, and how its logarithm hangs on the large costs.

    The shares are elasticities: the share of a small change of that cost by which the rate changes.
    """

    rate: float
    step_share: float
    load_share: float
    receive_share: float


def predict(config: TrialConfig, costs: Costs, plan: TrainingPlan) -> Prediction:
    """The rate over the planned run, and what it hangs on."""
    rate = foretold_rate(config, costs, plan)
    step = costs.steps[config.amp]

    def share(slower: Costs) -> float:
        return math.log(rate / foretold_rate(config, slower, plan)) / math.log(NUDGE)

    has_receiving = config.num_workers > 0 and _receive_s(config, costs) > 0
    return Prediction(
        rate=rate,
        step_share=share(replace(costs, steps={**costs.steps, config.amp: step.scaled(NUDGE)})),
        load_share=share(replace(costs, load=costs.load.scaled(NUDGE))),
        receive_share=share(costs.with_receiving(NUDGE)) if has_receiving else 0.0,
    )


def foretold_rate(config: TrialConfig, costs: Costs, plan: TrainingPlan) -> float:
    """Samples per second over the planned run, epoch starts by the contract's formula."""
    interval_s = batch_interval_s(config, costs)
    first_s = max(0.0, _first_batch_s(config, costs) - interval_s)
    start_s = costs.start_s + costs.worker_start_s * config.num_workers if config.num_workers else 0.0
    steady = config.batch_size / interval_s
    return effective_rate(
        Estimate(value=steady, low=steady, high=steady),
        EpochStart(fresh_s=start_s + first_s, refill_s=first_s),
        plan,
        persistent_workers=config.persistent_workers,
    ).value


def batch_interval_s(config: TrialConfig, costs: Costs) -> float:
    """Seconds between two batches inside an epoch."""
    batch = config.batch_size
    copy_s = batch * (costs.pinned_copy_sample_s if config.pin_memory else costs.copy_sample_s)
    step_s = costs.steps[config.amp].seconds(batch) + copy_s
    if config.num_workers == 0:
        return batch * costs.load.seconds + step_s
    receive_s = _receive_s(config, costs)
    consumer_s = step_s + receive_s - costs.hidden_share * min(step_s, receive_s)
    producer_s = batch * costs.load.together(config.num_workers, costs.cpus)
    buffered = config.num_workers * (config.prefetch_factor or 1) * _evenness(costs.load.spread, batch)
    # However many workers there are, the CPUs do no more than all the work that there is.
    work_s = batch * costs.load.cpu_s + receive_s + step_s * costs.step_cpus
    return max(consumer_s + empty_share(consumer_s, producer_s, buffered) * producer_s, work_s / costs.cpus)


def _receive_s(config: TrialConfig, costs: Costs) -> float:
    """Of a batch, in the main process."""
    return config.batch_size * (costs.pinned_receive_sample_s if config.pin_memory else costs.receive_sample_s)


def _evenness(spread: float | None, batch_size: int) -> float:
    """By what a buffer's capacity counts for more, since batches come more evenly than the queue formula takes them to.

    Queues grow with the squared coefficient of variation of both sides (Kingman, The single server queue in heavy
    traffic, 1961): 1 for either in that formula, while steps here are even and a batch is a sum of samples.
    """
    return 1.0 if spread is None else 2 / max(spread**2 / batch_size, LEAST_VARIATION)


def empty_share(consumer_s: float, producer_s: float, capacity: float) -> float:
    """How likely the consumer finds the buffer empty, from the intervals of both sides.

    The M/M/1/n queue as tf.data models its buffers (Murray et al., tf.data, VLDB 2021).
    """
    if producer_s <= 0:
        return 0.0
    ratio = consumer_s / producer_s
    if math.isclose(ratio, 1.0, rel_tol=1e-6):
        return 1 / (capacity + 1)
    if ratio > 1:
        # The same formula divided by ratio^(n+1), which would overflow.
        shrunk = ratio ** -(capacity + 1)
        return float((ratio - 1) * shrunk / (1 - shrunk))
    return float((1 - ratio) / (1 - ratio ** (capacity + 1)))


def _first_batch_s(config: TrialConfig, costs: Costs) -> float:
    """Every worker begins with a whole batch, and all of them share the CPUs."""
    if config.num_workers == 0:
        return 0.0
    load = costs.load
    crowd = max(1.0, config.num_workers * load.cpu_s / load.seconds / costs.cpus) if load.seconds > 0 else 1.0
    return config.batch_size * load.seconds * crowd
