"""Why a configuration won: what each knob is worth, changed one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipetune.core.space import SearchSpace, TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The chosen configuration with one knob changed: samples/s over the planned run, and which trial says so.

    `trial` is None where none ran: then the rate is what the search believes.
    """

    knob: str
    config: TrialConfig
    samples_per_sec: float
    trial: int | None


def neighbours(chosen: TrialConfig, space: SearchSpace) -> Iterator[tuple[str, TrialConfig]]:
    """The knob's name and the configuration, for the next values on both sides of each knob, and for 0 workers."""
    counts = {*_next_to(chosen.num_workers, space.num_workers), *({0} & set(space.num_workers))}
    for workers in sorted(counts - {chosen.num_workers}):
        yield "num_workers", _with_workers(chosen, workers, space)
    if chosen.num_workers:
        for prefetch in _next_to(chosen.prefetch_factor or 0, space.prefetch_factor):
            yield "prefetch_factor", replace(chosen, prefetch_factor=prefetch)
        for persistent in set(space.persistent_workers) - {chosen.persistent_workers}:
            yield "persistent_workers", replace(chosen, persistent_workers=persistent)
    for pin in set(space.pin_memory) - {chosen.pin_memory}:
        yield "pin_memory", replace(chosen, pin_memory=pin)
    for batch in _next_to(chosen.batch_size, space.batch_size):
        steps = chosen.effective_batch_size // batch
        yield "batch_size", replace(chosen, batch_size=batch, accumulation_steps=steps)
    yield from (("amp", replace(chosen, amp=amp)) for amp in space.amp if amp is not chosen.amp)


def _next_to(value: int, values: tuple[int, ...]) -> list[int]:
    """The next smaller and the next larger one, where there are such."""
    below, above = [one for one in values if one < value], [one for one in values if one > value]
    return [*below[-1:], *above[:1]]


def _with_workers(config: TrialConfig, workers: int, space: SearchSpace) -> TrialConfig:
    """What means nothing without workers goes and comes with them."""
    if workers == 0:
        return replace(config, num_workers=0, prefetch_factor=None, persistent_workers=False)
    if config.num_workers:
        return replace(config, num_workers=workers)
    return replace(
        config,
        num_workers=workers,
        prefetch_factor=space.prefetch_factor[0],
        persistent_workers=space.persistent_workers[-1],
    )
