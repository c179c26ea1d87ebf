"""`finetune init`, `finetune recipes` and `finetune schema`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.commands.options import ForceOption, JsonOption, complete_data, complete_shipped
from finetune.compare.text import wrapped
from finetune.console import Console
from finetune.errors import RecipeError
from finetune.recipe.reference import recipe_json_schema, render_json_schema
from finetune.start.copying import copy_shipped
from finetune.start.editor import write_schema
from finetune.start.shipped import find_shipped, shipped_files

if TYPE_CHECKING:
    from finetune.start.asking import Ask

recipes = typer.Typer(
    name="recipes",
    help="List, show and copy the recipes that come with the program.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="As `finetune recipes` lists it.", autocompletion=complete_shipped)
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(init)
    app.add_typer(recipes)
    app.command()(schema)


@recipes.callback()
def recipes_root(context: typer.Context, is_json: JsonOption = False) -> None:
    """List, show and copy the recipes that come with the program."""
    if context.invoked_subcommand is None:
        list_recipes(is_json)
    elif is_json:  # before the name of the command it means the same as after it
        context.default_map = {context.invoked_subcommand: {"is_json": True}}


@recipes.command(name="list")
def list_recipes(is_json: JsonOption = False) -> None:
    """List recipes and fragments with what each is for."""
    console = Console(is_json=is_json)
    files = shipped_files()
    for item in files:
        console.line(item.name, style="bold")
        for line in wrapped(item.purpose, indent="    "):
            console.line(line)
    console.line()
    console.line("finetune recipes copy NAME  # takes one here, with all that it names")
    console.result({"recipes": [item.as_dict() for item in files]})


@recipes.command()
def show(name: NameArgument, is_json: JsonOption = False) -> None:
    """Print a recipe as it is shipped."""
    console, shipped = Console(is_json=is_json), find_shipped(name)
    console.line(shipped.text.rstrip("\n"))
    console.result({**shipped.as_dict(), "text": shipped.text})


@recipes.command()
def copy(
    name: NameArgument,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="Folder, or file ending in .yaml.")] = Path("."),
    force: ForceOption = False,
    is_json: JsonOption = False,
) -> None:
    """Copy a recipe, with all that it names, to where you work.

    That is: the fragments that it extends, the data and the model that are shipped, and the schema for editors.
    """
    console = Console(is_json=is_json)
    copied = copy_shipped(find_shipped(name), destination, force=force)
    for path in copied.files:
        console.line(f"written  {path}")
    for path in copied.missing:
        console.line(f"missing  {path}: put your own data there, or change the path in the recipe")
    console.result(copied.as_dict())


DataArgument = Annotated[
    str | None, typer.Argument(metavar="DATA", help="Data file or folder.", autocompletion=complete_data)
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Recipe to write.")]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="ID|DIR", help="Hub id or folder.")]
CardOption = Annotated[
    str | None, typer.Option("--card", metavar="CARD", help="rtx3090, 24GiB, cpu, ... [default: auto]")
]
MethodOption = Annotated[str | None, typer.Option("--method", metavar="NAME", help="Training method [default: sft]")]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", metavar="TYPE", help="lora, or none to train all weights [default: lora]")
]
RunDirOption = Annotated[
    str | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the run [default: runs/ and FILE's name]")
]
ColumnOption = Annotated[
    list[str] | None, typer.Option("--column", metavar="ROLE=NAME", help="Column of a role: instruction=question")
]
LengthOption = Annotated[
    int | None, typer.Option("--max-length", metavar="TOKENS", min=8, help="Of a row [default: from the data]")
]
FractionOption = Annotated[
    float | None, typer.Option("--eval-fraction", metavar="SHARE", help="Held out, 0: nothing [default: from the data]")
]


def init(
    data: DataArgument = None,
    output: OutputOption = Path("recipe.yaml"),
    model: ModelOption = None,
    card: CardOption = None,
    method: MethodOption = None,
    adapter: AdapterOption = None,
    run_dir: RunDirOption = None,
    column: ColumnOption = None,
    max_length: LengthOption = None,
    eval_fraction: FractionOption = None,
    force: ForceOption = False,
    is_json: JsonOption = False,
) -> None:
    """Write a recipe from a look at your data and a few answers.

    Asks on a terminal for what no option gives; elsewhere, and with --json, takes the defaults.
    """
    from finetune.start.init import InitRequest
    from finetune.start.init import init as write_recipe

    console = Console(is_json=is_json)
    request = InitRequest(
        output=output,
        data=data,
        model=model,
        card=card,
        method=method,
        adapter=adapter,
        run_dir=run_dir,
        columns=_columns(column or []),
        max_length=max_length,
        eval_fraction=_fraction(eval_fraction),
        force=force,
    )
    written = write_recipe(request, console=console, ask=_asker(console))
    console.result(written.as_dict())


def _columns(pairs: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for pair in pairs:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            remedy = "For example: --column instruction=question --column output=answer"
            raise RecipeError(f"a column is given as ROLE=NAME, found `{pair}`", place="--column", remedy=remedy)
        columns[role] = name
    return columns


def _fraction(value: float | None) -> float | None:
    if value is not None and not 0 <= value < 1:
        remedy = "Give a share such as 0.1; 0 holds nothing out."
        raise RecipeError(
            f"the share must be at least 0 and below 1, found {value:g}", place="--eval-fraction", remedy=remedy
        )
    return value


def _asker(console: Console) -> Ask | None:
    """Returns what asks a question on the terminal, or None for a program: under `--json`, or without a terminal."""
    if console.is_json or not sys.stdin.isatty():
        return None

    def ask(question: str, default: str | None) -> str:
        return str(typer.prompt(question, default=default)).strip()

    return ask


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to FILE instead of stdout.")
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of recipes, which editors read."""
    console = Console(is_json=is_json)
    if output is not None:
        write_schema(output)
        console.line(f"written  {output}")
        console.result({"schema": str(output)})
    elif is_json:
        console.result(recipe_json_schema())
    else:
        sys.stdout.write(render_json_schema())
