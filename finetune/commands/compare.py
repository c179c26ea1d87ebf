"""`finetune diff` and `finetune runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.commands.options import JsonOption, complete_run
from finetune.compare.diff import diff_runs
from finetune.compare.listing import list_runs
from finetune.compare.record import read_run
from finetune.compare.text import show_diff, show_runs
from finetune.console import Console

_RUN_HELP = "Run folder; the run may be done, failed or still going on."


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(diff)
    app.command()(runs)


def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help=_RUN_HELP, autocompletion=complete_run)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help=_RUN_HELP, autocompletion=complete_run)],
    is_json: JsonOption = False,
) -> None:
    """Show what differs between two runs.

    Compared are the recipe with its defaults, the data, the environment, the trained weights and the figures. The
    exit code is 0 whether they differ or not; with --json, `is_same` says which.
    """
    console = Console(is_json=is_json)
    found = diff_runs(read_run(run_a), read_run(run_b))
    show_diff(console, found)
    console.result(found.as_dict())


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="Folder of runs [default: runs, else this one]", autocompletion=complete_run
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="FIELD", help="when, name, status, model, steps, loss or time.")
    ] = "when",
    is_json: JsonOption = False,
) -> None:
    """List the runs in and below a folder, the newest first."""
    console = Console(is_json=is_json)
    if folder is None:
        folder = Path("runs") if Path("runs").is_dir() else Path(".")
    listed = list_runs(folder, sort=sort)
    show_runs(console, listed, folder=str(folder))
    console.result({"dir": str(folder.absolute()), "runs": [run.as_dict() for run in listed]})
