import pytest
from builders import space, spaces, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.space import (
    WORKERS_PER_CPU_LIMIT,
    Amp,
    Bounds,
    DeclaredSpace,
    MachineLimits,
    TrialConfig,
    divisors,
    resolve,
    widened,
)
from pipetune.errors import InputError


def limits(**changes):
    values = {"cpus_usable": 4, "has_accelerator": True, "amps": (Amp.FP32, Amp.BF16), "epochs": 10}
    return MachineLimits(**values | changes)


def resolved(effective_batch_size=256, machine=None, **declared):
    return resolve(DeclaredSpace(**declared), machine or limits(), effective_batch_size=effective_batch_size)


def refusal(effective_batch_size=256, machine=None, **declared):
    with pytest.raises(InputError) as caught:
        resolved(effective_batch_size, machine, **declared)
    return str(caught.value)


# --- one point -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_workers": -1}, "num_workers is -1; it must be 0 or more"),
        ({"batch_size": 0}, "batch_size is 0 and accumulation_steps 4; both must be 1 or more"),
        ({"accumulation_steps": 0}, "batch_size is 64 and accumulation_steps 0; both must be 1 or more"),
        ({"prefetch_factor": None}, "prefetch_factor is None; with workers it must be 1 or more"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0; with workers it must be 1 or more"),
    ],
)
def test_a_config_that_torch_would_refuse_cannot_be_made(changes, told):
    with pytest.raises(InputError) as caught:
        trial_config(**{"num_workers": 4, "prefetch_factor": 2} | changes)
    assert str(caught.value) == told


@pytest.mark.parametrize("changes", [{"prefetch_factor": 2}, {"persistent_workers": True}])
def test_worker_knobs_are_refused_at_0_workers(changes):
    with pytest.raises(InputError, match=r"prefetch_factor must be null and persistent_workers false"):
        trial_config(0, **changes)


def test_amp_is_read_from_its_name():
    assert trial_config(amp="bf16").amp is Amp.BF16


def test_equal_configs_are_one_key():
    assert {trial_config(amp="bf16"): 1}[trial_config(amp=Amp.BF16)] == 1


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (trial_config(0, batch_size=256, accumulation_steps=1), "w=0 b=256 fp32"),
        (
            trial_config(8, batch_size=256, accumulation_steps=2, pin_memory=True, amp=Amp.BF16),
            "w=8 p=2 pin persist b=256x2 bf16",
        ),
    ],
)
def test_label(config, label):
    assert config.label() == label


def test_bounds_that_are_upside_down_are_refused():
    with pytest.raises(InputError, match=r"^min is 8 and max 2; min must not exceed max$"):
        Bounds(low=8, high=2)


# --- the space -------------------------------------------------------------------------------------------------


@given(spaces())
def test_len_counts_the_points(points):
    assert len(points) == len(list(points.configs()))


@given(spaces())
def test_no_point_twice(points):
    assert len(set(points.configs())) == len(points)


@given(spaces())
def test_every_point_is_a_member(points):
    assert all(config in points for config in points.configs())


@given(spaces())
def test_the_effective_batch_never_changes(points):
    assert {config.effective_batch_size for config in points.configs()} == {points.effective_batch_size}


@given(spaces())
def test_without_workers_there_is_nothing_to_prefetch_or_to_keep(points):
    serial = [config for config in points.configs() if config.num_workers == 0]
    assert bool(serial) == (0 in points.num_workers)
    assert all(config.prefetch_factor is None and not config.persistent_workers for config in serial)


@given(spaces(), st.data())
def test_a_point_of_another_space_is_a_member_only_where_it_is_listed(points, data):
    other = data.draw(spaces())
    config = data.draw(st.sampled_from(list(other.configs())))
    assert (config in points) == (config in set(points.configs()))


@pytest.mark.parametrize(
    "config",
    [
        trial_config(3),
        trial_config(4, prefetch_factor=8),
        trial_config(4, batch_size=32, accumulation_steps=8),
        trial_config(4, batch_size=64, accumulation_steps=2),
        trial_config(4, amp=Amp.FP16),
        "w=4 p=2 persist b=64x4 fp32",
    ],
)
def test_not_a_member(config):
    assert config not in space()


# --- divisors --------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_divisors_are_all_that_divide(number):
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


@pytest.mark.parametrize("number", [10**12, (10**6 + 3) ** 2])
def test_divisors_of_large_numbers_pair_up(number):
    found = divisors(number)
    assert [number // d for d in reversed(found)] == list(found)


# --- auto ------------------------------------------------------------------------------------------------------


def test_auto_on_a_gpu():
    assert resolved() == space(
        num_workers=(0, 1, 2, 3, 4), prefetch_factor=(2, 4, 8), batch_size=(4, 8, 16, 32, 64, 128, 256)
    )


def test_auto_on_a_cpu_has_nothing_to_pin():
    assert resolved(machine=limits(has_accelerator=False)).pin_memory == (False,)


def test_auto_for_one_epoch_has_no_workers_to_keep():
    assert resolved(machine=limits(epochs=1)).persistent_workers == (False,)


def test_auto_tries_a_worker_on_one_cpu():
    assert resolved(machine=limits(cpus_usable=1)).num_workers == (0, 1)


def test_auto_leaves_out_batches_that_are_launch_time_alone():
    assert resolved(2**20).batch_size[0] == 2**20 // 64


def test_auto_batches_fit_the_dataset():
    assert resolved(machine=limits(largest_batch=100)).batch_size[-1] == 64


def test_auto_takes_the_precisions_of_the_device():
    assert resolved(machine=limits(amps=(Amp.FP32,))).amp == (Amp.FP32,)


# --- declared --------------------------------------------------------------------------------------------------


def test_lists_are_taken_sorted_and_once():
    found = resolved(
        num_workers=(7, 0, 3, 7),
        prefetch_factor=(4, 1, 4),
        batch_size=(256, 32, 256),
        pin_memory=(True, False, True),
        amp=(Amp.BF16, Amp.FP32, Amp.BF16),
    )
    assert (found.num_workers, found.prefetch_factor, found.batch_size) == ((0, 3, 7), (1, 4), (32, 256))
    assert (found.pin_memory, found.amp) == ((False, True), (Amp.FP32, Amp.BF16))


def test_listed_workers_may_pass_the_cpus():
    assert resolved(num_workers=(0, 100)).num_workers == (0, 100)


def test_ranges_are_inclusive():
    found = resolved(
        num_workers=Bounds(low=2, high=5), prefetch_factor=Bounds(low=1, high=3), batch_size=Bounds(low=16, high=64)
    )
    assert found.num_workers == (2, 3, 4, 5)
    assert found.prefetch_factor == (1, 2, 3)
    assert found.batch_size == (16, 32, 64)


def test_a_fixed_value_is_the_only_one():
    found = resolved(
        num_workers=(6,),
        prefetch_factor=(3,),
        pin_memory=(False,),
        persistent_workers=(True,),
        batch_size=(128,),
        amp=(Amp.BF16,),
    )
    assert list(found.configs()) == [
        TrialConfig(
            num_workers=6,
            prefetch_factor=3,
            pin_memory=False,
            persistent_workers=True,
            batch_size=128,
            accumulation_steps=2,
            amp=Amp.BF16,
        )
    ]


def test_a_range_below_the_useful_batches_is_the_users_choice():
    assert resolved(batch_size=Bounds(low=1, high=2)).batch_size == (1, 2)


def test_the_workloads_own_batch_is_the_only_one():
    assert resolved(machine=limits(fixed_batch=32)).batch_size == (32,)


@given(st.integers(1, 4096), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 5000)))
def test_auto_always_resolves(effective_batch_size, cpus_usable, largest_batch):
    machine = limits(cpus_usable=cpus_usable, largest_batch=largest_batch)
    found = resolved(effective_batch_size, machine)
    assert 0 in found.num_workers
    assert cpus_usable in found.num_workers
    assert all(effective_batch_size % batch == 0 for batch in found.batch_size)
    assert largest_batch is None or found.batch_size[-1] <= largest_batch


# --- refused ---------------------------------------------------------------------------------------------------


def test_negative_workers_are_refused():
    assert refusal(num_workers=(-2, 4)) == "search.num_workers: -2 is not a worker count; use 0 or more"


def test_a_prefetch_of_0_is_refused():
    told = refusal(prefetch_factor=Bounds(low=0, high=4))
    assert told == "search.prefetch_factor: 0 is too small; torch needs 1 or more"


@pytest.mark.parametrize(("value", "nearest"), [(100, "64, 128"), (1000, "128, 256"), (-5, "1, 2")])
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(value, nearest):
    told = f"search.batch_size: {value} does not divide effective_batch_size 256; nearest that do: {nearest}"
    assert refusal(batch_size=(64, value)) == told


def test_a_batch_beyond_the_dataset_is_refused():
    told = refusal(machine=limits(largest_batch=100), batch_size=(128,))
    assert told == "search.batch_size: 128 is more than the 100 samples that the dataset holds"


def test_a_range_without_a_divisor_is_refused_with_the_divisors():
    assert refusal(7, batch_size=Bounds(low=2, high=6)) == (
        "search.batch_size: no divisor of effective_batch_size 7 is in the given range; divisors: 1, 7"
    )


def test_an_amp_that_the_device_lacks_is_refused():
    assert refusal(amp=(Amp.FP32, Amp.FP16)) == (
        "search.amp: this device has no fp16 of its own (an emulated one does not count); it supports fp32, bf16"
    )


def test_an_effective_batch_that_the_workloads_own_batch_does_not_divide_is_refused():
    assert refusal(machine=limits(fixed_batch=48)) == (
        "training.effective_batch_size: 256 is not a multiple of 48, "
        "the batch that the workload's own batch_sampler or make_loader gives"
    )


def test_a_listed_batch_that_the_workloads_own_batch_contradicts_is_refused():
    # GIVEN a batch sampler that gives 32, and a user who asks for 64 or 128
    told = refusal(machine=limits(fixed_batch=32), batch_size=(64, 128))
    assert told.startswith("search.batch_size: ")
    assert "32" in told


# --- widened ---------------------------------------------------------------------------------------------------


def test_widened_by_half():
    assert widened(space(num_workers=(0, 2, 8)), cpus_usable=4).num_workers == (0, 2, 8, 9, 10, 11, 12)


def test_widened_keeps_the_other_knobs():
    before = space()
    wider = widened(before, cpus_usable=4)
    assert set(before.configs()) < set(wider.configs())
    assert {config.num_workers for config in set(wider.configs()) - set(before.configs())} == {5, 6}


@given(st.integers(1, 600), st.integers(1, 64))
def test_widened_grows_up_to_the_limit_and_not_beyond(largest, cpus_usable):
    before = space(num_workers=(0, largest))
    wider = widened(before, cpus_usable=cpus_usable)
    limit = WORKERS_PER_CPU_LIMIT * cpus_usable
    assert (wider is before) == (largest >= limit)
    assert wider.num_workers[-1] <= max(limit, largest)


def test_widening_again_and_again_ends_at_the_limit():
    wider, before = space(), None
    while wider is not before:
        before, wider = wider, widened(wider, cpus_usable=2)
    assert wider.num_workers[-1] == 2 * WORKERS_PER_CPU_LIMIT


def test_widened_to_a_count():
    before = space(num_workers=(0, 1, 2))
    assert widened(before, cpus_usable=2, to=7).num_workers == tuple(range(8))
    assert widened(before, cpus_usable=2, to=100).num_workers[-1] == 2 * WORKERS_PER_CPU_LIMIT
    assert widened(before, cpus_usable=2, to=2) is before
