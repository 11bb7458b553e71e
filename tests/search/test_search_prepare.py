from dataclasses import replace

import pytest
from builders import facts, trial_config
from lab import study_config
from scripted import ScriptedRunner, loader_bound

from pipetune.core.cache import ReadAhead, ReadAheadEnd
from pipetune.core.facts import Preparation
from pipetune.core.measurement import FailureKind, Phase, TrialFailure
from pipetune.core.samples import SampleAgreement, SampleComparison
from pipetune.core.space import DeclaredSpace

DIFFERENT = SampleComparison(agreement=SampleAgreement.DIFFERENT, compared=64, different=3, first_different=7)
EQUAL = SampleComparison(agreement=SampleAgreement.EQUAL, compared=64)


def prepared(lab, preparation, **config):
    """A study whose samples were found to be so."""
    runner = ScriptedRunner(rate=loader_bound, preparation=preparation)
    result = lab.run(study_config(trials=6, **config), runner)
    return result, runner


def test_workers_that_read_other_samples_are_not_tried(lab):
    result, runner = prepared(lab, Preparation(comparison=DIFFERENT))
    assert {config.num_workers for config in runner.searched} == {0}
    (note,) = [note for note in result.summary.notes if "workers read other samples" in note]
    assert "3 of 64" in note
    assert "index 7" in note
    assert "only 0 workers are tried" in note


def test_waiting_does_not_bring_them_back(lab):
    runner = ScriptedRunner(rate=loader_bound, preparation=Preparation(comparison=DIFFERENT), waits=lambda _: 60.0)
    result = lab.run(study_config(trials=10), runner)
    assert {config.num_workers for config in runner.searched} == {0}
    assert result.tuned.config.num_workers == 0


def test_trials_of_an_earlier_run_with_workers_cannot_win_any_more(lab):
    # GIVEN a study that found many workers best
    first = lab.run(study_config(trials=6), ScriptedRunner(rate=loader_bound))
    assert first.tuned.config.num_workers > 0
    # WHEN it goes on, and workers are found to read other samples
    runner = ScriptedRunner(rate=loader_bound, preparation=Preparation(comparison=DIFFERENT))
    result = lab.run(study_config(trials=9), runner)
    assert result.tuned.config.num_workers == 0


def test_workers_that_the_user_insists_on_are_tried_with_a_warning(lab):
    declared = DeclaredSpace(num_workers=(2, 4))
    baseline = trial_config(2, batch_size=256, accumulation_steps=1, persistent_workers=False)
    result, runner = prepared(lab, Preparation(comparison=DIFFERENT), search=declared, baseline=baseline)
    assert {config.num_workers for config in runner.searched} == {2, 4}
    assert any("mind the result" in note for note in result.summary.notes)


def test_equal_samples_leave_the_space_as_it_is(lab):
    result, runner = prepared(lab, Preparation(comparison=EQUAL))
    assert max(config.num_workers for config in runner.searched) > 0
    assert not any("samples" in note and "workers" in note for note in result.summary.notes)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ReadAheadEnd.TIME, "trials read only that"),
        (ReadAheadEnd.WHOLE_EPOCH, "was read into the page cache"),
        (ReadAheadEnd.MEMORY, "does not fit into memory"),
        (ReadAheadEnd.UNKNOWN, "not labelled"),
    ],
)
def test_what_was_read_ahead_is_told(lab, end, words):
    ahead = ReadAhead(samples=5000, read_bytes=2**30, seconds=12.0, end=end)
    result, _ = prepared(lab, Preparation(read_ahead=ahead))
    assert any(words in note for note in result.summary.notes)


def test_data_in_memory_is_not_worth_a_word(lab):
    ahead = ReadAhead(samples=5000, read_bytes=0, seconds=1.0, end=ReadAheadEnd.IN_MEMORY)
    assert prepared(lab, Preparation(read_ahead=ahead))[0].summary.notes == ()


def test_a_failure_is_told_and_the_study_goes_on(lab):
    failure = TrialFailure(
        config=trial_config(2), kind=FailureKind.ERROR, phase=Phase.COMPARE_SAMPLES, message="ValueError: no"
    )
    result, runner = prepared(lab, Preparation(failure=failure))
    assert any("error in compare_samples: ValueError: no" in note for note in result.summary.notes)
    assert len(runner.searched) == 6


def test_a_finished_study_prepares_nothing(lab):
    config = study_config(trials=6)
    lab.run(config, ScriptedRunner(rate=loader_bound))
    again = ScriptedRunner(rate=loader_bound)
    lab.run(config, again)
    assert again.prepared_with == []


def test_kept_workers_are_not_tried_in_silence_where_a_dataset_has_set_epoch(lab):
    with_epochs = facts(traits=replace(facts().traits, dataset_has_set_epoch=True))
    runner = ScriptedRunner(rate=loader_bound, facts=with_epochs)
    lab.run(study_config(trials=8), runner)
    assert {config.persistent_workers for config in runner.searched} == {False}


def test_kept_workers_are_tried_where_they_are_asked_for(lab):
    with_epochs = facts(traits=replace(facts().traits, dataset_has_set_epoch=True))
    runner = ScriptedRunner(rate=loader_bound, facts=with_epochs)
    lab.run(study_config(trials=8, search=DeclaredSpace(persistent_workers=(True,))), runner)
    assert True in {config.persistent_workers for config in runner.searched}
