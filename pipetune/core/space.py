"""The knobs that are tuned: one point of them, what the user declared, and what this machine allows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pipetune.errors import InputError

WORKERS_PER_CPU_LIMIT = 8
"""Workers beyond this multiple of the CPUs are never tried unless the user lists them."""


class Amp(StrEnum):
    """Precision of the forward pass; the names that files use."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialConfig:
    """One point of the search space, in torch's own words; batch_size is one process's micro-batch."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: int
    accumulation_steps: int
    amp: Amp

    def __post_init__(self) -> None:
        object.__setattr__(self, "amp", Amp(self.amp))
        if self.num_workers < 0:
            raise InputError(f"num_workers is {self.num_workers}; it must be 0 or more")
        if self.batch_size < 1 or self.accumulation_steps < 1:
            raise InputError(
                f"batch_size is {self.batch_size} and accumulation_steps {self.accumulation_steps}; "
                "both must be 1 or more"
            )
        if self.num_workers == 0 and (self.prefetch_factor is not None or self.persistent_workers):
            raise InputError(
                "prefetch_factor must be null and persistent_workers false where num_workers is 0: "
                "torch refuses them without workers"
            )
        if self.num_workers > 0 and (self.prefetch_factor is None or self.prefetch_factor < 1):
            raise InputError(f"prefetch_factor is {self.prefetch_factor}; with workers it must be 1 or more")

    @property
    def effective_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.batch_size * self.accumulation_steps

    def label(self) -> str:
        """One short line for people: `w=8 p=2 pin persist b=256x2 bf16`."""
        parts = [f"w={self.num_workers}"]
        if self.prefetch_factor is not None:
            parts.append(f"p={self.prefetch_factor}")
        if self.pin_memory:
            parts.append("pin")
        if self.persistent_workers:
            parts.append("persist")
        accumulation = f"x{self.accumulation_steps}" if self.accumulation_steps > 1 else ""
        return " ".join([*parts, f"b={self.batch_size}{accumulation}", self.amp.value])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """An inclusive range as a user declares it: `{min: 0, max: 8}`."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InputError(f"min is {self.low} and max {self.high}; min must not exceed max")


Auto = Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSpace:
    """What the config file says of each knob: auto, a range, or the values to choose from."""

    num_workers: Auto | Bounds | tuple[int, ...] = "auto"
    prefetch_factor: Auto | Bounds | tuple[int, ...] = "auto"
    pin_memory: Auto | tuple[bool, ...] = "auto"
    persistent_workers: Auto | tuple[bool, ...] = "auto"
    batch_size: Auto | Bounds | tuple[int, ...] = "auto"
    amp: Auto | tuple[Amp, ...] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """What the machine and the workload allow, as far as it bounds the space."""

    cpus_usable: int
    has_accelerator: bool
    amps: tuple[Amp, ...]
    epochs: int
    largest_batch: int | None = None
    fixed_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values that each knob may take here, ascending; every combination that makes sense is a point."""

    num_workers: tuple[int, ...]
    prefetch_factor: tuple[int, ...]
    pin_memory: tuple[bool, ...]
    persistent_workers: tuple[bool, ...]
    batch_size: tuple[int, ...]
    amp: tuple[Amp, ...]
    effective_batch_size: int

    def configs(self) -> Iterator[TrialConfig]:
        """Every point once; knobs that mean nothing at 0 workers do not multiply it."""
        for workers in self.num_workers:
            for batch in self.batch_size:
                for amp in self.amp:
                    for pin in self.pin_memory:
                        for prefetch, persistent in self._loader_pairs(workers):
                            yield TrialConfig(
                                num_workers=workers,
                                prefetch_factor=prefetch,
                                pin_memory=pin,
                                persistent_workers=persistent,
                                batch_size=batch,
                                accumulation_steps=self.effective_batch_size // batch,
                                amp=amp,
                            )

    def _loader_pairs(self, workers: int) -> Iterable[tuple[int | None, bool]]:
        if workers == 0:
            return ((None, False),)
        return ((p, persistent) for p in self.prefetch_factor for persistent in self.persistent_workers)

    def __len__(self) -> int:
        with_workers = sum(1 for w in self.num_workers if w > 0)
        pairs = len(self.prefetch_factor) * len(self.persistent_workers)
        loaders = (len(self.num_workers) - with_workers) + with_workers * pairs
        return loaders * len(self.batch_size) * len(self.amp) * len(self.pin_memory)

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, TrialConfig) or config.effective_batch_size != self.effective_batch_size:
            return False
        in_loader = config.num_workers == 0 or (
            config.prefetch_factor in self.prefetch_factor and config.persistent_workers in self.persistent_workers
        )
        return (
            in_loader
            and config.num_workers in self.num_workers
            and config.batch_size in self.batch_size
            and config.pin_memory in self.pin_memory
            and config.amp in self.amp
        )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def resolve(declared: DeclaredSpace, limits: MachineLimits, *, effective_batch_size: int) -> SearchSpace:
    """Turn what was declared into the values that this machine allows.

    Raises InputError naming the key where nothing is left, or where a listed value cannot work.
    """
    return SearchSpace(
        num_workers=_workers(declared.num_workers, limits),
        prefetch_factor=_prefetch(declared.prefetch_factor),
        pin_memory=_flags(declared.pin_memory, auto=(False, True) if limits.has_accelerator else (False,)),
        persistent_workers=_flags(declared.persistent_workers, auto=(False, True) if limits.epochs > 1 else (False,)),
        batch_size=_batches(declared.batch_size, limits, effective_batch_size),
        amp=_amps(declared.amp, limits),
        effective_batch_size=effective_batch_size,
    )


def widened(space: SearchSpace, *, cpus_usable: int, to: int | None = None) -> SearchSpace:
    """Give the space half as many workers again as its largest count, or `to`; at most WORKERS_PER_CPU_LIMIT a CPU.

    The CPU count is where the search starts, not where it ends: a loader that waits gains beyond it.
    """
    largest = space.num_workers[-1]
    limit = WORKERS_PER_CPU_LIMIT * cpus_usable
    higher = min(limit, largest + max(1, largest // 2) if to is None else to)
    if higher <= largest:
        return space
    return SearchSpace(
        num_workers=(*space.num_workers, *range(largest + 1, higher + 1)),
        prefetch_factor=space.prefetch_factor,
        pin_memory=space.pin_memory,
        persistent_workers=space.persistent_workers,
        batch_size=space.batch_size,
        amp=space.amp,
        effective_batch_size=space.effective_batch_size,
    )


def _workers(declared: Auto | Bounds | tuple[int, ...], limits: MachineLimits) -> tuple[int, ...]:
    values = _integers(declared, auto=range(max(1, limits.cpus_usable) + 1))
    if values[0] < 0:
        raise InputError(f"search.num_workers: {values[0]} is not a worker count; use 0 or more")
    return values


def _prefetch(declared: Auto | Bounds | tuple[int, ...]) -> tuple[int, ...]:
    values = _integers(declared, auto=(2, 4, 8))
    if values[0] < 1:
        raise InputError(f"search.prefetch_factor: {values[0]} is too small; torch needs 1 or more")
    return values


def _batches(declared: Auto | Bounds | tuple[int, ...], limits: MachineLimits, effective: int) -> tuple[int, ...]:
    allowed = [d for d in divisors(effective) if limits.largest_batch is None or d <= limits.largest_batch]
    if limits.fixed_batch is not None:
        if effective % limits.fixed_batch:
            raise InputError(
                f"training.effective_batch_size: {effective} is not a multiple of {limits.fixed_batch}, "
                "the batch that the workload's own batch_sampler or make_loader gives"
            )
        if isinstance(declared, tuple) and limits.fixed_batch not in declared:
            raise InputError(
                f"search.batch_size: only {limits.fixed_batch} can be had: the workload's own batch_sampler or "
                "make_loader decides it"
            )
        return (limits.fixed_batch,)
    if isinstance(declared, tuple):
        for value in declared:
            if value not in allowed:
                raise InputError(_batch_refusal(value, allowed, effective, limits.largest_batch))
        return tuple(sorted(set(declared)))
    if isinstance(declared, Bounds):
        chosen = [d for d in allowed if declared.low <= d <= declared.high]
    else:
        chosen = _useful_batches(allowed)
    if not chosen:
        raise InputError(
            f"search.batch_size: no divisor of effective_batch_size {effective} is in the given range; "
            f"divisors: {', '.join(map(str, allowed))}"
        )
    return tuple(chosen)


def _useful_batches(allowed: Sequence[int]) -> list[int]:
    """Leave out micro-batches under a 64th of the largest: a step of them is launch time alone."""
    return [d for d in allowed if d * 64 >= allowed[-1]] if allowed else []


def _batch_refusal(value: int, allowed: Sequence[int], effective: int, largest: int | None) -> str:
    if value > 0 and effective % value == 0:
        return f"search.batch_size: {value} is more than the {largest} samples that the dataset holds"
    near = sorted(allowed, key=lambda d: abs(d - value))[:2]
    return (
        f"search.batch_size: {value} does not divide effective_batch_size {effective}; "
        f"nearest that do: {', '.join(map(str, sorted(near)))}"
    )


def _amps(declared: Auto | tuple[Amp, ...], limits: MachineLimits) -> tuple[Amp, ...]:
    if declared == "auto":
        return limits.amps
    for amp in declared:
        if amp not in limits.amps:
            raise InputError(
                f"search.amp: this device has no {amp} of its own (an emulated one does not count); "
                f"it supports {', '.join(limits.amps)}"
            )
    return tuple(sorted(set(declared), key=list(Amp).index))


def _integers(declared: Auto | Bounds | tuple[int, ...], *, auto: Iterable[int]) -> tuple[int, ...]:
    if isinstance(declared, Bounds):
        return tuple(range(declared.low, declared.high + 1))
    return tuple(sorted(set(auto if declared == "auto" else declared)))


def _flags(declared: Auto | tuple[bool, ...], *, auto: tuple[bool, ...]) -> tuple[bool, ...]:
    return auto if declared == "auto" else tuple(sorted(set(declared)))
