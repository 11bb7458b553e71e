"""Skipped steps: a scale that settles is warm-up, gradients that keep overflowing are no result."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetune.trial.overflow import MAX_HALVINGS, STILL_STEPS, Overflows


def looked(skips: str, every: int = 1) -> Overflows:
    """One letter an optimizer step, x for a skipped one; looked at every so many steps, and at the end."""
    overflows = Overflows()
    for steps in range(1, len(skips) + 1):
        if steps % every == 0 or steps == len(skips):
            overflows.look(steps, skips[:steps].count("x"))
    return overflows


@pytest.mark.parametrize("every", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "skips",
    [
        "." * 40,
        "xxxx" + "." * 40,
        "x.x.x..x...x" + "." * 40,
        "..xxx" + "." * 40,  # seen on a GPU: two steps in a row went well, and the scale had not settled
        "." * 200 + "xx" + "." * 100,  # the scaler tries a larger one now and then
        ("." * 2000 + "x") * 3,
    ],
)
def test_a_scale_that_settles_is_no_problem(skips: str, every: int) -> None:
    overflows = looked(skips, every)
    assert overflows.problem(at_end=True) is None
    assert not overflows.is_settling


@pytest.mark.parametrize(
    ("skips", "told"),
    [
        ("x" * (MAX_HALVINGS + 1), "21 of the first 21"),
        ("." * STILL_STEPS + "xxx", "3 of 3 optimizer steps were skipped after"),
        ("xx" + "." * 100 + "x." * 10, "after the loss scale had settled"),
        ("x.x.x." * 10, "of the first"),
    ],
)
def test_gradients_that_keep_overflowing_are_one(skips: str, told: str) -> None:
    assert told in str(looked(skips).problem())


def test_too_few_steps_to_tell_are_judged_at_the_end_only() -> None:
    # GIVEN a slow trial that saw hardly any step go well
    overflows = looked("xxx.xx")
    # THEN it goes on, and is no result if it ends so
    assert overflows.is_settling
    assert overflows.problem() is None
    assert "5 of the first 6" in str(overflows.problem(at_end=True))


def test_a_scale_still_settling_at_the_end_is_no_problem_where_most_steps_went_well() -> None:
    assert looked("xx....").problem(at_end=True) is None


@given(st.text(alphabet=".x", max_size=60), st.integers(1, 5))
def test_without_a_skipped_step_nothing_is_ever_wrong_and_with_all_of_them_always(skips: str, every: int) -> None:
    overflows = looked(skips, every)
    if "x" not in skips:
        assert overflows.problem(at_end=True) is None
        assert not overflows.is_settling
    elif "." not in skips:
        assert overflows.problem(at_end=True) is not None
