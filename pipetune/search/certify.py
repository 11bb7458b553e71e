"""Naming a winner, as decisions on values: whom to measure again, what to measure next, and when it is decided.

Two stages that share no data. Choosing: those that may be the best, against each other, until one is left or speed
cannot tell them apart. Verifying: the chosen one and the baseline, until the gain is decided. Since the second did
not choose, its figures are not those of the luckiest (the winner's curse), and they are what is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from pipetune.core.measurement import Measurement
from pipetune.core.objective import preferred
from pipetune.core.pooling import pooled_measurement
from pipetune.core.record import Round, Stage, TrialRecord
from pipetune.core.repeats import (
    CONTENDING,
    LEAST_CHOOSING_ROUNDS,
    LOOKS,
    MOST_ARMS,
    PRIOR,
    TIED_LIMIT,
    Judgement,
    Noise,
    Standing,
    Verdict,
    contenders,
    judged,
    margin,
    pooled,
    standing,
)
from pipetune.core.space import TrialConfig
from pipetune.core.tuned import Measured
from pipetune.search.ranking import Yardstick, fresh_noise, ranked, round_values, search_noise

MAX_FINALISTS = MOST_ARMS
"""Most configurations that are compared to choose one."""
MAX_TRIES = 3
"""Most configurations that meet the baseline, one after the other's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be certified: `values` are what the search says of all that may win, best first.

    `noise` is what the search saw trials of one configuration differ by, which tells whom to compare: they shared a
    process, so that it proves nothing. `most` is how many may be compared. `heir` is whom the contract prefers among
    those that the search cannot tell from its leader: it meets the baseline where there is no time to compare them.
    """

    values: Mapping[TrialConfig, float]
    baseline: TrialConfig
    noise: Noise
    yardstick: Yardstick
    most: int
    heir: TrialConfig | None = None

    @property
    def line(self) -> tuple[TrialConfig, ...]:
        """All that may win, best first."""
        return tuple(self.values)

    def finalists(self) -> list[TrialConfig]:
        """Whom the search cannot tell from its leader, as far as they can be compared."""
        return contenders(self.values, self.noise)[: self.most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Measure these next, in this order; `done` counts the rounds like it before."""

    stage: Stage
    configs: tuple[TrialConfig, ...]
    done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of a certification. `winner` is the baseline where there is no gain, None where the baseline failed.

    `judgement` is of the one that met the baseline last; None where none did.
    """

    winner: TrialConfig | None
    candidate: TrialConfig | None = None
    judgement: Judgement | None = None


def question(records: Sequence[TrialRecord], baseline: TrialConfig, yardstick: Yardstick) -> Question:
    """What the search leaves open. Where the baseline is ahead of all there is nothing to choose among the others."""
    noise = pooled(PRIOR, search_noise(records, yardstick))
    best_first = ranked(records, yardstick)
    # Those that had to clear the GPU's memory may win only where all had to.
    sound = [one for one in best_first if not _of(one).allocation_retries or one.config == baseline]
    may_win = sound if any(one.config != baseline for one in sound) else best_first
    values = {one.config: yardstick.of(_of(one)) for one in may_win}
    ahead = values.pop(baseline, -inf) - margin(noise, rounds=1, confidence=CONTENDING)
    most = 1 if ahead > max(values.values(), default=inf) else MAX_FINALISTS
    found = {one.config: Measured.of(_of(one), yardstick.plan) for one in may_win}
    tied = [config for config in contenders(values, noise) if values[config] >= max(values.values()) - TIED_LIMIT]
    heir = tied[preferred([(config, found[config]) for config in tied])] if tied else None
    return Question(values=values, baseline=baseline, noise=noise, yardstick=yardstick, most=most, heir=heir)


def next_step(asked: Question, rounds: Sequence[Round], allows: Callable[[Step], bool]) -> Step | Answer:
    """What to measure after these rounds; `allows` tells whether the budget has room for it.

    Every decision follows from the rounds, so that a certification that was broken off goes on from them.
    """
    choosing = [one for one in rounds if one.stage is Stage.CHOOSING]
    verifying = [one for one in rounds if one.stage is Stage.VERIFYING]
    if not verifying:
        step = _choosing_step(asked, choosing)
        if step is not None and allows(step):
            return step
    return _verifying_step(asked, choosing, verifying, allows)


# --- choosing --------------------------------------------------------------------------------------------------


def _choosing_step(asked: Question, choosing: Sequence[Round]) -> Step | None:
    """The next round of those that are left; None where there is nothing to choose any more."""
    heat = last_heat(choosing)
    if not heat:
        left = asked.finalists()
    elif _has_newcomers(asked, choosing):
        # The machine is noisier than the search could know: those that were left out may be the best.
        heat, left = [], _known(asked, choosing).finalists()
    else:
        now = _standing(asked, choosing)
        arms = [one.config for one in heat[0].outcomes]
        left = [] if now.is_over else [config for config in arms if config in now.left]
    if len(left) < 2:
        return None
    return Step(stage=Stage.CHOOSING, configs=_in_turn(left, len(heat)), done=len(heat))


def _known(asked: Question, choosing: Sequence[Round]) -> Question:
    """The question as it stands after some rounds, with what they say of the noise."""
    return replace(asked, noise=pooled(asked.noise, fresh_noise(choosing, asked.yardstick)))


def _fresh_noise(asked: Question, choosing: Sequence[Round]) -> Noise:
    """What is known of fresh processes: the prior, and what these rounds add."""
    return pooled(PRIOR, fresh_noise(choosing, asked.yardstick))


def last_heat(choosing: Sequence[Round]) -> list[Round]:
    """The rounds since somebody joined: only those compare all that are left."""
    heat: list[Round] = []
    before: set[TrialConfig] = set()
    for one in choosing:
        arms = {outcome.config for outcome in one.outcomes}
        heat = [*heat, one] if arms <= before else [one]
        before = arms
    return heat


def _has_newcomers(asked: Question, choosing: Sequence[Round]) -> bool:
    """Whether the first heat found so much noise that more have to be compared; asked once."""
    if len(choosing) != LEAST_CHOOSING_ROUNDS:
        return False
    met = {outcome.config for one in choosing for outcome in one.outcomes}
    return any(config not in met for config in _known(asked, choosing).finalists())


def _standing(asked: Question, choosing: Sequence[Round]) -> Standing[TrialConfig]:
    values = [round_values(one, asked.yardstick) for one in last_heat(choosing)]
    # What trials of one process differed by counts here too: a hasty choice costs little, and proves nothing.
    return standing(values, _known(asked, choosing).noise)


def _in_turn(configs: Sequence[TrialConfig], done: int) -> tuple[TrialConfig, ...]:
    """Every other round backwards: a machine that gets slower in a round favours nobody for long."""
    return tuple(configs if done % 2 == 0 else configs[::-1])


def succession(asked: Question, choosing: Sequence[Round]) -> list[TrialConfig]:
    """Who meets the baseline, and who follows where that one fails."""
    if not choosing:
        return list(dict.fromkeys([*([asked.heir] if asked.heir else []), *asked.line]))
    now = _standing(asked, choosing)
    failed = {config for one in choosing for config in one.failed()}
    chosen = _preferred(asked, last_heat(choosing), now.tied())
    order = dict.fromkeys([*chosen, *now.left, *asked.line])
    return [config for config in order if config not in failed]


def _preferred(asked: Question, choosing: Sequence[Round], tied: Sequence[TrialConfig]) -> list[TrialConfig]:
    """The one of the tied that the contract prefers; none of none."""
    plan = asked.yardstick.plan
    found = [(config, Measured.of(pooled_measurement(_rounds_of(config, choosing)), plan)) for config in tied]
    return [tied[preferred(found)]] if found else []


def _rounds_of(config: TrialConfig, rounds: Sequence[Round]) -> list[Measurement]:
    found = (one.measured().get(config) for one in rounds)
    return [one for one in found if one is not None]


# --- verifying -------------------------------------------------------------------------------------------------


def _verifying_step(
    asked: Question, choosing: Sequence[Round], verifying: Sequence[Round], allows: Callable[[Step], bool]
) -> Step | Answer:
    fallen = {config for one in verifying for config in one.failed()}
    if asked.baseline in fallen:
        return Answer(winner=None)
    left = [config for config in succession(asked, choosing)[:MAX_TRIES] if config not in fallen]
    if not left:
        return _baseline_alone(asked, verifying)
    pairs = [values for one in verifying if left[0] in (values := round_values(one, asked.yardstick))]
    step = Step(stage=Stage.VERIFYING, configs=_in_turn((left[0], asked.baseline), len(pairs)), done=len(pairs))
    if len(pairs) < LOOKS[0]:
        return step
    may_go_on = len(pairs) < LOOKS[-1] and allows(step)
    judgement = _judged(asked, choosing, left[0], pairs, is_last=not may_go_on)
    if judgement.verdict is Verdict.OPEN and may_go_on:
        return step
    winner = left[0] if judgement.verdict is Verdict.GAIN else asked.baseline
    return Answer(winner=winner, candidate=left[0], judgement=judgement)


def _baseline_alone(asked: Question, verifying: Sequence[Round]) -> Step | Answer:
    """Nothing to compare it with: it is measured for its own figures."""
    done = len(_rounds_of(asked.baseline, verifying))
    if done < LOOKS[0]:
        return Step(stage=Stage.VERIFYING, configs=(asked.baseline,), done=done)
    return Answer(winner=asked.baseline)


def _judged(
    asked: Question,
    choosing: Sequence[Round],
    candidate: TrialConfig,
    pairs: Sequence[Mapping[TrialConfig, float]],
    *,
    is_last: bool,
) -> Judgement:
    differences = [values[candidate] - values[asked.baseline] for values in pairs]
    return judged(differences, _fresh_noise(asked, choosing), is_last=is_last)


def _of(record: TrialRecord) -> Measurement:
    assert record.measurement is not None
    return record.measurement
