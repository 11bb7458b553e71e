"""What one trial tells of the parts of a step."""

import pytest
from builders import measurement, probe_of_loader, probe_of_step, trial_config

from pipetune.core.costs import (
    HIDDEN_SD,
    SEEN_SD,
    LoadCost,
    StepCost,
    costs_of_probes,
    costs_of_trial,
    guessed_costs,
    useful_workers,
)
from pipetune.core.prediction import batch_interval_s
from pipetune.core.space import Amp
from pipetune.core.throughput import EpochStart


def costs(trial, *, gpu=False, cpus=4.0):
    return costs_of_trial(trial, cpus=cpus, amps=tuple(Amp), has_accelerator=gpu)


def test_without_workers_waiting_is_loading_and_the_rest_is_the_step():
    # GIVEN 100 samples/s, of which 80 % of the time goes into waiting for data
    found = costs(measurement(trial_config(0), rate=100.0, wait_share=0.8))
    assert found.load.seconds == pytest.approx(0.008, rel=0.02)
    assert found.steps[Amp.FP32].seconds(64) == pytest.approx(64 * 0.002, rel=0.02)
    assert found.load.sd == SEEN_SD


@pytest.mark.parametrize("wait_share", [0.02, 0.5, 0.95])
def test_without_workers_the_trial_itself_is_foretold(wait_share):
    trial = measurement(trial_config(0), rate=500.0, wait_share=wait_share)
    assert batch_interval_s(trial.config, costs(trial)) == pytest.approx(64 / 500, rel=0.02)


def test_workers_that_are_waited_for_tell_what_a_sample_costs():
    # GIVEN 4 workers that together give 100/s
    found = costs(measurement(trial_config(4), rate=100.0, wait_share=0.6))
    assert found.load.seconds == pytest.approx(0.04, rel=0.02)


def test_workers_that_are_never_waited_for_tell_only_what_it_costs_at_most():
    found = costs(measurement(trial_config(4), rate=100.0, wait_share=0.01))
    assert found.load.seconds <= 0.04
    assert found.load.sd == HIDDEN_SD
    assert found.step_sd == SEEN_SD


@pytest.mark.parametrize("gpu", [False, True])
def test_a_precision_that_did_not_run_is_known_least(gpu):
    found = costs(measurement(trial_config(0), wait_share=0.1), gpu=gpu)
    assert found.steps[Amp.BF16].sd >= 0.4 > found.steps[Amp.FP32].sd == 0
    assert found.steps[Amp.BF16].seconds(64) <= found.steps[Amp.FP32].seconds(64)


def test_from_reduced_precision_fp32_is_foretold_slower_on_a_gpu():
    found = costs(measurement(trial_config(0, amp=Amp.BF16), wait_share=0.1), gpu=True)
    assert found.steps[Amp.FP32].seconds(64) > found.steps[Amp.BF16].seconds(64)
    assert found.steps[Amp.FP16].seconds(64) == found.steps[Amp.BF16].seconds(64)


def test_beside_a_gpu_the_longer_the_wait_the_less_is_known_of_the_step():
    found = [costs(measurement(trial_config(0), wait_share=share), gpu=True).step_sd for share in (0.1, 0.5, 0.9)]
    assert found[0] == SEEN_SD < found[1] < found[2]
    assert costs(measurement(trial_config(0), wait_share=0.9)).step_sd == SEEN_SD


def test_workers_beyond_the_cpus_wait_for_what_the_cpus_cannot_have_done():
    # GIVEN 16 workers on 2 CPUs that together give 100 samples/s
    trial = measurement(trial_config(16), rate=100.0, wait_share=0.6)
    found = costs(trial, cpus=2.0)
    assert found.load.cpu_s == pytest.approx(2 / 100, rel=0.02)
    assert found.load.seconds == pytest.approx(16 / 100, rel=0.02)
    # THEN the trial itself is foretold, and not eight times too slow
    assert batch_interval_s(trial.config, found) == pytest.approx(64 / 100, rel=0.7)


def test_an_epoch_start_is_not_counted_twice():
    # GIVEN 4 workers whose first batch takes 2.56 s of the 2.66 s that an epoch start costs
    trial = measurement(
        trial_config(4, persistent_workers=False), rate=100.0, wait_share=0.6,
        epoch_start=EpochStart(fresh_s=2.66, refill_s=None),
    )  # fmt: skip
    assert 4 * costs(trial).worker_start_s == pytest.approx(0.1, abs=0.05)


def test_a_trial_that_did_nothing_but_wait_breaks_nothing():
    assert costs(measurement(trial_config(0), wait_share=1.0), gpu=True).steps[Amp.FP32].seconds(64) > 0


def test_a_guess_trusts_itself_in_nothing():
    found = guessed_costs(cpus=4, amps=(Amp.FP32,), has_accelerator=False)
    assert min(found.load.sd, found.step_sd) >= 1.0


@pytest.mark.parametrize("work_share", [0.02, 0.5, 1.0])
def test_without_workers_what_is_no_work_is_waiting(work_share):
    found = costs(measurement(trial_config(0), rate=100.0, wait_share=0.8, work_share=work_share))
    assert found.load.seconds == pytest.approx(0.008, rel=0.02)
    assert found.load.cpu_s == pytest.approx(0.008 * work_share, rel=0.02)


def test_a_machine_that_worked_more_than_it_waited_only_worked():
    # GIVEN a dataset whose reading keeps several threads busy
    assert costs(measurement(trial_config(0), wait_share=0.8, work_share=3.0)).load.wait_s == 0


@pytest.mark.parametrize(
    ("work_share", "wait_share", "workers"),
    [
        (1.0, 0.9, 4),  # work: no more than the CPUs
        (0.1, 0.9, 11),  # mostly waiting: as many as keep up with a step of a ninth
        (0.25, 0.99, 16),  # a quarter of work: what keeps the CPUs busy
        (1.0, 0.1, 1),
    ],
)
def test_useful_workers_keep_up_or_keep_the_cpus_busy(work_share, wait_share, workers):
    trial = measurement(trial_config(0, amp=Amp.FP32), wait_share=wait_share, work_share=work_share)
    found = costs_of_trial(trial, cpus=4.0, amps=(Amp.FP32,), has_accelerator=False)
    assert useful_workers(found, 64) == workers


def test_useful_workers_have_an_end_where_a_step_takes_no_time():
    trial = measurement(trial_config(0), wait_share=1.0, work_share=0.0)
    assert useful_workers(costs(trial, gpu=True), 64) <= 4096


# --- probes ----------------------------------------------------------------------------------------------------


def probed(*probes, cpus=16.0):
    """Costs of a workload whose baseline told: 8 ms of work a sample, and a step of 2 ms a sample in fp32."""
    trial = measurement(trial_config(0), rate=100.0, wait_share=0.8)
    rest = costs_of_trial(trial, cpus=cpus, amps=tuple(Amp), has_accelerator=True)
    return costs_of_probes(probes, rest)


def test_without_probes_nothing_changes():
    trial = measurement(trial_config(0), rate=100.0, wait_share=0.8)
    rest = costs_of_trial(trial, cpus=16.0, amps=tuple(Amp), has_accelerator=True)
    assert costs_of_probes([], rest) == rest


def test_a_sample_is_what_one_process_takes_for_it():
    found = probed(probe_of_loader(0, batch_s=0.32, work_share=0.25, spread=0.5)).load
    assert (found.cpu_s, found.wait_s) == (pytest.approx(0.0025), pytest.approx(0.0075))
    # a batch of 32 whose time spreads by a half: a sample's spreads by the root of 32 times as much
    assert found.spread == pytest.approx(0.5 * 32**0.5)


def test_without_a_sample_of_its_own_the_fewest_workers_tell():
    found = probed(probe_of_loader(2, batch_s=0.16), probe_of_loader(8, batch_s=0.04))
    assert found.load.seconds == pytest.approx(0.01)


def test_a_probe_that_knows_no_work_share_leaves_that_of_the_trial():
    found = probed(probe_of_loader(0, batch_s=0.32, work_share=None))
    assert found.load.wait_s == 0.0


def test_workers_that_hold_each_other_up_are_believed_in_part():
    # 10 ms a sample alone: 8 workers would take 40 ms for 32 and take 80
    found = probed(probe_of_loader(0, batch_s=0.32), probe_of_loader(8, batch_s=0.08)).load
    assert 0.5 < found.alone(8, 16.0) / found.together(8, 16.0) < 1.0


@pytest.mark.parametrize("workers", [1, 3, 100])
def test_workers_are_never_together_faster_than_alone(workers):
    found = probed(probe_of_loader(0, batch_s=0.32), probe_of_loader(8, batch_s=0.01)).load
    assert found.together(workers, 16.0) >= found.alone(workers, 16.0)


def test_between_two_counts_the_share_is_between_theirs():
    load = LoadCost(cpu_s=0.01, shares=((2, 1.0), (8, 0.5)))
    assert load.alone(4, 16.0) / load.together(4, 16.0) == pytest.approx(0.75)
    assert load.alone(1, 16.0) / load.together(1, 16.0) == 1.0
    assert load.alone(16, 16.0) / load.together(16, 16.0) == 0.5


def test_starts_are_what_the_first_batch_took_beside_its_own_making():
    # batches of 32 take a worker 320 ms; 2 and 8 workers had their first after 0.52 s and 0.82 s
    found = probed(
        probe_of_loader(0, batch_s=0.32),
        probe_of_loader(2, batch_s=0.16, first_batch_s=0.52),
        probe_of_loader(8, batch_s=0.04, first_batch_s=0.82),
    )
    assert found.worker_start_s == pytest.approx(0.05)
    assert found.start_s == pytest.approx(0.1)


def test_receiving_is_told_a_sample_and_alike_for_pinned_ones_where_none_was_probed():
    found = probed(probe_of_loader(4, receive_s=0.0032))
    assert found.receive_sample_s == found.pinned_receive_sample_s == pytest.approx(1e-4)


def test_what_pinning_costs_is_believed_in_part():
    # GIVEN 0.1 ms a sample unpinned and 0.2 ms pinned, 0.15 ms in the mean
    found = probed(
        probe_of_loader(2, receive_s=0.0032),
        probe_of_loader(16, receive_s=0.0064, pin_memory=True),
    )
    assert found.receive_sample_s == pytest.approx((1e-4 * 1.5e-4) ** 0.5)
    assert found.pinned_receive_sample_s == pytest.approx((2e-4 * 1.5e-4) ** 0.5)


def test_each_precision_is_as_dear_as_its_probes_say():
    found = probed(
        probe_of_step(batch_size=256, amp=Amp.FP32, batch_s=0.8),
        probe_of_step(batch_size=256, amp=Amp.BF16, batch_s=0.2),
    )
    assert found.steps[Amp.FP32].seconds(256) == pytest.approx(0.8)
    assert found.steps[Amp.BF16].seconds(256) == pytest.approx(0.2)
    # fp16 was not probed, and is taken from fp32
    assert 0.3 < found.steps[Amp.FP16].seconds(256) < 0.8
    assert found.steps[Amp.FP16].sd > found.steps[Amp.BF16].sd


def test_a_size_that_is_out_of_line_is_believed_in_part():
    # GIVEN a step of 1 ms a sample that takes twice as long at the largest size, where memory is short
    found = probed(
        probe_of_step(batch_size=64, batch_s=0.064), probe_of_step(batch_size=256, batch_s=0.512)
    ).steps[Amp.FP32]  # fmt: skip
    assert 1.1 < (found.seconds(256) / 256) / (found.seconds(64) / 64) < 2.0


@pytest.mark.parametrize("points", [((16, 0.1), (64, 0.1)), ((16, 0.1), (64, 2.0)), ((16, 0.2), (64, 0.1))])
@pytest.mark.parametrize("size", [1, 8, 16, 32, 64, 128, 4096])
def test_no_step_is_for_nothing(points, size):
    step = StepCost(points=points)
    assert step.seconds(size) > 0
    if size > 64:
        assert step.seconds(size) >= step.seconds(64)


def test_copies_are_told_a_sample():
    found = probed(probe_of_step(batch_size=64, copy_s=0.0064, pinned_copy_s=0.00064))
    assert (found.copy_sample_s, found.pinned_copy_sample_s) == (pytest.approx(1e-4), pytest.approx(1e-5))
