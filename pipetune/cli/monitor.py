"""`pipetune monitor`: what a GPU's utilisation looks like, and what that means."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipetune.cli.exits import exit_codes
from pipetune.cli.output import print_object


def monitor(
    read: Annotated[
        Path, typer.Option("--read", metavar="FILE", help="A CSV file of `nvidia-smi --query-gpu`.", show_default=False)
    ],
    interval: Annotated[float, typer.Option(min=0.001, help="Seconds between samples without timestamps.")] = 1.0,
    epoch_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="How long an epoch takes, if you know.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Draw the utilisation in a file that nvidia-smi wrote, and name its shape: steady, saw-tooth, dips."""
    with exit_codes():
        from rich.console import Console

        from pipetune import api
        from pipetune.core.text import printable
        from pipetune.report.curve import curves_object, curves_view

        found, verdicts = api.read_curves(read, interval_s=interval, epoch_s=epoch_seconds)
        if found.skipped:
            told = f"pipetune: {read}: {len(found.skipped)} line(s) left out, the first: {found.skipped[0]}"
            print(printable(told), file=sys.stderr)
        if json_:
            print_object(curves_object(found.curves, verdicts))
        else:
            Console().print(curves_view(found.curves, verdicts))
