import time
from dataclasses import replace

import pytest
from builders import facts, trial_config
from lab import mismatched, study_config, with_trials
from optuna.trial import TrialState as OptunaState
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.config import tuned_file
from pipetune.core.measurement import FailureKind
from pipetune.core.objective import Objective
from pipetune.core.record import CertificationState
from pipetune.core.space import DeclaredSpace
from pipetune.core.tuned import Status
from pipetune.errors import InterruptedStudyError, NothingWorksError, StudyConflictError, WorkloadError
from pipetune.search import budget
from pipetune.search.budget import Spending
from pipetune.search.sampler import params_of

CONFIG = study_config(trials=6)
WORKERS = DeclaredSpace(num_workers=(1, 2, 3, 4))
FEW = DeclaredSpace(
    num_workers=(1,), prefetch_factor=(2,), persistent_workers=(True,), pin_memory=(False,), batch_size=(64,)
)
RULE = trial_config(3, batch_size=256, accumulation_steps=1, persistent_workers=True)


def runner(**changes):
    return ScriptedRunner(**{"rate": loader_bound} | changes)


def interrupted(lab, config, *, at, **changes):
    """A run that a signal breaks into at call `at`."""
    broken = runner(interrupts=frozenset({at}), **changes)
    with pytest.raises(InterruptedStudyError):
        lab.run(config, broken)
    return broken


# --- again -----------------------------------------------------------------------------------------------------


def test_a_finished_study_is_not_measured_again(lab):
    first = lab.run(CONFIG, runner())
    # WHEN the same command runs once more
    again = runner()
    second = lab.run(CONFIG, again)
    # THEN it measures nothing and says the same
    assert again.calls == []
    assert second.records == first.records
    for name in ("status", "config", "measured", "baseline_config", "baseline_measured", "ceiling"):
        assert getattr(second.tuned, name) == getattr(first.tuned, name)


def test_a_smaller_budget_changes_nothing(lab):
    first = lab.run(CONFIG, runner())
    again = runner()
    assert lab.run(with_trials(CONFIG, 3), again).tuned.config == first.tuned.config
    assert again.calls == []


def test_a_larger_budget_goes_on(lab):
    lab.run(CONFIG, runner())
    more = runner()
    result = lab.run(with_trials(CONFIG, 9), more)
    # THEN only what is new is measured, and the winner is certified anew
    assert len(more.searched) == 3
    assert len(result.records) == 9
    assert len({record.config for record in result.records}) == 8  # and the reference
    assert more.certified
    assert lab.store().certification().budget.trials == 9


def test_another_objective_is_another_study(lab):
    lab.run(CONFIG, runner())
    other = replace(CONFIG, objective=Objective.PARETO)
    with pytest.raises(StudyConflictError, match=r"objective: throughput there, pareto now"):
        lab.run(other, runner(facts=facts(gpu=True), gpu=lambda _: 50.0))


def test_what_a_study_has_cost_never_shrinks(lab):
    first = lab.run(CONFIG, runner())
    second = lab.run(CONFIG, runner())
    third = lab.run(with_trials(CONFIG, 8), runner())
    assert first.summary.seconds <= second.summary.seconds <= third.summary.seconds


def test_notes_of_earlier_runs_are_kept_once(lab):
    config = study_config(trials=8, baseline=trial_config(0))
    crashing = {"fails": fails_with(FailureKind.CRASH, lambda one: one != trial_config(0))}
    first = lab.run(config, runner(**crashing))
    second = lab.run(config, runner(**crashing))
    assert first.summary.notes == second.summary.notes
    assert len(first.summary.notes) == 1


# --- interrupted -----------------------------------------------------------------------------------------------


def test_an_interrupted_study_leaves_a_provisional_result(lab):
    interrupted(lab, CONFIG, at=4)
    assert tuned_file.read(lab.best_file).status is Status.PROVISIONAL
    assert len(lab.records()) == 4


def test_an_interrupted_trial_is_over(lab):
    interrupted(lab, CONFIG, at=4)
    states = [trial.state for trial in lab.store().study.trials]
    assert states[4] is OptunaState.FAIL
    assert OptunaState.RUNNING not in states


def test_an_interrupted_study_goes_on_with_exactly_what_is_left(lab):
    interrupted(lab, CONFIG, at=4)
    rest = runner()
    result = lab.run(CONFIG, rest)
    assert len(rest.searched) == 2
    assert len({record.config for record in result.records}) == len(result.records) == 6
    assert result.tuned.status is Status.CERTIFIED
    assert mismatched(lab.store()) == {}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_interrupted_configuration_is_the_next(lab, at):
    # GIVEN a run that ended during one of the rules' configurations
    lost = interrupted(lab, CONFIG, at=at).searched[at]
    # WHEN it goes on
    rest = runner()
    lab.run(CONFIG, rest)
    # THEN that configuration is not lost: the rule is often the best there is
    assert lost in rest.searched


def test_a_study_interrupted_in_its_baseline_begins_with_it_again(lab):
    interrupted(lab, study_config(trials=3, baseline=RULE), at=0)
    assert not lab.best_file.exists()
    rest = runner()
    lab.run(study_config(trials=3, baseline=RULE), rest)
    assert rest.searched[0] == RULE
    assert mismatched(lab.store()) == {}


def test_a_study_interrupted_while_it_was_certified_is_certified_next_time(lab):
    interrupted(lab, CONFIG, at=8)
    assert tuned_file.read(lab.best_file).status is Status.PROVISIONAL
    rest = runner()
    result = lab.run(CONFIG, rest)
    assert rest.searched == []
    assert result.tuned.status is Status.CERTIFIED


def certified_configs(lab):
    return [[one.config for one in r.outcomes] for r in lab.store().certification().rounds]


def test_a_certification_goes_on_from_the_rounds_that_it_has(lab):
    # GIVEN a study of a small gain on a noisy machine, which takes some rounds to certify
    noisy = {"rate": lambda one: 1060.0 if one.num_workers else 1000.0, "drift": 0.03}
    whole = runner(**noisy)
    lab.run(CONFIG, whole)
    rounds = certified_configs(lab)
    assert len(rounds) >= 4
    lab.journal.unlink()
    # WHEN it is broken off in the last process
    interrupted(lab, CONFIG, at=len(whole.calls) - 1, **noisy)
    kept = lab.store().certification()
    assert (kept.state, kept.winner) == (CertificationState.UNFINISHED, None)
    assert certified_configs(lab) == rounds[:-1]
    # THEN the next run does not measure again what is there, and comes to an end
    rest = runner(**noisy)
    result = lab.run(CONFIG, rest)
    assert rest.searched == []
    assert certified_configs(lab)[: len(rounds) - 1] == rounds[:-1]
    assert len(processes(lab)) == sum(map(len, rounds[:-1])) + len(rest.certified)
    assert lab.store().certification().state is CertificationState.FINISHED
    assert result.tuned.status in {Status.CERTIFIED, Status.NO_GAIN}


def in_the_second_round(lab):
    """Index of the call that is the second process of the second round of a certification, after six trials."""
    lab.run(CONFIG, runner())
    size = len(certified_configs(lab)[0])
    lab.journal.unlink()
    return 6 + size + 1


def test_an_interrupted_certification_is_charged_to_the_budget(lab, monkeypatch):
    at = in_the_second_round(lab)
    # GIVEN a clock that goes on by 10 s in every process
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def ten_seconds(_):
        now[0] += 10.0
        return 1.0

    monkeypatch.setattr(Spending.__init__, "__kwdefaults__", {"clock": lambda: now[0]})
    # WHEN a signal breaks into the second round
    interrupted(lab, CONFIG, at=at, scale=ten_seconds)
    # THEN six trials, a round and one process were spent, the last in vain
    assert lab.store().summary().seconds == pytest.approx(10.0 * at)
    lab.run(CONFIG, runner(scale=ten_seconds))
    assert lab.store().summary().seconds == pytest.approx(10.0 * (6 + 1 + len(processes(lab))))


def processes(lab):
    return [one for r in lab.store().certification().rounds for one in r.outcomes]


def test_more_trials_ask_for_another_certification(lab):
    # GIVEN a certification that was broken off after its first round
    interrupted(lab, CONFIG, at=in_the_second_round(lab))
    assert len(certified_configs(lab)) == 1
    # WHEN the study may search on
    rest = runner()
    lab.run(with_trials(CONFIG, 8), rest)
    # THEN what it finds is certified too, from the start
    assert len(rest.searched) == 2
    assert len(processes(lab)) == len(rest.certified)
    assert lab.store().certification().trials == 8


def test_a_certification_that_was_not_decided_goes_on_with_more_budget(lab, monkeypatch):
    # GIVEN a space that is exhausted, a gain of 12 % on a machine of 8 %, and two rounds only
    config = study_config(trials=6, baseline=trial_config(0), search=FEW)
    noisy = {"rate": lambda one: 1120.0 if one.num_workers else 1000.0, "drift": 0.08}
    with monkeypatch.context() as patch:
        patch.setattr(budget, "ROUNDS", 2)
        assert lab.run(config, runner(**noisy)).tuned.status is Status.NO_GAIN
    before = len(processes(lab))
    # WHEN the same study may spend more
    rest = runner(**noisy, seed=5)
    lab.run(with_trials(config, 7), rest)
    # THEN it goes on with the rounds that are there
    assert rest.searched == []
    assert len(processes(lab)) == before + len(rest.certified) > before


def test_a_baseline_that_failed_in_certification_is_tried_again_next_time(lab):
    config = study_config(trials=4, baseline=trial_config(0))
    failing = {"fails": lambda call: FailureKind.CRASH if call.fresh and call.config == trial_config(0) else None}
    assert lab.run(config, runner(**failing)).tuned.status is Status.PROVISIONAL
    assert lab.run(config, runner()).tuned.status is Status.CERTIFIED


def test_a_certification_of_an_earlier_version_is_measured_anew(lab):
    lab.run(CONFIG, runner())
    lab.store().study.set_user_attr("certification", {"arms": [], "seconds": 1.0, "budget": {}})
    again = runner()
    result = lab.run(CONFIG, again)
    assert again.searched == []
    assert len(again.certified) >= 4
    assert result.tuned.status is Status.CERTIFIED


def test_an_interrupted_run_does_not_replace_a_certified_file(lab):
    lab.run(CONFIG, runner())
    interrupted(lab, with_trials(CONFIG, 10), at=2)
    assert tuned_file.read(lab.best_file).status is Status.CERTIFIED


def test_what_a_killed_run_left_running_is_over(lab):
    # GIVEN a run that was killed without a word in its fourth trial
    interrupted(lab, CONFIG, at=3)
    lab.store().study.ask()
    # WHEN the next run goes on
    result = lab.run(CONFIG, runner())
    # THEN nothing runs for ever, and the budget is spent on what is left
    assert OptunaState.RUNNING not in {trial.state for trial in lab.store().study.trials}
    assert len(result.records) == 6


def test_an_error_of_our_own_abandons_the_trial_too(lab):
    def explode(config):
        if config.num_workers:
            raise ZeroDivisionError
        return 1000.0

    with pytest.raises(ZeroDivisionError):
        lab.run(CONFIG, runner(rate=explode))
    assert [trial.state for trial in lab.store().study.trials][:2] == [OptunaState.COMPLETE, OptunaState.FAIL]


# --- failures of earlier runs ----------------------------------------------------------------------------------


def test_memory_limits_that_were_met_before_are_remembered(lab):
    gpu = facts(gpu=True)
    lab.run(CONFIG, runner(facts=gpu, fails=gpu_holds(64)))
    met = {(record.config.amp, record.config.batch_size) for record in lab.records() if record.failure}
    rest = runner(facts=gpu, fails=gpu_holds(64))
    lab.run(with_trials(CONFIG, 20), rest)
    assert met
    assert not any(one.amp is amp and one.batch_size >= batch for one in rest.searched for amp, batch in met)


def test_where_nothing_worked_the_next_run_may_find_something(lab):
    with pytest.raises(NothingWorksError):
        lab.run(study_config(trials=8), runner(fails=fails_with(FailureKind.CRASH)))
    result = lab.run(study_config(trials=12), runner())
    assert result.tuned.config.num_workers > 0
    assert len(result.records) == 12


def test_what_failed_in_an_earlier_run_is_tried_again(lab):
    # GIVEN a run in which the rule crashed
    lab.run(study_config(trials=3), runner(fails=fails_with(FailureKind.CRASH, lambda config: config == RULE)))
    # WHEN the user has repaired the code and allows more
    more = runner()
    lab.run(study_config(trials=6), more)
    # THEN it may be measured now
    assert RULE in more.searched


def test_failures_of_earlier_runs_do_not_end_this_one(lab):
    crashing = {"fails": fails_with(FailureKind.CRASH, lambda config: config.num_workers > 0)}
    # GIVEN a run that ended after five crashes in a row
    lab.run(study_config(trials=6, search=WORKERS, baseline=trial_config(0)), runner(**crashing))
    # WHEN it may go on, and crashes fewer times
    more = runner(**crashing)
    lab.run(study_config(trials=10, search=WORKERS, baseline=trial_config(0)), more)
    # THEN the five of before are not counted in
    assert len(more.searched) == 4


def test_what_another_program_enqueued_is_not_taken_for_the_baseline(lab):
    # GIVEN a study into which somebody put a trial by Optuna's own means
    config = study_config(trials=4, baseline=trial_config(2))
    interrupted(lab, config, at=0)
    lab.store().study.enqueue_trial(params_of(trial_config(1)))
    # WHEN it goes on
    result = lab.run(config, runner())
    # THEN the baseline is still the user's, and every record says what was measured
    assert result.tuned.baseline_config == trial_config(2)
    assert mismatched(lab.store()) == {}


# --- what changed between the runs -----------------------------------------------------------------------------


def test_workers_stay_widened(lab):
    # GIVEN a study whose budget ended right when more workers had been allowed
    waiting = {"rate": lambda config: 60.0 * max(0.5, config.num_workers), "waits": lambda _: 60.0}
    lab.run(study_config(trials=4), runner(**waiting))
    # WHEN it may go on
    more = runner(**waiting)
    lab.run(study_config(trials=5), more)
    # THEN more workers than there are CPUs are next
    assert more.searched[0].num_workers > 4


def test_widening_goes_on(lab):
    waiting = {"rate": lambda config: 60.0 * max(0.5, config.num_workers), "waits": lambda _: 60.0}
    lab.run(study_config(trials=5), runner(**waiting))
    widest = max(record.config.num_workers for record in lab.records())
    lab.run(study_config(trials=12), runner(**waiting))
    assert max(record.config.num_workers for record in lab.records()) > widest


def test_another_baseline_is_measured_and_compared_with(lab):
    # GIVEN a finished study
    lab.run(study_config(trials=4, baseline=trial_config(0)), runner())
    # WHEN the user changes what they have today, which is no part of the key
    today = trial_config(1, prefetch_factor=3)
    result = lab.run(study_config(trials=6, baseline=today), runner())
    # THEN the result is compared with that
    assert result.tuned.baseline_config == today
    assert mismatched(lab.store()) == {}


def test_another_baseline_is_compared_with_even_where_the_budget_is_spent(lab):
    lab.run(study_config(trials=4, baseline=trial_config(0)), runner())
    today = trial_config(1, prefetch_factor=3)
    result = lab.run(study_config(trials=4, baseline=today), runner())
    assert result.tuned.baseline_config == today


def test_another_baseline_is_no_other_configuration_in_optunas_record(lab):
    # GIVEN a study that ended with proposals still waiting
    lab.run(study_config(trials=1, baseline=trial_config(0)), runner())
    # WHEN the next run has another baseline
    lab.run(study_config(trials=3, baseline=trial_config(1, prefetch_factor=3)), runner())
    # THEN its trial has its own parameters, not those of the first in the queue
    assert mismatched(lab.store()) == {}


def test_a_baseline_that_failed_once_is_tried_again(lab):
    # GIVEN a baseline that crashed because the machine was full
    config = study_config(trials=4, baseline=trial_config(0))
    with pytest.raises(WorkloadError, match="fail without any tuning"):
        lab.run(config, runner(fails=fails_with(FailureKind.CRASH)))
    # WHEN the user frees it and runs the same command
    result = lab.run(config, runner())
    # THEN the study runs
    assert result.tuned.baseline_config == trial_config(0)
