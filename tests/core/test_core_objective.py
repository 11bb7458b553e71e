import pytest
from builders import estimate, measured, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.objective import Objective, preferred, score
from pipetune.core.space import Amp
from pipetune.errors import InputError

# --- the score -------------------------------------------------------------------------------------------------


def test_throughput_is_the_effective_rate():
    one = measured(900.0, steady_samples_per_sec=estimate(1200.0))
    assert score(Objective.THROUGHPUT, one, baseline_rate=300.0) == (900.0,)


def test_throughput_needs_no_utilisation():
    assert score(Objective.THROUGHPUT, measured(900.0, gpu=None), baseline_rate=1.0) == (900.0,)


def test_weighted_is_four_fifths_speed_and_one_fifth_utilisation():
    found = score(Objective.WEIGHTED, measured(900.0, gpu=50.0), baseline_rate=300.0)
    assert found == (pytest.approx(0.8 * 3.0 + 0.2 * 0.5),)


def test_pareto_has_both():
    assert score(Objective.PARETO, measured(900.0, gpu=50.0), baseline_rate=300.0) == (900.0, 50.0)


@pytest.mark.parametrize("objective", [Objective.WEIGHTED, Objective.PARETO])
def test_without_utilisation_the_refusal_says_why_and_what_to_do(objective):
    blind = measured(gpu_utilization_reason="NVML is not permitted")
    with pytest.raises(InputError) as caught:
        score(objective, blind, baseline_rate=1.0)
    assert str(caught.value) == (
        f"objective: {objective} needs GPU utilisation, which is not available: "
        "NVML is not permitted; use `objective: throughput`"
    )


@given(st.sampled_from(Objective), st.floats(1, 1e6), st.floats(0, 100))
def test_a_score_has_as_many_values_as_the_study_has_directions(objective, rate, gpu):
    assert len(score(objective, measured(rate, gpu=gpu), baseline_rate=100.0)) == objective.directions


def test_only_throughput_does_without_utilisation():
    assert [one for one in Objective if not one.needs_utilization] == [Objective.THROUGHPUT]


# --- among the tied --------------------------------------------------------------------------------------------


def chosen(*tied):
    return preferred(list(tied))


def test_the_busier_gpu_is_preferred():
    idle, busy = measured(gpu=60.0), measured(gpu=90.0)
    assert chosen((trial_config(1), idle), (trial_config(8, amp=Amp.BF16), busy)) == 1


def test_a_difference_inside_its_own_noise_prefers_nothing():
    # GIVEN 60 +- 3 and 64 +- 2: the fewer workers decide
    one, other = measured(gpu=60.0, gpu_half=3.0), measured(gpu=64.0, gpu_half=2.0)
    assert chosen((trial_config(8), other), (trial_config(2), one)) == 1


def test_where_one_utilisation_is_unknown_none_counts():
    assert chosen((trial_config(8), measured(gpu=99.0)), (trial_config(2), measured())) == 1


def test_full_precision_comes_before_fewer_workers():
    reduced, full = trial_config(1, amp=Amp.BF16), trial_config(8)
    assert chosen((reduced, measured()), (full, measured())) == 1


def test_fewer_workers_come_before_less_memory():
    small, large = measured(host_memory_bytes=1), measured(host_memory_bytes=2**40)
    assert chosen((trial_config(8), small), (trial_config(2), large)) == 1


def test_less_memory_decides_at_last():
    large = measured(host_memory_bytes=1, peak_gpu_memory_bytes=2**34)
    small = measured(host_memory_bytes=2**30, peak_gpu_memory_bytes=None)
    assert chosen((trial_config(batch_size=256, accumulation_steps=1), large), (trial_config(), small)) == 1


def test_the_leader_stays_where_nothing_differs():
    same = measured()
    assert chosen((trial_config(pin_memory=True), same), (trial_config(), same)) == 0
