"""A TrialRunner without a machine: a known throughput surface, so that the search is tested in milliseconds."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from builders import facts, usage

from pipetune.core.facts import Preparation, WorkloadFacts
from pipetune.core.measurement import FailureKind, GpuUsage, Measurement, Phase, TrialFailure, TrialOutcome
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.throughput import EpochStart, Window
from pipetune.errors import InterruptedStudyError, WorkloadError
from pipetune.trial.protocol import MeasureLimits

MESSAGES = {
    FailureKind.GPU_OUT_OF_MEMORY: "CUDA out of memory. Tried to allocate 2.00 GiB",
    FailureKind.HOST_OUT_OF_MEMORY: "ended by signal 9 (SIGKILL)",
    FailureKind.SHARED_MEMORY: "DataLoader worker (pid 7) is killed by signal: Bus error",
    FailureKind.TIMEOUT: "ended after 90 s, the last 90 of them without a sign of life",
    FailureKind.CRASH: "ended by signal 11 (SIGSEGV)",
    FailureKind.ERROR: "RuntimeError: boom",
    FailureKind.INVALID_DATA: "a batch that is no tensor",
    FailureKind.NON_FINITE: "the loss is nan",
}
SAMPLE_BYTES = 2**12


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to the runner; `index` counts all of them, `seen` those of this configuration before."""

    index: int
    seen: int
    config: TrialConfig
    fresh: bool
    compute_only: bool
    least_rate: float | None = None


def no_failure(call: Call) -> FailureKind | None:  # noqa: ARG001 - a rule's own signature
    return None


def gpu_holds(batch_size: int) -> Callable[[Call], FailureKind | None]:
    """A GPU that runs out of memory above this micro-batch."""
    return lambda call: FailureKind.GPU_OUT_OF_MEMORY if call.config.batch_size > batch_size else None


def fails_with(kind: FailureKind, where: Callable[[TrialConfig], bool] = lambda _: True):
    """Every configuration of a kind fails in one way."""
    return lambda call: kind if where(call.config) else None


def flat(config: TrialConfig) -> float:  # noqa: ARG001 - a surface's own signature
    """Nothing makes a difference."""
    return 1000.0


def loader_bound(config: TrialConfig) -> float:
    """Each worker loads 100/s beside the 80/s of the main process; the step takes 900/s (bf16: 1300/s)."""
    loading = 80.0 if config.num_workers == 0 else 100.0 * config.num_workers
    step = 1300.0 if config.amp is Amp.BF16 else 900.0
    overlap = 0.98 if config.pin_memory else 0.94
    return overlap * min(loading, step)


@dataclass(kw_only=True)
class ScriptedRunner:
    """Measures what `rate` says of a configuration, with noise inside a trial and between trials.

    `scale` changes the rate of single calls; `fails` decides which calls fail, and how. `gpu` gives the mean
    utilisation, None where NVML gives none; `waits` the percentage of time that waits for data,
    and `works` the share of that which is work. `step_alone` and `loader_alone` are the rates that probes find,
    in samples/s; without them they are what the trials' waiting says.
    Probes, which `fails` decides on too, see the parts of the same truth: what waits is loading, the rest is the step.
    `interrupts` are the indices of calls that a signal breaks into; `closed_after` counts the calls before each close.
    """

    rate: Callable[[TrialConfig], float] = flat
    sigma: float = 0.005
    drift: float = 0.002
    scale: Callable[[Call], float] = lambda _: 1.0
    fails: Callable[[Call], FailureKind | None] = no_failure
    gpu: Callable[[TrialConfig], float] | None = None
    waits: Callable[[TrialConfig], float] = lambda _: 1.0
    works: float | None = None
    peak_bytes: Callable[[TrialConfig], int] = lambda config: config.batch_size * 2**20
    step_alone: Callable[[TrialConfig], float] | None = None
    loader_alone: Callable[[TrialConfig], float] | None = None
    facts: WorkloadFacts = field(default_factory=facts)
    refuses: str | None = None
    interrupts: frozenset[int] = frozenset()
    preparation: Preparation = field(default_factory=Preparation)
    seed: int = 0
    prepared_with: list[TrialConfig] = field(default_factory=list)
    probed: list[TrialConfig] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    closed_after: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now_s = 1000.0

    def describe(self) -> WorkloadFacts:
        if self.refuses is not None:
            raise WorkloadError("workload.target: build raised ValueError", self.refuses)
        return self.facts

    def prepare(
        self, config: TrialConfig, *, dataset_samples: int | None, compare_s: float, read_ahead_s: float
    ) -> Preparation:
        assert dataset_samples == self.facts.dataset_samples
        assert compare_s > 0
        assert read_ahead_s > 0
        self.prepared_with.append(config)
        return self.preparation

    def probe_step(self, config: TrialConfig, *, seconds: float) -> StepProbe | TrialFailure:
        assert seconds > 0
        failure = self._probe_failure(config)
        has_gpu = self.facts.has_accelerator
        return failure or StepProbe(
            config=config,
            batch_s=config.batch_size / self.step_alone(config)
            if self.step_alone
            else (1 - self.waits(config) / 100) * config.batch_size / self.rate(config),
            copy_s=config.batch_size * 2e-6 if has_gpu else None,
            pinned_copy_s=config.batch_size * 1e-6 if has_gpu else None,
            peak_gpu_memory_bytes=self.peak_bytes(config) if has_gpu else None,
            batch_bytes=config.batch_size * SAMPLE_BYTES,
            seconds=seconds,
        )

    def probe_loader(self, config: TrialConfig, *, seconds: float) -> LoaderProbe | TrialFailure:
        """With workers the loader is taken for just as fast as the whole, which it cannot fall behind."""
        assert seconds > 0
        failure = self._probe_failure(config)
        interval_s = config.batch_size / self.rate(config)
        batch_s = interval_s if config.num_workers else interval_s * self.waits(config) / 100
        if self.loader_alone:
            batch_s = config.batch_size / self.loader_alone(config)
        return failure or LoaderProbe(
            config=config,
            first_batch_s=batch_s * max(1, config.num_workers) + 0.05 * config.num_workers,
            batch_s=batch_s,
            receive_s=0.0,
            work_share=1.0 if self.works is None else self.works,
            spread=None if config.num_workers else 0.0,
            batches=max(2, 2 * config.num_workers),
            batch_bytes=config.batch_size * SAMPLE_BYTES,
            worker_memory_bytes=2**28 if config.num_workers else None,
            seconds=seconds,
        )

    def _probe_failure(self, config: TrialConfig) -> TrialFailure | None:
        self.probed.append(config)
        call = Call(index=len(self.calls), seen=0, config=config, fresh=False, compute_only=False)
        kind = self.fails(call)
        return None if kind is None else replace(self._failure(call, kind), phase=Phase.PROBE)

    def run(
        self, config: TrialConfig, limits: MeasureLimits, *, fresh: bool = False, compute_only: bool = False
    ) -> TrialOutcome:
        seen = sum(1 for call in self.calls if call.config == config)
        call = Call(
            index=len(self.calls),
            seen=seen,
            config=config,
            fresh=fresh,
            compute_only=compute_only,
            least_rate=limits.least_rate,
        )
        self.calls.append(call)
        if call.index in self.interrupts:
            raise InterruptedStudyError("interrupted by SIGINT", 2)
        kind = self.fails(call)
        return self._measurement(call, limits) if kind is None else self._failure(call, kind)

    def close_hosts(self) -> None:
        self.closed_after.append(len(self.calls))

    @property
    def searched(self) -> list[TrialConfig]:
        """Configurations of trials, in order."""
        return [call.config for call in self.calls if not call.fresh]

    @property
    def certified(self) -> list[Call]:
        """Requests for a fresh process, in order."""
        return [call for call in self.calls if call.fresh]

    def _failure(self, call: Call, kind: FailureKind) -> TrialFailure:
        is_error = kind is FailureKind.ERROR
        return TrialFailure(
            config=call.config,
            kind=kind,
            phase=Phase.WARM_UP,
            message=MESSAGES[kind],
            traceback_text=f"Traceback of call {call.index}\nRuntimeError: boom\n" if is_error else "",
            log_tail=f"log of call {call.index}\n",
            seconds=1.0,
        )

    def _measurement(self, call: Call, limits: MeasureLimits) -> Measurement:
        config = call.config
        rate = self.rate(config) * self.scale(call) * (1 + self._random.gauss(0, self.drift))
        windows = self._windows(config, rate, limits)
        censored = call.least_rate is not None and rate < call.least_rate
        fresh_s = 0.0 if censored else 0.2 + 0.05 * config.num_workers
        usage_or_none = self._usage(config)
        return Measurement(
            config=config,
            windows=windows,
            epoch_start=EpochStart(fresh_s=fresh_s, refill_s=fresh_s / 4 if config.persistent_workers else None),
            settled=not censored,
            censored=censored,
            gpu=usage_or_none,
            gpu_reason="NVML gave no samples" if usage_or_none is None else None,
            peak_gpu_memory_bytes=config.batch_size * 2**20 if self.facts.has_accelerator else None,
            host_memory_bytes=2**29 + config.num_workers * 2**28,
            compute_only_samples_per_sec=1.1 * rate if call.compute_only else None,
            seconds=sum(window.seconds for window in windows) + 2.0,
            phase_seconds={"measure": sum(window.seconds for window in windows)},
        )

    def _windows(self, config: TrialConfig, rate: float, limits: MeasureLimits) -> tuple[Window, ...]:
        """Whole optimizer steps, until `min_s` are timed."""
        share = self.waits(config) / 100
        windows: list[Window] = []
        while sum(window.seconds for window in windows) < limits.min_s:
            steps = max(1, round(rate * limits.window_s / config.effective_batch_size))
            samples = steps * config.effective_batch_size
            seconds = samples / (rate * max(0.1, 1 + self._random.gauss(0, self.sigma)))
            windows.append(
                Window(
                    samples=samples,
                    seconds=seconds,
                    data_wait_s=share * seconds,
                    data_work_s=None if self.works is None else self.works * share * seconds,
                    began_s=self._now_s,
                )
            )
            self._now_s += seconds
        return tuple(windows)

    def _usage(self, config: TrialConfig) -> GpuUsage | None:
        if self.gpu is None:
            return None
        mean = min(100.0, max(0.0, self.gpu(config) + self._random.gauss(0, 0.2)))
        return usage(mean, spread_percent=2.0, samples=40)
