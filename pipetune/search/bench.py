"""Where configurations are measured: one process at a time, told of before, judged after, open to signals."""

import time
from dataclasses import replace

from pipetune.core.measurement import FailureKind, Phase, TrialFailure, TrialOutcome
from pipetune.core.space import TrialConfig
from pipetune.errors import InputError
from pipetune.search.ledger import Ledger
from pipetune.search.setting import Setting


class Bench:
    """Runs one configuration after another and says what each cost."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self._setting = setting
        self._ledger = ledger

    def measure(
        self,
        config: TrialConfig,
        purpose: str,
        *,
        fresh: bool = False,
        compute_only: bool = False,
        least_rate: float | None = None,
    ) -> TrialOutcome:
        """The outcome, with the seconds that it took from here. What an interrupted one took is kept, too.

        What cannot reach `least_rate` (samples/s) is ended early.
        """
        setting = self._setting
        setting.progress.trial_began(config, purpose, setting.spending.seconds_left())
        began = time.monotonic()
        try:
            with setting.signals.interruptible():
                limits = replace(setting.limits, least_rate=least_rate)
                outcome = setting.runner.run(config, limits, fresh=fresh, compute_only=compute_only)
        except BaseException:
            self._ledger.keep_summary()
            raise
        return replace(self._judged(outcome), seconds=time.monotonic() - began)

    def _judged(self, outcome: TrialOutcome) -> TrialOutcome:
        """A measurement without the utilisation that the objective needs is none.

        Raises InputError where already the baseline has none: nothing else will.
        """
        objective = self._setting.config.objective
        if isinstance(outcome, TrialFailure) or outcome.gpu or not objective.needs_utilization:
            return outcome
        message = (
            f"objective: {objective} needs GPU utilisation, which is not known: {outcome.gpu_reason}; "
            "use `objective: throughput`"
        )
        if outcome.config == self._ledger.baseline:
            raise InputError(message)
        return TrialFailure(config=outcome.config, kind=FailureKind.INVALID_DATA, phase=Phase.MEASURE, message=message)
