"""`pipetune validate CONFIG`: every problem of a config and its workload, without measuring."""

from pathlib import Path
from typing import Annotated

import typer

from pipetune.cli.exits import exit_codes
from pipetune.cli.output import print_object


def validate(
    config: Annotated[Path, typer.Argument(help="The study's config file.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Check a config file, build its workload, read a first sample and show the search space."""
    with exit_codes():
        from pipetune import api
        from pipetune.report.console import validation_text
        from pipetune.report.machine import validation_object

        checked = api.validate(config, overrides=set_ or [])
        if json_:
            print_object(validation_object(checked))
        else:
            print(f"{config}: valid\n{validation_text(checked)}")
