"""The hands of a certification: measures what `certify` asks for, keeps every round, and tells what came out."""

from dataclasses import replace
from math import expm1
from statistics import median

from pipetune.core.measurement import TrialFailure
from pipetune.core.record import Certification, CertificationState, Round, Stage
from pipetune.core.repeats import Judgement, Verdict
from pipetune.core.space import TrialConfig
from pipetune.search.bench import Bench
from pipetune.search.certify import Answer, Question, Step, next_step, question
from pipetune.search.ledger import Ledger
from pipetune.search.setting import Setting


class Certifier:
    """Measures the best few and the baseline again, interleaved, each in a fresh process a round."""

    def __init__(self, setting: Setting, ledger: Ledger, bench: Bench) -> None:
        self._setting = setting
        self._ledger = ledger
        self._bench = bench
        self._seconds: dict[TrialConfig, float] = {}

    def run(self, begun: Certification | None) -> Certification | None:
        """Go on from what was begun, where it still is about the same trials.

        None where the baseline failed: there is nothing to compare with, and the result stays provisional.
        """
        setting, ledger = self._setting, self._ledger
        with setting.signals.interruptible():
            setting.runner.close_hosts()
        ledger.note_other_load(setting.busy_cpus())
        if len(ledger.records()) == 1 and len(ledger.space) > 1:
            ledger.note("only the baseline was measured: give the study more time or trials")
        kept = begun if begun is not None and self._is_of_these_trials(begun) else self._new()
        self._expect(kept)
        asked = question(ledger.candidates(), ledger.baseline, ledger.yardstick())
        asked = replace(asked, most=self._affordable(asked))
        while isinstance(step := next_step(asked, kept.rounds, self._allows), Step):
            kept = self._with_round(kept, step)
        return self._finished(kept, step)

    # --- what is there -------------------------------------------------------------------------------------

    def _is_of_these_trials(self, begun: Certification) -> bool:
        return begun.trials == len(self._ledger.records()) and begun.baseline == self._ledger.baseline

    def _new(self) -> Certification:
        return Certification(
            baseline=self._ledger.baseline,
            state=CertificationState.UNFINISHED,
            winner=None,
            rounds=(),
            trials=len(self._ledger.records()),
            seconds=0.0,
            budget=self._setting.config.budget,
        )

    # --- what it costs -------------------------------------------------------------------------------------

    def _expect(self, kept: Certification) -> None:
        """What a fresh process of each configuration takes: its last one, or its trial and a set-up."""
        fresh_s = self._setting.spending.fresh_s
        self._seconds = {record.config: fresh_s(record.seconds) for record in self._ledger.best_first()}
        for one in kept.rounds:
            self._learn(one)

    def _learn(self, one: Round) -> None:
        self._seconds.update((outcome.config, outcome.seconds) for outcome in one.outcomes)

    def _affordable(self, asked: Question) -> int:
        line = [self._cost_s(config) for config in asked.line[: asked.most]]
        return self._setting.spending.affordable_finalists(line, self._pair_seconds())

    def _pair_seconds(self) -> list[float]:
        """The leader's and the baseline's."""
        best = [record.config for record in self._ledger.best_first() if record.config != self._ledger.baseline]
        return [self._cost_s(config) for config in (*best[:1], self._ledger.baseline)]

    def _cost_s(self, config: TrialConfig) -> float:
        """In a shared storage another host may have found it since: it costs what the others do."""
        return self._seconds.get(config) or median(self._seconds.values())

    def _allows(self, step: Step) -> bool:
        round_s = sum(self._cost_s(config) for config in step.configs)
        if step.stage is Stage.CHOOSING:
            return self._setting.spending.allows_choosing(round_s, self._pair_seconds())
        return self._setting.spending.allows_verifying(step.done, round_s)

    # --- what is measured ----------------------------------------------------------------------------------

    def _with_round(self, kept: Certification, step: Step) -> Certification:
        """One more round, in the storage before the next begins."""
        if step.done == 0:
            self._setting.progress.note(_announced(step))
        round_ = self._measured(step)
        self._learn(round_)
        seconds = kept.seconds + sum(outcome.seconds for outcome in round_.outcomes)
        # More rounds than an earlier run made may give another answer.
        kept = replace(
            kept,
            state=CertificationState.UNFINISHED,
            winner=None,
            rounds=(*kept.rounds, round_),
            seconds=seconds,
        )
        self._setting.store.keep_certification(kept)
        self._ledger.keep_summary()
        return kept

    def _measured(self, step: Step) -> Round:
        """The ceiling is timed once, where a configuration first meets the baseline."""
        compute_only = step.stage is Stage.VERIFYING and step.done == 0
        outcomes = []
        for config in step.configs:
            outcome = self._bench.measure(config, "certify", fresh=True, compute_only=compute_only)
            outcomes.append(outcome)
            if isinstance(outcome, TrialFailure):
                self._ledger.note(f"{config.label()} failed when it was measured again: {outcome.headline()}")
        return Round(stage=step.stage, outcomes=tuple(outcomes))

    # --- what came out -------------------------------------------------------------------------------------

    def _finished(self, kept: Certification, answer: Answer) -> Certification | None:
        if answer.winner is None:
            # The next run may find the baseline repaired.
            self._setting.store.keep_certification(None)
            return None
        if answer.judgement is not None and answer.judgement.verdict is Verdict.OPEN:
            assert answer.candidate is not None
            self._ledger.note(_undecided(answer.candidate, answer.judgement, kept))
        kept = replace(
            kept, state=CertificationState.FINISHED, winner=answer.winner, budget=self._setting.config.budget
        )
        self._setting.store.keep_certification(kept)
        return kept


def _announced(step: Step) -> str:
    names = ", ".join(config.label() for config in step.configs)
    what = "to choose among them" if step.stage is Stage.CHOOSING else "in turns"
    return f"measuring {names} again {what}, each in a fresh process"


def _undecided(candidate: TrialConfig, judgement: Judgement, kept: Certification) -> str:
    """How far it was, in figures."""
    gain, low, high = (100 * expm1(value) for value in (judgement.gain, judgement.low, judgement.high))
    rounds = len(kept.arm(candidate).rounds)
    return (
        f"not decided: {candidate.label()} made {gain:+.1f} % ({low:+.1f} to {high:+.1f} %) in {rounds} rounds "
        "beside the baseline, which stays; more time, or a quieter machine, would tell"
    )
