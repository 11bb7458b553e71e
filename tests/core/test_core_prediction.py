"""The formula: limits that it must have, and directions that it must go."""

from dataclasses import replace

import pytest
from builders import PLAN, spaces, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.costs import Costs, LoadCost, StepCost
from pipetune.core.prediction import batch_interval_s, empty_share, foretold_rate, predict
from pipetune.core.space import Amp

seconds = st.floats(1e-5, 0.1)


@st.composite
def all_costs(draw):
    return Costs(
        cpus=draw(st.sampled_from([1.0, 2.0, 16.0])),
        load=LoadCost(cpu_s=draw(seconds), wait_s=draw(st.sampled_from([0.0, 0.01]))),
        steps={amp: StepCost.line(fixed_s=draw(seconds), sample_s=draw(seconds)) for amp in Amp},
        step_cpus=draw(st.sampled_from([1.0, 2.0])),
        receive_sample_s=draw(st.sampled_from([0.0, 1e-5])),
        pinned_receive_sample_s=draw(st.sampled_from([0.0, 2e-5])),
    )


def costs(*, load_s=0.001, wait_s=0.0, fixed_s=0.0, sample_s=0.001, cpus=16.0, **changes):
    step = StepCost.line(fixed_s=fixed_s, sample_s=sample_s)
    return Costs(
        cpus=cpus, load=LoadCost(cpu_s=load_s, wait_s=wait_s), steps=dict.fromkeys(Amp, step),
        start_s=0.0, worker_start_s=0.0, **changes,
    )  # fmt: skip


def configs():
    return spaces().flatmap(lambda points: st.sampled_from(list(points.configs())))


def test_without_workers_it_is_the_sum():
    config = trial_config(0)
    assert batch_interval_s(config, costs(load_s=0.003, fixed_s=0.02, sample_s=0.001)) == pytest.approx(
        64 * 0.003 + 0.02 + 64 * 0.001
    )


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_slow_loader_gives_what_its_workers_give(workers):
    rate = 64 / batch_interval_s(trial_config(workers), costs(load_s=0.1))
    assert rate == pytest.approx(workers / 0.1, rel=0.02)


def test_a_slow_step_gives_what_the_step_gives():
    assert 64 / batch_interval_s(trial_config(8), costs(sample_s=0.01)) == pytest.approx(100, rel=0.001)


def test_workers_are_no_faster_than_the_cpus():
    crowd = 1 / batch_interval_s(trial_config(64, batch_size=1), costs(load_s=0.1, cpus=4.0, sample_s=1e-6))
    assert crowd == pytest.approx(4 / 0.1, rel=0.01)


def test_workers_that_wait_gain_far_beyond_the_cpus():
    waiting = costs(load_s=0.0002, wait_s=0.02, cpus=2.0, sample_s=1e-6)
    assert batch_interval_s(trial_config(22), waiting) < 0.2 * batch_interval_s(trial_config(2), waiting)


@pytest.mark.parametrize("pinned_s", [0.002, 0.008])
def test_where_receiving_limits_pinning_pays_as_far_as_it_makes_receiving_cheaper(pinned_s):
    fat = costs(sample_s=1e-5, receive_sample_s=0.004, pinned_receive_sample_s=pinned_s)
    plain, pinned = (64 / batch_interval_s(trial_config(8, pin_memory=pin), fat) for pin in (False, True))
    assert plain == pytest.approx(1 / 0.004, rel=0.05)
    assert pinned == pytest.approx(1 / pinned_s, rel=0.05)


def test_where_both_sides_are_as_fast_more_prefetch_helps():
    even = costs(load_s=0.004, sample_s=0.001)
    little, much = (batch_interval_s(trial_config(4, prefetch_factor=p), even) for p in (1, 8))
    assert 0.064 < much < little


def test_kept_workers_are_never_foretold_slower():
    dear = replace(costs(), start_s=1.0)
    kept, new = (foretold_rate(trial_config(4, persistent_workers=p), dear, PLAN) for p in (True, False))
    assert kept > new


@given(configs(), all_costs())
def test_dearer_parts_never_make_it_faster(config, given_costs):
    rate = foretold_rate(config, given_costs, PLAN)
    assert rate > 0
    dearer = (
        replace(given_costs, load=given_costs.load.scaled(1.5)),
        replace(given_costs, steps={amp: step.scaled(1.5) for amp, step in given_costs.steps.items()}),
        replace(given_costs, receive_sample_s=given_costs.receive_sample_s + 1e-4),
        replace(given_costs, pinned_receive_sample_s=given_costs.pinned_receive_sample_s + 1e-4),
        replace(given_costs, worker_start_s=given_costs.worker_start_s + 1),
    )
    for other in dearer:
        assert foretold_rate(config, other, PLAN) <= rate * (1 + 1e-9)


@given(configs(), all_costs())
def test_shares_tell_what_the_rate_hangs_on(config, given_costs):
    found = predict(config, given_costs, PLAN)
    assert -1e-6 <= found.step_share <= 1.3
    assert -1e-6 <= found.load_share <= 1.3
    assert found.step_share + found.load_share <= 1.5


def test_a_slow_loader_hangs_on_loading_and_a_slow_step_on_the_step():
    loading = predict(trial_config(2), costs(load_s=0.1), PLAN)
    stepping = predict(trial_config(2), costs(sample_s=0.1), PLAN)
    assert (loading.load_share, stepping.step_share) == (pytest.approx(1, abs=0.05), pytest.approx(1, abs=0.05))
    assert (loading.step_share, stepping.load_share) == (pytest.approx(0, abs=0.05), pytest.approx(0, abs=0.05))


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.integers(1, 500))
def test_a_buffer_is_empty_between_never_and_always_and_less_often_the_larger_it_is(consumer, producer, capacity):
    share = empty_share(consumer, producer, capacity)
    assert 0 <= share <= 1
    assert empty_share(consumer, producer, capacity + 1) <= share + 1e-12


@pytest.mark.parametrize("capacity", [1, 2, 10])
def test_an_even_queue_is_empty_once_in_its_states(capacity):
    assert empty_share(0.5, 0.5, capacity) == pytest.approx(1 / (capacity + 1))
    assert empty_share(0.5, 0.5 * (1 + 1e-5), capacity) == pytest.approx(1 / (capacity + 1), rel=1e-3)


def test_what_is_always_there_is_never_waited_for():
    assert empty_share(1.0, 0.0, 3) == 0
