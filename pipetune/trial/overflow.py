"""Skipped optimizer steps: whether fp16 still looks for its loss scale, or gradients keep overflowing."""

STILL_STEPS = 8
"""A loss scale has settled after so many optimizer steps in a row none of which was skipped."""
MAX_HALVINGS = 20
"""Scales begin at 65536, and each skipped step halves them: what overflows even below 1 is infinite."""
MAX_SKIPPED_STEPS = 2
MAX_SKIPPED_SHARE = 0.01
"""More skipped optimizer steps than both, once the scale has settled, and training goes wrong."""


class Overflows:
    """Follows the counts of optimizer steps, and of those skipped, over one trial."""

    def __init__(self) -> None:
        self._steps = 0
        self._skipped = 0
        self._still_from = 0
        self._settled_at: tuple[int, int] | None = None

    @property
    def is_settling(self) -> bool:
        """Whether steps were skipped, and it is not known yet that this is over."""
        return self._skipped > 0 and self._settled_at is None

    def look(self, steps: int, skipped: int) -> None:
        """Take the counts of the trial so far; `skipped` ones are among `steps`."""
        if skipped > self._skipped:
            self._still_from = steps
        self._steps, self._skipped = steps, skipped
        if self._settled_at is None and steps - self._still_from >= STILL_STEPS:
            self._settled_at = (steps, skipped)

    def problem(self, *, at_end: bool = False) -> str | None:
        """Why this does not train, or None; `at_end` judges also a scale that had no time to settle."""
        if self._settled_at is None:
            is_hopeless = self._skipped > MAX_HALVINGS or (at_end and 0 < self._steps <= 2 * self._skipped)
            return f"{self._skipped} of the first {self._steps} optimizer steps were skipped" if is_hopeless else None
        steps, skipped = self._steps - self._settled_at[0], self._skipped - self._settled_at[1]
        if skipped > max(MAX_SKIPPED_STEPS, MAX_SKIPPED_SHARE * steps):
            return f"{skipped} of {steps} optimizer steps were skipped after the loss scale had settled"
        return None
