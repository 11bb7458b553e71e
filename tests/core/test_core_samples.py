import pytest

from pipetune.core.samples import SampleAgreement, SampleDigests, compare, spread_indices


def digests(*values, **changes):
    return SampleDigests(asked=len(values), indices=tuple(range(len(values))), digests=values, **changes)


SERIAL = digests(*"abcdefghij")
BROKEN = digests(*"abcXefghij")


def test_equal_samples_agree():
    found = compare(SERIAL, SERIAL)
    assert (found.agreement, found.compared, found.different) == (SampleAgreement.EQUAL, 10, 0)


def test_a_difference_names_its_first_index():
    found = compare(SERIAL, BROKEN)
    assert (found.agreement, found.different, found.first_different) == (SampleAgreement.DIFFERENT, 1, 3)
    assert "the first at index 3" in found.sentence()


def test_a_difference_stands_where_another_build_reads_as_the_first():
    assert compare(SERIAL, BROKEN, rebuilt=SERIAL).agreement is SampleAgreement.DIFFERENT


def test_a_difference_that_one_thread_makes_is_none():
    assert compare(SERIAL, BROKEN, rebuilt=BROKEN).agreement is SampleAgreement.EQUAL


def test_a_build_that_is_random_says_nothing():
    found = compare(SERIAL, BROKEN, rebuilt=digests(*"zyxwvutsrq"))
    assert found.agreement is SampleAgreement.SKIPPED
    assert "each time it is built" in found.sentence()


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (digests(*"abcdefghij", is_random=True), "augmentation"),
        (SampleDigests(asked=0, skipped="the dataset is iterable"), "iterable"),
        (SampleDigests(asked=100, indices=(0, 1), digests=("a", "b")), "too slow: only 2 of 100"),
        (digests(*[None] * 10), "nothing whose content"),
    ],
)
def test_what_cannot_be_compared_is_skipped_with_the_reason(read, reason):
    found = compare(read, SERIAL)
    assert found.agreement is SampleAgreement.SKIPPED
    assert reason in found.sentence()


@pytest.mark.parametrize(("length", "count"), [(0, 5), (1, 5), (2, 5), (1000, 256), (256, 256)])
def test_indices_are_different_and_reach_both_ends(length, count):
    chosen = spread_indices(length, count)
    assert len(set(chosen)) == len(chosen) == min(length, count)
    assert set(chosen) <= set(range(length))
    if length > 1:
        assert {0, length - 1} <= set(chosen)
