"""What holds a configuration back: decided from its own figures, or from an examination of what could be better."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipetune.core.ceilings import MOSTLY_WAITING
from pipetune.core.facts import WorkloadFacts
from pipetune.core.findings import Finding, Severity
from pipetune.core.measurement import CacheState, Measurement
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp
from pipetune.core.text import size
from pipetune.core.throughput import TrainingPlan
from pipetune.core.tuned import Ceiling, Measured

COMPUTE_SHARE = 0.95
"""From this share of the compute-only rate on, the step is what limits."""
LITTLE_WAIT_PERCENT = 2.0
"""A step that waits less than this for data is what limits, whatever a noisy ceiling says."""
INPUT_WAIT_PERCENT = 10.0
"""From this share of time waiting for data on, the loader is what limits."""
WORTH = 1.1
"""A remedy is told from this gain on: less is lost in what probes and machines vary by."""
RELEVANT_PERCENT = 10.0
"""A stage of the main thread that takes less of its time is nobody's bottleneck."""
COPY_PERCENT = 5.0
CROWDED = 2.0
"""A step that takes so many times as long beside workers as alone is in their way, and they in its."""
EPOCH_SHARE = 0.1
"""Epoch starts that take more of the planned run are told."""
MEMORY_SHARE = 0.5
"""A dataset that takes less of the memory that there is could stay in it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The main thread's time in an epoch, percent of the whole: the parts sum to 100.

    Forward, backward and optimizer are what the main thread does for them; on a GPU most of it is starting kernels,
    and waiting for the GPU shows where something waits. `other` is what lies between: logging, checkpoints, a
    train_step's own work.
    """

    data_wait: float
    copy: float
    forward: float
    backward: float
    optimizer: float
    other: float

    @classmethod
    def of(cls, measurement: Measurement) -> "Account | None":
        """Over all windows that count; None where the stages were not timed."""
        windows = measurement.windows
        stages = [window.stages for window in windows if window.stages is not None]
        total_s = sum(window.seconds for window in windows)
        if len(stages) < len(windows) or total_s <= 0:
            return None
        parts = {
            "data_wait": sum(window.data_wait_s for window in windows),
            "copy": sum(one.copy_s for one in stages),
            "forward": sum(one.forward_s for one in stages),
            "backward": sum(one.backward_s for one in stages),
            "optimizer": sum(one.optimizer_s for one in stages),
        }
        return cls(
            **{name: 100 * seconds / total_s for name, seconds in parts.items()},
            other=100 * (1 - sum(parts.values()) / total_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One configuration examined: it trained, and its parts ran alone. None is "not known".

    `measurement` has the step alone as `compute_only_samples_per_sec`. `sample` is one process loading without
    training. `loader` is the loader alone as configured, None without workers; `full_loader` the same with a worker a
    CPU. `steps` are steps alone at the micro-batch in use, by precision; `larger_step` is one at a larger micro-batch
    in the precision in use.
    """

    measurement: Measurement
    plan: TrainingPlan
    facts: WorkloadFacts
    cpus_usable: int
    memory_bytes: int
    sample: LoaderProbe | None = None
    loader: LoaderProbe | None = None
    full_loader: LoaderProbe | None = None
    steps: Mapping[Amp, StepProbe]
    larger_step: StepProbe | None = None

    @property
    def account(self) -> Account | None:
        """Where the main thread's time went."""
        return Account.of(self.measurement)

    @property
    def together(self) -> float:
        """Samples/s of loader and step together, inside an epoch."""
        return self.measurement.steady().value

    @property
    def step_alone(self) -> float | None:
        """Samples/s of the step on a batch that lies on the device."""
        return self.measurement.compute_only_samples_per_sec

    @property
    def loader_alone(self) -> float | None:
        """Samples/s of the loader as configured, without training."""
        probe = self.loader if self.measurement.config.num_workers else self.sample
        return None if probe is None else probe.samples_per_sec

    @property
    def is_input_bound(self) -> bool:
        """Whether the step waits for data, and would run faster if it had not to."""
        waits = self.measurement.data_wait_percent() >= INPUT_WAIT_PERCENT
        return waits and (self.step_alone is None or self.step_alone >= WORTH * self.together)


Rule = Callable[[Evidence], Iterator[Finding]]


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """What holds it back, the greatest gain first; nothing where all is well."""
    found = [finding for rule in RULES for finding in rule(evidence)]
    return tuple(sorted(found, key=lambda finding: -(finding.gain or 1.0)))


def verdict(evidence: Evidence) -> str:
    """One sentence: what limits, and by how much."""
    wait = evidence.measurement.data_wait_percent()
    if evidence.is_input_bound:
        gain = (
            ""
            if evidence.step_alone is None
            else f"; the step alone is {evidence.step_alone / evidence.together:.1f} times as fast"
        )
        return f"Input-bound: the step waits for data {wait:.0f} % of the time{gain}."
    if evidence.step_alone is not None and wait < LITTLE_WAIT_PERCENT:
        share = min(100.0, 100 * evidence.together / evidence.step_alone)
        return (
            f"Compute-bound: training makes {share:.0f} % of what the step alone makes; no loader setting can add much."
        )
    return f"Neither loader nor step limits alone: the step waits for data {wait:.0f} % of the time."


# --- the loader ------------------------------------------------------------------------------------------------------


def _loading(evidence: Evidence) -> Iterator[Finding]:
    """Why batches come too slowly: too few workers, waiting for storage, or the work of making a sample."""
    if not evidence.is_input_bound or _in_turn_gain(evidence) >= WORTH:
        return
    workers, cpus = evidence.measurement.config.num_workers, evidence.cpus_usable
    gain_of_more = _gain_of_workers(evidence)
    waiting = _waiting_share(evidence)
    is_cold = evidence.measurement.cache is CacheState.COLD
    if waiting is not None and waiting >= MOSTLY_WAITING:
        source = "storage, past the page cache" if is_cold else "storage, a network or a lock"
        more = max(2 * cpus, 2 * workers, 4)
        yield _found(
            "slow_storage",
            f"a sample is waiting for {waiting:.0%} of its time, with {_workers(workers)}",
            f"a worker that waits for {source} uses no CPU, so more workers than CPUs help",
            f"num_workers {more} and more (`pipetune tune` finds how many), or faster storage",
            # Waiting is done side by side, the work by the CPUs.
            _limit_gain(evidence, min(more, cpus / max(1 - waiting, 1e-9)) * _one(evidence)),
        )
    elif gain_of_more is not None and gain_of_more >= WORTH and workers < cpus:
        yield _found(
            "few_workers",
            f"{_workers(workers)} load {_rate(evidence.loader_alone)}; {cpus} would load {_rate(_full(evidence))}",
            "samples are made by the CPUs that workers run on, and some have nothing to do",
            f"num_workers {cpus}",
            gain_of_more,
        )
    else:
        yield _found(
            "slow_samples",
            _sample_figure(evidence),
            "all usable CPUs are busy making samples",
            "cheaper decoding or augmentation (smaller files, a faster decoder, less on the CPU), or more CPUs",
            _limit_gain(evidence, None),
        )
        yield from _decoded_anew(evidence)


def _decoded_anew(evidence: Evidence) -> Iterator[Finding]:
    """A dataset whose samples would fit in memory as they leave the loader."""
    sample, count = evidence.sample, evidence.facts.dataset_samples
    if sample is None or not count:
        return
    needed = count * sample.batch_bytes / sample.config.batch_size
    if needed < MEMORY_SHARE * evidence.memory_bytes:
        yield _found(
            "fits_in_memory",
            f"{count:,} samples as they leave the loader are {size(needed)}",
            "they are made anew in each epoch, and would fit in memory",
            "decode once, and keep the tensors in memory or in one memory-mapped file (random augmentation after that)",
            _limit_gain(evidence, None),
        )


def _hurting_workers(evidence: Evidence) -> Iterator[Finding]:
    """Workers that cost more than they bring: loading and training in turn would be faster."""
    gain = _in_turn_gain(evidence)
    if gain >= WORTH:
        yield _found(
            "workers_hurt",
            f"{_workers(evidence.measurement.config.num_workers)}: {_rate(evidence.together)}; without any it would be "
            f"about {_rate(gain * evidence.together)}",
            "samples are so cheap that handing them over between processes costs more than making them",
            "num_workers 0",
            gain,
        )


def _epoch_starts(evidence: Evidence) -> Iterator[Finding]:
    """Time that passes before a new epoch is under way."""
    measurement = evidence.measurement
    config, effective = measurement.config, measurement.effective(evidence.plan).value
    if evidence.plan.epochs < 2 or effective >= (1 - EPOCH_SHARE) * evidence.together:
        return
    lost_s = measurement.epoch_start.fresh_s
    keeps = config.persistent_workers or not config.num_workers
    yield _found(
        "epoch_starts",
        f"{lost_s:.2g} s pass at the start of an epoch; over the planned epochs the rate is {_rate(effective)}, "
        f"inside one {_rate(evidence.together)}",
        "workers are started and the queue is filled while the device has nothing to do",
        "longer epochs (a sampler that goes on), or fewer workers and batches in the queue"
        if keeps
        else "persistent_workers true (not with a dataset that has a set_epoch())",
        evidence.together / effective,
    )


# --- the step --------------------------------------------------------------------------------------------------------


def _precision(evidence: Evidence) -> Iterator[Finding]:
    """Reduced precision that would pay, or that is used and does not."""
    used = evidence.measurement.config.amp
    own, fp32 = evidence.steps.get(used), evidence.steps.get(Amp.FP32)
    if evidence.is_input_bound or own is None:
        return
    fastest = max(evidence.steps.values(), key=lambda one: one.samples_per_sec)
    gain = fastest.samples_per_sec / own.samples_per_sec
    if used is not Amp.FP32 and fp32 is not None and fp32.samples_per_sec >= own.samples_per_sec:
        yield _found(
            "amp_does_not_pay",
            f"the step alone makes {_rate(own.samples_per_sec)} in {used}, {_rate(fp32.samples_per_sec)} in fp32",
            "casting costs more than the arithmetic saves: a small model, or a device that emulates it",
            "amp fp32",
            fp32.samples_per_sec / own.samples_per_sec,
        )
    elif used is Amp.FP32 and gain >= WORTH:
        amp = fastest.config.amp
        yield _found(
            "no_amp",
            f"the step alone makes {_rate(own.samples_per_sec)} in fp32, {_rate(fastest.samples_per_sec)} in {amp}",
            "the device computes it in its own units; the result of training changes within rounding",
            f"amp {amp}",
            gain,
        )


def _batch(evidence: Evidence) -> Iterator[Finding]:
    """A micro-batch that leaves the device time between kernels."""
    larger, own = evidence.larger_step, evidence.steps.get(evidence.measurement.config.amp)
    account = evidence.account
    if evidence.is_input_bound or larger is None or own is None:
        return
    if account is not None and account.other >= RELEVANT_PERCENT:
        return  # fewer steps do less of the other work, too: that is told
    gain = larger.samples_per_sec / own.samples_per_sec
    if gain >= WORTH:
        batch = larger.config.batch_size
        yield _found(
            "small_batch",
            f"the step alone makes {_rate(own.samples_per_sec)} at a micro-batch of {own.config.batch_size}, "
            f"{_rate(larger.samples_per_sec)} at {batch}",
            "what each step costs whatever its size, such as starting kernels, takes longer than the arithmetic",
            f"batch_size {batch} and fewer accumulation steps: the optimizer's batch stays the same",
            gain,
        )


def _copies(evidence: Evidence) -> Iterator[Finding]:
    """Batches that are copied to the device while nothing else happens."""
    account, own = evidence.account, evidence.steps.get(evidence.measurement.config.amp)
    config = evidence.measurement.config
    if account is None or config.pin_memory or account.copy < COPY_PERCENT or not evidence.facts.has_accelerator:
        return
    if own is None or own.copy_s is None or own.pinned_copy_s is None:
        return
    yield _found(
        "blocking_copies",
        f"the main thread copies for {account.copy:.0f} % of its time; a batch takes {1000 * own.copy_s:.1f} ms, "
        f"{1000 * own.pinned_copy_s:.1f} ms from pinned memory",
        "copies from pageable memory block the main thread, and wait for the kernels before them",
        "pin_memory true, and `.to(device, non_blocking=True)`",
        1 / (1 - account.copy / 100),
    )


def _other_work(evidence: Evidence) -> Iterator[Finding]:
    """What a train_step does beside training."""
    account = evidence.account
    if account is None or account.other < RELEVANT_PERCENT:
        return
    yield _found(
        "other_work",
        f"{account.other:.0f} % of the main thread's time is neither data nor copy, forward, backward or optimizer",
        "logging, checkpoints, printing or `.item()` in each step hold the next batch back",
        "do it every 50 steps or so, and add up on the device what is logged",
        1 / (1 - account.other / 100),
    )


def _retries(evidence: Evidence) -> Iterator[Finding]:
    """GPU memory so full or so torn that the allocator starts over."""
    retries = evidence.measurement.allocation_retries
    if retries:
        yield _found(
            "allocation_retries",
            f"the allocator emptied its cache {retries} times",
            "each time waits for the GPU and allocates anew: memory is full, or in pieces",
            "a smaller micro-batch, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            None,
        )


# --- the machine -----------------------------------------------------------------------------------------------------


def _threads(evidence: Evidence) -> Iterator[Finding]:
    """More threads than CPUs."""
    threads = int(evidence.facts.flags.get("torch_num_threads", "0"))
    if threads > evidence.cpus_usable:
        yield _found(
            "oversubscribed",
            f"torch uses {threads} threads on {evidence.cpus_usable} usable CPUs",
            "threads that wait for each other's turn do less than fewer threads would",
            f"OMP_NUM_THREADS={evidence.cpus_usable}, or torch.set_num_threads()",
            None,
        )


def _crowd(evidence: Evidence) -> Iterator[Finding]:
    """Workers and the threads of a step that runs on the same CPUs."""
    account, alone = evidence.account, evidence.step_alone
    config = evidence.measurement.config
    if account is None or alone is None or evidence.facts.has_accelerator or not config.num_workers:
        return
    share = (account.forward + account.backward + account.optimizer) / 100
    slower = share * alone / evidence.together
    if 100 * share >= RELEVANT_PERCENT and slower >= CROWDED:
        threads = max(1, evidence.cpus_usable - config.num_workers)
        yield _found(
            "crowded_step",
            f"beside {_workers(config.num_workers)} the step takes {slower:.2g} times as long as alone, "
            f"{100 * share:.0f} % of the time",
            "threads of the step wait for each other while workers have their CPUs",
            f"torch.set_num_threads({threads})",
            1 / (1 - share * (1 - 1 / slower)),
        )


def _cold(evidence: Evidence) -> Iterator[Finding]:
    """A first epoch that is slower than the ones after it."""
    if evidence.measurement.cache is CacheState.COLD and not evidence.is_input_bound:
        yield _found(
            "cold_cache",
            "samples came from storage, not from the page cache",
            "a first epoch is slower than the ones after it, if the dataset fits in memory",
            "nothing, if it fits; else faster storage",
            None,
        )


RULES: tuple[Rule, ...] = (
    _loading,
    _hurting_workers,
    _epoch_starts,
    _precision,
    _batch,
    _copies,
    _other_work,
    _retries,
    _threads,
    _crowd,
    _cold,
)


# --- figures ---------------------------------------------------------------------------------------------------------


def _found(code: str, figure: str, why: str, remedy: str, gain: float | None) -> Finding:
    severity = Severity.NOTE if gain is not None and gain < WORTH else Severity.WARNING
    return Finding(code=code, severity=severity, figure=figure, why=why, remedy=remedy, gain=gain)


def _waiting_share(evidence: Evidence) -> float | None:
    """Of the time that making a sample takes, where one process makes it alone."""
    sample = evidence.sample
    return None if sample is None or sample.work_share is None else 1 - sample.work_share


def _one(evidence: Evidence) -> float:
    """Samples/s of one process that loads."""
    return 0.0 if evidence.sample is None else evidence.sample.samples_per_sec


def _full(evidence: Evidence) -> float | None:
    return None if evidence.full_loader is None else evidence.full_loader.samples_per_sec


def _gain_of_workers(evidence: Evidence) -> float | None:
    """Of a worker a CPU; the step takes its own share of them where it runs there too."""
    full = _full(evidence)
    return None if full is None else _limit_gain(evidence, full)


def _limit_gain(evidence: Evidence, loader: float | None) -> float | None:
    """Of a loader of this rate, or of one that never limits (None).

    Where the step runs on the CPUs too, loader and step take them from each other.
    """
    step = evidence.step_alone
    if loader is None or step is None:
        rate = loader or step
    else:
        rate = min(loader, step) if evidence.facts.has_accelerator else 1 / (1 / loader + 1 / step)
    return None if rate is None else max(1.0, rate / evidence.together)


def _in_turn_gain(evidence: Evidence) -> float:
    """Of loading and training in turn, without workers; 1 where there are none, or where nobody can tell."""
    sample, step = evidence.sample, evidence.step_alone
    if not evidence.measurement.config.num_workers or sample is None or step is None:
        return 1.0
    return 1 / (1 / sample.samples_per_sec + 1 / step) / evidence.together


def _sample_figure(evidence: Evidence) -> str:
    sample = evidence.sample
    workers = _workers(evidence.measurement.config.num_workers)
    if sample is None:
        return f"{workers} load {_rate(evidence.loader_alone)}"
    cost_s = sample.batch_s / sample.config.batch_size
    return f"a sample takes {1000 * cost_s:.3g} ms of CPU; {workers} load {_rate(evidence.loader_alone)}"


def _workers(count: int) -> str:
    return "no workers" if count == 0 else "1 worker" if count == 1 else f"{count} workers"


def _rate(value: float | None) -> str:
    if value is None:
        return "at an unknown rate"
    return f"{value:,.0f} samples/s" if value >= 100 else f"{value:.3g} samples/s"
