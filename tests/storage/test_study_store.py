import json
import random
import re
from dataclasses import replace

import optuna
import pytest
from builders import PLAN, failure, measurement, space, trial_config, usage
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as OptunaState

from pipetune.core.measurement import FailureKind, GpuUsage, Measurement, Phase, TrialFailure
from pipetune.core.record import Certification, CertificationState, Round, Stage, StudySummary
from pipetune.core.space import Amp
from pipetune.core.study import Budget
from pipetune.core.throughput import EpochStart, Window
from pipetune.errors import InputError, StudyConflictError
from pipetune.search.sampler import distributions, params_of
from pipetune.storage.study_store import StudyKey, StudyStore

KEY = StudyKey(parts={"workload": "job.py:build", "hardware": "abcd1234 (A CPU, 4 CPUs)", "objective": "throughput"})
SPACE = space()
RANGES = distributions(SPACE)


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "study.journal"


def opened(journal, *, key=KEY, study="quick", directions=1, url=None, fresh=False):
    return StudyStore.open(url, journal, study=study, key=key, directions=directions, fresh=fresh)


def told(store, outcome, values=None):
    """One trial with the outcome's configuration, told."""
    params = params_of(outcome.config)
    store.study.enqueue_trial(params)
    trial = store.study.ask({name: RANGES[name] for name in params})
    if values is None:
        values = [outcome.steady().value] if isinstance(outcome, Measurement) else []
    store.tell(trial, outcome.config, outcome, PLAN, values)
    return trial


# --- round trips -----------------------------------------------------------------------------------------------

seconds = st.floats(0, 1e5)
rates = st.floats(0, 1e9)
memory = st.one_of(st.none(), st.integers(0, 2**50))
percent = st.floats(0, 100)
configs = st.sampled_from(list(SPACE.configs()))


@st.composite
def measurements(draw):
    has_gpu = draw(st.booleans())
    return Measurement(
        config=draw(configs),
        windows=tuple(
            draw(
                st.lists(
                    st.builds(
                        Window,
                        samples=st.integers(1, 10**9),
                        seconds=st.floats(0.01, 100),
                        data_wait_s=seconds,
                        began_s=st.floats(0, 1e9),
                    ),
                    min_size=1,
                    max_size=5,
                )
            )
        ),
        epoch_start=EpochStart(fresh_s=draw(seconds), refill_s=draw(st.one_of(st.none(), seconds))),
        settled=draw(st.booleans()),
        gpu=GpuUsage(mean_percent=draw(percent), spread_percent=draw(percent), samples=draw(st.integers(1, 10**6)))
        if has_gpu
        else None,
        gpu_reason=None if has_gpu else draw(st.text(min_size=1)),
        peak_gpu_memory_bytes=draw(memory),
        host_memory_bytes=draw(memory),
        compute_only_samples_per_sec=draw(st.one_of(st.none(), rates)),
        seconds=draw(seconds),
        phase_seconds=draw(st.dictionaries(st.sampled_from([phase.value for phase in Phase]), seconds)),
    )


failures = st.builds(
    TrialFailure,
    config=configs,
    kind=st.sampled_from(FailureKind),
    phase=st.sampled_from(Phase),
    message=st.text(),
    traceback_text=st.text(),
    log_tail=st.text(),
    seconds=seconds,
)


@settings(max_examples=25)
@given(st.lists(st.one_of(measurements(), failures), min_size=1, max_size=3))
def test_what_was_measured_is_read_back_as_it_was(tmp_path_factory, outcomes):
    # GIVEN a study that was told of some trials
    journal = tmp_path_factory.mktemp("round") / "study.journal"
    store = opened(journal)
    for outcome in outcomes:
        told(store, outcome)
    # WHEN another process reads it
    records = StudyStore.read(journal).records()
    # THEN it sees the very same values
    assert [record.outcome for record in records] == outcomes
    assert [record.number for record in records] == list(range(len(outcomes)))
    assert [record.config for record in records] == [outcome.config for outcome in outcomes]
    assert [record.seconds for record in records] == [outcome.seconds for outcome in outcomes]


def test_bytes_that_are_no_text_do_not_spoil_a_study(journal):
    # GIVEN a failure that names a file which is not valid UTF-8, as os.fsdecode gives it
    outcome = failure(kind=FailureKind.ERROR, message="cannot open '/data/caf\udce9.jpg'")
    # WHEN it is told
    told(opened(journal), outcome)
    # THEN the study can still be read
    (record,) = StudyStore.read(journal).records()
    assert record.failure.kind is FailureKind.ERROR
    assert "cannot open '/data/caf" in record.failure.message


def test_records_grow_as_trials_are_told(journal):
    store = opened(journal)
    assert store.records() == ()
    told(store, measurement(trial_config(1)))
    assert [record.config.num_workers for record in store.records()] == [1]
    told(store, measurement(trial_config(2)))
    assert [record.config.num_workers for record in store.records()] == [1, 2]


def test_the_summary_is_kept(journal):
    summary = StudySummary(
        study="quick", plan=PLAN, space_size=7, most_workers=6, workers_limit="all", notes=("one", "zwölf"), seconds=1.5
    )
    store = opened(journal)
    assert store.summary() is None
    store.keep_summary(summary)
    assert StudyStore.read(journal).summary() == summary


@pytest.mark.parametrize("budget", [Budget(seconds=60.0, trials=None), Budget(seconds=None, trials=8)])
def test_the_certification_is_kept(journal, budget):
    leader, baseline = trial_config(4), trial_config(0)
    rounds = (
        Round(stage=Stage.CHOOSING, outcomes=(measurement(leader), failure(trial_config(3)))),
        Round(stage=Stage.VERIFYING, outcomes=(measurement(leader), measurement(baseline))),
    )
    certification = Certification(
        baseline=baseline,
        state=CertificationState.UNFINISHED,
        winner=None,
        rounds=rounds,
        trials=8,
        seconds=12.5,
        budget=budget,
    )
    store = opened(journal)
    assert store.certification() is None
    store.keep_certification(certification)
    assert StudyStore.read(journal).certification() == certification
    finished = replace(certification, state=CertificationState.FINISHED, winner=leader)
    store.keep_certification(finished)
    assert StudyStore.read(journal).certification() == finished


def test_a_certification_can_be_forgotten(journal):
    store = opened(journal)
    store.study.set_user_attr("certification", {"state": "finished"})
    store.keep_certification(None)
    assert store.certification() is None


# --- what optuna is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [FailureKind.GPU_OUT_OF_MEMORY, FailureKind.HOST_OUT_OF_MEMORY, FailureKind.SHARED_MEMORY]
)
def test_out_of_memory_is_told_as_worthless_and_infeasible(journal, kind):
    store = opened(journal)
    told(store, failure(kind=kind, message="too large"))
    (trial,) = store.study.trials
    assert (trial.state, trial.values) == (OptunaState.COMPLETE, [0.0])
    assert trial.constraints["memory"] > 0
    assert trial.user_attrs["failure"] == f"{kind} in measure: too large"


def test_what_ran_is_told_as_feasible(journal):
    store = opened(journal)
    told(store, measurement(rate=100.0))
    (trial,) = store.study.trials
    assert (trial.state, trial.values) == (OptunaState.COMPLETE, [pytest.approx(100.0)])
    assert trial.constraints["memory"] <= 0


def test_out_of_memory_has_a_value_for_each_direction(journal):
    store = opened(journal, directions=2)
    told(store, failure(kind=FailureKind.GPU_OUT_OF_MEMORY))
    assert store.study.trials[0].values == [0.0, 0.0]


def test_the_best_trial_never_is_out_of_memory(journal):
    # GIVEN a trial that did not fit, and one that scores even worse
    store = opened(journal)
    told(store, failure(trial_config(4), FailureKind.GPU_OUT_OF_MEMORY))
    told(store, measurement(trial_config(2)), [-1.0])
    # THEN the one that ran is the best
    assert store.study.best_trial.number == 1


def test_without_a_trial_that_ran_there_is_no_best(journal):
    store = opened(journal)
    told(store, failure(kind=FailureKind.GPU_OUT_OF_MEMORY))
    with pytest.raises(ValueError, match="feasible"):
        _ = store.study.best_trial


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if not kind.is_memory])
def test_what_is_broken_is_failed(journal, kind):
    store = opened(journal)
    told(store, failure(kind=kind, message="bang"))
    assert store.study.trials[0].state is OptunaState.FAIL
    assert store.records()[0].failure.kind is kind


def test_flat_figures_are_there_for_optunas_own_tools(journal):
    store = opened(journal)
    one = measurement(gpu=usage(80.0), gpu_reason=None, wait_share=0.25)
    told(store, one)
    attributes = store.study.trials[0].user_attrs
    assert attributes["effective_samples_per_sec"] == one.effective(PLAN).value
    assert attributes["steady_samples_per_sec"] == one.steady().value
    assert attributes["gpu_utilization_percent"] == 80.0
    assert attributes["data_wait_percent"] == pytest.approx(25.0)


def test_unknown_utilisation_is_null_and_not_0(journal):
    store = opened(journal)
    told(store, measurement(gpu=None))
    assert store.study.trials[0].user_attrs["gpu_utilization_percent"] is None


def workers_decide(journal, count):
    """So many trials of different workers, micro-batches and precisions, of which the workers alone matter."""
    store = opened(journal)
    configs = random.Random(0).sample(list(SPACE.configs()), count)
    for config in configs:
        told(store, measurement(config, rates=[100.0 + 10 * config.num_workers] * 8))
    return store


def test_importances_name_the_knob_that_decides(journal):
    importances = workers_decide(journal, 40).importances()
    assert set(importances) == set(RANGES)
    assert max(importances, key=importances.get) == "num_workers"
    assert sum(importances.values()) == pytest.approx(1)


def test_importances_are_those_that_optuna_shows(journal):
    store = workers_decide(journal, 12)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.load_study(study_name=store.name, storage=storage)
    ours = store.importances()  # warnings are errors here: it must not give any
    with pytest.warns(UserWarning, match="less than 2 trials"):
        assert ours == optuna.importance.get_param_importances(study)


def test_too_few_trials_tell_no_importances(journal):
    store = workers_decide(journal, 9)
    for _ in range(5):
        told(store, failure(trial_config(1), FailureKind.CRASH))
    assert store.importances() == {}


def test_trials_that_a_killed_run_left_running_are_failed(journal):
    # GIVEN a run that was killed during its second trial
    killed = opened(journal)
    told(killed, measurement(trial_config(1)))
    killed.study.ask(RANGES)
    # WHEN the next one begins
    store = opened(journal)
    store.fail_stale_trials()
    # THEN the trial is over, told trials are untouched, and it counts for nothing
    assert [trial.state for trial in store.study.trials] == [OptunaState.COMPLETE, OptunaState.FAIL]
    assert len(store.records()) == 1


def test_enqueued_trials_are_not_stale(journal):
    store = opened(journal)
    store.study.enqueue_trial(params_of(trial_config(4)))
    store.fail_stale_trials()
    assert store.study.trials[0].state is OptunaState.WAITING


def test_an_abandoned_trial_is_no_record(journal):
    store = opened(journal)
    store.abandon(store.study.ask())
    assert store.study.trials[0].state is OptunaState.FAIL
    assert store.records() == ()


def test_plain_optuna_opens_the_journal(journal):
    # GIVEN a study of 14 trials, one out of memory and one crashed
    store = opened(journal)
    serial = [config for config in SPACE.configs() if config.num_workers == 0]
    parallel = [config for config in SPACE.configs() if config.num_workers > 0]
    chosen = random.Random(0).sample(serial, 4) + random.Random(0).sample(parallel, 8)
    for number, config in enumerate(chosen):
        told(store, measurement(config, rate=100.0 + 10 * number))
    told(store, failure(trial_config(1), FailureKind.GPU_OUT_OF_MEMORY))
    told(store, failure(trial_config(2), FailureKind.CRASH))
    # WHEN Optuna opens it without a word from us
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.load_study(study_name=None, storage=storage)
    # THEN trials, parameters and importances are there
    assert study.study_name == f"quick-{KEY.digest()}"
    assert len(study.trials) == 14
    assert study.best_trial.number == 11
    assert set(optuna.importance.get_param_importances(study)) == set(params_of(trial_config(1)))


# --- opening ---------------------------------------------------------------------------------------------------


def test_the_same_key_opens_the_same_study(journal):
    told(opened(journal), measurement())
    assert len(opened(journal).records()) == 1


def test_the_order_of_parts_is_no_difference(journal):
    told(opened(journal), measurement())
    turned = StudyKey(parts=dict(reversed(KEY.parts.items())))
    assert len(opened(journal, key=turned).records()) == 1


def test_another_key_is_refused_with_the_parts_that_differ(journal):
    told(opened(journal), measurement())
    other = StudyKey(parts={**KEY.parts, "workload": "job.py:other", "objective": "pareto"})
    with pytest.raises(StudyConflictError) as caught:
        opened(journal, key=other)
    assert str(caught.value) == (
        f"{journal.parent} holds a study of something else (objective: throughput there, pareto now; "
        "workload: job.py:build there, job.py:other now); start over with --fresh, "
        "or choose another folder with --study-dir"
    )


def test_a_study_without_a_measured_trial_refuses_nobody(journal):
    told(opened(journal), failure())
    other = StudyKey(parts={**KEY.parts, "objective": "pareto"})
    assert opened(journal, key=other).records() == ()


def test_an_empty_study_of_this_key_does_not_let_it_in_beside_a_measured_one(journal):
    # GIVEN a study that was begun and never measured, and another that has a result in this folder
    opened(journal)
    other = StudyKey(parts={**KEY.parts, "training": "128 x 2 epochs of 1024"})
    told(opened(journal, key=other), measurement())
    # THEN the first may not go on there and write over it
    with pytest.raises(StudyConflictError):
        opened(journal)


def test_a_refused_key_leaves_the_journal_as_it_was(journal):
    told(opened(journal), measurement())
    before = journal.read_bytes()
    with pytest.raises(StudyConflictError):
        opened(journal, key=StudyKey(parts={**KEY.parts, "objective": "pareto"}))
    assert journal.read_bytes() == before


def test_a_study_of_another_name_is_told_apart_by_its_name(journal):
    # GIVEN a folder in which the study was called otherwise; all else is the same
    told(opened(journal, study="first"), measurement())
    with pytest.raises(StudyConflictError) as caught:
        opened(journal, study="second")
    # THEN the message says what differs: the name
    assert "first" in str(caught.value)
    assert "()" not in str(caught.value)


def test_a_part_that_is_new_is_a_difference(journal):
    told(opened(journal), measurement())
    with pytest.raises(StudyConflictError, match=r"\(cache: unknown there, warm now\)"):
        opened(journal, key=StudyKey(parts={**KEY.parts, "cache": "warm"}))


def test_one_database_holds_many_studies(tmp_path, journal):
    url = f"sqlite:///{tmp_path}/studies.db"
    told(opened(journal, url=url), measurement())
    other = opened(journal, url=url, key=StudyKey(parts={**KEY.parts, "objective": "pareto"}))
    assert other.records() == ()
    assert len(opened(journal, url=url).records()) == 1
    assert not journal.exists()


def test_fresh_forgets_the_trials(journal):
    told(opened(journal), measurement())
    assert opened(journal, fresh=True).records() == ()
    assert StudyStore.read(journal).records() == ()


def test_fresh_forgets_a_study_of_something_else(journal):
    told(opened(journal), measurement())
    other = StudyKey(parts={**KEY.parts, "objective": "pareto"})
    assert opened(journal, key=other, fresh=True).records() == ()


def test_fresh_needs_nothing_to_forget(journal):
    assert opened(journal, fresh=True).records() == ()


def test_fresh_in_a_database_forgets_this_study_alone(tmp_path, journal):
    # GIVEN a database with two studies
    url = f"sqlite:///{tmp_path}/studies.db"
    other = StudyKey(parts={**KEY.parts, "objective": "pareto"})
    told(opened(journal, url=url), measurement())
    told(opened(journal, url=url, key=other), measurement())
    # WHEN one starts over
    assert opened(journal, url=url, fresh=True).records() == ()
    # THEN the other is as it was
    assert len(opened(journal, url=url, key=other).records()) == 1


def test_fresh_replaces_a_garbage_journal(journal):
    journal.write_bytes(b"this is no journal\n")
    assert opened(journal, fresh=True).records() == ()


def test_trials_of_another_host_in_a_shared_storage_go_on(tmp_path, journal):
    store = opened(journal, url=f"sqlite:///{tmp_path}/studies.db")
    store.study.ask()
    store.fail_stale_trials()
    assert store.study.trials[0].state is OptunaState.RUNNING


def test_trials_of_any_state_are_counted(journal):
    store = opened(journal)
    assert store.trial_count() == 0
    told(store, measurement())
    store.abandon(store.study.ask())
    store.study.enqueue_trial(params_of(trial_config()))
    assert store.trial_count() == 3


def test_a_study_is_read_from_its_folder(journal):
    told(opened(journal), measurement())
    assert len(StudyStore.read(journal).records()) == 1


def test_reading_a_folder_without_a_study_is_bad_input(journal):
    with pytest.raises(InputError, match=r"there is no study\.journal"):
        StudyStore.read(journal)
    assert not journal.exists()


def test_a_study_is_read_by_its_name(tmp_path, journal):
    # GIVEN a database with two studies
    url = f"sqlite:///{tmp_path}/studies.db"
    mine = opened(journal, url=url)
    told(mine, measurement())
    opened(journal, url=url, key=StudyKey(parts={**KEY.parts, "objective": "pareto"}))
    # THEN each is found
    assert len(StudyStore.read(journal, url=url, name=mine.name).records()) == 1
    with pytest.raises(InputError, match="holds no study nobody"):
        StudyStore.read(journal, url=url, name="nobody")


def test_an_empty_journal_holds_no_study(journal):
    journal.touch()
    with pytest.raises(InputError, match=r"holds no study$"):
        StudyStore.read(journal)


def test_an_empty_journal_is_a_new_study(journal):
    journal.touch()
    assert opened(journal).records() == ()


GARBAGE = [
    b"this is no journal\n",
    b"\x00\xff\xfe\n\x80\n",
    b"[]\n",
    b"null\n",
    b'{"op_code": 99}\n',
    b'{"schema_version": 1}\n{"a": 1}\n',
]


@pytest.mark.parametrize("content", GARBAGE)
def test_opening_a_garbage_journal_is_bad_input(journal, content):
    journal.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(journal.parent))):
        opened(journal)


@pytest.mark.parametrize("content", GARBAGE)
def test_reading_a_garbage_journal_is_bad_input(journal, content):
    journal.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(journal.parent))):
        StudyStore.read(journal)


def test_a_write_that_a_kill_cut_short_costs_no_more_than_itself(journal):
    # GIVEN a run that was killed in the middle of a line
    told(opened(journal), measurement(trial_config(1)))
    with journal.open("ab") as file:
        file.write(b'{"op_code": 9, "worker_id": "abc", "tri')
    # WHEN the next run goes on
    store = opened(journal)
    told(store, measurement(trial_config(2)))
    # THEN all told trials are there, now and for whoever reads it later
    assert [record.config.num_workers for record in store.records()] == [1, 2]
    assert [record.config.num_workers for record in StudyStore.read(journal).records()] == [1, 2]


def test_a_trial_of_another_version_is_named(journal):
    store = opened(journal)
    trial = store.study.ask()
    trial.set_user_attr("outcome", {"speed": 1})
    store.study.tell(trial, 1.0)
    with pytest.raises(InputError, match=r"trial 0 of the study cannot be read \(written by another version\?\)"):
        store.records()


def test_a_study_of_another_version_is_named(journal):
    store = opened(journal)
    store.study.set_user_attr("summary", {"speed": 1})
    with pytest.raises(InputError, match="cannot be read"):
        store.summary()


def test_a_certification_of_another_version_is_none(journal):
    store = opened(journal)
    store.study.set_user_attr("certification", {"speed": 1})
    assert store.certification() is None


def test_the_key_is_plain_text_in_the_journal(journal):
    opened(journal)
    kept = [json.loads(line).get("user_attr", {}).get("key") for line in journal.read_text().splitlines()]
    assert dict(KEY.parts) in kept


# --- URLs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@nowhere.invalid/db",
        "mysql://me:hunter2@nowhere.invalid/db",
        "nonsense://me:hunter2@nowhere.invalid/db",
        "me:hunter2@nowhere.invalid",
        "redis://:hunter2@nowhere.invalid:6379",
        "sqlite:////nowhere/hunter2/study.db",
    ],
)
def test_a_password_in_a_url_is_not_told(journal, url):
    with pytest.raises(InputError) as caught:
        opened(journal, url=url)
    assert str(caught.value).startswith("storage: the given URL cannot be opened: ")
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_no_database_is_bad_input(tmp_path, journal):
    (tmp_path / "notes.db").write_text("dear diary\n" * 100)
    with pytest.raises(InputError, match=r"^storage: the given URL cannot be opened"):
        opened(journal, url=f"sqlite:///{tmp_path}/notes.db")


def test_amp_is_stored_by_its_name(journal):
    store = opened(journal)
    told(store, measurement(trial_config(4, amp=Amp.BF16)))
    assert store.study.trials[0].user_attrs["config"]["amp"] == "bf16"
