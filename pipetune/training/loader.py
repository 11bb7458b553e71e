"""A configuration in DataLoader's own arguments; the one place that knows which belong together."""

from typing import Any

from pipetune.core.space import TrialConfig


def start_method(context: Any = None) -> str:
    """How workers are started with this `multiprocessing_context`; asking does not fix it for the process."""
    from torch import multiprocessing

    if context is None:
        return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return context if isinstance(context, str) else str(context.get_start_method())


def loader_kwargs(config: TrialConfig) -> dict[str, Any]:
    """DataLoader's keyword arguments; those that torch refuses at 0 workers are left out there."""
    kwargs: dict[str, Any] = {
        "batch_size": config.batch_size,
        "num_workers": config.num_workers,
        "pin_memory": config.pin_memory,
    }
    if config.num_workers > 0:
        kwargs["prefetch_factor"] = config.prefetch_factor
        kwargs["persistent_workers"] = config.persistent_workers
    return kwargs
