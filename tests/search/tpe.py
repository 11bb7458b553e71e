"""Plain Optuna as people use it, for comparison: TPE over every knob, a failed trial told as failed."""

import warnings

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from pipetune.core.space import Amp, SearchSpace, TrialConfig
from pipetune.search.sampler import params_of


class Tpe:
    """Suggests one configuration after another; each is told before the next is asked for."""

    def __init__(self, space: SearchSpace, *, seed: int, multivariate: bool = False) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate is experimental
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=multivariate, group=multivariate)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._effective = space.effective_batch_size
        self._ranges = ranges(space)

    def know(self, config: TrialConfig, rate: float) -> None:
        """A trial that was made before."""
        params = params_of(config)
        known = {name: values for name, values in self._ranges.items() if name in params}
        self._study.add_trial(optuna.trial.create_trial(params=params, distributions=known, value=rate))

    def ask(self) -> TrialConfig:
        """The next one to measure, which may be one that was measured before."""
        self._trial = self._study.ask()
        workers, batch = self._suggested("num_workers"), self._suggested("batch_size")
        return TrialConfig(
            num_workers=workers,
            prefetch_factor=self._suggested("prefetch_factor") if workers else None,
            pin_memory=self._suggested("pin_memory"),
            persistent_workers=bool(workers) and self._suggested("persistent_workers"),
            batch_size=batch,
            accumulation_steps=self._effective // batch,
            amp=Amp(self._suggested("amp")),
        )

    def tell(self, rate: float | None) -> None:
        """Samples/s of what was asked for last; None where it failed."""
        if rate is None:
            self._study.tell(self._trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._trial, rate)

    def _suggested(self, name: str) -> object:
        return self._trial.suggest_categorical(name, self._ranges[name].choices)


def ranges(space: SearchSpace) -> dict[str, BaseDistribution]:
    """All are categorical: TPE knows nothing of lists, and values have gaps."""
    values = {
        "num_workers": space.num_workers,
        "prefetch_factor": space.prefetch_factor,
        "pin_memory": space.pin_memory,
        "persistent_workers": space.persistent_workers,
        "batch_size": space.batch_size,
        "amp": tuple(amp.value for amp in space.amp),
    }
    return {name: CategoricalDistribution(choices) for name, choices in values.items()}
