"""Whether workers read the samples that training reads without them: what was read, and the verdict."""

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

LEAST_COMPARED = 8
"""Fewer samples read than this, out of more, say nothing."""


class SampleAgreement(StrEnum):
    """Whether samples are the same with workers and without."""

    EQUAL = "equal"
    DIFFERENT = "different"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDigests:
    """A hash of each sample that was read; None for one that has no content to compare.

    `digests[i]` belongs to the sample `indices[i]`; `asked` is how many were to be read, which the time limit may
    have cut. `is_random` where one index gave two different samples in the same process. `skipped` says why
    nothing was read.
    """

    asked: int
    indices: tuple[int, ...] = ()
    digests: tuple[str | None, ...] = ()
    is_random: bool = False
    skipped: str | None = None

    def __post_init__(self) -> None:
        assert len(self.indices) == len(self.digests) <= self.asked

    def by_index(self) -> dict[int, str | None]:
        """The digests under their indices, in the order in which they were read."""
        return dict(zip(self.indices, self.digests, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleComparison:
    """The verdict: over `compared` samples, of which `different` differ; `first_different` is an index.

    `reason` says why it was skipped; None otherwise.
    """

    agreement: SampleAgreement
    compared: int = 0
    different: int = 0
    first_different: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        assert (self.reason is not None) == (self.agreement is SampleAgreement.SKIPPED)
        assert (self.different > 0) == (self.agreement is SampleAgreement.DIFFERENT)
        assert (self.first_different is not None) == (self.agreement is SampleAgreement.DIFFERENT)

    def sentence(self) -> str:
        """One line for people."""
        if self.agreement is SampleAgreement.SKIPPED:
            return f"samples with and without workers were not compared: {self.reason}"
        if self.agreement is SampleAgreement.EQUAL:
            return f"{self.compared} samples are the same with workers and without"
        return (
            f"workers read other samples: {self.different} of {self.compared} differ from those read without workers, "
            f"the first at index {self.first_different}; open files and connections in the worker, not in __init__"
        )


def spread_indices(length: int, count: int, *, seed: int = 0) -> tuple[int, ...]:
    """Up to `count` different indices of `length`, the first and the last among them; one from each even stretch.

    In an order that mixes far and near: what two workers share, a position in a file, is then moved at each read.
    """
    generator = random.Random(seed)  # noqa: S311 - it only spreads them
    count = min(length, count)
    borders = [length * i // count for i in range(count + 1)] if count else []
    chosen = {generator.randrange(low, high) for low, high in pairwise(borders)}
    if count > 1:
        chosen = {*sorted(chosen)[1:-1], 0, length - 1}
    shuffled = sorted(chosen)
    generator.shuffle(shuffled)
    return tuple(shuffled)


def compare(serial: SampleDigests, workers: SampleDigests, *, rebuilt: SampleDigests | None = None) -> SampleComparison:
    """Compare what was read without workers with what two workers read.

    `rebuilt` is what another serial host read after building the workload anew, with one thread as workers have:
    where that is what workers read, threads made the difference (the order of a sum decides its last bit); where
    it differs from both, the build is random (an unseeded split, say). Neither is the workers' doing.
    """
    reason = _why_not(serial) or _why_not(workers)
    if reason is None and rebuilt is not None and _differing(rebuilt, workers) == (len(workers.indices), []):
        serial = rebuilt
    if reason is None and rebuilt is not None and rebuilt.is_random:
        reason = _why_not(rebuilt)
    elif reason is None and rebuilt is not None and _differing(serial, rebuilt)[1]:
        reason = "the dataset is another each time it is built (a split or an order without a seed)"
    if reason is not None:
        return SampleComparison(agreement=SampleAgreement.SKIPPED, reason=reason)
    compared, different = _differing(serial, workers)
    if not compared:
        reason = "samples hold nothing whose content can be compared"
        return SampleComparison(agreement=SampleAgreement.SKIPPED, reason=reason)
    return SampleComparison(
        agreement=SampleAgreement.DIFFERENT if different else SampleAgreement.EQUAL,
        compared=compared,
        different=len(different),
        first_different=min(different, default=None),
    )


def _why_not(read: SampleDigests) -> str | None:
    if read.skipped is not None:
        return read.skipped
    if read.is_random:
        return "the dataset gives another sample each time, by design (augmentation)"
    if len(read.indices) < min(LEAST_COMPARED, read.asked):
        return f"too slow: only {len(read.indices)} of {read.asked} samples were read in the time for it"
    return None


def _differing(one: SampleDigests, other: SampleDigests) -> tuple[int, list[int]]:
    """How many indices both have a digest for, and those whose digests differ."""
    others = other.by_index()
    pairs = {index: (mine, others.get(index)) for index, mine in one.by_index().items()}
    known = {index: pair for index, pair in pairs.items() if None not in pair}
    return len(known), [index for index, (mine, theirs) in known.items() if mine != theirs]
