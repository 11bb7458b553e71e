"""Ceilings: only what was measured in full is one, and what was disturbed is none."""

import pytest
from builders import probe_of_loader, probe_of_step, space, trial_config

from pipetune.core.ceilings import is_reached, loader_ceiling, loader_demand, step_ceiling
from pipetune.core.costs import Costs, LoadCost, StepCost
from pipetune.core.space import Amp


def test_the_fastest_step_is_the_ceiling():
    probes = [
        probe_of_step(batch_size=256, amp=Amp.FP32, batch_s=0.5),
        probe_of_step(batch_size=256, amp=Amp.BF16, batch_s=0.25),
        probe_of_step(batch_size=64, amp=Amp.BF16, batch_s=0.1),
    ]
    assert step_ceiling(probes, space()) == 1024


def test_a_precision_that_was_not_probed_may_be_faster():
    assert step_ceiling([probe_of_step(batch_size=256, amp=Amp.FP32)], space()) is None
    assert step_ceiling([probe_of_step(batch_size=256, amp=Amp.FP32)], space(amp=(Amp.FP32,))) is not None


def test_a_size_that_is_not_searched_is_no_ceiling():
    assert step_ceiling([probe_of_step(batch_size=512)], space(amp=(Amp.FP32,))) is None


def test_cpus_load_no_faster_than_the_cheapest_sample_was():
    # 2 workers make a batch of 32 in 40 ms, half of that work: 1.25 ms of CPU a sample; alone 2 ms
    probes = [
        probe_of_loader(0, batch_s=0.064, work_share=1.0),
        probe_of_loader(2, batch_s=0.04, work_share=0.5),
    ]
    assert loader_ceiling(probes, 16) == pytest.approx(16 / 0.00125)


@pytest.mark.parametrize("share", [None, 0.0])
def test_without_work_that_was_seen_there_is_none(share):
    assert loader_ceiling([probe_of_loader(2, work_share=share)], 16) is None


@pytest.mark.parametrize(("rate", "reached"), [(970, False), (981, True), (1000, True), (1040, True), (1060, False)])
def test_near_a_ceiling_and_far_beyond_it(rate, reached):
    assert is_reached(rate, 1000.0) is reached


def test_what_the_step_asks_of_the_loader():
    step = StepCost.line(fixed_s=0.0, sample_s=0.001)
    costs = Costs(cpus=16, load=LoadCost(cpu_s=0.02, wait_s=0.06), steps={Amp.FP32: step})
    demand = loader_demand(trial_config(8), costs)
    assert demand.cpus == pytest.approx(20)
    assert demand.wait_share == pytest.approx(0.75)
