"""Arguments and options that several commands share, and what a shell completes for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer

from finetune.errors import FinetuneError
from finetune.recipe.paths import DATA_FILE
from finetune.start.shipped import shipped_files


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the YAML files that begin as typed, and folders to look into."""
    return complete_paths(incomplete, lambda path: path.endswith((".yaml", ".yml")))


def complete_data(incomplete: str) -> list[str]:
    """Returns the data files that begin as typed, and folders to look into."""
    return complete_paths(incomplete, lambda path: DATA_FILE.search(path) is not None)


def complete_run(incomplete: str) -> list[str]:
    """Returns the run folders that begin as typed, and folders to look into."""
    return complete_paths(incomplete, lambda path: os.path.isfile(os.path.join(path, "run.json")))


def complete_shipped(incomplete: str) -> list[str]:
    """Returns the names of shipped recipes and fragments that begin as typed."""
    try:
        return [item.name for item in shipped_files() if item.name.startswith(incomplete)]
    except FinetuneError:  # an installation without recipes completes none; the command says why
        return []


def complete_paths(incomplete: str, takes: Callable[[str], bool]) -> list[str]:
    """Returns the paths that are taken and begin as typed, then folders, with a slash at their end.

    A shell puts a space after a match that is the only one, which would end a path at its first folder; so of a
    single folder what it holds is returned.
    """
    folder, typed = os.path.split(incomplete)
    try:
        names = sorted(os.listdir(os.path.expanduser(folder) or "."))
    except OSError:  # nothing to complete in a folder that is not there
        return []
    shown = [os.path.join(folder, name) for name in names if _begins(name, typed)]
    taken = [path for path in shown if takes(os.path.expanduser(path))]
    folders = [path for path in shown if path not in taken and os.path.isdir(os.path.expanduser(path))]
    if not taken and len(folders) == 1:
        return complete_paths(f"{folders[0]}/", takes) or [f"{folders[0]}/"]
    return taken + [f"{path}/" for path in folders]


def _begins(name: str, typed: str) -> bool:
    return name.startswith(typed) and (typed.startswith(".") or not name.startswith("."))


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="YAML file that describes the run.", autocompletion=complete_recipe)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values laid over the recipe: training.learning_rate=1e-4"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, the rest on stderr.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that are there already.")]
