"""One configuration examined: what is used today trains once, and then its parts run alone."""

from collections.abc import Callable
from dataclasses import replace

from pipetune.core.diagnosis import INPUT_WAIT_PERCENT, Evidence
from pipetune.core.facts import WorkloadFacts
from pipetune.core.hardware import HardwareProfile
from pipetune.core.measurement import Measurement, TrialFailure
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp, SearchSpace, TrialConfig
from pipetune.core.study import StudyConfig
from pipetune.errors import NothingWorksError, WorkloadError
from pipetune.search.baseline import check_baseline
from pipetune.search.plan import default_baseline, loader_config
from pipetune.search.terms import check_cache, resolved_space, training_plan
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import TrialRunner

LIMITS = MeasureLimits(min_s=3.0, max_s=6.0)
PROBE_S = 1.0
PREFETCH = 2
LARGER = 4
"""How much larger the other micro-batch is, or as near to it as the effective batch allows."""


class Examination:
    """Asks the runner for one trial and a few probes; what a probe cannot tell is left out of the evidence."""

    def __init__(
        self,
        config: StudyConfig,
        runner: TrialRunner,
        hardware: HardwareProfile,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` gets a line before each thing that takes a while."""
        self._config = config
        self._runner = runner
        self._hardware = hardware
        self._tell = tell

    def evidence(self) -> Evidence:
        """All of it. Raises WorkloadError or InputError like a study, NothingWorksError where nothing trains."""
        self._tell("building the workload")
        facts = self._runner.describe()
        check_cache(self._config, facts)
        plan = training_plan(self._config, facts)
        space = resolved_space(self._config, facts, self._hardware)
        if self._config.baseline is not None:
            check_baseline(self._config.baseline, facts, plan)
        measurement = self._present(space, replace(LIMITS, epoch_samples=plan.epoch_samples))
        config = measurement.config
        is_waiting = measurement.data_wait_percent() >= INPUT_WAIT_PERCENT
        return Evidence(
            measurement=measurement,
            plan=plan,
            facts=facts,
            cpus_usable=self._hardware.cpus_usable,
            memory_bytes=self._hardware.memory_bytes,
            sample=self._loader(loader_config(space, 0)),
            loader=self._loader(config) if config.num_workers else None,
            full_loader=self._full_loader(config) if is_waiting else None,
            steps=self._steps(config, facts),
            larger_step=self._larger_step(config, space),
        )

    def _present(self, space: SearchSpace, limits: MeasureLimits) -> Measurement:
        """What is used today: the config's baseline, else torch's defaults at the largest micro-batch that fits."""
        theirs = self._config.baseline
        candidates = (theirs,) if theirs else default_baseline(space.batch_size, space.effective_batch_size)
        for config in candidates:
            self._tell(f"training as it is: {config.label()}")
            outcome = self._runner.run(config, limits, compute_only=True)
            if isinstance(outcome, Measurement):
                return outcome
            if theirs is not None:
                raise WorkloadError(
                    f"baseline: your present settings ({theirs.label()}) fail: {outcome.headline()}",
                    outcome.traceback_text or outcome.log_tail,
                )
            failure = outcome
            if not outcome.kind.is_memory:
                break
        raise NothingWorksError(f"torch's own defaults do not train: {failure.headline()}")

    def _full_loader(self, config: TrialConfig) -> LoaderProbe | None:
        """A worker for each usable CPU, where there are fewer."""
        workers = self._hardware.cpus_usable
        if config.num_workers >= workers:
            return None
        return self._loader(replace(config, num_workers=workers, prefetch_factor=PREFETCH))

    def _loader(self, config: TrialConfig) -> LoaderProbe | None:
        self._tell(f"the loader alone: {config.label()}")
        probe = self._runner.probe_loader(config, seconds=PROBE_S)
        return None if isinstance(probe, TrialFailure) else probe

    def _steps(self, config: TrialConfig, facts: WorkloadFacts) -> dict[Amp, StepProbe]:
        found = {}
        for amp in facts.amps:
            if (probe := self._step(replace(config, amp=amp))) is not None:
                found[amp] = probe
        return found

    def _larger_step(self, config: TrialConfig, space: SearchSpace) -> StepProbe | None:
        """At the micro-batch nearest to LARGER times the one in use; None where it is the largest."""
        larger = [size for size in space.batch_size if size > config.batch_size]
        if not larger:
            return None
        size = min(larger, key=lambda one: abs(one - LARGER * config.batch_size))
        return self._step(replace(config, batch_size=size, accumulation_steps=space.effective_batch_size // size))

    def _step(self, config: TrialConfig) -> StepProbe | None:
        self._tell(f"the step alone: micro-batch {config.batch_size} {config.amp}")
        probe = self._runner.probe_step(config, seconds=PROBE_S)
        return None if isinstance(probe, TrialFailure) else probe
