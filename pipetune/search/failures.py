"""What failed trials tell: what else will not fit, and why nothing works."""

from collections import Counter
from collections.abc import Sequence

from pipetune.core.measurement import FailureKind, TrialFailure
from pipetune.core.record import TrialRecord
from pipetune.core.space import Amp, TrialConfig


def is_beyond(config: TrialConfig, failure: TrialFailure) -> bool:
    """Whether a configuration needs at least as much of the memory that ran out."""
    met = failure.config
    if failure.kind is FailureKind.GPU_OUT_OF_MEMORY:
        # bf16 and fp16 take the same room; fp32 may take less than either where weights outweigh activations.
        is_alike = (config.amp is Amp.FP32) == (met.amp is Amp.FP32)
        return is_alike and config.batch_size >= met.batch_size
    if failure.kind in {FailureKind.SHARED_MEMORY, FailureKind.HOST_OUT_OF_MEMORY}:
        return (
            config.num_workers >= met.num_workers > 0
            and config.batch_size >= met.batch_size
            and (config.prefetch_factor or 0) >= (met.prefetch_factor or 0)
        )
    return False


def table_of_reasons(records: Sequence[TrialRecord]) -> str:
    """How many trials failed in which way, and the first traceback in full."""
    failures = [record.failure for record in records if record.failure is not None]
    counts = Counter(failure.headline() for failure in failures)
    lines = [f"  {count} x {reason}" for reason, count in counts.most_common()]
    text = "\n".join([f"no configuration works: {len(failures)} trials, none ran to its end", *lines])
    first = next((f for f in failures if f.traceback_text or f.log_tail), None)
    if first is None:
        return text
    return f"{text}\n\nthe first of them ({first.config.label()}):\n{first.traceback_text or first.log_tail}"
