import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.objective import TIE_FLOOR
from pipetune.core.repeats import (
    ALPHAS,
    CHOOSING_ROUNDS,
    LOOKS,
    MOST_ARMS,
    PRIOR,
    TIE,
    Noise,
    Verdict,
    contenders,
    judged,
    margin,
    pooled,
    repeat_noise,
    round_noise,
    standing,
)

QUIET = Noise(sd=0.005, freedom=30.0)
NOISY = Noise(sd=0.08, freedom=30.0)
VALUES = st.floats(-5.0, 5.0)


def rounds_of(levels, *, count, sd=0.0, seed=0, drift=0.0):
    """So many rounds of arms at these levels; each round may lie `drift` above the one before."""
    rng = random.Random(seed)
    return [{arm: level + rng.gauss(0.0, sd) + drift * n for arm, level in levels.items()} for n in range(count)]


# --- noise -----------------------------------------------------------------------------------------------------


def test_pooling_weighs_variances_by_what_they_are_known_by():
    found = pooled(Noise(sd=0.03, freedom=1.0), Noise(sd=0.01, freedom=3.0))
    assert found.freedom == 4.0
    assert found.sd == pytest.approx(math.sqrt((0.0009 + 3 * 0.0001) / 4))


def test_nothing_known_is_no_noise_and_no_weight():
    nothing = repeat_noise([])
    assert (nothing.sd, nothing.freedom) == (0.0, 0.0)
    assert pooled(nothing) == nothing
    assert pooled(PRIOR, nothing) == PRIOR


def test_repeats_are_compared_within_their_configuration():
    # GIVEN two configurations that are far apart, and one measured once
    found = repeat_noise([[1.0, 1.2], [5.0, 5.0, 5.3], [9.0]])
    assert found.freedom == 3.0
    assert found.sd == pytest.approx(math.sqrt((0.02 + 0.06) / 3))


@given(st.lists(VALUES, min_size=2, max_size=4), st.lists(VALUES, min_size=2, max_size=4))
def test_levels_of_arms_and_of_rounds_are_no_noise(arms, drifts):
    rounds = [{arm: level + drift for arm, level in enumerate(arms)} for drift in drifts]
    found = round_noise(rounds)
    assert found.freedom == (len(arms) - 1) * (len(drifts) - 1)
    assert found.sd == pytest.approx(0.0, abs=1e-9)


def test_arms_may_be_missing_from_rounds():
    rounds = rounds_of({"a": 0.0, "b": 1.0, "c": 2.0}, count=4, drift=0.5)
    for one in rounds[2:]:
        del one["c"]
    found = round_noise(rounds)
    assert found.freedom == 10 - (3 + 4 - 1)
    assert found.sd == pytest.approx(0.0, abs=1e-9)


def test_rounds_of_nothing_tell_nothing():
    assert round_noise([]).freedom == round_noise([{}]).freedom == 0.0


@pytest.mark.parametrize("sd", [0.01, 0.08])
def test_noise_is_found_under_drift(sd):
    found = round_noise(rounds_of(dict.fromkeys(range(10), 0.0), count=12, sd=sd, drift=0.3))
    assert found.sd == pytest.approx(sd, rel=0.2)


@given(st.integers(1, 20), st.floats(0.5, 0.999))
def test_a_margin_shrinks_with_rounds_and_grows_with_confidence(rounds, confidence):
    assert margin(NOISY, rounds=rounds + 1, confidence=confidence) <= margin(
        NOISY, rounds=rounds, confidence=confidence
    )
    assert margin(NOISY, rounds=rounds, confidence=confidence) <= margin(NOISY, rounds=rounds, confidence=0.9999)


# --- who contends ----------------------------------------------------------------------------------------------


def test_a_clear_leader_contends_alone():
    assert contenders({"a": 0.0, "b": 0.3, "c": 0.1}, QUIET) == ["b"]


def test_noise_lets_more_contend():
    values = {number: -0.01 * number for number in range(30)}
    assert len(contenders(values, QUIET)) == 2
    assert len(contenders(values, NOISY)) == MOST_ARMS


def test_what_is_within_a_tie_contends_on_the_quietest_machine():
    silent = Noise(sd=1e-6, freedom=100.0)
    assert contenders({"a": 0.0, "b": -0.9 * TIE}, silent) == ["a", "b"]
    assert contenders({"a": 0.0, "b": -1.1 * TIE}, silent) == ["a"]


@given(st.dictionaries(st.integers(), VALUES, min_size=1, max_size=12), st.floats(-3.0, 3.0), st.randoms())
def test_neither_units_nor_order_decide_who_contends(values, shift, shuffler):
    # Far from the edges of the band: a shift changes the last digits.
    values = {arm: round(value, 3) + arm % 7 * 1e-6 for arm, value in values.items()}
    arms = list(values)
    shuffler.shuffle(arms)
    shifted = {arm: values[arm] + shift for arm in arms}
    noise = Noise(sd=0.0777777, freedom=9.0)
    assert {round(values[a], 7) for a in contenders(values, noise)} == {
        round(values[a], 7) for a in contenders(shifted, noise)
    }


# --- choosing --------------------------------------------------------------------------------------------------


def test_nobody_is_out_after_one_round():
    now = standing(rounds_of({"a": 0.0, "b": 3.0}, count=1), QUIET)
    assert set(now.left) == {"a", "b"}
    assert not now.is_over


def test_who_is_behind_beyond_the_noise_is_out():
    rounds = rounds_of({"a": 0.0, "b": 0.1}, count=2)
    assert list(standing(rounds, QUIET).left) == ["b"]
    assert standing(rounds, QUIET).is_over
    assert set(standing(rounds, NOISY).left) == {"a", "b"}
    assert not standing(rounds, NOISY).is_over


def test_what_is_within_a_tie_stays_however_sure():
    now = standing(rounds_of({"a": 0.0, "b": -0.9 * TIE}, count=4), Noise(sd=1e-6, freedom=99.0))
    assert now.tied() == ["a", "b"]
    assert now.is_over


def test_after_every_second_round_the_slower_half_is_out():
    levels = {number: -0.001 * number for number in range(8)}
    assert [len(standing(rounds_of(levels, count=count), NOISY).left) for count in (1, 2, 3, 4)] == [8, 4, 8, 4]


def test_two_are_never_halved():
    assert len(standing(rounds_of({"a": 0.0, "b": 0.01}, count=4), NOISY).left) == 2


def test_choosing_ends_at_its_limit():
    levels = {"a": 0.0, "b": 0.0}
    assert not standing(rounds_of(levels, count=CHOOSING_ROUNDS - 1), NOISY).is_over
    assert standing(rounds_of(levels, count=CHOOSING_ROUNDS), NOISY).is_over


def test_it_is_over_where_little_can_be_lost():
    # GIVEN two that are 1 % apart, on a machine of 0.5 %
    assert standing(rounds_of({"a": 0.0, "b": 0.01}, count=2), QUIET).is_over


def test_what_is_estimated_far_behind_is_not_tied_on_a_noisy_machine():
    now = standing(rounds_of({"a": 0.0, "b": -0.05}, count=2), NOISY)
    assert set(now.left) == {"a", "b"}
    assert now.tied() == ["a"]


def test_where_all_failed_nobody_is_left():
    now = standing([{"a": 1.0, "b": 1.0}, {}], QUIET)
    assert (dict(now.left), now.is_over, now.tied()) == ({}, True, [])


@given(st.integers(0, 10**6), st.randoms())
def test_the_order_of_arms_decides_nothing(seed, shuffler):
    rounds = rounds_of(dict.fromkeys("abcdef", 0.0), count=3, sd=0.05, seed=seed)
    order = list("abcdef")
    shuffler.shuffle(order)
    assert standing([{arm: one[arm] for arm in order} for one in rounds], NOISY) == standing(rounds, NOISY)


@given(st.integers(0, 10**6), st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=2))
def test_drift_of_whole_rounds_decides_nothing(seed, drifts):
    rounds = rounds_of(dict.fromkeys("abcd", 0.0), count=2, sd=0.05, seed=seed)
    moved = [{arm: value + drift for arm, value in one.items()} for one, drift in zip(rounds, drifts, strict=True)]
    assert list(standing(moved, NOISY).left) == list(standing(rounds, NOISY).left)


# --- verifying -------------------------------------------------------------------------------------------------


def test_the_errors_of_all_looks_stay_far_below_two_percent():
    assert len(ALPHAS) == len(LOOKS)
    assert sum(ALPHAS) <= 0.01


def test_eight_times_the_speed_takes_two_rounds():
    assert judged([math.log(8.0), math.log(7.5)], PRIOR).verdict is Verdict.GAIN


def test_a_gain_under_the_tie_floor_is_none_however_sure():
    silent = Noise(sd=1e-6, freedom=99.0)
    assert judged([math.log(1 + 0.9 * TIE_FLOOR)] * 8, silent).verdict is Verdict.NO_GAIN
    assert judged([math.log(1 + 1.2 * TIE_FLOOR)] * LOOKS[-1], silent).verdict is Verdict.GAIN


def test_a_clear_loss_ends_after_two_rounds():
    assert judged([-0.3, -0.2], QUIET).verdict is Verdict.NO_GAIN


def test_what_may_still_be_proved_is_open():
    assert judged([0.1, 0.12], NOISY).verdict is Verdict.OPEN


def test_between_two_looks_nothing_is_proved():
    # GIVEN what the look after four pairs would call a gain
    assert judged([0.5] * 4, NOISY).verdict is Verdict.GAIN
    assert judged([0.5] * 3, NOISY).verdict is Verdict.OPEN
    # THEN it is one after three where they are the last
    assert judged([0.5] * 3, NOISY, is_last=True).verdict is Verdict.GAIN


def test_pairs_that_differ_widely_count_against_what_others_differed_by():
    # GIVEN other arms that were quiet for long, and two that are not
    long_quiet = Noise(sd=0.005, freedom=1000.0)
    wild = [0.6, -0.4] * 4
    assert sum(wild) / len(wild) == pytest.approx(0.1)
    assert judged([0.1] * 8, long_quiet).verdict is Verdict.GAIN
    assert judged(wild, long_quiet).verdict is not Verdict.GAIN


def test_the_interval_holds_the_gain():
    found = judged([0.1, 0.2], NOISY)
    assert found.low < found.gain < found.high
    assert found.gain == pytest.approx(0.15)


def sequence(gain, sd, seed):
    """How a machine of that noise is judged, look after look; nothing is known of it before but a few repeats."""
    rng = random.Random(seed)
    known = pooled(PRIOR, repeat_noise([[rng.gauss(0.0, sd) for _ in range(8)]]))
    differences = []
    while True:
        differences.append(gain + rng.gauss(0.0, sd) - rng.gauss(0.0, sd))
        found = judged(differences, known, is_last=len(differences) == LOOKS[-1])
        if len(differences) >= 2 and (found.verdict is not Verdict.OPEN or len(differences) == LOOKS[-1]):
            return found.verdict


@pytest.mark.parametrize("sd", [0.01, 0.08, 0.2])
def test_a_gain_that_is_none_is_hardly_ever_proved(sd):
    found = [sequence(0.0, sd, seed) for seed in range(400)]
    assert found.count(Verdict.GAIN) <= 8


def test_a_gain_of_15_percent_is_proved_on_a_noisy_machine():
    found = [sequence(math.log(1.15), 0.08, seed) for seed in range(200)]
    assert found.count(Verdict.GAIN) >= 185
