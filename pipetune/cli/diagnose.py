"""`pipetune diagnose CONFIG`: what holds today's settings back."""

from pathlib import Path
from typing import Annotated

import typer

from pipetune.cli.exits import exit_codes
from pipetune.cli.output import print_object


def diagnose(
    config: Annotated[Path, typer.Argument(help="The study's config file.", show_default=False)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Train once with the present settings (the config's baseline), run the parts alone, and name the bottleneck."""
    with exit_codes():
        from rich.console import Console

        from pipetune import api
        from pipetune.report.diagnosis import diagnosis_object, diagnosis_view

        with Console(stderr=True).status("starting") as status:
            evidence = api.diagnose(config, overrides=set_ or [], tell=status.update)
        if json_:
            print_object(diagnosis_object(evidence))
        else:
            Console().print(diagnosis_view(evidence))
