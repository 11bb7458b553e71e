"""Study results for report tests: one of each kind, with figures that a real study could have."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

from builders import PLAN, estimate, failure, measured, measurement, trial_config, usage
from rich.console import Console

from pipetune.core.alternatives import Alternative
from pipetune.core.diagnosis import Bottleneck
from pipetune.core.measurement import FailureKind, Phase
from pipetune.core.record import StudyResult, StudySummary, TrialRecord
from pipetune.core.space import Amp
from pipetune.core.throughput import EpochStart
from pipetune.core.tuned import Ceiling, Status, TunedConfig
from pipetune.report.console import result_view

BASELINE = trial_config(0)
RULE = trial_config(15, batch_size=256, accumulation_steps=1, amp=Amp.BF16, pin_memory=True)
WINNER = trial_config(14, batch_size=128, accumulation_steps=2, amp=Amp.BF16, pin_memory=True)


def record(number, config, outcome):
    return TrialRecord(number=number, config=config, outcome=outcome, seconds=8.1234)


def trial(number, config, rate, **changes):
    """A measured trial whose windows differ by 2 %."""
    return record(number, config, measurement(config, rates=[0.99 * rate, 1.01 * rate] * 5, **changes))


def failed(number, config, kind, message, phase=Phase.WARM_UP):
    return record(number, config, failure(config, kind, phase=phase, message=message))


def tuned_config(**changes):
    values = {
        "status": Status.CERTIFIED,
        "config": WINNER,
        "changes_training": ("the forward pass runs in bf16 instead of fp32: losses differ in the last digits",),
        "measured": measured(2404.4, 14.1, gpu=98.7, steady_samples_per_sec=estimate(2420.3, 12.0)),
        "baseline_config": BASELINE,
        "baseline_measured": measured(295.1, 3.3, gpu=18.2, data_wait_percent=81.0),
        "ceiling": Ceiling(samples_per_sec=2488.0, limit="compute"),
        "hardware": {"gpu": "NVIDIA H200", "cpus_usable": 16},
        "provenance": {"study": "photos", "trials": 3},
    }
    return TunedConfig(**values | changes)


ALTERNATIVES = tuple(
    Alternative(knob=knob, config=replace(WINNER, **changes), samples_per_sec=rate, trial=trial)
    for knob, changes, rate, trial in (
        ("num_workers", {"num_workers": 13}, 2391.2, None),
        ("persistent_workers", {"persistent_workers": False}, 2310.0, 4),
        ("batch_size", {"batch_size": 64, "accumulation_steps": 4}, 2212.7, None),
        ("amp", {"amp": Amp.FP32}, 961.3, 7),
    )
)


def summary(**changes):
    values = {
        "study": "photos",
        "plan": PLAN,
        "space_size": 1224,
        "most_workers": 16,
        "workers_limit": "CPU affinity (16 of 64)",
        "notes": (),
        "seconds": 254.6,
    }
    return StudySummary(**values | changes)


RECORDS = (
    trial(0, BASELINE, 297.0, gpu=usage(18.3), gpu_reason=None, wait_share=0.81),
    trial(1, RULE, 2391.0, gpu=usage(97.9), gpu_reason=None, wait_share=0.004),
    trial(2, WINNER, 2431.0, gpu=usage(98.6), gpu_reason=None, wait_share=0.012),
)


def result(*, notes=(), **changes):
    values = {
        "folder": Path("studies/photos"),
        "tuned": tuned_config(),
        "bottleneck": Bottleneck.COMPUTE,
        "records": RECORDS,
        "summary": summary(notes=notes),
    }
    return StudyResult(**values | changes)


def certified():
    return result(summary=summary(alternatives=ALTERNATIVES))


def no_gain():
    """On a CPU, where nothing is known of a GPU and nothing beats the baseline."""
    figures = measured(1237.6, 43.7, data_wait_percent=12.2)
    records = (
        trial(0, BASELINE, 1222.0, wait_share=0.122),
        record(1, trial_config(1), measurement(trial_config(1), rates=[900.0, 1100.0] * 5, wait_share=0.21)),
    )
    return result(
        tuned=tuned_config(
            status=Status.NO_GAIN,
            config=BASELINE,
            changes_training=(),
            measured=figures,
            baseline_measured=figures,
            ceiling=None,
        ),
        bottleneck=Bottleneck.INPUT,
        records=records,
        summary=summary(space_size=2, workers_limit="all CPUs present", seconds=45.2),
    )


def provisional():
    """Interrupted after the second trial."""
    return result(
        tuned=tuned_config(status=Status.PROVISIONAL, config=RULE, changes_training=(), ceiling=None),
        bottleneck=Bottleneck.BALANCED,
        records=RECORDS[:2],
        summary=summary(seconds=19.4),
    )


def failures():
    """A failure of each kind between two trials that ran."""
    kinds = (
        (
            FailureKind.GPU_OUT_OF_MEMORY,
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
        ),
        (FailureKind.HOST_OUT_OF_MEMORY, "the trial process was ended by SIGKILL"),
        (FailureKind.SHARED_MEMORY, "RuntimeError: unable to write to file </torch_31_1>"),
        (FailureKind.TIMEOUT, "ended after 90 s, the last 90 of them without a sign of life; likely: a worker that "),
        (FailureKind.CRASH, "the trial process was ended by SIGSEGV"),
        (FailureKind.ERROR, "ValueError: no augmentation named [red]x[/red] in [bold]\nsecond line"),
        (FailureKind.INVALID_DATA, "DataEndedError: the stream ended after 3 batches"),
        (FailureKind.NON_FINITE, "NonFiniteLossError: the loss became NaN or infinite within 12 optimizer steps"),
    )
    rows = [failed(n, trial_config(n, pin_memory=True), *kind) for n, kind in enumerate(kinds, 1)]
    return result(
        records=(RECORDS[0], *rows, replace(RECORDS[2], number=9)),
        notes=("stopped searching: 5 trials in a row failed with error",),
    )


def widest():
    """The longest of everything that a real machine gives."""
    config = trial_config(
        128, batch_size=4096, accumulation_steps=16, amp=Amp.BF16, pin_memory=True, prefetch_factor=16
    )
    slow = replace(BASELINE, batch_size=4096, accumulation_steps=16)
    return result(
        folder=Path("/home/someone/projects/vision/experiments/studies/photos-with-a-long-name"),
        tuned=tuned_config(
            config=config,
            measured=measured(12_345_678.9, 123_456.7, gpu=100.0),
            baseline_config=slow,
            baseline_measured=measured(1_234_567.8, 12_345.6, gpu=18.2),
            changes_training=("a change of training that is told in more words than fit on a line, " * 2,),
            ceiling=Ceiling(samples_per_sec=12_999_999.9, limit="compute"),
        ),
        records=(
            trial(0, slow, 1_234_567.8, gpu=usage(18.2), gpu_reason=None),
            trial(
                123,
                config,
                12_345_678.9,
                gpu=usage(100.0),
                gpu_reason=None,
                epoch_start=EpochStart(fresh_s=0.0, refill_s=0.0),
            ),
        ),
        notes=("a note without a place to break: " + "x" * 100,),
    )


def rendered(view, width=80):
    """What a terminal of that width shows, without the blanks at the ends of lines."""
    console = Console(file=StringIO(), width=width)
    console.print(view)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def shown(study_result):
    return rendered(result_view(study_result))
