import itertools
import time
from types import SimpleNamespace

import torch

from pipetune.trial.loop import compute_only_rate, step_seconds


class Schooled:
    """Stands in for a Training whose steps take the seconds that are given, one after another."""

    device = torch.device("cpu")
    workload = SimpleNamespace(loss_weight=None)

    def __init__(self, seconds, accumulation_steps=1):
        self.step = SimpleNamespace(accumulation_steps=accumulation_steps)
        self.batches = 0
        self._seconds = iter(seconds)

    def learn(self, _batch, _weight):
        self.batches += 1
        time.sleep(next(self._seconds))


def test_the_step_alone_gives_its_own_rate():
    training = Schooled(itertools.repeat(0.01), accumulation_steps=2)
    rate = compute_only_rate(training, None, samples=5, seconds=0.3)
    assert 0.85 * 500 < rate < 500
    assert training.batches % 2 == 0


def test_one_quick_step_does_not_make_the_probe_endless():
    """Steps are not all alike on a busy machine: 15 s were seen where 1 s was asked for."""
    usual = itertools.repeat(0.005, 200)  # ten times what fits
    began = time.monotonic()
    compute_only_rate(Schooled(itertools.chain([0.0, 0.0], usual)), None, samples=1, seconds=0.1)
    assert time.monotonic() - began < 0.5


def test_a_step_slower_than_the_time_for_it_is_timed_once():
    training, signs = Schooled([0.02, 0.03], accumulation_steps=2), []
    assert 0.025 < step_seconds(training, None, 0.0, lambda: signs.append(None)) < 0.05
    assert training.batches == len(signs) == 2


def test_stretches_end_with_the_time_for_them():
    began = time.monotonic()
    seconds = step_seconds(Schooled(itertools.repeat(0.01)), None, 0.2)
    assert 0.01 < seconds < 0.013
    assert 0.2 < time.monotonic() - began < 0.5
