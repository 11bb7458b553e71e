import random

import optuna
import pytest
from builders import space, spaces, trial_config
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from pipetune.core.space import Amp
from pipetune.search.sampler import SpaceExhaustedError, SpaceSampler, distributions, params_of

SMALL = space(num_workers=(0, 3, 7), prefetch_factor=(2, 5), batch_size=(64, 256), amp=(Amp.FP32,))


def shuffled(seed=0):
    """An order that is the same each time."""
    return lambda points: random.Random(seed).sample(list(points.configs()), len(points))


class Search:
    """A study whose every proposal counts as measured."""

    def __init__(self, points, *, seed=0, refused=lambda _: False, order=None):
        self.proposed = []
        self.sampler = SpaceSampler(
            points,
            seed=seed,
            open_ones=lambda: lambda config: config not in self.proposed and not refused(config),
            order=order or shuffled(seed),
        )
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = optuna.create_study(direction="maximize", sampler=self.sampler)

    def propose(self):
        trial, config = self.sampler.ask(self.study)
        self.proposed.append(config)
        self.study.tell(trial, float(config.num_workers))
        return config

    def exhaust(self):
        while True:
            try:
                self.propose()
            except SpaceExhaustedError:
                return self.proposed


# --- parameters ------------------------------------------------------------------------------------------------


@given(spaces(), st.data())
def test_every_configuration_goes_through_optuna_and_back(points, data):
    # GIVEN any point of any space
    config = data.draw(st.sampled_from(list(points.configs())))
    # WHEN it is queued and asked for
    search = Search(points)
    search.sampler.queue(config)
    trial, asked = search.sampler.ask(search.study)
    # THEN it comes back as it was, and Optuna's record has the same parameters
    assert asked == config
    assert trial.params == params_of(config)


@given(spaces(), spaces(max_workers=30), st.data())
def test_a_queued_configuration_may_lie_outside_of_the_space(points, others, data):
    # GIVEN what a user has today, which no space of this machine holds
    config = data.draw(st.sampled_from(list(others.configs())))
    assume(points.effective_batch_size == others.effective_batch_size)
    search = Search(points)
    search.sampler.queue(config)
    trial, asked = search.sampler.ask(search.study)
    # THEN it is asked for all the same, and the next proposal lies inside again
    assert asked == config
    assert trial.params == params_of(config)
    assert search.propose() in points


def test_what_is_queued_comes_in_its_order_before_anything_else():
    search = Search(SMALL)
    queued = random.Random(0).sample(list(SMALL.configs()), 4)
    for config in queued:
        search.sampler.queue(config)
    assert [search.propose() for _ in range(4)] == queued
    assert search.propose() not in queued


def test_what_means_nothing_without_workers_is_no_parameter():
    assert set(params_of(trial_config(0))) == {"num_workers", "pin_memory", "batch_size", "amp"}
    assert set(params_of(trial_config(1))) - set(params_of(trial_config(0))) == {
        "prefetch_factor",
        "persistent_workers",
    }


@given(spaces())
def test_counts_are_integers_of_real_values(points):
    ranges = distributions(points)
    for name in ("num_workers", "prefetch_factor", "batch_size"):
        values = getattr(points, name)
        assert isinstance(ranges[name], IntDistribution)
        assert (ranges[name].low, ranges[name].high) == (values[0], values[-1])


def test_choices_are_the_same_in_every_space():
    # THEN one study may hold trials of spaces that differ: Optuna refuses other choices under one name
    small = distributions(space(pin_memory=(False,), amp=(Amp.FP32,), persistent_workers=(True,)))
    for name in ("pin_memory", "persistent_workers", "amp"):
        assert small[name] == distributions(space())[name]


# --- proposals -------------------------------------------------------------------------------------------------


def test_a_list_of_workers_yields_only_its_values():
    proposed = Search(SMALL).exhaust()
    assert {config.num_workers for config in proposed} == {0, 3, 7}
    assert {config.prefetch_factor for config in proposed} == {None, 2, 5}


def test_the_space_is_exhausted_without_repeats_and_then_it_stops():
    proposed = Search(SMALL).exhaust()
    assert len(proposed) == len(SMALL)
    assert set(proposed) == set(SMALL.configs())


@settings(max_examples=15)
@given(spaces(), st.integers(0, 2**31))
def test_any_small_space_is_exhausted_without_repeats(points, seed):
    assume(len(points) <= 40)
    proposed = Search(points, seed=seed).exhaust()
    assert len(proposed) == len(points)
    assert set(proposed) == set(points.configs())


def test_what_is_closed_is_never_proposed():
    proposed = Search(SMALL, refused=lambda config: config.batch_size > 64).exhaust()
    assert set(proposed) == {config for config in SMALL.configs() if config.batch_size == 64}


def test_where_all_is_closed_it_stops_at_once():
    search = Search(SMALL, refused=lambda _: True)
    with pytest.raises(SpaceExhaustedError):
        search.propose()
    assert [trial.state for trial in search.study.trials] == [TrialState.FAIL]


def test_a_space_of_one_point_yields_it():
    only = space(
        num_workers=(3,), prefetch_factor=(2,), pin_memory=(True,), persistent_workers=(True,), batch_size=(64,),
        amp=(Amp.BF16,),
    )  # fmt: skip
    assert Search(only).exhaust() == list(only.configs())


def test_the_same_seed_proposes_the_same():
    one, same, other = Search(SMALL, seed=1), Search(SMALL, seed=1), Search(SMALL, seed=2)
    for search in (one, same, other):
        for _ in range(10):
            search.propose()
    assert one.proposed == same.proposed
    assert one.proposed != other.proposed


def test_the_first_open_of_the_order_is_proposed():
    order = list(SMALL.configs())[::-1]
    search = Search(SMALL, refused=lambda config: config == order[0], order=lambda _: order)
    assert search.propose() == order[1]


def test_a_wider_space_is_used_at_once_in_the_same_study():
    search = Search(space(num_workers=(0, 1)))
    for _ in range(8):
        search.propose()
    search.sampler.use(space(num_workers=(30, 40)))
    assert {search.propose().num_workers for _ in range(8)} <= {30, 40}


# --- the nearest open ------------------------------------------------------------------------------------------


@given(spaces(), st.data())
def test_an_open_wish_is_granted(points, data):
    config = data.draw(st.sampled_from(list(points.configs())))
    sampler = SpaceSampler(points, seed=0, open_ones=lambda: lambda _: True, order=shuffled())
    assert sampler.nearest_open(config) == config


def test_the_nearest_differs_in_one_step():
    # GIVEN a wish for a point that was measured
    wish = trial_config(4, batch_size=128, accumulation_steps=2)
    sampler = SpaceSampler(space(), seed=0, open_ones=lambda: lambda config: config != wish, order=shuffled())
    # THEN one knob is moved by one step
    found = params_of(sampler.nearest_open(wish))
    changed = {name for name, value in params_of(wish).items() if found[name] != value}
    assert len(changed) == 1


@pytest.mark.parametrize(("wished", "nearest"), [(5, 7), (2, 3), (100, 7)])
def test_a_wish_outside_of_the_space_is_moved_into_it(wished, nearest):
    sampler = SpaceSampler(SMALL, seed=0, open_ones=lambda: lambda _: True, order=shuffled())
    assert sampler.nearest_open(trial_config(wished)).num_workers == nearest
