"""`pipetune doctor`: whether this machine is fit to train, and what limits it."""

from pathlib import Path
from typing import Annotated

import typer

from pipetune.cli.exits import exit_codes
from pipetune.cli.output import print_object


def doctor(
    data: Annotated[
        Path | None, typer.Option(help="The folder that samples are read from.", show_default=False)
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="A training script, to be looked at for a main guard.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Check driver, GPU, CPUs, memory, shared memory, limits and storage; exit code 1 where training would stop."""
    with exit_codes():
        from rich.console import Console

        from pipetune import api
        from pipetune.core.findings import Severity, worst
        from pipetune.report.findings import findings_object, findings_view

        with Console(stderr=True).status("looking at the machine, importing torch ..."):
            findings = api.doctor(data=data, script=script)
        if json_:
            print_object(findings_object(findings))
        else:
            Console().print(findings_view(findings))
        if worst(findings) is Severity.STOP:
            raise SystemExit(1)
