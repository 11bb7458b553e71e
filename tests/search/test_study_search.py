import re

import pytest
from builders import facts, hardware, space, trial_config
from lab import mismatched, study_config
from optuna.trial import TrialState as OptunaState
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.core.measurement import FailureKind
from pipetune.core.objective import Objective
from pipetune.core.space import WORKERS_PER_CPU_LIMIT, Amp, DeclaredSpace
from pipetune.core.tuned import Status
from pipetune.errors import NothingWorksError
from pipetune.search.reference import EVERY

ONE_POINT = DeclaredSpace(
    num_workers=(2,), prefetch_factor=(2,), persistent_workers=(True,), batch_size=(64,), amp=(Amp.FP32,)
)


# --- how much is measured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [1, 2, 7])
def test_the_budget_of_trials_is_spent_and_not_passed(lab, trials):
    runner = ScriptedRunner(rate=loader_bound)
    result = lab.run(study_config(trials=trials), runner)
    assert len(runner.searched) == trials
    assert len(result.records) == trials


def test_failed_trials_count_too(lab):
    runner = ScriptedRunner(fails=fails_with(FailureKind.CRASH, lambda config: config.batch_size == 256))
    lab.run(study_config(trials=7, baseline=trial_config(0)), runner)
    assert len(runner.searched) == 7


@pytest.mark.usefixtures("whole_budget")
@pytest.mark.parametrize("seed", range(3))
def test_no_configuration_but_the_reference_is_measured_twice(lab, seed):
    runner = ScriptedRunner(rate=loader_bound, facts=facts(gpu=True), seed=seed)
    lab.run(study_config(trials=20, seed=seed), runner)
    references = [config for purpose, config in lab.told.began if purpose == "reference"]
    assert len(references) == 2
    assert len(set(references)) == 1
    assert len(set(runner.searched)) == 18


def test_only_what_was_declared_is_measured(lab):
    runner = ScriptedRunner(facts=facts(gpu=True))
    declared = DeclaredSpace(num_workers=(0, 3, 7), batch_size=(64, 256), prefetch_factor=(5,), amp=(Amp.FP16,))
    lab.run(study_config(trials=12, search=declared, baseline=trial_config(0)), runner)
    points = space(num_workers=(0, 3, 7), batch_size=(64, 256), prefetch_factor=(5,), amp=(Amp.FP16,))
    assert all(config in points for config in runner.searched[1:])


def test_optuna_knows_the_same_parameters_as_were_measured(lab):
    lab.run(study_config(trials=14), ScriptedRunner(rate=loader_bound, facts=facts(gpu=True)))
    assert mismatched(lab.store()) == {}


def test_a_small_space_is_measured_once_and_then_it_stops(lab):
    runner = ScriptedRunner()
    declared = DeclaredSpace(num_workers=(0, 1), prefetch_factor=(2,), persistent_workers=(False,), batch_size=(256,))
    result = lab.run(study_config(trials=50, search=declared), runner)
    assert len(runner.searched) == 2
    assert "every configuration that can work here has been measured" in result.summary.notes


def test_a_finished_study_has_no_running_trial(lab):
    # GIVEN a study that ended because its space was exhausted
    lab.run(study_config(trials=50, search=ONE_POINT), ScriptedRunner())
    # THEN Optuna's own tools show nothing that still runs
    assert OptunaState.RUNNING not in {trial.state for trial in lab.store().study.trials}


def test_it_gets_better(lab):
    result = lab.run(study_config(trials=12), ScriptedRunner(rate=loader_bound, facts=facts(gpu=True)))
    assert result.tuned.config.num_workers >= 4
    assert result.tuned.speedup > 4


# --- memory that ran out ---------------------------------------------------------------------------------------


def test_nothing_larger_than_what_ran_out_of_gpu_memory_is_tried_in_that_precision(lab):
    # GIVEN a GPU that holds 64 samples in fp32 and 128 in half precision
    def too_large(config):
        return config.batch_size > (64 if config.amp is Amp.FP32 else 128)

    runner = ScriptedRunner(facts=facts(gpu=True), fails=fails_with(FailureKind.GPU_OUT_OF_MEMORY, too_large))
    lab.run(study_config(trials=30), runner)
    # THEN whatever followed a failure is smaller, or of another precision
    met = []
    for config in runner.searched:
        assert not any(config.amp is one.amp and config.batch_size >= one.batch_size for one in met)
        if too_large(config):
            met.append(config)
    assert met
    assert len(runner.searched) == 30


@pytest.mark.parametrize("kind", [FailureKind.SHARED_MEMORY, FailureKind.HOST_OUT_OF_MEMORY])
def test_nothing_that_holds_more_batches_than_what_ran_out_of_memory_is_tried(lab, kind):
    def held(config):
        return config.num_workers * (config.prefetch_factor or 0) * config.batch_size

    runner = ScriptedRunner(fails=fails_with(kind, lambda config: held(config) > 1000))
    lab.run(study_config(trials=30), runner)
    met = []
    for config in runner.searched:
        assert not any(
            config.num_workers >= one.num_workers
            and config.batch_size >= one.batch_size
            and (config.prefetch_factor or 0) >= one.prefetch_factor
            for one in met
        )
        if held(config) > 1000:
            met.append(config)
    assert met


@pytest.mark.usefixtures("whole_budget")
def test_running_out_of_memory_often_does_not_end_the_search(lab):
    runner = ScriptedRunner(facts=facts(gpu=True), fails=gpu_holds(4), rate=loader_bound)
    result = lab.run(study_config(trials=25), runner)
    assert len(runner.searched) == 25
    assert result.tuned.status is Status.CERTIFIED
    assert result.tuned.config.batch_size == 4


# --- failures --------------------------------------------------------------------------------------------------


def test_where_nothing_works_the_reasons_are_told(lab):
    runner = ScriptedRunner(fails=fails_with(FailureKind.ERROR))
    with pytest.raises(NothingWorksError) as caught:
        lab.run(study_config(trials=30), runner)
    assert str(caught.value) == (
        "no configuration works: 5 trials, none ran to its end\n"
        "  5 x error in warm_up: RuntimeError: boom\n"
        "\n"
        "the first of them (w=0 b=256 fp32):\n"
        "Traceback of call 0\nRuntimeError: boom\n"
    )
    assert len(runner.calls) == 5


def test_where_nothing_works_an_older_file_is_left_alone(lab):
    lab.best_file.write_text("status: an older one\n")
    with pytest.raises(NothingWorksError):
        lab.run(study_config(), ScriptedRunner(fails=fails_with(FailureKind.CRASH)))
    assert lab.best_file.read_text() == "status: an older one\n"
    assert lab.written == []


def test_unlike_reasons_are_counted_each(lab):
    def fails(call):
        return FailureKind.TIMEOUT if call.index % 3 == 2 else FailureKind.CRASH

    with pytest.raises(NothingWorksError) as caught:
        lab.run(study_config(trials=8), ScriptedRunner(fails=fails))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no configuration works: 8 trials, none ran to its end"
    assert lines[1] == "  6 x crash in warm_up: ended by signal 11 (SIGSEGV)"
    assert lines[2].startswith("  2 x timeout in warm_up: ended after 90 s")
    assert "log of call 0" in lines


def test_unlike_failures_do_not_end_the_search(lab):
    def fails(call):
        kinds = (FailureKind.CRASH, FailureKind.TIMEOUT)
        return None if call.config == trial_config(0) else kinds[call.index % 2]

    runner = ScriptedRunner(fails=fails)
    lab.run(study_config(trials=12, baseline=trial_config(0)), runner)
    assert len(runner.searched) == 12


def test_five_like_failures_in_a_row_end_the_search_and_what_ran_is_the_result(lab):
    runner = ScriptedRunner(fails=fails_with(FailureKind.CRASH, lambda config: config != trial_config(0)))
    result = lab.run(study_config(trials=30, baseline=trial_config(0)), runner)
    assert len(runner.searched) == 6
    assert "stopped searching: 5 trials in a row failed with crash" in result.summary.notes
    assert (result.tuned.status, result.tuned.config) == (Status.NO_GAIN, trial_config(0))


# --- wider -----------------------------------------------------------------------------------------------------


def waiting_loader(config):
    """A loader that waits for storage: each worker adds the same, far beyond the CPUs."""
    return 60.0 * max(0.5, config.num_workers)


def test_workers_are_widened_where_the_leader_has_the_most_and_waits(lab):
    runner = ScriptedRunner(rate=waiting_loader, waits=lambda _: 60.0)
    result = lab.run(study_config(trials=12), runner)
    # THEN the search goes past the 4 CPUs, half as many again at a time, and says so
    counts = [config.num_workers for config in runner.searched]
    assert counts[counts.index(4) + 1] == 6
    assert max(counts) > 9
    assert result.tuned.config.num_workers == max(counts)
    assert result.summary.notes[0] == (
        "the best so far uses all 4 workers that were allowed and still waits for data: up to 6 are tried"
    )
    assert mismatched(lab.store()) == {}


def test_widening_ends_at_the_limit(lab):
    runner = ScriptedRunner(rate=waiting_loader, waits=lambda _: 60.0)
    lab.run(study_config(trials=30), runner)
    assert max(config.num_workers for config in runner.searched) == 4 * WORKERS_PER_CPU_LIMIT


@pytest.mark.parametrize(
    ("declared", "waits"),
    [
        (DeclaredSpace(), 9.0),  # the leader does not wait
        (DeclaredSpace(num_workers=(0, 2, 4)), 60.0),  # the user said which counts
    ],
)
def test_workers_are_not_widened(lab, declared, waits):
    runner = ScriptedRunner(rate=waiting_loader, waits=lambda _: waits)
    lab.run(study_config(trials=15, search=declared), runner)
    assert max(config.num_workers for config in runner.searched) == 4


def test_workers_are_not_widened_for_a_leader_below_the_top(lab):
    runner = ScriptedRunner(rate=lambda config: 1000.0 - abs(config.num_workers - 2) * 100, waits=lambda _: 60.0)
    lab.run(study_config(trials=15), runner)
    assert max(config.num_workers for config in runner.searched) == 4


# --- from an older file ----------------------------------------------------------------------------------------

OLDER = trial_config(2, prefetch_factor=4, persistent_workers=True, batch_size=32, accumulation_steps=8)


def test_an_older_result_is_tried_right_after_the_baseline(lab):
    runner = ScriptedRunner()
    lab.run(study_config(trials=3), runner, start_from=OLDER)
    assert runner.searched[1] == OLDER


def test_an_older_result_from_elsewhere_is_moved_into_the_space(lab):
    runner = ScriptedRunner()
    elsewhere = trial_config(40, batch_size=1000, accumulation_steps=1, amp=Amp.BF16)
    lab.run(study_config(trials=3), runner, start_from=elsewhere)
    assert (runner.searched[1].num_workers, runner.searched[1].batch_size) == (4, 256)


def test_an_older_result_where_all_is_measured_already_changes_nothing(lab):
    # GIVEN a space of one point, which is the baseline
    only = trial_config(2, prefetch_factor=2, persistent_workers=True)
    config = study_config(trials=5, search=ONE_POINT, baseline=only)
    result = lab.run(config, ScriptedRunner(), start_from=OLDER)
    assert [record.config for record in result.records] == [only]


# --- what is told ----------------------------------------------------------------------------------------------


def test_other_programs_on_the_machine_are_told_of_once(lab):
    result = lab.run(study_config(trials=2), ScriptedRunner(), busy_cpus=1.5)
    assert result.summary.notes == (
        "other programs keep 1.5 of 64 CPUs busy: what is best beside them may not be best without them",
    )


def test_an_idle_machine_is_no_news(lab):
    assert lab.run(study_config(trials=2), ScriptedRunner(), busy_cpus=0.2).summary.notes == ()


def test_progress_is_told_trial_by_trial(lab):
    lab.run(study_config(trials=5), ScriptedRunner(rate=loader_bound))
    purposes = [purpose for purpose, _ in lab.told.began]
    assert purposes[:6] == ["baseline", "search", "search", "search", "search", "certify"]
    assert [record.number for record, _ in lab.told.ended] == [0, 1, 2, 3, 4]


def test_the_best_so_far_only_improves(lab):
    lab.run(study_config(trials=10), ScriptedRunner(rate=loader_bound, sigma=0.0, drift=0.0))
    rates = [best.measurement.steady().value for _, best in lab.told.ended]
    assert rates == sorted(rates)


def test_no_best_is_told_before_one_ran(lab):
    runner = ScriptedRunner(facts=facts(gpu=True), fails=gpu_holds(64))
    lab.run(study_config(trials=4), runner)
    assert [best is None for _, best in lab.told.ended] == [True, True, False, False]


def test_a_provisional_result_is_written_after_every_trial(lab):
    lab.run(study_config(trials=5), ScriptedRunner(rate=loader_bound))
    assert [tuned.status for tuned in lab.written] == [Status.PROVISIONAL] * 5 + [Status.CERTIFIED]


# --- the reference ---------------------------------------------------------------------------------------------


def references(lab):
    return [index for index, (purpose, _) in enumerate(lab.told.began) if purpose == "reference"]


@pytest.mark.usefixtures("whole_budget")
def test_the_reference_comes_back_every_few_trials(lab):
    runner = ScriptedRunner(rate=loader_bound)
    result = lab.run(study_config(trials=22), runner)
    assert references(lab) == [EVERY, 2 * EVERY + 1, 3 * EVERY + 2]
    # THEN it is the fastest of the first few, a trial like others, and known to Optuna as what it is
    first = [(record.measurement.steady().value, record.config) for record in result.records[:4]]
    assert {runner.searched[index] for index in references(lab)} == {max(first, key=lambda pair: pair[0])[1]}
    assert len(result.records) == 22
    assert mismatched(lab.store()) == {}


def test_short_studies_have_no_reference(lab):
    lab.run(study_config(trials=EVERY), ScriptedRunner(rate=loader_bound))
    assert references(lab) == []


@pytest.mark.usefixtures("whole_budget")
def test_the_reference_goes_on_in_the_next_run(lab):
    lab.run(study_config(trials=EVERY + 2), ScriptedRunner(rate=loader_bound))
    lab.run(study_config(trials=2 * EVERY + 2), ScriptedRunner(rate=loader_bound))
    # THEN it counts trials of the earlier run: its first return was trial 6, the next is trial 13
    assert [lab.records()[index + EVERY + 2].number for index in references(lab)] == [2 * EVERY + 1]


def test_a_reference_that_fails_once_is_no_end(lab):
    runner = ScriptedRunner(
        rate=loader_bound, fails=lambda call: FailureKind.CRASH if call.seen == 1 and not call.fresh else None
    )
    result = lab.run(study_config(trials=10), runner)
    assert references(lab) == [EVERY]
    assert result.records[EVERY].failure is not None
    assert len(result.records) == 10
    assert result.tuned.status is Status.CERTIFIED


def test_drift_between_two_trials_of_the_reference_is_told_in_figures(lab):
    # GIVEN a machine that is 20 % slower from the seventh trial on
    runner = ScriptedRunner(rate=lambda _: 1000.0, drift=0.0, scale=lambda call: 0.8 if call.index >= EVERY else 1.0)
    result = lab.run(study_config(trials=8, epochs=1), runner)
    (note,) = [note for note in result.summary.notes if note.startswith("the reference ")]
    assert re.search(
        r"made [\d.]+ samples/s in trial \d and [\d.]+ \(-(19|20) %\) in trial 6: this machine is not steady", note
    )


@pytest.mark.parametrize("scale", [0.95, 1.0, 1.05])
def test_a_steady_machine_is_no_news(lab, scale):
    runner = ScriptedRunner(rate=lambda _: 1000.0, scale=lambda call: scale if call.index >= EVERY else 1.0)
    result = lab.run(study_config(trials=8), runner)
    assert not any(note.startswith("the reference ") for note in result.summary.notes)


def test_a_difference_inside_the_noise_of_both_trials_is_no_news(lab):
    # GIVEN trials that are not sure of their own rate to 20 %
    runner = ScriptedRunner(rate=lambda _: 1000.0, sigma=0.3, scale=lambda call: 0.9 if call.index >= EVERY else 1.0)
    result = lab.run(study_config(trials=8), runner)
    assert not any(note.startswith("the reference ") for note in result.summary.notes)


def test_a_lucky_repeat_of_the_reference_does_not_lead(lab):
    # GIVEN a trial that is 70 % faster than all, and a reference that is twice as fast when it comes back
    fast = {4: 1.7, EVERY: 2.0}
    runner = ScriptedRunner(scale=lambda call: fast.get(call.index, 1.0))
    lab.run(study_config(trials=8, epochs=1), runner)
    assert [best.number for _, best in lab.told.ended][4:] == [4] * 4
    assert references(lab) == [EVERY]


def slow_store(config):
    """20 ms a sample, nearly all of them waiting."""
    return 50.0 * max(1, config.num_workers) if config.num_workers < 20 else 1000.0


def test_where_reading_is_waiting_many_workers_are_tried_from_the_start(lab):
    lab.machine = hardware(cpus_usable=2)
    runner = ScriptedRunner(rate=slow_store, waits=lambda config: 95.0 if config.num_workers < 16 else 10.0, works=0.02)
    result = lab.run(study_config(trials=5), runner)
    assert max(config.num_workers for config in runner.searched) >= 12
    assert result.tuned.config.num_workers >= 12
    assert any("waiting for 98% of its time: up to 16 workers" in note for note in result.summary.notes)


@pytest.mark.parametrize(
    ("works", "declared"), [(0.6, "auto"), (None, "auto"), (0.02, (0, 1, 2))], ids=["work", "unknown", "listed"]
)
def test_otherwise_the_search_begins_with_the_cpus(lab, works, declared):
    lab.machine = hardware(cpus_usable=2)
    runner = ScriptedRunner(rate=slow_store, waits=lambda config: 95.0 if config.num_workers == 0 else 1.0, works=works)
    lab.run(study_config(trials=5, search=DeclaredSpace(num_workers=declared)), runner)
    assert max(config.num_workers for config in runner.searched) == 2


# --- races -----------------------------------------------------------------------------------------------------


def raced(lab, objective=Objective.THROUGHPUT):
    """A baseline of 1000/s, and everything with workers far behind it."""
    runner = ScriptedRunner(
        rate=lambda config: 500.0 if config.num_workers else 1000.0, facts=facts(gpu=True), gpu=lambda _: 50.0
    )
    result = lab.run(study_config(trials=8, objective=objective), runner)
    return runner, result


def test_what_cannot_come_near_the_best_is_ended_early_and_is_a_finished_trial(lab):
    _, result = raced(lab)
    ended = [record for record in result.records if record.measurement.censored]
    assert ended
    assert all(record.config.num_workers for record in ended)
    trials = {trial.number: trial for trial in lab.store().study.trials}
    assert all(trials[record.number].state is OptunaState.COMPLETE for record in ended)
    assert all("ended early" in record.measurement.remarks()[0] for record in ended)


def test_what_was_ended_early_is_never_measured_again_to_choose(lab):
    runner, result = raced(lab)
    ended = {record.config for record in result.records if record.measurement.censored}
    assert not ended & {call.config for call in runner.certified}


def test_the_baseline_the_reference_and_the_finalists_run_to_their_end(lab):
    runner, _ = raced(lab)
    assert runner.calls[0].least_rate is None
    assert all(call.least_rate is None for call in runner.certified)
    # THEN what is asked for leaves room for the noise between trials
    assert 800 < runner.calls[1].least_rate <= 900


def test_where_utilisation_counts_nothing_is_ended_early(lab):
    runner, _ = raced(lab, Objective.WEIGHTED)
    assert all(call.least_rate is None for call in runner.calls)
