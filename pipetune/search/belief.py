"""What is believed of every configuration: its prediction, corrected by what trials showed that it missed.

A Gaussian process over the logarithm of measured / predicted (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, algorithm 2.1), whose covariance follows how predictions go wrong: a cost that was measured wrongly
moves every configuration as far as its rate hangs on that cost; what the formula itself misses moves neighbours alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipetune.core.costs import Costs
from pipetune.core.prediction import Prediction, predict
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.throughput import TrainingPlan

BATCH_SD = 0.2
"""What a step's cost per sample differs by from the line over batch sizes (of logarithms)."""
BATCH_SCALE = 0.8
WORKERS_SD = 0.15
"""What the rate of workers differs by from their number: memory bandwidth, caches, hyper-threads."""
WORKERS_SCALE = 1.0
PINNING_SD = 0.2
"""What receiving differs by, pinned or not, from what probes say of it."""
KNOB_SDS = (0.08, 0.05, 0.04, 0.04, 0.08, 0.06)
KNOB_SCALES = (1.0, 2.0, 1.0, 1.0, 1.0, 2.0)
"""What the formula misses of each knob, whatever the others are, and how far that reaches: doublings of workers and
of prefetch, pinned, kept, doublings of batch, precisions."""
JOINT_SD = 0.03
"""What it misses of each combination."""
TRIAL_SD = 0.03
"""What a trial differs by from the next one of the same configuration, beside its own interval."""

QUEUES = 3
BURSTS = 8
"""How often a trial goes through its queue, and through a batch of each worker."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A trial's rate in samples/s, and the standard deviation of its logarithm as far as the trial itself can tell."""

    config: TrialConfig
    rate: float
    sd: float = 0.0


class Belief:
    """Over a fixed list of configurations; `about` may be asked again and again as trials come in."""

    def __init__(self, configs: Sequence[TrialConfig], costs: Costs, plan: TrainingPlan) -> None:
        self.configs = tuple(configs)
        self._costs = costs
        self._plan = plan
        self._points = _Points.of(self.configs, [predict(config, costs, plan) for config in self.configs], costs)

    def predicted(self) -> FloatArray:
        """Logarithms of the foretold rates, one for each configuration, before any trial."""
        return self._points.log_rates

    def about(self, seen: Sequence[Seen]) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the logarithm of each configuration's true rate."""
        points = self._points
        variances = points.variances()
        if not seen:
            return points.log_rates, np.sqrt(variances)
        predictions = [predict(one.config, self._costs, self._plan) for one in seen]
        known = _Points.of([one.config for one in seen], predictions, self._costs)
        missed = np.log([one.rate for one in seen]) - known.log_rates
        noise = np.diag([one.sd**2 + TRIAL_SD**2 for one in seen])
        lower = np.linalg.cholesky(known.covariance(known) + noise)
        cross = np.linalg.solve(lower, known.covariance(points))
        mean = points.log_rates + cross.T @ np.linalg.solve(lower, missed)
        return mean, np.sqrt(np.maximum(variances - (cross**2).sum(axis=0), 1e-12))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    """Configurations as arrays of one row each."""

    log_rates: FloatArray
    step_shares: FloatArray
    load_shares: FloatArray
    receive_shares: FloatArray
    places: FloatArray
    step_sds: FloatArray
    common_sd: float
    load_sd: float
    receive_sd: float

    @classmethod
    def of(cls, configs: Sequence[TrialConfig], predictions: Sequence[Prediction], costs: Costs) -> "_Points":
        return cls(
            log_rates=np.log([one.rate for one in predictions]),
            step_shares=np.array([one.step_share for one in predictions]),
            load_shares=np.array([one.load_share for one in predictions]),
            receive_shares=np.array([one.receive_share for one in predictions]),
            places=np.array([place(config) for config in configs]),
            step_sds=np.array([costs.steps[config.amp].sd for config in configs]),
            common_sd=costs.step_sd,
            load_sd=costs.load.sd,
            receive_sd=costs.receive_sd,
        )

    def variances(self) -> FloatArray:
        step = self.step_shares**2 * (self.common_sd**2 + self.step_sds**2 + BATCH_SD**2)
        load = self.load_shares**2 * (self.load_sd**2 + WORKERS_SD**2)
        receive = self.receive_shares**2 * (self.receive_sd**2 + PINNING_SD**2)
        return step + load + receive + sum(sd**2 for sd in KNOB_SDS) + JOINT_SD**2

    def covariance(self, other: "_Points") -> FloatArray:
        apart = self.places[:, None, :] - other.places[None, :, :]
        same_amp = (apart[:, :, 5] == 0).astype(np.float64)
        near_batch = _near(apart[:, :, 4], BATCH_SCALE)
        near_workers = _near(apart[:, :, 0], WORKERS_SCALE)
        own_amp = same_amp * (self.step_sds[:, None] ** 2 + BATCH_SD**2 * near_batch)
        step = np.outer(self.step_shares, other.step_shares) * (self.common_sd**2 + own_amp)
        load = np.outer(self.load_shares, other.load_shares) * (self.load_sd**2 + WORKERS_SD**2 * near_workers)
        same_pinning = (apart[:, :, 2] == 0).astype(np.float64)
        own_pinning = self.receive_sd**2 + PINNING_SD**2 * same_pinning
        receive = np.outer(self.receive_shares, other.receive_shares) * own_pinning
        squares = -0.5 * (apart / np.array(KNOB_SCALES)) ** 2
        knobs = np.exp(squares) @ np.square(KNOB_SDS)
        return np.asarray(step + load + receive + knobs + JOINT_SD**2 * np.exp(squares.sum(axis=2)))


def _near(apart: FloatArray, scale: float) -> FloatArray:
    return np.asarray(np.exp(-0.5 * (apart / scale) ** 2))


_AMP_PLACES = {Amp.FP32: 0.0, Amp.BF16: 2.0, Amp.FP16: 3.0}


def place(config: TrialConfig) -> tuple[float, ...]:
    """Coordinates in which one step of any knob is about one: doublings of counts, flips of switches."""
    workers = config.num_workers
    return (
        math.log2(workers) if workers else -2.0,
        math.log2(config.prefetch_factor or 2),
        float(config.pin_memory),
        float(config.persistent_workers),
        math.log2(config.batch_size),
        _AMP_PLACES[config.amp],
    )


def expected_gains(mean: FloatArray, sd: FloatArray, best: float) -> FloatArray:
    """By how much a trial of each is expected to beat `best`, as a share (expected improvement; Mockus, 1975)."""
    above = mean - best
    z = above / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return np.asarray(above * _normal_cdf(z) + sd * density)


def trial_seconds(configs: Sequence[TrialConfig], mean: FloatArray, overhead_s: float) -> FloatArray:
    """About what a trial of each takes at the rate that is believed of it: the overhead, its queue, its bursts.

    All that is queued is used up before timing and again at an epoch end, and windows hold a batch of each worker.
    """
    queued = np.array([config.num_workers * (config.prefetch_factor or 0) * config.batch_size for config in configs])
    bursts = np.array([max(1, config.num_workers) * config.batch_size for config in configs])
    return np.asarray(overhead_s + (QUEUES * queued + BURSTS * bursts) / np.exp(mean))


def _normal_cdf(z: FloatArray) -> FloatArray:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
