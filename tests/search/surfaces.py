"""Machines of known truth for the search: rates over whole search spaces, made by other formulas than the prediction.

Nothing here imports the prediction. A surface knows the true rate of each configuration, or that its memory does not
suffice, what the costs of its parts really are, and how long a trial takes.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from builders import measurement

from pipetune.core.measurement import Measurement
from pipetune.core.space import Amp, SearchSpace, TrialConfig
from pipetune.core.throughput import EpochStart, TrainingPlan

EFFECTIVE = 256
BATCHES = (4, 8, 16, 32, 64, 128, 256)
EPOCH_SAMPLES = 50_000
EPOCHS = 20
PLAN = TrainingPlan(effective_batch_size=EFFECTIVE, epochs=EPOCHS, epoch_samples=EPOCH_SAMPLES)


def grid(workers: tuple[int, ...], amps: tuple[Amp, ...] = tuple(Amp)) -> SearchSpace:
    return SearchSpace(
        num_workers=workers,
        prefetch_factor=(2, 4, 8),
        pin_memory=(False, True),
        persistent_workers=(False, True),
        batch_size=BATCHES,
        amp=amps,
        effective_batch_size=EFFECTIVE,
    )


@dataclass(kw_only=True)
class Parts:
    """True costs in seconds: a sample's work and waiting, a step as `fixed + b * sample` for each precision."""

    cpus: int
    sample_cpu_s: float
    sample_wait_s: float = 0.0
    steps: Mapping[Amp, tuple[float, float]]
    receive_s: float = 2e-4
    receive_sample_s: float = 0.0
    start_s: float = 0.3
    worker_start_s: float = 0.05


@dataclass(kw_only=True)
class Effects:
    """What really happens beside; each is something that was seen on a real machine."""

    contention: float = 0.01  # each further worker takes this share of a worker's rate from all (memory bandwidth)
    oversubscribed: float = 0.03  # each worker beyond the CPUs costs the main process this share
    jitter: float = 0.3  # loss through uneven samples: this over the square root of all that is buffered
    interpreter: float = 0.5  # share of receiving that the launching thread cannot hide
    pinned_gain: float = 0.03  # of the step where transfers matter
    pinned_cost: float = 0.0
    sharpness: float = 4.0  # how sudden one side takes over from the other
    memory: Mapping[Amp, int] = field(default_factory=dict)  # largest batch that fits
    bump: Callable[[TrialConfig], float] = lambda _: 1.0


@dataclass(kw_only=True)
class Surface:
    name: str
    space: SearchSpace
    parts: Parts
    effects: Effects
    noise_sd: float = 0.03
    plan: TrainingPlan = PLAN

    @property
    def cpus(self) -> float:
        return self.parts.cpus

    @property
    def has_accelerator(self) -> bool:
        return self.parts.cpus > 2

    def rate(self, config: TrialConfig) -> float | None:
        """True samples/s over the planned run; None where the memory does not suffice."""
        if config.batch_size > self.effects.memory.get(config.amp, config.batch_size):
            return None
        seconds = self._seconds_a_batch(config)
        start_s, refill_s = self._starts(config)
        batches = EPOCH_SAMPLES / config.batch_size
        lost_s = start_s + (EPOCHS - 1) * (refill_s if config.persistent_workers else start_s)
        rate = EPOCHS * EPOCH_SAMPLES / (EPOCHS * batches * seconds + lost_s)
        return rate * self.effects.bump(config)

    def _seconds_a_batch(self, config: TrialConfig) -> float:
        parts, effects, batch, workers = self.parts, self.effects, config.batch_size, config.num_workers
        fixed_s, sample_s = parts.steps[config.amp]
        step_s = fixed_s + batch * sample_s
        step_s *= 1 - effects.pinned_gain * config.pin_memory
        load_s = batch * (parts.sample_cpu_s + parts.sample_wait_s)
        if workers == 0:
            return load_s + step_s
        busy = workers * parts.sample_cpu_s / (parts.sample_cpu_s + parts.sample_wait_s)
        making_s = self._making_s(batch, workers)
        making_s *= 1 + effects.jitter / math.sqrt(workers * (config.prefetch_factor or 1))
        receive_s = self.receive_s(batch, pin_memory=config.pin_memory)
        taking_s = max(step_s, receive_s) + effects.interpreter * min(step_s, receive_s)
        taking_s *= 1 + effects.oversubscribed * max(0.0, busy - parts.cpus + 1)
        power = effects.sharpness
        return (making_s**power + taking_s**power) ** (1 / power)

    def _making_s(self, batch: int, workers: int) -> float:
        """Seconds a batch of workers whose samples are all alike."""
        parts = self.parts
        busy = workers * parts.sample_cpu_s / (parts.sample_cpu_s + parts.sample_wait_s)
        load_s = batch * (parts.sample_cpu_s + parts.sample_wait_s)
        return load_s / workers * max(1.0, busy / parts.cpus) * (1 + self.effects.contention * (workers - 1))

    def receive_s(self, batch: int, *, pin_memory: bool) -> float:
        """Seconds of the main process for a batch that a worker made."""
        parts = self.parts
        return parts.receive_s + batch * parts.receive_sample_s * (1 + self.effects.pinned_cost * pin_memory)

    def loader_alone_s(self, batch: int, workers: int, *, pin_memory: bool) -> float:
        """Seconds a batch where nothing is done with it: the slower of making and receiving."""
        parts = self.parts
        if workers == 0:
            return batch * (parts.sample_cpu_s + parts.sample_wait_s)
        return max(self._making_s(batch, workers), self.receive_s(batch, pin_memory=pin_memory))

    def step_alone_s(self, config: TrialConfig) -> float:
        """Seconds of a micro-batch that lies on the device; what thrashes does so without a loader too."""
        fixed_s, sample_s = self.parts.steps[config.amp]
        return (fixed_s + config.batch_size * sample_s) / self.effects.bump(config)

    def _starts(self, config: TrialConfig) -> tuple[float, float]:
        parts, workers = self.parts, config.num_workers
        if workers == 0:
            return 0.0, 0.0
        refill_s = config.batch_size * (parts.sample_cpu_s + parts.sample_wait_s)
        return parts.start_s + parts.worker_start_s * workers + refill_s, refill_s

    def seconds(self, config: TrialConfig) -> float:
        """What a trial takes: workers start, the queue is emptied once, windows, an epoch end."""
        if self.rate(config) is None:
            return 4.0
        a_batch_s = self._seconds_a_batch(config)
        start_s, _ = self._starts(config)
        queue_s = config.num_workers * (config.prefetch_factor or 0) * a_batch_s
        windows_s = max(6.0, 8 * max(1, config.num_workers) * a_batch_s)
        return min(60.0, 1.0 + 2 * start_s + 2 * queue_s + windows_s)

    def trial(self, config: TrialConfig, rate: float) -> Measurement:
        """What a trial without workers tells of its parts, at the rate that was measured."""
        parts = self.parts
        fixed_s, sample_s = parts.steps[config.amp]
        a_sample_s = parts.sample_cpu_s + parts.sample_wait_s
        load_s = config.batch_size * a_sample_s
        return measurement(
            config,
            rate=rate,
            wait_share=load_s / (load_s + fixed_s + config.batch_size * sample_s),
            work_share=parts.sample_cpu_s / a_sample_s,
            epoch_start=EpochStart(fresh_s=0.0, refill_s=None),
        )

    def best(self) -> tuple[TrialConfig, float]:
        rates = ((config, self.rate(config)) for config in self.space.configs())
        return max(((config, rate) for config, rate in rates if rate is not None), key=lambda one: one[1])


CPUS_16 = tuple(range(17))


def _amp_steps(rng: random.Random, fixed_s: float, sample_s: float, gains: tuple[float, float]) -> dict:
    """fp32, bf16, fp16: autocast makes launching dearer and computing cheaper."""
    bf16, fp16 = (gain * rng.uniform(0.9, 1.1) for gain in gains)
    return {
        Amp.FP32: (fixed_s, sample_s),
        Amp.BF16: (fixed_s * rng.uniform(1.1, 1.5), sample_s / bf16),
        Amp.FP16: (fixed_s * rng.uniform(1.2, 1.7), sample_s / fp16),
    }


def decode_bound(rng: random.Random) -> Surface:
    steps = _amp_steps(rng, 0.02, rng.uniform(2e-4, 5e-4), (1.8, 2.2))
    return Surface(
        name="decode-bound",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=rng.uniform(5e-3, 1.2e-2), steps=steps),
        effects=Effects(contention=rng.uniform(0.01, 0.03)),
    )


def compute_bound(rng: random.Random) -> Surface:
    steps = _amp_steps(rng, 0.03, rng.uniform(5e-3, 2e-2), (5.0, 5.5))
    return Surface(
        name="compute-bound",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=rng.uniform(2e-4, 2e-3), steps=steps),
        effects=Effects(memory={Amp.FP32: 64, Amp.BF16: 128, Amp.FP16: 128}),
    )


def launch_bound(rng: random.Random) -> Surface:
    steps = _amp_steps(rng, rng.uniform(0.006, 0.02), rng.uniform(1e-6, 1e-5), (1.3, 1.3))
    return Surface(
        name="launch-bound",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=rng.uniform(2e-5, 6e-5), steps=steps, receive_s=rng.uniform(5e-4, 2e-3)),
        effects=Effects(interpreter=0.9, pinned_gain=-0.04),
        noise_sd=0.08,
    )


def worker_hostile(rng: random.Random) -> Surface:
    steps = _amp_steps(rng, 0.004, rng.uniform(1e-5, 3e-5), (1.6, 1.6))
    return Surface(
        name="worker-hostile",
        space=grid(CPUS_16),
        parts=Parts(
            cpus=16,
            sample_cpu_s=rng.uniform(1e-5, 2e-5),
            steps=steps,
            receive_s=rng.uniform(1e-3, 3e-3),
            receive_sample_s=rng.uniform(5e-5, 1e-4),
        ),
        effects=Effects(interpreter=1.0),
        noise_sd=0.05,
    )


def slow_store(rng: random.Random) -> Surface:
    """Two CPUs and samples that wait: far more workers than CPUs are best."""
    steps = _amp_steps(rng, 0.01, rng.uniform(1e-4, 4e-4), (1.0, 0.6))
    return Surface(
        name="slow-store",
        space=grid((0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16), (Amp.FP32, Amp.BF16)),
        parts=Parts(cpus=2, sample_cpu_s=rng.uniform(1e-4, 3e-4), sample_wait_s=rng.uniform(5e-3, 2e-2), steps=steps),
        effects=Effects(contention=0.005),
    )


def heavy_tail(rng: random.Random) -> Surface:
    """A few samples take fifty times as long: all that is buffered evens them out."""
    steps = _amp_steps(rng, 0.01, rng.uniform(2e-4, 6e-4), (2.0, 2.0))
    return Surface(
        name="heavy-tail",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=rng.uniform(2e-3, 4e-3), steps=steps),
        effects=Effects(jitter=rng.uniform(1.5, 3.0)),
        noise_sd=0.05,
    )


def fat_tensors(rng: random.Random) -> Surface:
    """Megabytes a sample: the main process moves them, and pinning costs a copy more."""
    steps = _amp_steps(rng, 0.01, rng.uniform(3e-4, 8e-4), (1.5, 1.5))
    return Surface(
        name="fat-tensors",
        space=grid(CPUS_16),
        parts=Parts(
            cpus=16, sample_cpu_s=rng.uniform(3e-3, 6e-3), steps=steps, receive_sample_s=rng.uniform(8e-4, 1.5e-3)
        ),
        effects=Effects(contention=0.05, pinned_gain=0.0, pinned_cost=rng.choice((-0.3, 0.3)), interpreter=0.6),
    )


def memory_cliff(rng: random.Random) -> Surface:
    """The largest batch that fits thrashes, and the next one does not fit at all."""
    steps = _amp_steps(rng, 0.03, rng.uniform(2e-3, 4e-3), (1.8, 2.3))
    largest = {Amp.FP32: 32, Amp.BF16: 64, Amp.FP16: 64}

    def bump(config: TrialConfig) -> float:
        return 0.6 if config.batch_size == largest[config.amp] else 1.0

    return Surface(
        name="memory-cliff",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=rng.uniform(2e-3, 6e-3), steps=steps),
        effects=Effects(memory=largest, bump=bump),
    )


def two_optima(rng: random.Random) -> Surface:
    """A second socket: workers that spill over onto it lose, until there are enough of them."""
    steps = _amp_steps(rng, 0.02, rng.uniform(2e-4, 4e-4), (1.5, 1.9))
    valley = rng.uniform(0.65, 0.8)

    def bump(config: TrialConfig) -> float:
        return valley if 5 <= config.num_workers <= 12 else 1.0

    return Surface(
        name="two-optima",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=rng.uniform(1.5e-3, 4e-3), steps=steps),
        effects=Effects(bump=bump),
    )


def pure_noise(rng: random.Random) -> Surface:
    """Everything is equally fast, and nothing is to be found."""
    steps = dict.fromkeys(Amp, (0.0, rng.uniform(1e-3, 5e-3)))
    return Surface(
        name="pure-noise",
        space=grid(CPUS_16),
        parts=Parts(cpus=16, sample_cpu_s=1e-6, steps=steps, start_s=0.0, worker_start_s=0.0, receive_s=0.0),
        effects=Effects(contention=0, oversubscribed=0, jitter=0, interpreter=0, pinned_gain=0),
        noise_sd=0.08,
    )


SURFACES: tuple[Callable[[random.Random], Surface], ...] = (
    decode_bound,
    compute_bound,
    launch_bound,
    worker_hostile,
    slow_store,
    heavy_tail,
    fat_tensors,
    memory_cliff,
    two_optima,
    pure_noise,
)
