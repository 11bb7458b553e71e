"""What lies around a configuration: one knob changed at a time."""

from dataclasses import replace

import pytest
from builders import space, spaces, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.alternatives import neighbours
from pipetune.core.space import Amp


def points_and_one():
    return spaces().flatmap(lambda points: st.tuples(st.just(points), st.sampled_from(list(points.configs()))))


@given(points_and_one())
def test_each_lies_in_the_space_and_is_told_once(points_and_chosen):
    points, chosen = points_and_chosen
    found = [config for _, config in neighbours(chosen, points)]
    assert all(config in points for config in found)
    assert chosen not in found
    assert len(set(found)) == len(found)


@given(points_and_one())
def test_nothing_but_the_named_knob_changes_and_what_belongs_to_it(points_and_chosen):
    points, chosen = points_and_chosen
    follows = {"num_workers": ("prefetch_factor", "persistent_workers"), "batch_size": ("accumulation_steps",)}
    for knob, config in neighbours(chosen, points):
        names = (knob, *follows.get(knob, ()))
        assert getattr(config, knob) != getattr(chosen, knob)
        back = {name: getattr(chosen, name) for name in names}
        assert replace(config, **back) == chosen


def test_the_next_values_on_both_sides_and_no_workers_at_all():
    points = space(num_workers=(0, 2, 4, 8), batch_size=(64, 128, 256), amp=tuple(Amp))
    chosen = trial_config(4, batch_size=128, accumulation_steps=2, amp=Amp.BF16)
    found = {}
    for knob, config in neighbours(chosen, points):
        found.setdefault(knob, []).append(getattr(config, knob))
    assert found == {
        "num_workers": [0, 2, 8],
        "prefetch_factor": [4],
        "persistent_workers": [False],
        "pin_memory": [True],
        "batch_size": [64, 256],
        "amp": [Amp.FP32, Amp.FP16],
    }


@pytest.mark.parametrize("workers", [0, 4])
def test_a_space_of_one_point_has_nothing_around_it(workers):
    only = trial_config(workers)
    points = space(
        num_workers=(workers,), prefetch_factor=(2,), pin_memory=(False,), persistent_workers=(True,), batch_size=(64,),
        amp=(Amp.FP32,),
    )  # fmt: skip
    assert list(neighbours(only, points)) == []
