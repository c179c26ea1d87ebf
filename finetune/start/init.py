"""`finetune init`: from a few answers and a look at the data to a recipe that loads, with its schema beside it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from finetune.console import Console
from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.load import load_recipe
from finetune.recipe.paths import HUB_ID, is_hub_dataset
from finetune.recipe.schema import TrainingSection
from finetune.run.atomic import write_text
from finetune.start.asking import Ask, Asking, Question
from finetune.start.card import parse_card
from finetune.start.editor import SCHEMA_NAME, require_own_schema, schema_line, write_schema
from finetune.start.look import MAX_ROWS, Look, Unmapped, column_names, look_at, require_roles
from finetune.start.recipe_text import RecipeValues, render_recipe
from finetune.start.suggest import model_facts, suggest

METHODS: Sequence[str] = get_args(TrainingSection.model_fields["method"].annotation)
ADAPTERS: Sequence[str] = ("lora", "none")


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """What the command line gave; None is asked for, or takes its default."""

    output: Path
    data: str | None = None
    model: str | None = None
    card: str | None = None
    method: str | None = None
    adapter: str | None = None
    run_dir: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    max_length: int | None = None
    eval_fraction: float | None = None
    force: bool = False


@dataclass(frozen=True)
class Written:
    """What was written, for `--json`."""

    recipe: Path
    schema: Path
    values: RecipeValues

    @property
    def next_commands(self) -> list[str]:
        name = shlex.quote(str(self.recipe))
        return [f"finetune preview {name}", f"finetune train {name} --dry-run", f"finetune train {name}"]

    def as_dict(self) -> dict[str, Any]:
        values = self.values
        return {
            "recipe": str(self.recipe),
            "schema": str(self.schema),
            "data": values.look.as_dict() if values.look else None,
            "card": values.card.name,
            "suggested": vars(values.values),
            "next": self.next_commands,
        }


def init(request: InitRequest, *, console: Console, ask: Ask | None) -> Written:
    """Writes a recipe.

    Args:
        ask: asks the user; None where nobody can be asked.

    Raises:
        RecipeError: an answer is missing or wrong, or the recipe's file exists.
        DataError: the data cannot be read or used.
        EnvironmentProblem: the file cannot be written.
    """
    target, schema = request.output, request.output.parent / SCHEMA_NAME
    _require_free(target, force=request.force)
    require_own_schema(schema)
    require_roles(request.columns)
    asking = Asking(ask, console)
    data, look = _data(request, asking, console)
    model, folder = asking.taken(
        request.model,
        Question("Model (hub id or folder)", "--model"),
        lambda model: (model, _model_folder(model)),
    )
    card = asking.taken(
        request.card, Question("Card (name, memory such as 24GiB, auto or cpu)", "--card", "auto"), parse_card
    )
    method = asking.choice(request.method, METHODS, Question("Training method", "--method"))
    adapter = asking.choice(request.adapter, ADAPTERS, Question("Adapter: lora, or none for all weights", "--adapter"))
    run_dir = request.run_dir or f"runs/{target.stem}"
    if request.run_dir is None and ask is not None:
        run_dir = ask("Folder of the run", run_dir)
    values = suggest(look, card=card, model=model_facts(folder, model), adapter=adapter, max_length=request.max_length)
    if request.eval_fraction is not None:
        values = replace(values, eval_fraction=request.eval_fraction or None)
    recipe = RecipeValues(
        schema_line=schema_line(target, schema),
        model=_from_recipe(model, target) if folder is not None else model,
        data=data if is_hub_dataset(data) else _from_recipe(data, target),
        columns=look.columns if look is not None else request.columns,
        card=card,
        method=method,
        adapter=adapter,
        run_dir=run_dir,
        look=look,
        values=values,
    )
    _write(target, schema, render_recipe(recipe))
    written = Written(target, schema, recipe)
    _show(console, written)
    return written


def _data(request: InitRequest, asking: Asking, console: Console) -> tuple[str, Look | None]:
    """Settles the data, and shows the first record as it was understood; hub data is not looked at."""
    question = Question("Data file, folder or hub dataset", "DATA")
    if request.columns:
        # No other answer mends a wrong --column, so that is refused once the data can be read at all.
        data, names = asking.taken(request.data, question, lambda data: (data, _column_names(data)))
        _require_columns(request.columns, names, data)
        look = _looked(data, request.columns, asking)
    else:
        data, look = asking.taken(request.data, question, lambda data: (data, _looked(data, {}, asking)))
    for line in look.first_record if look is not None else ():
        console.line(line)
    return data, look


def _require_free(target: Path, *, force: bool) -> None:
    if target.suffix not in (".yaml", ".yml"):
        raise RecipeError("a recipe is a YAML file", place=str(target), remedy="Name it by .yaml, such as recipe.yaml.")
    if os.path.lexists(target) and not force:
        remedy = "Name another file with --output, or add --force to replace this one."
        raise RecipeError("the file exists and will not be replaced", place=str(target), remedy=remedy)


def _column_names(data: str) -> tuple[str, ...] | None:
    """Returns the columns of the first record; None for a dataset of the hub, which is not looked at."""
    return None if is_hub_dataset(data) else column_names(_absolute(data))


def _require_columns(columns: Mapping[str, str], names: Sequence[str] | None, data: str) -> None:
    """Refuses a `--column` that the data does not have."""
    for role, name in columns.items():
        if names is not None and name not in names:
            raise RecipeError(
                f"there is no column `{name}` in {data}",
                place=f"--column {role}={name}",
                remedy=f"Use one of: {', '.join(names)}." if names else "Leave --column out: the data is plain text.",
            )


def _absolute(data: str) -> str:
    return os.path.abspath(os.path.expanduser(data))


def _looked(data: str, columns: Mapping[str, str], asking: Asking) -> Look | None:
    if is_hub_dataset(data):
        asking.console.note(f"{data} is a dataset of the hub, which is not looked at; `finetune preview` does")
        return None
    path = _absolute(data)
    look = look_at(path, columns=columns)
    if isinstance(look, Unmapped):
        chosen = _mapped(look, data, asking)
        look = look_at(path, columns=chosen)
        assert isinstance(look, Look), "with columns, what fits no format is an error"
    return look


def _mapped(unmapped: Unmapped, data: str, asking: Asking) -> dict[str, str]:
    """Returns the columns by role: as the user answers, or as their names say where nobody can be asked."""
    names, guess = ", ".join(unmapped.columns), unmapped.guess

    def column(name: str) -> str:
        if name not in unmapped.columns:
            raise RecipeError(f"there is no column `{name}`", place=data, remedy=f"Use one of: {names}.")
        return name

    if asking.ask is not None and not {"messages", "text"} & set(guess):
        return {
            role: asking.taken(None, Question(f"Which column holds the {what}? ({names})", "", guess.get(role)), column)
            for role, what in (("instruction", "question"), ("output", "answer"))
        }
    if not guess:
        raise RecipeError(
            f"the columns fit no known format: {names}",
            place=data,
            remedy="Say which is which, such as --column instruction=NAME --column output=NAME, or --column text=NAME.",
        )
    return guess


def _model_folder(model: str) -> Path | None:
    """Returns the folder of a model, or None for a hub id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith(("/", ".", "~")) or HUB_ID.fullmatch(model) is None:
        remedy = "Give the folder with the model's files, or a hub id such as Qwen/Qwen3-0.6B."
        raise RecipeError("there is no such folder", place=model, remedy=remedy)
    return None


def _from_recipe(path: str, recipe: Path) -> str:
    """Returns a path as the recipe names it: an absolute one as it is, else relative to the recipe's folder."""
    expanded = os.path.expanduser(path)
    if os.path.isabs(expanded):
        return expanded
    return Path(os.path.relpath(expanded, recipe.parent)).as_posix()


def _write(target: Path, schema: Path, text: str) -> None:
    """Writes the recipe once it is known to load, and the schema."""
    trial = target.with_name(f".{target.stem}.{os.getpid()}.yaml")
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(trial, text)
            load_recipe(trial)
        finally:
            trial.unlink(missing_ok=True)
        write_text(target, text)
        write_schema(schema)
    except OSError as error:
        remedy = "Name another file with --output, or change the permissions of this folder."
        reason = error.strerror or str(error)
        raise EnvironmentProblem(f"the recipe cannot be written: {reason}", place=str(target), remedy=remedy) from error


def _show(console: Console, written: Written) -> None:
    recipe, values = written.values, written.values.values
    if look := recipe.look:
        rows = f"{look.num_rows:,} rows" if look.is_whole else f"more than {MAX_ROWS:,} rows"
        console.line(f"data     {rows}, recognised as {look.format}")
        if look.columns:
            console.line(f"columns  {', '.join(f'{role} is {column}' for role, column in look.columns.items())}")
        console.line(
            f"length   about {look.longest_tokens:,} tokens at most, estimated: max_length {values.max_length}"
        )
        if look.num_faulty:
            console.warning(f"{look.num_faulty:,} rows cannot be used, the first: {look.first_fault}")
    console.line(f"card     {recipe.card}: quantization {values.quantization}, device {values.device}")
    console.line(f"method   {recipe.method}, adapter {recipe.adapter}, run folder {recipe.run_dir}")
    for warning in values.warnings:
        console.warning(warning)
    console.line(f"written  {written.recipe}, and {written.schema} for editors", style="bold")
    console.line()
    meanings = ("see the data as the model will", "check everything but the weights", "train")
    width = max(map(len, written.next_commands))
    for command, meaning in zip(written.next_commands, meanings, strict=True):
        console.line(f"{command.ljust(width)}  # {meaning}")
