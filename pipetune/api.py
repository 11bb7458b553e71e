"""pipetune from code: tune a workload, load a result."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipetune.core.study import Budget, StudyConfig
from pipetune.errors import InputError, InterruptedStudyError

if TYPE_CHECKING:
    from pipetune.core.curve import CurveVerdict
    from pipetune.core.diagnosis import Evidence
    from pipetune.core.findings import Finding
    from pipetune.core.record import StudyResult, Validation
    from pipetune.integrations.torch import Tuned
    from pipetune.search.progress import Progress
    from pipetune.storage.gpu_csv import GpuCsv

LOAD_CHECK_S = 0.5
"""How long the machine is watched for the work of other programs."""


def load(path: str | Path, *, check: bool = True) -> "Tuned":
    """Read a best.yaml for training code.

    Warns of each difference between this machine and the measured one, and raises InputError for what cannot
    work here; `check=False` leaves both out. Raises ConfigError where the file is damaged.
    """
    from pipetune.config import tuned_file
    from pipetune.integrations.torch import Tuned, check_machine

    result = tuned_file.read(path)
    if check:
        check_machine(result)
    return Tuned(result)


def tune(
    config: str | Path | Mapping[str, Any] | StudyConfig,
    *,
    overrides: Sequence[str] = (),
    study_dir: str | Path | None = None,
    fresh: bool = False,
    start_from: str | Path | None = None,
    progress: "Progress | None" = None,
) -> "StudyResult":
    """Measure until the budget is spent, certify the winner, write best.yaml, and return what was found.

    config is a config file, its content as a mapping, or a checked StudyConfig; overrides are `key=value` texts
    with dotted keys. `study_dir` is the study's own folder, `studies/<study>` by default. Runs of one study
    resume; `fresh` starts over; `start_from` is an older best.yaml, tried early. Trials run in processes of their
    own: a mapping's target names a function in a file or module, never one of a notebook.
    """
    from pipetune.config.tuned_file import ResultWriter
    from pipetune.config.tuned_file import read as read_result
    from pipetune.hardware.environment import profile, versions
    from pipetune.hardware.host import busy_cpus
    from pipetune.search.progress import Silent
    from pipetune.search.signals import Signals
    from pipetune.search.study import StudyRun
    from pipetune.storage.folder import StudyFolder
    from pipetune.storage.study_store import StudyStore
    from pipetune.trial.process import HOST_MARK
    from pipetune.trial.runner import HostRunner

    if os.environ.get(HOST_MARK):
        raise InputError(
            "tune() was called while a trial process imported your file; "
            "put the call under `if __name__ == '__main__':`"
        )
    checked = read_config(config, overrides)
    older = read_result(start_from).config if start_from is not None else None
    progress = progress or Silent()
    path = Path(study_dir) if study_dir is not None else Path("studies", checked.study)
    signals = Signals()
    with StudyFolder(path) as folder, signals.caught():
        runner = HostRunner(
            checked.workload,
            device=checked.device,
            seed=checked.seed,
            log_folder=folder.log_folder,
            isolation=checked.isolation,
            cache=checked.cache,
            gpu_memory_headroom=checked.gpu_memory_headroom,
            timeouts=_timeouts(checked.budget),
            on_phase=progress.phase,
        )
        try:
            return StudyRun(
                checked,
                runner=runner,
                hardware=profile(),
                versions=versions(),
                open_store=lambda key: StudyStore.open(
                    checked.storage,
                    folder.journal_file,
                    study=checked.study,
                    key=key,
                    directions=checked.objective.directions,
                    fresh=fresh,
                ),
                write=ResultWriter(folder.best_file, replaces_older=fresh),
                folder=path,
                progress=progress,
                signals=signals,
                busy_cpus=lambda: busy_cpus(LOAD_CHECK_S),
                start_from=older,
            ).run()
        except InterruptedStudyError as error:
            kept = (
                f"the best so far is in {folder.best_file}" if folder.best_file.is_file() else "nothing is measured yet"
            )
            raise InterruptedStudyError(f"{error}; {kept}; the same command goes on", error.signal_number) from None
        finally:
            runner.close()


def validate(config: str | Path | Mapping[str, Any] | StudyConfig, *, overrides: Sequence[str] = ()) -> "Validation":
    """Check a config, build its workload and read a first sample, in a process of its own; measure nothing."""
    from pipetune.core.record import Validation
    from pipetune.hardware.environment import profile
    from pipetune.search.terms import check_cache, resolved_space, training_plan
    from pipetune.trial.runner import HostRunner

    checked = read_config(config, overrides)
    hardware = profile()
    with TemporaryDirectory(prefix="pipetune-") as folder:
        runner = HostRunner(checked.workload, device=checked.device, seed=checked.seed, log_folder=Path(folder))
        try:
            facts = runner.describe()
        finally:
            runner.close()
    check_cache(checked, facts)
    return Validation(
        facts=facts,
        plan=training_plan(checked, facts),
        space=resolved_space(checked, facts, hardware),
        workers_limit=hardware.cpus_limit,
    )


def diagnose(
    config: str | Path | Mapping[str, Any] | StudyConfig,
    *,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> "Evidence":
    """Examine the present settings: train with them once, then run loader and step alone; about half a minute.

    The present settings are the config's baseline, or torch's defaults. What the evidence means is told by
    `pipetune.core.diagnosis`: `verdict(evidence)` and `diagnose(evidence)`. `tell` gets a line before each thing that
    takes a while.
    """
    from pipetune.hardware.environment import profile
    from pipetune.search.examine import Examination
    from pipetune.trial.runner import HostRunner

    checked = read_config(config, overrides)
    with TemporaryDirectory(prefix="pipetune-") as folder:
        runner = HostRunner(
            checked.workload,
            device=checked.device,
            seed=checked.seed,
            log_folder=Path(folder),
            cache=checked.cache,
            gpu_memory_headroom=checked.gpu_memory_headroom,
        )
        try:
            return Examination(checked, runner, profile(), tell=tell).evidence()
        finally:
            runner.close()


def doctor(*, data: str | Path | None = None, script: str | Path | None = None) -> tuple["Finding", ...]:
    """Whether this machine is fit to train, and what limits it: findings, those in order included.

    `data` is the folder that samples are read from: its files are read for a second or two. `script` is a training
    script, looked at for a main guard. Takes some seconds, most of them to import torch in a process of its own.
    """
    from pipetune.core.checkup import checkup
    from pipetune.hardware.machine import look_at_machine
    from pipetune.trial.torch_process import ask_torch

    # First without torch, whose process would be on the GPU.
    facts = look_at_machine(None if data is None else Path(data), None if script is None else Path(script))
    return checkup(replace(facts, torch=ask_torch()))


def read_curves(
    path: str | Path, *, interval_s: float = 1.0, epoch_s: float | None = None
) -> tuple["GpuCsv", "Mapping[str, CurveVerdict]"]:
    """Utilisation curves of each GPU in a CSV file of `nvidia-smi --query-gpu`, and what shape they have.

    `interval_s` lies between samples where the file has no timestamps; `epoch_s` is how long an epoch takes, if known.
    Raises InputError where the file is none of that kind.
    """
    from pipetune.core.curve import read_curve
    from pipetune.storage.gpu_csv import read_gpu_csv

    found = read_gpu_csv(Path(path), interval_s=interval_s)
    return found, {name: read_curve(curve, epoch_s=epoch_s) for name, curve in found.curves.items()}


def show(study: str | Path, *, storage: str | None = None) -> "StudyResult":
    """Read a study from its folder (or its name under `studies/`); `storage` is the URL of its trials, if any.

    Raises InputError where there is none.
    """
    from pipetune.config import tuned_file
    from pipetune.core.diagnosis import bottleneck
    from pipetune.core.record import StudyResult
    from pipetune.storage.folder import StudyFolder
    from pipetune.storage.study_store import StudyStore

    given = Path(study).parent if Path(study).is_file() else Path(study)
    path = given if given.is_dir() else Path("studies", study)
    folder = StudyFolder(path)
    if not folder.best_file.is_file():
        raise InputError(f"{path} holds no study with a result: there is no {folder.best_file.name}")
    tuned = tuned_file.read(folder.best_file)
    store = StudyStore.read(folder.journal_file, url=storage, name=tuned.provenance.get("optuna_study"))
    summary = store.summary()
    if summary is None:
        raise InputError(f"{path} holds no result yet: no trial of it has run to its end")
    return StudyResult(
        folder=path,
        tuned=tuned,
        bottleneck=bottleneck(tuned.measured, tuned.ceiling),
        records=store.records(),
        summary=summary,
    )


def read_config(config: str | Path | Mapping[str, Any] | StudyConfig, overrides: Sequence[str] = ()) -> StudyConfig:
    """A checked config from whatever form it has. Raises ConfigError with every problem."""
    from pipetune.config import schema

    if isinstance(config, StudyConfig):
        if overrides:
            raise InputError("overrides: a StudyConfig is checked already; use dataclasses.replace on it")
        return config
    if isinstance(config, Mapping):
        return schema.from_mapping(_with_named_target(config), Path.cwd(), overrides)
    return schema.load(Path(config), overrides)


def _with_named_target(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a function object by the name under which the trial process can find it."""
    workload = config.get("workload")
    target = workload.get("target") if isinstance(workload, Mapping) else None
    if not callable(target) or workload is None:
        return config
    return {**config, "workload": {**workload, "target": _name_of(target)}}


def _name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    if "<" in name or "." in name or not name:
        raise InputError(
            f"workload.target: {name or function!r} is not a function of a module's top level; the trial process "
            "cannot find it: move it to the top level of a file"
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    if "." in module or (file is None and module != "__main__"):
        return f"{module}:{name}"
    if file is None:
        raise InputError(
            f"workload.target: {name} was defined in a notebook or an interactive session and cannot reach the "
            "trial process; put it into a file job.py and use 'job.py:" + name + "'"
        )
    return f"{Path(file).resolve()}:{name}"


def _timeouts(budget: Budget) -> Any:
    """Limits in proportion to the budget: nobody waits five minutes for one trial of a two-minute study."""
    from pipetune.trial.runner import TrialTimeouts

    if budget.seconds is None:
        return TrialTimeouts()
    return TrialTimeouts(
        stall_s=min(120.0, max(30.0, budget.seconds / 5)), total_s=min(600.0, max(60.0, budget.seconds / 2))
    )
