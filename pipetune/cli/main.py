"""The `pipetune` command."""

from typing import Annotated

import typer

from pipetune import __version__
from pipetune.cli.diagnose import diagnose
from pipetune.cli.doctor import doctor
from pipetune.cli.monitor import monitor
from pipetune.cli.show import show
from pipetune.cli.tune import tune
from pipetune.cli.validate import validate

app = typer.Typer(
    name="pipetune",
    help="Measure the fastest DataLoader, batch and precision settings for a PyTorch run; write them as YAML.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(tune)
app.command()(validate)
app.command()(show)
app.command()(doctor)
app.command()(diagnose)
app.command()(monitor)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        print(f"pipetune {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _print_version(wanted=wanted),
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Options of the command as a whole."""


def main() -> None:
    """Entry point of the console script."""
    app()
