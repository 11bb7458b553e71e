import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.interference import (
    Cause,
    Disturbance,
    Finding,
    Reading,
    judge,
    storage_read_bytes,
    summary,
)

MIB = 2**20
QUIET = Reading(
    at_s=100.0,
    mask_cpus=4,
    busy_s=1000.0,
    steal_s=10.0,
    own_cpu_s=50.0,
    group_cpu_s=70.0,
    throttled_s=3.0,
    storage_read_bytes=10 * MIB,
    faulted_bytes=MIB,
    resident_bytes=500 * MIB,
    swapped_bytes=40 * MIB,
    memory_stall_s=2.0,
)


def after(seconds=1.0, **grown):
    """The reading that follows QUIET, with these counters that much larger."""
    values = {name: getattr(QUIET, name) + amount for name, amount in grown.items()}
    return dataclasses.replace(QUIET, at_s=QUIET.at_s + seconds, **values)


def found(reading, cpus=4.0):
    return judge(QUIET, reading, cpus=cpus)


def test_nothing_that_moved_is_nothing_found():
    assert found(after()).findings == ()


@pytest.mark.parametrize(
    ("busy", "own", "lines"),
    [
        (4.0, 4.0, ()),  # all of it ours
        (4.0, 3.1, ("other processes used 0.9 of 4 CPUs",)),
        (4.0, 3.7, ()),  # 7 % of the capacity is a trifle
        (3.0, 1.0, ()),  # two CPUs of others beside an idle one cost nothing
        (3.5, 2.5, ("other processes used 1.0 of 4 CPUs",)),
        (3.3, 0.0, ()),  # not full
        (4.0, 0.0, ("other processes used 4.0 of 4 CPUs",)),
        (3.9, 4.1, ()),  # ticks and exact times differ a little
    ],
)
def test_others_count_where_all_cpus_are_contended(busy, own, lines):
    result = found(after(busy_s=busy, own_cpu_s=own))
    assert (result.outside, result.own) == (lines, ())


def test_figures_are_a_second_whatever_the_windows_length():
    result = found(after(seconds=5, busy_s=20.0, own_cpu_s=10.0))
    assert result.outside == ("other processes used 2.0 of 4 CPUs",)
    assert result.findings[0].amount == pytest.approx(2.0)


def test_one_cpu_is_named_in_the_singular():
    before = dataclasses.replace(QUIET, mask_cpus=1)
    result = judge(before, dataclasses.replace(after(busy_s=1.0, own_cpu_s=0.5), mask_cpus=1), cpus=1)
    assert result.outside == ("other processes used 0.5 of 1 CPU",)


def test_a_few_ticks_in_a_very_short_window_are_noise():
    assert found(after(seconds=0.01, busy_s=0.04, own_cpu_s=0.0)).findings == ()


@pytest.mark.parametrize(
    ("busy", "steal", "lines"),
    [
        (3.5, 0.5, ("the hypervisor took 12 % of the CPU time",)),
        (0.8, 0.2, ("the hypervisor took 20 % of the CPU time",)),  # 5 % of the capacity, 20 % of what was wanted
        (4.0, 0.1, ()),
        (0.01, 0.04, ()),
    ],
)
def test_steal_is_a_share_of_the_wanted_time(busy, steal, lines):
    assert found(after(busy_s=busy, own_cpu_s=busy, steal_s=steal)).outside == lines


@pytest.mark.parametrize(
    ("busy", "own", "group", "lines"),
    [
        (3.0, 2.0, 2.0, ()),  # the other tenant has its own part
        (4.0, 2.0, 2.0, ()),  # the machine is full and we had all of ours
        (4.0, 1.8, 1.8, ()),
        (4.0, 1.0, 1.0, ("other processes used 3.0 of the machine's 4 CPUs and left none idle",)),
        (3.7, 1.0, 1.0, ()),  # a CPU is partly idle: whoever wants it can have it
        (3.0, 1.2, 2.0, ("other processes used 0.8 of the quota's 2 CPUs",)),
        (3.0, 1.2, 1.3, ()),
        (3.0, 0.5, 1.0, ()),  # the quota is not used up
    ],
)
def test_with_a_quota_the_load_of_other_tenants_is_normal(busy, own, group, lines):
    result = found(after(busy_s=busy, own_cpu_s=own, group_cpu_s=group), cpus=2.0)
    assert (result.outside, result.own) == (lines, ())


def test_steal_counts_with_a_quota_too():
    assert found(after(busy_s=2.0, own_cpu_s=1.9, steal_s=0.5), cpus=2).outside == (
        "the hypervisor took 20 % of the CPU time",
    )


def test_the_quota_that_our_workers_use_up_is_our_own():
    result = found(after(busy_s=2.0, own_cpu_s=2.0, group_cpu_s=2.0, throttled_s=1.4), cpus=2)
    assert result.outside == ()
    assert result.own == ("the CPU quota held work back for 1.40 CPU seconds a second",)
    assert found(after(throttled_s=0.01)).findings == ()


@pytest.mark.parametrize(
    ("grown", "is_group", "outside", "own"),
    [
        ({"memory_stall_s": 0.07}, True, (), ("everything waited for memory for 7 % of the time",)),
        (
            {"memory_stall_s": 0.07},
            False,
            ("the machine was short of memory for 7 % of the time, which this trial did not bring about",),
            (),
        ),
        (
            {"memory_stall_s": 0.07, "resident_bytes": 5 * MIB},
            False,
            (),
            ("everything waited for memory for 7 % of the time",),
        ),
        (
            {"memory_stall_s": 0.07, "storage_read_bytes": 90 * MIB},
            False,
            (),
            ("everything waited for memory for 7 % of the time",),
        ),
        ({"memory_stall_s": 0.005}, True, (), ()),
        ({"swapped_bytes": 30 * MIB}, True, ("the machine swapped 30 MiB/s for other processes",), ()),
        (
            {"swapped_bytes": 30 * MIB, "faulted_bytes": 2 * MIB},
            True,
            (),
            ("the machine swapped 30 MiB/s, this trial among it",),
        ),
        ({"swapped_bytes": 1000}, True, (), ()),
    ],
)
def test_a_shortage_of_memory_is_ours_in_doubt(grown, is_group, outside, own):
    reading = dataclasses.replace(after(**grown), stall_is_own_group=is_group)
    result = found(reading)
    assert (result.outside, result.own) == (outside, own)


def test_a_tree_that_shrank_had_no_part():
    assert found(after(swapped_bytes=30 * MIB, resident_bytes=-100 * MIB)).outside


def test_what_cannot_be_read_is_not_judged():
    blind = Reading(at_s=1.0, mask_cpus=4)
    assert judge(blind, dataclasses.replace(blind, at_s=2.0), cpus=4).findings == ()
    assert judge(blind, after(busy_s=4.0), cpus=4).findings == ()
    assert judge(blind, after(busy_s=4.0), cpus=2).findings == ()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_holds_no_disturbance(seconds):
    assert found(after(seconds=seconds, busy_s=4.0, steal_s=3.0, throttled_s=9.0)).findings == ()


def test_bytes_from_storage_are_a_difference_or_unknown():
    assert storage_read_bytes(QUIET, after(storage_read_bytes=7)) == 7
    assert storage_read_bytes(QUIET, dataclasses.replace(after(), storage_read_bytes=None)) is None
    assert storage_read_bytes(after(storage_read_bytes=7), QUIET) == 0


amounts = st.floats(-1e3, 1e3) | st.none()
COUNTERS = [
    field.name for field in dataclasses.fields(Reading) if field.name not in {"at_s", "mask_cpus", "stall_is_own_group"}
]


@given(st.fixed_dictionaries(dict.fromkeys(COUNTERS, amounts)), st.floats(0.01, 10), st.floats(0.5, 8))
def test_figures_are_never_negative_and_shares_at_most_all(grown, seconds, cpus):
    values = {name: None if grown[name] is None else getattr(QUIET, name) + grown[name] for name in COUNTERS}
    reading = dataclasses.replace(QUIET, at_s=QUIET.at_s + seconds, **values)
    result = judge(QUIET, reading, cpus=cpus)
    assert all(finding.amount > 0 and "-" not in finding.text for finding in result.findings)
    assert len(result.outside) + len(result.own) == len(result.findings)
    assert all(
        finding.amount <= 1
        for finding in result.findings
        if finding.cause in {Cause.HYPERVISOR, Cause.OWN_MEMORY, Cause.OTHERS_MEMORY}
    )


@given(st.floats(0, 4), st.floats(0, 4), st.floats(0, 4))
def test_more_use_by_others_never_makes_a_finding_go_away(own, less, more):
    less, more = sorted((less, more))
    few, many = (found(after(busy_s=own + others, own_cpu_s=own)).findings for others in (less, more))
    assert not few or (many and many[0].amount >= few[0].amount - 1e-9)


@given(st.floats(0, 4), st.floats(0, 4), st.floats(0, 4))
def test_our_own_use_alone_is_never_interference(own, throttled, cpus):
    reading = after(busy_s=own, own_cpu_s=own, group_cpu_s=own, throttled_s=throttled, resident_bytes=9 * MIB)
    assert found(reading, cpus=max(0.5, cpus)).outside == ()


def finding(cause, amount):
    return Finding(cause=cause, amount=amount, text=f"{cause} {amount}")


def test_a_summary_has_one_line_a_cause_with_the_worst_figure_outside_first():
    windows = [
        Disturbance(findings=(finding(Cause.CPU_QUOTA, 0.5), finding(Cause.OTHER_PROCESSES, 0.4))),
        Disturbance(),
        Disturbance(findings=(finding(Cause.OTHER_PROCESSES, 0.9),)),
        Disturbance(findings=(finding(Cause.OTHER_PROCESSES, 0.2),)),
    ]
    assert summary(windows) == (
        "other_processes 0.9 (in 3 of 4 windows, at the worst)",
        "cpu_quota 0.5 (in 1 of 4 windows)",
    )


def test_a_summary_of_little_is_short():
    assert summary([]) == ()
    assert summary([Disturbance(), Disturbance()]) == ()
    assert summary([Disturbance(findings=(finding(Cause.GPU_HEAT, 1),))]) == ("gpu_heat 1",)


def test_every_cause_is_either_outside_or_own():
    own = {cause for cause in Cause if cause.is_own}
    assert own == {Cause.CPU_QUOTA, Cause.OWN_MEMORY, Cause.OWN_SWAP, Cause.GPU_POWER_CAP}
    for cause in Cause:
        seen = Disturbance(findings=(finding(cause, 1),))
        assert bool(seen.own) is cause.is_own
        assert bool(seen.outside) is not cause.is_own
