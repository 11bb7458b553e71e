"""Before the first trial: whether workers read the same samples, and what trials will read from memory."""

from dataclasses import replace

from pipetune.core.facts import Preparation
from pipetune.core.samples import SampleAgreement
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.search.ledger import Ledger
from pipetune.search.plan import loader_config
from pipetune.search.setting import Setting
from pipetune.search.terms import keeps_no_workers

COMPARE_S = 2.0
"""How long samples are read on either side, at most."""
READ_AHEAD_SHARE = 0.1
READ_AHEAD_S = 60.0
"""Reading ahead may take this share of the time budget, and never longer than so many seconds."""


def prepare(setting: Setting, ledger: Ledger) -> None:
    """Take workers out of the space where they read other samples, and tell what was found."""
    budget_s = setting.config.budget.seconds
    with setting.signals.interruptible():
        found = setting.runner.prepare(
            _reader(ledger.space, setting.hardware.cpus_usable),
            dataset_samples=setting.facts.dataset_samples,
            compare_s=COMPARE_S,
            read_ahead_s=READ_AHEAD_S if budget_s is None else min(READ_AHEAD_S, READ_AHEAD_SHARE * budget_s),
        )
    _tell(found, ledger)
    if keeps_no_workers(setting.config, setting.facts):
        ledger.note(
            "persistent_workers: true is not tried: the dataset has a set_epoch(), which kept workers do not hear; "
            "list it under search.persistent_workers to try it"
        )
    is_different = found.comparison is not None and found.comparison.agreement is SampleAgreement.DIFFERENT
    if is_different and 0 in ledger.space.num_workers:
        ledger.space = without_workers(ledger.space)
        ledger.bars_workers = True


def without_workers(space: SearchSpace) -> SearchSpace:
    """What is left where every sample must be read in the main process."""
    return replace(space, num_workers=(0,), persistent_workers=(False,))


def _reader(space: SearchSpace, cpus_usable: int) -> TrialConfig:
    """As many workers as there are CPUs, as far as the space has them."""
    workers = max((count for count in space.num_workers if count <= cpus_usable), default=space.num_workers[0])
    return loader_config(space, workers)


def _tell(found: Preparation, ledger: Ledger) -> None:
    if found.failure is not None:
        ledger.note(
            "reading samples in workers failed before the first trial, and trials with workers will most likely fail "
            f"too: {found.failure.headline()}"
        )
    comparison, ahead = found.comparison, found.read_ahead
    if comparison is not None and comparison.agreement is SampleAgreement.DIFFERENT:
        is_left = 0 in ledger.space.num_workers
        ledger.note(f"{comparison.sentence()}; {'only 0 workers are tried' if is_left else 'mind the result'}")
    elif comparison is not None and comparison.agreement is SampleAgreement.SKIPPED:
        ledger.note(comparison.sentence())
    if ahead is not None and (told := ahead.sentence()) is not None:
        ledger.note(told)
