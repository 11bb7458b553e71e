"""What the parts of a training step cost on this machine, as far as one trial tells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipetune.core.measurement import Measurement
from pipetune.core.space import Amp, TrialConfig

SEEN_SD = 0.15
"""How well a trial tells the cost that limited it (of logarithms)."""
HIDDEN_SD = 0.7
"""How little it tells of what it never waited for."""
UNSEEN_AMP_SD = {True: 0.6, False: 0.4}
"""What a precision that was not tried may change, on a GPU and on a CPU."""
REDUCED_GAIN = {True: 1.6, False: 1.0}
"""What reduced precision is expected to gain there: 1 to 6 times on an H200, and often nothing on a CPU."""
FIXED_SHARE = 0.15
"""Share of a step that does not grow with its batch, before two batch sizes were seen."""
HIDDEN_SHARE = 0.5
"""Of the step that a wait for data may hide beside a GPU, so much is expected (as a standard deviation)."""
MOST_WAITING = 0.99
SPARE_WORKERS = 1.2
"""Workers are uneven: so many times those that would just keep up."""
MOST_WORKERS = 4096
WAITING_SHARE = 0.05
"""A loader that is waited for less than this share of the time is not what limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one micro-batch in the device's hands: `fixed_s + b * sample_s`; `sd` of its logarithm."""

    fixed_s: float
    sample_s: float
    sd: float = 0.1

    def seconds(self, batch_size: int) -> float:
        """Of a micro-batch."""
        return self.fixed_s + batch_size * self.sample_s

    def scaled(self, factor: float) -> "StepCost":
        """The same step, so many times as dear."""
        return replace(self, fixed_s=self.fixed_s * factor, sample_s=self.sample_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """What one sample costs in the process that reads it: seconds of work, and of waiting; `sd` of the logarithm."""

    cpu_s: float
    wait_s: float = 0.0
    sd: float = 0.1

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.cpu_s + self.wait_s

    def scaled(self, factor: float) -> "LoadCost":
        """The same sample, so many times as dear."""
        return replace(self, cpu_s=self.cpu_s * factor, wait_s=self.wait_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a workload costs on a machine, part by part; seconds.

    `step_sd` is how well the steps of all precisions together are known, beside what each has of its own.
    `step_cpus` is how many CPUs a step keeps busy: all threads of torch on a CPU, the launching one beside a GPU.
    `receive_s` is what the main process spends on a batch that a worker made, `receive_sample_s` on each sample of it.
    `start_s` and `worker_start_s` are of an epoch with new workers.
    """

    cpus: float
    load: LoadCost
    steps: Mapping[Amp, StepCost]
    step_sd: float = 0.0
    step_cpus: float = 1.0
    receive_s: float = 0.0
    receive_sample_s: float = 0.0
    start_s: float = 0.05
    worker_start_s: float = 0.02


def costs_of_trial(measurement: Measurement, *, cpus: float, amps: Sequence[Amp], has_accelerator: bool) -> Costs:
    """Split one trial's time into loading and computing by what it waited for; what it did not show gets a wide `sd`.

    Without workers the wait is the loading itself. With workers that are waited for, they are the slower side.
    """
    config = measurement.config
    interval_s = config.batch_size / measurement.steady().value
    waiting = min(measurement.data_wait_percent() / 100, MOST_WAITING)
    if config.num_workers:
        load, step_sd = _load_of_workers(config, interval_s, waiting, cpus)
    else:
        load, step_sd = _load_without_workers(waiting * interval_s / config.batch_size, measurement), SEEN_SD
    if has_accelerator:
        # While data is waited for the GPU works on, and what it does meanwhile is not seen.
        step_sd = max(step_sd, -HIDDEN_SHARE * math.log(1 - waiting))
    step_s = interval_s * (1 - waiting)
    known = StepCost(fixed_s=FIXED_SHARE * step_s, sample_s=(1 - FIXED_SHARE) * step_s / config.batch_size, sd=0.0)
    costs = Costs(
        cpus=cpus,
        load=load,
        steps={amp: _of_other_amp(known, config.amp, amp, has_accelerator=has_accelerator) for amp in amps},
        step_sd=step_sd,
        step_cpus=1.0 if has_accelerator else cpus,
    )
    if config.num_workers == 0:
        return costs
    # What an epoch start lost holds the first batch too, which is foretold apart.
    start_s = max(0.0, measurement.epoch_start.fresh_s - config.batch_size * load.seconds)
    return replace(costs, start_s=0.0, worker_start_s=start_s / config.num_workers)


def guessed_costs(*, cpus: float, amps: Sequence[Amp], has_accelerator: bool) -> Costs:
    """Where nothing ran yet: a sample and a step of some size, and no trust in either."""
    step = StepCost(fixed_s=0.005, sample_s=1e-3, sd=0.0)
    return Costs(
        cpus=cpus,
        load=LoadCost(cpu_s=2e-3, sd=1.0),
        steps={amp: _of_other_amp(step, Amp.FP32, amp, has_accelerator=has_accelerator) for amp in amps},
        step_sd=1.0,
        step_cpus=1.0 if has_accelerator else cpus,
    )


def useful_workers(costs: Costs, batch_size: int) -> int:
    """So many that they keep up with the fastest step, or keep the CPUs busy, whichever is less."""
    load = costs.load
    step_s = min(step.seconds(batch_size) for step in costs.steps.values()) / batch_size
    keep_up = SPARE_WORKERS * load.seconds / step_s
    busy = costs.cpus * load.seconds / load.cpu_s if load.cpu_s > 0 else math.inf
    return max(1, math.ceil(min(keep_up, busy, MOST_WORKERS)))


def _load_without_workers(seconds: float, measurement: Measurement) -> LoadCost:
    """The wait is the loading; what the process did not work meanwhile it waited itself, for a disk or a network."""
    work_share = measurement.data_work_share()
    cpu_s = seconds if work_share is None else seconds * work_share
    return LoadCost(cpu_s=cpu_s, wait_s=seconds - cpu_s, sd=SEEN_SD)


def _load_of_workers(config: TrialConfig, interval_s: float, waiting: float, cpus: float) -> tuple[LoadCost, float]:
    """The cost of a sample, and how well the step's is known beside it."""
    most_s = config.num_workers * interval_s / config.batch_size
    is_limit = waiting > WAITING_SHARE
    seconds = most_s if is_limit else most_s / 2
    # More work than the CPUs do in that time it cannot have been: the rest was waiting.
    cpu_s = min(seconds, cpus * interval_s / config.batch_size)
    sd = 2 * SEEN_SD if is_limit else HIDDEN_SD
    return LoadCost(cpu_s=cpu_s, wait_s=seconds - cpu_s, sd=sd), 2 * SEEN_SD if is_limit else SEEN_SD


def _of_other_amp(cost: StepCost, known: Amp, wanted: Amp, *, has_accelerator: bool) -> StepCost:
    if wanted is known:
        return cost
    gain = REDUCED_GAIN[has_accelerator]
    factor = {(True, False): 1 / gain, (False, True): gain}.get((known is Amp.FP32, wanted is Amp.FP32), 1.0)
    return replace(cost.scaled(factor), sd=UNSEEN_AMP_SD[has_accelerator])
