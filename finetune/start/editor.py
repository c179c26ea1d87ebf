"""The recipe's JSON Schema as a file beside a recipe, where editors find it without a network.

A recipe's first line names it: `# yaml-language-server: $schema=recipe.schema.json`. The path is read from the recipe's
own folder, so it holds on any machine that the folder is copied to, which a path into an installation would not, and
it needs neither a network, as an address would, nor a setting of the editor.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.reference import recipe_json_schema, render_json_schema
from finetune.run.atomic import write_text

SCHEMA_NAME = "recipe.schema.json"
SCHEMA_LINE = "# yaml-language-server: $schema="


def schema_line(recipe: Path, schema: Path) -> str:
    """Returns the first line of a recipe that names the schema by its path from the recipe's folder."""
    return SCHEMA_LINE + Path(os.path.relpath(schema, recipe.parent)).as_posix()


def require_own_schema(path: Path) -> None:
    """Raises RecipeError where a file of the schema's name is something else, which would be lost."""
    if not os.path.lexists(path):
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or values.get("title") != recipe_json_schema()["title"]:
        remedy = "Move the file away, or write into another folder."
        raise RecipeError(
            "the file is no schema of this program; it will not be replaced", place=str(path), remedy=remedy
        )


def write_schema(path: Path) -> None:
    """Writes the schema of this version, over one of another version.

    Raises:
        RecipeError: another file has this name.
        EnvironmentProblem: the file cannot be written.
    """
    require_own_schema(path)
    try:
        write_text(path, render_json_schema())
    except OSError as error:
        message = f"the schema cannot be written: {error.strerror or error}"
        remedy = "Name a folder that is there and that you may write to."
        raise EnvironmentProblem(message, place=str(path), remedy=remedy) from error
