"""What the parts of a training step cost on this machine, as far as one trial tells."""

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

    `step_cpus` is how many CPUs a step keeps busy: all threads of torch on a CPU, the launching one beside a GPU.
    `receive_s` is what the main process spends on a batch that a worker made, `receive_sample_s` on each sample of it.
    `start_s` and `worker_start_s` are of an epoch with new workers.
    """

    cpus: float
    load: LoadCost
    steps: Mapping[Amp, StepCost]
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
    waiting = measurement.data_wait_percent() / 100
    step_s = max(interval_s * (1 - waiting), 0.01 * interval_s)
    load, step_sd = _load_of(config, interval_s, waiting)
    # Beside a GPU the wait for data hides what the GPU does meanwhile.
    step_sd = HIDDEN_SD if has_accelerator and waiting > 0.5 else step_sd
    cost = StepCost(fixed_s=FIXED_SHARE * step_s, sample_s=(1 - FIXED_SHARE) * step_s / config.batch_size, sd=step_sd)
    start = measurement.epoch_start
    return Costs(
        cpus=cpus,
        load=load,
        steps={amp: _of_other_amp(cost, config.amp, amp, has_accelerator=has_accelerator) for amp in amps},
        step_cpus=1.0 if has_accelerator else cpus,
        **({"start_s": 0.0, "worker_start_s": start.fresh_s / config.num_workers} if config.num_workers else {}),
    )


def guessed_costs(*, cpus: float, amps: Sequence[Amp], has_accelerator: bool) -> Costs:
    """Where nothing ran yet: a sample and a step of some size, and no trust in either."""
    step = StepCost(fixed_s=0.005, sample_s=1e-3, sd=1.0)
    return Costs(
        cpus=cpus,
        load=LoadCost(cpu_s=2e-3, sd=1.0),
        steps={amp: _of_other_amp(step, Amp.FP32, amp, has_accelerator=has_accelerator) for amp in amps},
        step_cpus=1.0 if has_accelerator else cpus,
    )


def _load_of(config: TrialConfig, interval_s: float, waiting: float) -> tuple[LoadCost, float]:
    """The cost of a sample, and how well the step's is known beside it."""
    if config.num_workers == 0:
        return LoadCost(cpu_s=waiting * interval_s / config.batch_size, sd=SEEN_SD), SEEN_SD
    most_s = config.num_workers * interval_s / config.batch_size
    if waiting > WAITING_SHARE:
        return LoadCost(cpu_s=most_s, sd=2 * SEEN_SD), 2 * SEEN_SD
    return LoadCost(cpu_s=most_s / 2, sd=HIDDEN_SD), SEEN_SD


def _of_other_amp(cost: StepCost, known: Amp, wanted: Amp, *, has_accelerator: bool) -> StepCost:
    if wanted is known:
        return cost
    gain = REDUCED_GAIN[has_accelerator]
    factor = {(True, False): 1 / gain, (False, True): gain}.get((known is Amp.FP32, wanted is Amp.FP32), 1.0)
    return replace(cost.scaled(factor), sd=(cost.sd**2 + UNSEEN_AMP_SD[has_accelerator] ** 2) ** 0.5)
