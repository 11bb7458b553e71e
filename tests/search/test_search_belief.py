"""The belief: predictions that trials correct, where they have something in common."""

import math

import numpy as np
import pytest
from builders import PLAN, space, trial_config
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetune.core.costs import Costs, LoadCost, StepCost
from pipetune.core.prediction import predict
from pipetune.core.space import Amp
from pipetune.search.belief import Belief, Seen, expected_gains

SPACE = space(num_workers=(0, 1, 2, 4, 8), amp=tuple(Amp))
CONFIGS = tuple(SPACE.configs())
COMPUTE = Costs(
    cpus=16, load=LoadCost(cpu_s=1e-4), steps={amp: StepCost.line(fixed_s=0.01, sample_s=0.002, sd=0.3) for amp in Amp}
)
LOADING = Costs(
    cpus=16, load=LoadCost(cpu_s=0.02, sd=0.3), steps={amp: StepCost.line(fixed_s=0.001, sample_s=1e-5) for amp in Amp}
)


def belief(costs=COMPUTE):
    return Belief(CONFIGS, costs, PLAN)


def seen(config, factor, costs=COMPUTE, sd=0.0):
    """A trial that ran at so much of what was foretold."""
    return Seen(config=config, rate=factor * predict(config, costs, PLAN).rate, sd=sd)


def moved(config, trials, costs=COMPUTE):
    """How far the trials moved the belief about a configuration, as a logarithm."""
    one = belief(costs)
    mean, _ = one.about(trials)
    return float((mean - one.predicted())[CONFIGS.index(config)])


def test_before_any_trial_it_is_the_prediction():
    one = belief()
    mean, sd = one.about([])
    assert np.array_equal(mean, one.predicted())
    assert [math.exp(m) for m in mean] == pytest.approx([predict(c, COMPUTE, PLAN).rate for c in CONFIGS])
    assert (sd > 0).all()


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.4])
def test_a_trial_is_believed_of_its_own_configuration(factor):
    config = trial_config(4)
    assert moved(config, [seen(config, factor)]) == pytest.approx(math.log(factor), abs=0.05 * abs(math.log(factor)))


def test_a_noisy_trial_is_believed_less():
    config = trial_config(4)
    assert moved(config, [seen(config, 0.5, sd=0.5)]) > 0.5 * math.log(0.5)


def test_a_step_that_is_slower_than_foretold_is_so_with_any_workers_but_not_in_another_precision():
    trial = seen(trial_config(4, amp=Amp.BF16), 0.6)
    same = moved(trial_config(8, amp=Amp.BF16), [trial])
    other = moved(trial_config(8, amp=Amp.FP32), [trial])
    assert same < 0.6 * math.log(0.6)
    assert other > 0.5 * same


def test_loading_that_is_slower_than_foretold_is_so_in_any_precision():
    trial = seen(trial_config(4, amp=Amp.BF16), 0.6, LOADING)
    assert moved(trial_config(4, amp=Amp.FP16), [trial], LOADING) < 0.8 * math.log(0.6)


def test_receiving_that_pinning_makes_dearer_is_so_with_any_workers_and_little_of_it_without_pinning():
    fat = Costs(
        cpus=16,
        load=LoadCost(cpu_s=1e-4),
        steps={amp: StepCost.line(fixed_s=0.001, sample_s=1e-5) for amp in Amp},
        receive_sample_s=0.004,
        pinned_receive_sample_s=0.004,
        receive_sd=0.1,
    )
    trial = seen(trial_config(4, pin_memory=True), 0.7, fat)
    pinned = moved(trial_config(8, pin_memory=True), [trial], fat)
    unpinned = moved(trial_config(8, pin_memory=False), [trial], fat)
    assert pinned < 0.8 * math.log(0.7)
    assert unpinned > 0.5 * pinned


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(CONFIGS), st.floats(0.2, 3)), min_size=1, max_size=25))
def test_trials_make_it_surer_and_never_break_it(trials):
    one = belief()
    found = [seen(config, factor) for config, factor in trials]
    _, before = one.about(found[:-1])
    mean, after = one.about(found)
    assert np.isfinite(mean).all()
    assert (after > 0).all()
    assert (after <= before + 1e-9).all()


def test_the_expected_gain_is_the_mean_of_what_lies_above():
    means, sds = np.array([0.0, 0.3, -0.5]), np.array([0.2, 0.01, 0.4])
    draws = np.random.default_rng(0).normal(means, sds, (400_000, 3))
    expected = np.maximum(draws - 0.1, 0).mean(axis=0)
    assert expected_gains(means, sds, 0.1) == pytest.approx(expected, abs=1e-3)


def test_a_cost_that_all_precisions_share_moves_them_all():
    shared = Costs(
        cpus=16,
        load=LoadCost(cpu_s=1e-4),
        steps={amp: StepCost.line(fixed_s=0.01, sample_s=0.002, sd=0.05) for amp in Amp},
        step_sd=0.5,
    )
    trial = seen(trial_config(4, amp=Amp.FP32), 0.5, shared)
    assert moved(trial_config(4, amp=Amp.BF16), [trial], shared) < 0.7 * math.log(0.5)
