"""A utilisation curve as a picture in the terminal, in words, and for programs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pipetune.core.curve import Curve, CurveVerdict, Shape
from pipetune.core.text import printable
from pipetune.report.console import duration

WIDTH, HEIGHT = 68, 6
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WORDS = {
    Shape.TOO_SHORT: "too short to tell a shape",
    Shape.IDLE: "the GPU was idle",
    Shape.STEADY_HIGH: "steadily high: the GPU is used",
    Shape.STEADY_LOW: "steadily low: the GPU waits within each step (small batches, a slow loader, syncs)",
    Shape.SAW_TOOTH: "a saw-tooth: the GPU works, then waits for data",
    Shape.DIPS: "high, with dips",
    Shape.UNEVEN: "uneven, without a rhythm: other programs, or samples of very different cost",
}
_NEXT = {
    Shape.STEADY_LOW: "`pipetune diagnose CONFIG` says what holds each step back",
    Shape.SAW_TOOTH: "`pipetune diagnose CONFIG` says whether decoding, storage or too few workers make it wait",
    Shape.DIPS: "where the period is an epoch's, persistent_workers help; else look for checkpoints and evaluation",
    Shape.IDLE: "is the model on this GPU?",
}


def curves_view(curves: Mapping[str, Curve], verdicts: Mapping[str, CurveVerdict]) -> RenderableType:
    """A picture and a sentence for each GPU."""
    parts: list[RenderableType] = []
    for name, curve in curves.items():
        parts += [Text(f"GPU {printable(name)}", style="bold"), _picture(curve), Text(words(verdicts[name]))]
        if (advice := _NEXT.get(verdicts[name].shape)) is not None:
            parts.append(Text(f"-> {advice}", style="bold"))
        parts.append("")
    return Group(*parts[:-1])


def words(verdict: CurveVerdict) -> str:
    """One sentence."""
    text = f"busy {verdict.mean_percent:.0f} % of the time, {_WORDS[verdict.shape]}"
    if verdict.shape in {Shape.SAW_TOOTH, Shape.DIPS}:
        text += f"; low for {verdict.low_share:.0%} of the time"
    if verdict.period_s is not None:
        text += f", every {verdict.period_s:.3g} s"
    if verdict.is_epoch is not None:
        text += ", which is the epoch" if verdict.is_epoch else ", which is not the epoch"
    return text


def curves_object(curves: Mapping[str, Curve], verdicts: Mapping[str, CurveVerdict]) -> dict[str, Any]:
    """Plain types only."""
    return {
        "gpus": [
            {
                "gpu": name,
                "samples": len(curve.percents),
                "seconds": curve.times_s[-1] if curve.times_s else 0.0,
                "shape": verdicts[name].shape.value,
                "mean_percent": round(verdicts[name].mean_percent, 2),
                "low_share": round(verdicts[name].low_share, 3),
                "period_s": verdicts[name].period_s,
                "is_epoch": verdicts[name].is_epoch,
            }
            for name, curve in curves.items()
        ]
    }


def _picture(curve: Curve) -> Text:
    """Columns of blocks, each the mean of its part of the time."""
    columns = _means(curve.percents, min(WIDTH, len(curve.percents)))
    lines = []
    for row in range(HEIGHT, 0, -1):
        low, high = 100 * (row - 1) / HEIGHT, 100 * row / HEIGHT
        line = "".join(_BLOCKS[round(8 * min(1.0, max(0.0, (value - low) / (high - low))))] for value in columns)
        lines.append(f"{high:>4.0f} |{line}" if row in {1, HEIGHT} else f"     |{line}")
    seconds = curve.times_s[-1] if curve.times_s else 0.0
    lines.append(f"      0 s{duration(seconds):>{max(1, len(columns) - 3)}}")
    return Text("\n".join(lines), style="cyan")


def _means(values: Sequence[float], count: int) -> list[float]:
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count else [0]
    return [fmean(values[begin:end]) for begin, end in pairwise(edges)]
