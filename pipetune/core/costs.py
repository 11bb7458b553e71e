"""What the parts of a training step cost on this machine, as far as probes, or else one trial, tell."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipetune.core.measurement import Measurement
from pipetune.core.probes import LoaderProbe, Probe, StepProbe
from pipetune.core.space import Amp, TrialConfig

SEEN_SD = 0.15
"""How well a trial tells the cost that limited it (of logarithms)."""
PROBED_SD = 0.2
"""How well a probe tells the cost that it measures: it takes a second, beside what else the machine does."""
SHAPE_TRUST = 0.5
SHARE_TRUST = 0.5
"""What a probe says of one batch size, or of one count of workers, or of pinning, is believed by so much of its
logarithm: as much as it differs by error, neighbours differ in truth."""
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
RECEIVE_SD = 0.3
"""How well it is known what receiving a batch costs, and what of that a step hides."""
RECEIVE_HIDDEN_SHARE = 0.5
"""Of receiving beside a GPU's step: all of it where the GPU computes long, nothing where launching is the step."""
MOST_WAITING = 0.99
SPARE_WORKERS = 1.2
"""Workers are uneven: so many times those that would just keep up."""
MOST_WORKERS = 4096
WAITING_SHARE = 0.05
"""A loader that is waited for less than this share of the time is not what limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one micro-batch in the device's hands, known at a few sizes; `sd` of its logarithm.

    `points` are (micro-batch, seconds), the smallest first. Between them and beyond them it is a line.
    """

    points: tuple[tuple[int, float], ...]
    sd: float = 0.1

    @classmethod
    def line(cls, *, fixed_s: float, sample_s: float, sd: float = 0.1) -> "StepCost":
        """`fixed_s + b * sample_s`."""
        return cls(points=((1, fixed_s + sample_s), (2, fixed_s + 2 * sample_s)), sd=sd)

    @classmethod
    def through(cls, batch_size: int, seconds: float, *, sd: float = 0.1) -> "StepCost":
        """Known at one size only: of which a share does not grow with it."""
        fixed_s = FIXED_SHARE * seconds
        return cls.line(fixed_s=fixed_s, sample_s=(seconds - fixed_s) / batch_size, sd=sd)

    def seconds(self, batch_size: int) -> float:
        """Of a micro-batch."""
        above = next((i for i, (size, _) in enumerate(self.points) if size >= batch_size), len(self.points) - 1)
        (small, small_s), (large, large_s) = self.points[max(above, 1) - 1 : max(above, 1) + 1]
        line_s = small_s + (large_s - small_s) * (batch_size - small) / (large - small)
        if batch_size < small:
            # A large batch may thrash; no smaller one is for nothing because of that.
            return max(line_s, small_s * batch_size / small)
        return max(line_s, large_s) if batch_size > large else line_s

    def scaled(self, factor: float) -> "StepCost":
        """The same step, so many times as dear."""
        return replace(self, points=tuple((size, seconds * factor) for size, seconds in self.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """What one sample costs in the process that reads it: seconds of work, and of waiting; `sd` of the logarithm.

    `shares` are (workers, share): what so many workers made of all that they would make if none held up another.
    `spread` is the standard deviation of a sample's seconds over their mean; None where that is not known.
    """

    cpu_s: float
    wait_s: float = 0.0
    shares: tuple[tuple[int, float], ...] = ()
    spread: float | None = None
    sd: float = 0.1

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.cpu_s + self.wait_s

    @property
    def wait_share(self) -> float:
        """Share of a sample's time that is waiting, 0-1; 0 where it takes none."""
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0

    def alone(self, workers: int, cpus: float) -> float:
        """Seconds a sample of so many workers (at least one), none of whom holds up another."""
        return max(self.seconds / workers, self.cpu_s / cpus)

    def together(self, workers: int, cpus: float) -> float:
        """Seconds a sample of so many workers as they are; between known counts by doublings."""
        if not self.shares:
            return self.seconds / workers
        return self.alone(workers, cpus) / _between(self.shares, workers)

    def scaled(self, factor: float) -> "LoadCost":
        """The same sample, so many times as dear."""
        return replace(self, cpu_s=self.cpu_s * factor, wait_s=self.wait_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a workload costs on a machine, part by part; seconds.

    `step_sd` is how well the steps of all precisions together are known, beside what each has of its own.
    `step_cpus` is how many CPUs a step keeps busy: all threads of torch on a CPU, the launching one beside a GPU.
    `receive_sample_s` is what the main process spends on each sample of a batch that a worker made,
    `pinned_receive_sample_s` the same where it pins the batch too; `hidden_share` of that goes on beside a GPU's step,
    or of the step beside it, and `receive_sd` is of its logarithm.
    `copy_sample_s` is what moving a sample to the device takes, `pinned_copy_sample_s` the same from pinned memory.
    `start_s` and `worker_start_s` are of an epoch with new workers.
    """

    cpus: float
    load: LoadCost
    steps: Mapping[Amp, StepCost]
    step_sd: float = 0.0
    step_cpus: float = 1.0
    receive_sample_s: float = 0.0
    pinned_receive_sample_s: float = 0.0
    receive_sd: float = 0.0
    hidden_share: float = 0.0
    copy_sample_s: float = 0.0
    pinned_copy_sample_s: float = 0.0
    start_s: float = 0.05
    worker_start_s: float = 0.02

    def with_receiving(self, factor: float) -> "Costs":
        """The same, with receiving so many times as dear."""
        return replace(
            self,
            receive_sample_s=self.receive_sample_s * factor,
            pinned_receive_sample_s=self.pinned_receive_sample_s * factor,
        )


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
    known = StepCost.through(config.batch_size, step_s, sd=0.0)
    costs = Costs(
        cpus=cpus,
        load=load,
        steps={amp: _of_other_amp(known, config.amp, amp, has_accelerator=has_accelerator) for amp in amps},
        step_sd=step_sd,
        step_cpus=1.0 if has_accelerator else cpus,
        hidden_share=RECEIVE_HIDDEN_SHARE if has_accelerator else 0.0,
    )
    if config.num_workers == 0:
        return costs
    # What an epoch start lost holds the first batch too, which is foretold apart.
    start_s = max(0.0, measurement.epoch_start.fresh_s - config.batch_size * load.seconds)
    return replace(costs, start_s=0.0, worker_start_s=start_s / config.num_workers)


def guessed_costs(*, cpus: float, amps: Sequence[Amp], has_accelerator: bool) -> Costs:
    """Where nothing ran yet: a sample and a step of some size, and no trust in either."""
    step = StepCost.line(fixed_s=0.005, sample_s=1e-3, sd=UNSEEN_AMP_SD[has_accelerator])
    return Costs(
        cpus=cpus,
        load=LoadCost(cpu_s=2e-3, sd=1.0),
        steps={amp: _of_other_amp(step, Amp.FP32, amp, has_accelerator=has_accelerator) for amp in amps},
        step_sd=1.0,
        step_cpus=1.0 if has_accelerator else cpus,
        hidden_share=RECEIVE_HIDDEN_SHARE if has_accelerator else 0.0,
    )


def costs_of_probes(probes: Sequence[Probe], rest: Costs) -> Costs:
    """What probes tell of each part; of a part that none was made of, what `rest` says."""
    loaders = sorted((one for one in probes if isinstance(one, LoaderProbe)), key=lambda one: one.config.num_workers)
    steps = [one for one in probes if isinstance(one, StepProbe)]
    costs = replace(rest, load=_probed_load(loaders, rest))
    costs = _with_probed_workers(costs, [one for one in loaders if one.config.num_workers])
    return _with_probed_steps(costs, steps) if steps else costs


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


def _probed_load(loaders: Sequence[LoaderProbe], rest: Costs) -> LoadCost:
    """A sample's cost from the fewest workers, none of them at best; how they get on with each other from all."""
    if not loaders:
        return rest.load
    first = loaders[0]
    workers, batch = max(1, first.config.num_workers), first.config.batch_size
    seconds = workers * first.batch_s / batch
    # Workers also wait for a CPU that others use, and for the main process: only without them is it storage.
    share = None if first.config.num_workers else first.work_share
    cpu_s = seconds * (1 - rest.load.wait_share if share is None else share)
    load = LoadCost(
        cpu_s=cpu_s,
        wait_s=seconds - cpu_s,
        spread=None if first.spread is None else first.spread * math.sqrt(batch),
        sd=PROBED_SD,
    )
    return replace(load, shares=tuple(_share(one, load, rest.cpus) for one in loaders if one.config.num_workers))


def _share(probe: LoaderProbe, load: LoadCost, cpus: float) -> tuple[int, float]:
    workers = probe.config.num_workers
    share = load.alone(workers, cpus) * probe.config.batch_size / probe.batch_s
    return workers, min(1.0, share**SHARE_TRUST)


def _with_probed_workers(costs: Costs, loaders: Sequence[LoaderProbe]) -> Costs:
    """What receiving costs the main process, and what starting workers takes beside their first batch."""
    if not loaders:
        return costs
    unpinned, pinned = ([one for one in loaders if one.config.pin_memory is pin] for pin in (False, True))
    starts = [(one.config.num_workers, max(0.0, one.first_batch_s - _first_load_s(one, costs))) for one in loaders]
    (few, few_s), (many, many_s) = starts[0], starts[-1]
    each_s = max(0.0, (many_s - few_s) / (many - few)) if many > few else few_s / few
    return replace(
        costs,
        receive_sample_s=_receive_sample_s(loaders, unpinned),
        pinned_receive_sample_s=_receive_sample_s(loaders, pinned),
        receive_sd=RECEIVE_SD,
        start_s=max(0.0, few_s - few * each_s),
        worker_start_s=each_s,
    )


def _receive_sample_s(loaders: Sequence[LoaderProbe], alike: Sequence[LoaderProbe]) -> float:
    """As dear as all probes say together, and those that pin or do not, by themselves as far as one can tell."""
    level_s, own_s = _mean_receive_sample_s(loaders), _mean_receive_sample_s(alike or loaders)
    return float(own_s**SHARE_TRUST * level_s ** (1 - SHARE_TRUST))


def _mean_receive_sample_s(loaders: Sequence[LoaderProbe]) -> float:
    work_s = sum(one.receive_s * one.batches for one in loaders)
    return work_s / sum(one.config.batch_size * one.batches for one in loaders)


def _first_load_s(probe: LoaderProbe, costs: Costs) -> float:
    workers = probe.config.num_workers
    return probe.config.batch_size * workers * costs.load.together(workers, costs.cpus)


def _with_probed_steps(costs: Costs, steps: Sequence[StepProbe]) -> Costs:
    """A precision that was not probed stays as its own trial told it, or is guessed from one that was."""
    points: dict[Amp, dict[int, float]] = {}
    for one in steps:
        points.setdefault(one.config.amp, {})[one.config.batch_size] = one.batch_s
    probed = {amp: _probed_step(own, costs.steps.get(amp)) for amp, own in points.items()}
    # What the guesses of the others missed in the one that was probed, they will have missed in those too.
    known = min(probed, key=lambda amp: costs.steps[amp].sd if amp in costs.steps else math.inf)
    size = max(points[known])
    missed = probed[known].seconds(size) / costs.steps[known].seconds(size) if known in costs.steps else 1.0
    guessed = {
        amp: step if step.sd == 0.0 else step.scaled(missed) for amp, step in costs.steps.items() if amp not in probed
    }
    copied = [one for one in steps if one.copy_s is not None and one.pinned_copy_s is not None]
    samples = sum(one.config.batch_size for one in copied)
    return replace(
        costs,
        steps=probed | guessed,
        step_sd=PROBED_SD / 2,
        copy_sample_s=sum(one.copy_s or 0.0 for one in copied) / samples if samples else 0.0,
        pinned_copy_sample_s=sum(one.pinned_copy_s or 0.0 for one in copied) / samples if samples else 0.0,
    )


def _probed_step(points: Mapping[int, float], known: StepCost | None) -> StepCost:
    """As dear as its probes say together; each size by itself as far as one probe can tell."""
    sizes = sorted(points)
    shape = known or StepCost.through(sizes[-1], points[sizes[-1]])
    missed = {size: math.log(points[size] / shape.seconds(size)) for size in sizes}
    level = sum(missed.values()) / len(sizes)
    sd = PROBED_SD / math.sqrt(len(sizes))
    if len(sizes) == 1:
        return replace(shape.scaled(math.exp(level)), sd=sd)
    seconds = {size: shape.seconds(size) * math.exp(level + SHAPE_TRUST * (missed[size] - level)) for size in sizes}
    return StepCost(points=tuple(seconds.items()), sd=sd)


def _between(points: Sequence[tuple[int, float]], wanted: int) -> float:
    """The value at a count, by doublings between the two that are next to it; beyond them that of the outer one."""
    below = [point for point in points if point[0] <= wanted]
    above = [point for point in points if point[0] > wanted]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (few, low), (many, high) = below[-1], above[0]
    return low + (high - low) * math.log(wanted / few) / math.log(many / few)
