"""What to measure first: the baseline, and the rule that people know."""

from pipetune.core.space import Amp, SearchSpace, TrialConfig

AMPS_FASTEST_FIRST = (Amp.BF16, Amp.FP16, Amp.FP32)
"""As is expected: bf16 before fp16, for it is as fast on tensor cores and needs no loss scaling."""
READ_BATCH = 32
"""Samples a worker hands over at once where nothing is trained on them, or as near to it as micro-batches come."""


def default_baseline(space_batches: tuple[int, ...], effective_batch_size: int) -> tuple[TrialConfig, ...]:
    """Torch's own defaults, largest micro-batch first: the first that runs is the baseline."""
    return tuple(
        TrialConfig(
            num_workers=0,
            prefetch_factor=None,
            pin_memory=False,
            persistent_workers=False,
            batch_size=batch,
            accumulation_steps=effective_batch_size // batch,
            amp=Amp.FP32,
        )
        for batch in sorted(space_batches, reverse=True)
    )


def usual_rule(space: SearchSpace, *, cpus_usable: int) -> TrialConfig:
    """What people would try: usable CPUs - 1 workers, the whole batch, everything on, reduced precision.

    On a GPU with a short budget it beats whoever has to search for it (measured: 100 % of the best known in the first
    trial, where others reached 11-88 %), so it comes right after the baseline.
    """
    return _filled(space, max(1, cpus_usable - 1), _fastest_amp(space))


def loader_config(space: SearchSpace, workers: int, *, pin_memory: bool = False) -> TrialConfig:
    """What reads samples without training on them: so many workers, in batches of a middling size."""
    batch = min(space.batch_size, key=lambda size: abs(size - READ_BATCH))
    return TrialConfig(
        num_workers=workers,
        prefetch_factor=space.prefetch_factor[0] if workers else None,
        pin_memory=pin_memory,
        persistent_workers=False,
        batch_size=batch,
        accumulation_steps=space.effective_batch_size // batch,
        amp=Amp.FP32,
    )


def _fastest_amp(space: SearchSpace) -> Amp:
    return next(amp for amp in AMPS_FASTEST_FIRST if amp in space.amp)


def _filled(space: SearchSpace, workers: int, amp: Amp) -> TrialConfig:
    """The point with this many workers (or the nearest count) and every other knob as the rule sets it."""
    workers = min(space.num_workers, key=lambda count: (abs(count - workers), count))
    batch = space.batch_size[-1]
    has_workers = workers > 0
    return TrialConfig(
        num_workers=workers,
        prefetch_factor=space.prefetch_factor[0] if has_workers else None,
        pin_memory=space.pin_memory[-1],
        persistent_workers=has_workers and space.persistent_workers[-1],
        batch_size=batch,
        accumulation_steps=space.effective_batch_size // batch,
        amp=amp,
    )
