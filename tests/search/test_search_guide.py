"""The guide in whole studies: it leads to the fast ones, away from what fails, and through every point once."""

import pytest
from builders import facts, failure, hardware, space, trial_config
from lab import study_config
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.core.facts import Preparation
from pipetune.core.measurement import FailureKind
from pipetune.core.samples import SampleAgreement, SampleComparison
from pipetune.core.space import Amp, DeclaredSpace
from pipetune.errors import NothingWorksError
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
    ran_out = failure(trial_config(amp=met), FailureKind.GPU_OUT_OF_MEMORY)
    assert is_beyond(trial_config(2, amp=other), ran_out) is beyond


@pytest.mark.usefixtures("whole_budget")
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


# --- alternatives ----------------------------------------------------------------------------------------------


def test_what_each_knob_is_worth_comes_from_trials_where_they_ran(lab):
    runner = ScriptedRunner(rate=loader_bound, facts=facts(gpu=True), sigma=0.001, drift=0.001)
    lab.machine = hardware(cpus_usable=8)
    result = lab.run(study_config(trials=30), runner)
    chosen, trials = result.tuned.config, {record.number: record for record in result.records}
    found = result.summary.alternatives
    assert {one.knob for one in found} >= {"num_workers", "pin_memory", "amp", "batch_size"}
    assert any(one.trial is not None for one in found)
    assert any(one.trial is None for one in found)
    for one in found:
        assert one.trial is None or trials[one.trial].config == one.config
        # THEN what a trial says is what it measured; epoch starts, which this surface adds, stay under a few per cent
        if one.trial is not None:
            expected = loader_bound(one.config) / loader_bound(chosen)
            assert one.samples_per_sec == pytest.approx(
                expected * result.tuned.measured.effective_samples_per_sec.value, rel=0.05
            )


def test_what_does_not_fit_is_no_alternative(lab):
    runner = ScriptedRunner(rate=loader_bound, facts=facts(gpu=True), fails=gpu_holds(64))
    result = lab.run(study_config(trials=20), runner)
    assert all(one.config.batch_size <= 64 for one in result.summary.alternatives if one.config.amp is Amp.FP32)


def test_show_tells_the_same_alternatives(lab):
    result = lab.run(study_config(trials=6), ScriptedRunner(rate=loader_bound))
    assert lab.store().summary().alternatives == result.summary.alternatives != ()


# --- going on with a study -------------------------------------------------------------------------------------


def test_what_failed_before_it_was_repaired_is_not_held_against_its_relatives(lab):
    # GIVEN a study in which every fp16 trial crashed, and code that was repaired since
    fails = fails_with(FailureKind.CRASH, lambda config: config.amp is Amp.FP16)
    fp16_is_best = lambda config: 3000.0 if config.amp is Amp.FP16 else loader_bound(config)  # noqa: E731
    lab.run(study_config(trials=6), ScriptedRunner(rate=fp16_is_best, facts=facts(gpu=True), fails=fails))
    again = ScriptedRunner(rate=fp16_is_best, facts=facts(gpu=True))
    lab.run(study_config(trials=14), again)
    assert any(config.amp is Amp.FP16 for config in again.searched)


def test_an_older_result_is_tried_although_nothing_more_is_expected(lab):
    def rate(config):
        return 100.0 if config.num_workers == 0 else 600.0

    quiet = {"rate": rate, "sigma": 0.001, "drift": 0.001}
    first = ScriptedRunner(**quiet)
    lab.run(study_config(trials=400), first)
    older = next(config for config in space(num_workers=(1, 2), pin_memory=(False,), batch_size=(64,),
                                            amp=(Amp.FP32,)).configs() if config not in first.searched)  # fmt: skip
    again = ScriptedRunner(**quiet)
    lab.run(study_config(trials=500), again, start_from=older)
    assert again.searched[0] == older


def test_a_trial_that_was_ended_early_becomes_no_baseline(lab):
    # GIVEN a study that ended trials early
    slow_workers = {"rate": lambda config: 500.0 if config.num_workers else 1000.0}
    result = lab.run(study_config(trials=8), ScriptedRunner(**slow_workers))
    ended = next(record.config for record in result.records if record.measurement.censored)
    # WHEN one of them is named as the baseline
    again = ScriptedRunner(**slow_workers)
    lab.run(study_config(trials=10, baseline=ended), again)
    # THEN it runs to its end
    assert again.calls[0].config == ended
    assert again.calls[0].least_rate is None


def test_what_was_ended_early_is_open_again_where_nothing_that_outran_it_may_win(lab):
    # GIVEN a study in which workers were so fast that trials without were ended early
    declared = DeclaredSpace(
        num_workers=(0, 2), prefetch_factor=(2,), persistent_workers=(True,), batch_size=(64, 128, 256), amp=(Amp.FP32,)
    )
    surface = {"rate": lambda config: (1000.0 if config.num_workers else 300.0) + config.batch_size}
    first = lab.run(study_config(trials=6, search=declared, baseline=trial_config(0)), ScriptedRunner(**surface))
    ended = {record.config for record in first.records if record.measurement.censored}
    best_without = trial_config(0, batch_size=256, accumulation_steps=1)
    assert best_without in ended
    # WHEN workers are found to read other samples
    different = SampleComparison(agreement=SampleAgreement.DIFFERENT, compared=64, different=3, first_different=7)
    again = ScriptedRunner(**surface, preparation=Preparation(comparison=different))
    result = lab.run(study_config(trials=20, search=declared, baseline=trial_config(0)), again)
    # THEN the best of them is measured again, to its end, and wins
    assert best_without in again.searched
    assert result.tuned.config == best_without
