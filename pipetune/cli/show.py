"""`pipetune show STUDY`: what a study found, read from its folder."""

from pathlib import Path
from typing import Annotated

import typer

from pipetune.cli.exits import exit_codes
from pipetune.cli.output import print_object


def show(
    study: Annotated[Path, typer.Argument(help="A study's folder, or its name under studies/.", show_default=False)],
    storage: Annotated[
        str | None, typer.Option(help="The Optuna storage URL of its trials.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Show the result and the trials of a study."""
    with exit_codes():
        from rich.console import Console

        from pipetune import api
        from pipetune.report.console import result_view
        from pipetune.report.machine import result_object

        result = api.show(study, storage=storage)
        if json_:
            print_object(result_object(result))
        else:
            Console().print(result_view(result))
