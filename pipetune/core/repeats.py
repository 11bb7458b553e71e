"""What repeated measurements tell: how much processes differ, who is behind, and whether a gain is real.

Values are natural logarithms of rates (or scores), so differences are ratios whatever the unit. A round is a mapping
from an arm to its value; arms of one round ran right after each other, so that slow drift of the machine moves them
together. Everything here was chosen by `tests/benchmarks/certification.py`, which simulates whole studies.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np

from pipetune.core.objective import TIE_FLOOR

TIE = -math.log(1 - TIE_FLOOR)
"""Differences of logarithms under this are ties, however sure."""
CHOOSING_ROUNDS = 8
"""Most rounds in which arms are compared with each other."""
LEAST_CHOOSING_ROUNDS = 2
"""Nobody is out after one round."""
LOSS_LIMIT = 0.05
"""What nobody measures on for: choosing ends where no arm that is left can be behind the leader by more, and
verifying where the gain cannot be more."""
TIED_LIMIT = 0.03
"""An arm that is estimated to be this far behind is not preferred to the leader, however noisy the machine."""
BEHIND = 0.975
"""How sure it has to be that an arm is behind the leader before it is left out."""
CONTENDING = 0.99
"""The same for a single trial of the search, of which there are many: the best of many is partly luck."""
NOISE_AN_ARM = 0.004
"""One arm is compared for so much noise: what the luckiest of many is ahead by grows with it, and what is at stake."""
MOST_ARMS = 16
"""Most arms that are compared with each other, on the noisiest machine."""
LOOKS = (2, 4, 8, 12, 20)
"""After how many pairs a winner is looked at."""
ALPHAS = (0.0005, 0.001, 0.0015, 0.0015, 0.002)
"""Error spent at each look, one-sided; 0.65 % in sum, so that looking again is paid for (Bonferroni)."""
HOPE = 0.99
"""How sure it has to be that the rounds to come cannot prove a gain before they are left out."""
EVIDENCE_LIMIT = 10.0
"""What other arms differed by counts for so many degrees of freedom: two arms noisier than the rest show in time."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviation between processes of one configuration (of log rates), and how well it is known."""

    sd: float
    freedom: float

    def up_to(self, freedom: float) -> "Noise":
        """The same with no more than that many degrees of freedom."""
        return Noise(sd=self.sd, freedom=min(self.freedom, freedom))


PRIOR = Noise(sd=0.03, freedom=4.0)
"""What is believed before anything was repeated (scaled inverse chi-square).

Real machines gave 0.1 % (tokens, GPU) to 8 % (small images, shared CPUs). Four degrees of freedom keep two rounds
that agree by luck from proving anything, and are outvoted by the first choosing rounds.
"""


def pooled(*parts: Noise) -> Noise:
    """Several estimates as one, each with the weight of its degrees of freedom."""
    freedom = sum(part.freedom for part in parts)
    if freedom == 0:
        return Noise(sd=0.0, freedom=0.0)
    return Noise(sd=math.sqrt(sum(part.freedom * part.sd**2 for part in parts) / freedom), freedom=freedom)


def repeat_noise(groups: Iterable[Sequence[float]]) -> Noise:
    """What the values of one configuration differed by, over all of them; drift between them counts as noise."""
    squares, freedom = 0.0, 0
    for values in groups:
        mean = sum(values) / len(values)
        squares += sum((value - mean) ** 2 for value in values)
        freedom += len(values) - 1
    return _noise(squares, freedom)


def round_noise(rounds: Sequence[Mapping[K, float]]) -> Noise:
    """What is left of the values once each arm and each round has its own level (two-way least squares).

    Drift that moves a whole round is in the level of that round; arms may be missing from rounds.
    """
    cells = [(arm, number, value) for number, one in enumerate(rounds) for arm, value in one.items()]
    if not cells:
        return _noise(0.0, 0)
    arms = {arm: column for column, arm in enumerate(dict.fromkeys(arm for arm, _, _ in cells))}
    design = np.zeros((len(cells), len(arms) + len(rounds)))
    for row, (arm, number, _) in enumerate(cells):
        design[row, arms[arm]] = design[row, len(arms) + number] = 1.0
    values = np.array([value for _, _, value in cells])
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    squares = float(((values - design @ fit) ** 2).sum())
    return _noise(squares, len(cells) - int(rank))


def _noise(squares: float, freedom: int) -> Noise:
    return Noise(sd=math.sqrt(squares / freedom) if freedom else 0.0, freedom=float(freedom))


def margin(noise: Noise, *, rounds: int, confidence: float) -> float:
    """How far the means of two equal arms are apart at most, one-sided, after so many rounds (Student's t)."""
    from scipy.special import stdtrit

    return float(stdtrit(noise.freedom, confidence)) * noise.sd * math.sqrt(2 / rounds)


# --- choosing --------------------------------------------------------------------------------------------------


def contenders(values: Mapping[K, float], noise: Noise) -> list[K]:
    """The leader of single measurements and whom noise could have put behind it, best first."""
    best_first = sorted(values, key=values.__getitem__, reverse=True)
    reach = max(TIE, margin(noise, rounds=1, confidence=CONTENDING))
    limit = min(MOST_ARMS, max(2, round(noise.sd / NOISE_AN_ARM)))
    return [arm for arm in best_first[:limit] if values[arm] >= values[best_first[0]] - reach]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Generic[K]):
    """Where choosing stands: `left` are the arms that may still be the best, best first, with their means."""

    left: Mapping[K, float]
    is_over: bool

    def tied(self) -> list[K]:
        """Those that speed cannot tell from the leader, the leader first."""
        best = max(self.left.values(), default=0.0)
        return [arm for arm, mean in self.left.items() if mean >= best - TIED_LIMIT]


def standing(rounds: Sequence[Mapping[K, float]], noise: Noise) -> Standing[K]:
    """Who is left of the arms of the last round; `noise` is what is known, these rounds included.

    Those are out that are behind the leader beyond the noise (and beyond TIE), and after every second round the slower
    half too: rounds are dear, and the best is hardly ever in it.
    """
    count = len(rounds)
    means = {arm: sum(one[arm] for one in rounds) / count for arm in rounds[-1]}
    best_first = sorted(means, key=means.__getitem__, reverse=True)
    if count < LEAST_CHOOSING_ROUNDS:
        return Standing(left={arm: means[arm] for arm in best_first}, is_over=len(means) < 2)
    reach = margin(noise, rounds=count, confidence=BEHIND)
    left = [arm for arm in best_first if means[arm] >= means[best_first[0]] - max(TIE, reach)]
    is_over = len(left) < 2 or count >= CHOOSING_ROUNDS
    if not is_over and count % 2 == 0:
        is_over = means[left[0]] - means[left[-1]] + reach < LOSS_LIMIT
        left = left if is_over else left[: max(2, (len(rounds[-1]) + 1) // 2)]
    return Standing(left={arm: means[arm] for arm in left}, is_over=is_over)


# --- verifying -------------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What is known of a gain."""

    GAIN = "gain"
    NO_GAIN = "no_gain"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, and the gain with its 95 % interval, as logarithms."""

    verdict: Verdict
    gain: float
    low: float
    high: float


def judged(differences: Sequence[float], noise: Noise, *, is_last: bool = False) -> Judgement:
    """Whether a candidate gains on the baseline, from the differences (candidate - baseline) of their rounds.

    A group-sequential one-sided test with a fixed error at each of LOOKS (Jennison and Turnbull, 2000, chapter 2);
    a last look that comes early takes the error of the next. `noise` is what was known before these rounds. The end
    without a gain is not binding: it comes where what is left to do could not prove one.
    """
    count = len(differences)
    gain = sum(differences) / count
    # A difference has twice the variance of a value.
    own = repeat_noise([[one / math.sqrt(2) for one in differences]])
    known = pooled(noise.up_to(EVIDENCE_LIMIT), own)

    def reach(confidence: float, rounds: int = count) -> float:
        return margin(known, rounds=rounds, confidence=confidence)

    verdict = Verdict.OPEN
    look = _look(count, is_last=is_last)
    if look is not None and gain > max(TIE, reach(1 - ALPHAS[look])):
        verdict = Verdict.GAIN
    elif count >= LOOKS[0] and gain + reach(HOPE) < max(LOSS_LIMIT, reach(1 - ALPHAS[-1], LOOKS[-1])):
        verdict = Verdict.NO_GAIN
    half = reach(0.975)
    return Judgement(verdict=verdict, gain=gain, low=gain - half, high=gain + half)


def _look(count: int, *, is_last: bool) -> int | None:
    """Which look this is, if it is one."""
    if count in LOOKS:
        return LOOKS.index(count)
    following = [number for number, look in enumerate(LOOKS) if look > count]
    return following[0] if is_last and following else None
