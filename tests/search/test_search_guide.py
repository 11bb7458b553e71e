"""The guide in whole studies: it leads to the fast ones, away from what fails, and through every point once."""

import pytest
from builders import facts, hardware, space, trial_config
from lab import study_config
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.core.measurement import FailureKind
from pipetune.core.space import Amp, DeclaredSpace
from pipetune.search import guide
from pipetune.search.failures import is_beyond


def test_a_handful_of_trials_finds_what_a_loader_bound_workload_needs(lab):
    # GIVEN 2,000 configurations, of which those with 13 workers or more and bf16 are the fastest
    runner = ScriptedRunner(rate=loader_bound, facts=facts(gpu=True))
    lab.machine = hardware(cpus_usable=16)
    lab.run(study_config(trials=8), runner)
    best = max(loader_bound(config) for config in runner.searched)
    assert best >= 0.97 * 0.98 * 1300


def test_what_fails_has_relatives_that_are_tried_last(lab):
    # GIVEN a model that does not train in fp16, which looks as fast as bf16 beforehand
    fails = fails_with(FailureKind.NON_FINITE, lambda config: config.amp is Amp.FP16)
    runner = ScriptedRunner(rate=loader_bound, facts=facts(gpu=True), fails=fails)
    lab.run(study_config(trials=20), runner)
    assert sum(config.amp is Amp.FP16 for config in runner.searched) <= 3


def test_memory_that_did_not_suffice_is_not_asked_for_again(lab):
    runner = ScriptedRunner(rate=loader_bound, facts=facts(gpu=True), fails=gpu_holds(64))
    lab.run(study_config(trials=20), runner)
    too_large = [config for config in runner.searched if config.batch_size > 64]
    # THEN each of the two sizes above is met once in fp32, and at most once more in reduced precision
    assert len(too_large) <= 4


@pytest.mark.parametrize(("met", "other", "beyond"), [
    (Amp.BF16, Amp.FP16, True), (Amp.FP16, Amp.BF16, True), (Amp.FP32, Amp.BF16, False), (Amp.BF16, Amp.FP32, False),
])  # fmt: skip
def test_reduced_precisions_take_the_same_room(met, other, beyond):
    from builders import failure

    ran_out = failure(trial_config(amp=met), FailureKind.GPU_OUT_OF_MEMORY)
    assert is_beyond(trial_config(2, amp=other), ran_out) is beyond


@pytest.mark.parametrize("most", [1, 50, 10**6])
def test_every_configuration_is_reached_however_few_are_looked_at(lab, monkeypatch, most):
    monkeypatch.setattr(guide, "MOST_POINTS", most)
    declared = DeclaredSpace(num_workers=(0, 1, 2, 3, 4), prefetch_factor=(2, 4), batch_size=(256,), amp=(Amp.FP32,))
    runner = ScriptedRunner(rate=loader_bound)
    lab.run(study_config(trials=100, search=declared), runner)
    points = space(
        num_workers=(0, 1, 2, 3, 4), prefetch_factor=(2, 4), batch_size=(256,), amp=(Amp.FP32,), pin_memory=(False,)
    )
    assert set(runner.searched) == set(points.configs())


def test_where_nothing_runs_the_search_still_goes_through_the_space(lab):
    from pipetune.errors import NothingWorksError

    kinds = list(FailureKind)
    runner = ScriptedRunner(fails=lambda call: kinds[call.index % len(kinds)])
    with pytest.raises(NothingWorksError):
        lab.run(study_config(trials=12), runner)
    assert len(set(runner.searched)) == len(runner.searched) > 5


def test_it_stops_where_nothing_that_is_left_is_expected_to_gain(lab):
    # GIVEN a quiet machine on which the step limits everything with two workers or more
    def rate(config):
        return 100.0 if config.num_workers == 0 else 600.0

    runner = ScriptedRunner(rate=rate, sigma=0.001, drift=0.001)
    result = lab.run(study_config(trials=500), runner)
    assert guide.LEAST_TRIALS <= len(runner.searched) < 400
    assert any("stopped searching: nothing that is left" in note for note in result.summary.notes)


def test_what_does_not_fit_gives_no_hope(lab):
    # GIVEN the largest batches, which would be the fastest and run out of memory
    def rate(config):
        return 1000.0 * config.batch_size**0.5

    runner = ScriptedRunner(rate=rate, sigma=0.001, drift=0.001, fails=gpu_holds(32), facts=facts(gpu=True))
    result = lab.run(study_config(trials=2000), runner)
    assert len(runner.searched) < 1000
    assert any("stopped searching" in note for note in result.summary.notes)
