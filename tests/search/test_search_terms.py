from dataclasses import replace

import pytest
from builders import facts, hardware
from lab import study_config, with_trials

from pipetune.core.objective import Objective
from pipetune.core.space import Amp, DeclaredSpace
from pipetune.core.study import CachePolicy, WorkloadSpec
from pipetune.errors import InputError
from pipetune.search.terms import check_cache, hardware_facts, measure_limits, resolved_space, study_key, training_plan


@pytest.mark.parametrize(("seconds", "max_s"), [(60.0, 4.0), (300.0, 10.0), (3600.0, 20.0), (None, 20.0)])
def test_a_trial_measures_in_proportion_to_the_budget(seconds, max_s):
    assert measure_limits(study_config(seconds=seconds)).max_s == pytest.approx(max_s)


def test_a_cold_cache_needs_files_to_drop():
    config = study_config(cache=CachePolicy.COLD)
    check_cache(config, facts(has_data_paths=True))
    with pytest.raises(InputError, match="give the Workload its data_paths"):
        check_cache(config, facts(has_data_paths=False))
    check_cache(study_config(), facts(has_data_paths=False))


# --- the plan --------------------------------------------------------------------------------------------------


def test_an_epoch_is_as_long_as_the_dataset():
    assert training_plan(study_config(), facts(dataset_samples=777)).epoch_samples == 777


def test_an_epoch_is_as_long_as_the_user_says():
    assert training_plan(study_config(epoch_samples=10_000), facts(dataset_samples=777)).epoch_samples == 10_000


def test_a_dataset_without_a_length_needs_epoch_samples():
    with pytest.raises(InputError, match=r"^training\.epoch_samples: the dataset has no length"):
        training_plan(study_config(), facts(dataset_samples=None, is_iterable=True))


def test_an_epoch_shorter_than_a_step_is_refused():
    with pytest.raises(InputError, match=r"^training\.effective_batch_size: 256 is more than the 255 samples"):
        training_plan(study_config(), facts(dataset_samples=255))


# --- the space -------------------------------------------------------------------------------------------------


def test_the_space_is_of_this_machine_and_this_device():
    found = resolved_space(study_config(), facts(gpu=True), hardware(6))
    assert (found.num_workers[-1], found.amp, found.pin_memory) == (6, tuple(Amp), (False, True))


def test_one_epoch_keeps_no_workers():
    assert resolved_space(study_config(epochs=1), facts(), hardware()).persistent_workers == (False,)


@pytest.mark.parametrize(("is_iterable", "largest"), [(False, 64), (True, 256)])
def test_a_batch_fits_a_dataset_that_has_a_length(is_iterable, largest):
    found = resolved_space(study_config(), facts(dataset_samples=100, is_iterable=is_iterable), hardware())
    assert found.batch_size[-1] == largest


def test_the_workloads_own_batch_is_kept():
    assert resolved_space(study_config(), facts(fixed_batch=32), hardware()).batch_size == (32,)


# --- the key ---------------------------------------------------------------------------------------------------


def key(config=None, found=None, machine=None):
    config, found = config or study_config(), found or facts()
    return study_key(config, training_plan(config, found), machine or hardware(), found).digest()


@pytest.mark.parametrize(
    "other",
    [
        with_trials(study_config(), 99),
        study_config(trials=None, seconds=60.0),
        study_config(seed=7),
        study_config(study="renamed"),
    ],
)
def test_what_is_no_part_of_the_key(other):
    assert key(other) == key()


@pytest.mark.parametrize(
    "other",
    [
        study_config(workload=WorkloadSpec(target="job.py:other", options={}, folder="/")),
        study_config(workload=WorkloadSpec(target="job.py:build", options={"depth": 50}, folder="/")),
        study_config(search=DeclaredSpace(num_workers=(0, 4))),
        study_config(search=DeclaredSpace(amp=(Amp.FP32,))),
        study_config(objective=Objective.PARETO),
        study_config(effective_batch_size=128),
        study_config(epochs=3),
        study_config(epoch_samples=1000),
        study_config(cache=CachePolicy.COLD),
    ],
)
def test_what_makes_another_study(other):
    assert key(other) != key()


def test_another_machine_makes_another_study():
    assert key(machine=hardware(8)) != key()
    assert key(found=facts(gpu=True)) != key()


def test_more_memory_makes_no_other_study():
    assert key(machine=replace(hardware(), memory_bytes=1)) == key()


def test_the_order_of_options_makes_no_other_study():
    one, other = (
        study_config(workload=WorkloadSpec(target="job.py:build", options=options, folder="/"))
        for options in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    assert key(one) == key(other)


def test_the_machine_in_the_file():
    found = hardware_facts(hardware(16, driver="570.1"), facts(gpu=True))
    assert (found["gpu"], found["cpus_usable"], found["driver"]) == ("NVIDIA H200", 16, "570.1")
    assert found["amps"] == ["fp32", "bf16", "fp16"]
    assert hardware_facts(hardware(), facts())["gpu"] is None
