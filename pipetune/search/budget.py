"""What a study may still spend: trials and seconds, with enough kept back to certify the winner."""

import time
from collections.abc import Callable, Sequence
from statistics import median

from pipetune.core.record import TrialRecord
from pipetune.core.study import Budget
from pipetune.search.certify import ROUNDS

CERTIFICATION_SHARE = 0.5
"""At most this share of the time is kept back, however dear a fresh process is."""


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

    def certification_s(self, arm_seconds: Sequence[float]) -> float:
        """What certifying is expected to take: each arm in a fresh process, in the rounds that are always made."""
        return (ROUNDS - 1) * sum(self.set_up_s + seconds for seconds in arm_seconds)

    def affordable_arms(self, arm_seconds: Sequence[float]) -> int:
        """How many arms, the baseline (the last) among them, fit into the time that is left; at least two."""
        left = self.seconds_left()
        count = len(arm_seconds)
        while (
            left is not None and count > 2 and self.certification_s([*arm_seconds[: count - 1], arm_seconds[-1]]) > left
        ):
            count -= 1
        return count

    def allows_trial(self, records: Sequence[TrialRecord], arm_seconds: Sequence[float]) -> bool:
        """Whether one more trial fits, with the certification of those arms still to come."""
        if self.budget.trials is not None and len(records) >= self.budget.trials:
            return False
        left = self.seconds_left()
        if left is None or self.budget.seconds is None:
            return True
        reserve = min(self.certification_s(arm_seconds), CERTIFICATION_SHARE * self.budget.seconds)
        return left > reserve + _typical_s(records)

    def allows_round(self, done: int, round_s: float) -> bool:
        """Whether another round of certification fits; two are always made."""
        if done < ROUNDS - 1:
            return True
        left = self.seconds_left()
        return done < ROUNDS and (left is None or left > round_s)


def _typical_s(records: Sequence[TrialRecord]) -> float:
    return median([record.seconds for record in records]) if records else 0.0
