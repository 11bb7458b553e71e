"""`pipetune tune CONFIG`: measure, certify, write best.yaml."""

from pathlib import Path
from typing import Annotated

import typer

from pipetune.cli.exits import exit_codes
from pipetune.cli.output import print_object


def tune(
    config: Annotated[Path, typer.Argument(help="The study's config file.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. search.num_workers=[0,4,8]."),
    ] = None,
    study_dir: Annotated[
        Path | None,
        typer.Option(help="This study's own folder. [default: studies/<study>]", show_default=False),
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Budget over all runs of the study, e.g. 10m.", show_default=False)
    ] = None,
    trials: Annotated[int | None, typer.Option(help="At most this many trials.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of what trials draw at random.", show_default=False)] = None,
    storage: Annotated[str | None, typer.Option(help="An Optuna storage URL.", show_default=False)] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="BEST.yaml",
            help="Try the settings of an older result early.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the study's earlier trials.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Measure real training steps until the budget is spent, and write the best settings as YAML."""
    with exit_codes():
        from rich.console import Console

        from pipetune import api
        from pipetune.report.console import result_view
        from pipetune.report.live import LiveProgress
        from pipetune.report.machine import result_object

        options = {
            "budget.time": time,
            "budget.trials": trials,
            "device": device,
            "seed": seed,
            "storage": storage,
        }
        overrides = [
            *(set_ or []),
            *(f"{key}={value}" for key, value in options.items() if value is not None),
        ]
        with LiveProgress(Console(stderr=True)) as progress:
            result = api.tune(
                config,
                overrides=overrides,
                study_dir=study_dir,
                fresh=fresh,
                start_from=from_,
                progress=progress,
            )
        if json_:
            print_object(result_object(result))
        else:
            Console().print(result_view(result))
