"""Optuna's side of the search space: distributions, and a sampler that proposes only what can be measured."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from pipetune.core.space import Amp, SearchSpace, TrialConfig
from pipetune.search.belief import place


class SpaceExhaustedError(Exception):
    """Every configuration that can work has been measured."""


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """Real values, not indices: bounds may differ between runs, and plots tell the truth."""
    return {
        "num_workers": IntDistribution(space.num_workers[0], space.num_workers[-1]),
        "prefetch_factor": IntDistribution(space.prefetch_factor[0], space.prefetch_factor[-1], log=True),
        "pin_memory": CategoricalDistribution((False, True)),
        "persistent_workers": CategoricalDistribution((False, True)),
        "batch_size": IntDistribution(space.batch_size[0], space.batch_size[-1], log=True),
        "amp": CategoricalDistribution(tuple(amp.value for amp in Amp)),
    }


def params_of(config: TrialConfig) -> dict[str, Any]:
    """Optuna's parameters of a configuration; what means nothing at 0 workers is not among them."""
    params: dict[str, Any] = {
        "num_workers": config.num_workers,
        "pin_memory": config.pin_memory,
        "batch_size": config.batch_size,
        "amp": config.amp.value,
    }
    if config.num_workers > 0:
        params["prefetch_factor"] = config.prefetch_factor
        params["persistent_workers"] = config.persistent_workers
    return params


class SpaceSampler(BaseSampler):
    """Proposes whole configurations to Optuna: those queued first, then the first open one of an order.

    `order` is asked anew for each trial. Nothing is proposed twice, which TPE does with 12-17 % of its first 40 trials.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        seed: int,
        open_ones: Callable[[], Callable[[TrialConfig], bool]],
        order: Callable[[SearchSpace], Iterable[TrialConfig]],
    ) -> None:
        """`open_ones` gives what tells whether a configuration may still be proposed, as things stand when it is asked.

        `order` names all of a space, best first.
        """
        self._open_ones = open_ones
        self._order = order
        self._queue: deque[tuple[TrialConfig, bool]] = deque()
        self._random = RandomSampler(seed=seed)
        self.use(space)

    def use(self, space: SearchSpace) -> None:
        """Propose from this space from now on."""
        self._space = space
        self._ranges = distributions(space)

    def queue(self, config: TrialConfig, *, always: bool = False) -> None:
        """Ask for this configuration before any of the sampler's own; it may lie outside of the space.

        Where it is not open any more its nearest neighbour is asked for, but with `always` itself all the same.
        """
        self._queue.append((config, always))

    @property
    def has_queued(self) -> bool:
        """Whether something was asked for that was not proposed yet."""
        return bool(self._queue)

    def queue_next(self, config: TrialConfig) -> None:
        """Ask for this configuration before anything else, measured already or not."""
        self._queue.appendleft((config, True))

    def ask(self, study: optuna.Study) -> tuple[optuna.Trial, TrialConfig]:
        """The next trial and its configuration. Raises SpaceExhaustedError where none is left."""
        trial = study.ask()
        space = _stretched(self._space, self._queue[0][0]) if self._queue else self._space
        self._ranges = distributions(space)
        waiting = list(self._queue)
        try:
            config = self._suggest(trial, space)
        except SpaceExhaustedError:
            study.tell(trial, state=OptunaState.FAIL)
            raise
        if "fixed_params" in study.get_trials(deepcopy=False)[trial.number].system_attrs:
            # Another program enqueued this one; ours wait for the next.
            self._queue = deque(waiting)
        return trial, config

    def _suggest(self, trial: optuna.Trial, space: SearchSpace) -> TrialConfig:
        """Every parameter that exists there, one by one."""
        ranges = self._ranges

        def value(name: str) -> Any:
            wanted = ranges[name]
            if isinstance(wanted, IntDistribution):
                return trial.suggest_int(name, wanted.low, wanted.high, log=wanted.log)
            assert isinstance(wanted, CategoricalDistribution)
            return trial.suggest_categorical(name, wanted.choices)

        workers = value("num_workers")
        batch = value("batch_size")
        return TrialConfig(
            num_workers=workers,
            prefetch_factor=value("prefetch_factor") if workers > 0 else None,
            pin_memory=value("pin_memory"),
            persistent_workers=value("persistent_workers") if workers > 0 else False,
            batch_size=batch,
            accumulation_steps=max(1, space.effective_batch_size // batch),
            amp=Amp(value("amp")),
        )

    def reseed_rng(self) -> None:
        """Part of Optuna's interface."""
        self._random.reseed_rng()

    def infer_relative_search_space(
        self,
        study: optuna.Study,  # noqa: ARG002 - Optuna's interface
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        """Every parameter is proposed together."""
        return {name: rng for name, rng in self._ranges.items() if not rng.single()}

    def sample_relative(
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """What was queued, or else the first of the order that is open."""
        if self._queue:
            config, always = self._queue.popleft()
            if not always and not self._open_ones()(config):
                config = self.nearest_open(config)
        else:
            config = self._first_open()
        return {name: value for name, value in params_of(config).items() if name in search_space}

    def _first_open(self) -> TrialConfig:
        is_open = self._open_ones()
        for config in self._order(self._space):
            if is_open(config):
                return config
        raise SpaceExhaustedError

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Only for what a trial enqueued by another program left out."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def nearest_open(self, wished: TrialConfig) -> TrialConfig:
        """The open configuration that differs least from the wish, in steps of all knobs."""
        target, is_open = place(wished), self._open_ones()
        for config in sorted(self._space.configs(), key=lambda config: _distance(place(config), target)):
            if is_open(config):
                return config
        raise SpaceExhaustedError


def _stretched(space: SearchSpace, config: TrialConfig) -> SearchSpace:
    """The space widened so that its distributions hold one more configuration."""
    prefetch = {*space.prefetch_factor, config.prefetch_factor or space.prefetch_factor[0]}
    return replace(
        space,
        num_workers=tuple(sorted({*space.num_workers, config.num_workers})),
        prefetch_factor=tuple(sorted(prefetch)),
        batch_size=tuple(sorted({*space.batch_size, config.batch_size})),
    )


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))
