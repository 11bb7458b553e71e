"""What a study may still spend: trials and seconds, with enough kept back to certify the winner."""

import time
from collections.abc import Callable, Sequence
from statistics import median

from pipetune.core.record import TrialRecord
from pipetune.core.repeats import LOOKS
from pipetune.core.study import Budget

CERTIFICATION_SHARE = 0.5
"""At most this share of the time is kept back, however dear a fresh process is."""
CHOOSING_SHARE = 0.2
"""Of which at most this much is for choosing: more trials are worth more than that."""
ROUNDS = LOOKS[-1]
"""Most rounds in which the chosen configuration meets the baseline."""
LEAST_ROUNDS = LOOKS[0]
"""Rounds that are always made."""


class Spending:
    """Counts what this and earlier runs of a study have cost."""

    def __init__(self, budget: Budget, *, spent_before_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.set_up_s = 0.0
        self._spent_before_s = spent_before_s
        self._clock = clock
        self._began = clock()

    def seconds(self) -> float:
        """Spent over all runs."""
        return self._spent_before_s + self._clock() - self._began

    def seconds_left(self) -> float | None:
        """None where the budget has no time."""
        return None if self.budget.seconds is None else max(0.0, self.budget.seconds - self.seconds())

    def fresh_s(self, trial_s: float) -> float:
        """What a configuration is expected to take in a fresh process, from what it took as a trial."""
        return self.set_up_s + trial_s

    def affordable_finalists(self, finalist_seconds: Sequence[float], pair_seconds: Sequence[float]) -> int:
        """How many can be compared with each other, best first, and the chosen one with the baseline afterwards.

        One where not even two can: then the leader of the search is the chosen one.
        """
        left = self.seconds_left()
        count = len(finalist_seconds)
        while left is not None and count > 1 and _least_s([*finalist_seconds[:count], *pair_seconds]) > left:
            count -= 1
        return count

    def allows_trial(
        self, records: Sequence[TrialRecord], pair_seconds: Sequence[float], finalist_seconds: Sequence[float] = ()
    ) -> bool:
        """Whether one more trial fits, with the certification still to come.

        `pair_seconds` are of the leader and the baseline in fresh processes, for which time is kept back in any case;
        `finalist_seconds` of all that have to be compared to choose one.
        """
        if self.budget.trials is not None and len(records) >= self.budget.trials:
            return False
        left = self.seconds_left()
        if left is None or self.budget.seconds is None:
            return True
        choosing = min(_least_s(finalist_seconds), CHOOSING_SHARE * self.budget.seconds)
        reserve = min(_least_s(pair_seconds) + choosing, CERTIFICATION_SHARE * self.budget.seconds)
        return left > reserve + _typical_s(records)

    def allows_first(self, records: Sequence[TrialRecord]) -> bool:
        """Whether one configuration beside the baseline is tried, whatever measuring both again will take.

        A slow baseline can use up a small budget, and without another there is nothing to certify.
        """
        left = self.seconds_left()
        return len(records) == 1 and self.budget.trials != 1 and (left is None or left > 0)

    def allows_choosing(self, round_s: float, pair_seconds: Sequence[float]) -> bool:
        """Whether another round among the finalists fits before the chosen one meets the baseline."""
        left = self.seconds_left()
        return left is None or left > round_s + _least_s(pair_seconds)

    def allows_verifying(self, done: int, round_s: float) -> bool:
        """Whether another round with the baseline fits; two are always made."""
        if done < LEAST_ROUNDS:
            return True
        left = self.seconds_left()
        return done < ROUNDS and (left is None or left > round_s)


def _least_s(process_seconds: Sequence[float]) -> float:
    """What the fewest rounds take, from the seconds of a process of each arm."""
    return LEAST_ROUNDS * sum(process_seconds)


def _typical_s(records: Sequence[TrialRecord]) -> float:
    return median([record.seconds for record in records]) if records else 0.0
