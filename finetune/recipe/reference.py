"""The recipe's reference and JSON Schema, made from the schema's own texts.

`python -m finetune.recipe.reference` writes both to `docs/`; a test fails when they are stale.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, TypeGuard

from pydantic.fields import FieldInfo

from finetune.recipe.fields import describe, sections, type_names, whole_annotation
from finetune.recipe.schema import Recipe, Section

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXTENDS_TEXT = (
    "File or files that this one builds on, relative to it; later ones win over earlier ones, and this file over all."
)
HEAD = """\
<!-- Generated from finetune/recipe/schema.py by `python -m finetune.recipe.reference`; do not edit. -->

# Recipe reference

A recipe is one YAML file. The sections `model`, `data` and `output` are required; every other section and every key
with a default may be left out. An unknown key, a wrong type or a broken rule is an error that names file, line and
column.

- **Values** follow YAML 1.2: `1e-4` is a number, `true` and `false` are the only truth values, `no` and `off` are text.
  Types are strict: `"8"` is no number and `8.0` no whole number.
- **`extends`**, at the top level, takes a file or a list of files, relative to the file that names them. They are
  merged in order, the later over the earlier and the file itself over all. Mappings merge key by key, lists
  and single values replace, and a mapping that changes its `type` replaces the whole mapping.
- **Overrides** on the command line win over files: `finetune train recipe.yaml training.learning_rate=1e-4
  data.train.0.path=other.jsonl data.eval=null`. The value is YAML; a number in the key is an item of a list, from 0.
- **Input paths** are relative to the file that names them, in an override to the current folder; `~` is the home
  folder. `output.dir` is relative to the current folder. Environment variables are not expanded.
- **Editors** read the JSON Schema that the first line names, `# yaml-language-server: $schema=recipe.schema.json`;
  `finetune schema --output recipe.schema.json` writes it, as `finetune init` and `finetune recipes copy` do
  ([editors.md](editors.md)). It lets required keys be absent, since `extends` may supply them; `finetune train`
  does not.
"""


def render_reference() -> str:
    """Returns `docs/recipe_reference.md`: every section with its keys, values, limits, defaults and texts."""
    parts = [HEAD]
    for path, section in sections():
        kinds = type_names(section)
        title = f"`{path}`" + (f" with `type: {kinds[0]}`" if kinds else "")
        parts.append(f"## {title}\n\n{_one_line(inspect.getdoc(section) or '')}\n")
        rows = [_row(name, info) for name, info in section.model_fields.items()]
        parts.append("| key | values | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def recipe_json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) for editors.

    A recipe that extends others, and a fragment, hold only a part of the keys. So no key of the sections that merge is
    required here; keys inside list items, and `type: none`, still are. Unknown keys are refused everywhere.
    """
    schema = Recipe.model_json_schema()
    for info in Recipe.model_fields.values():
        if _is_section(info.annotation):
            schema["$defs"][info.annotation.__name__].pop("required", None)
    schema.pop("required")
    names = {"type": "string", "minLength": 1}
    extends = {
        "anyOf": [names, {"type": "array", "items": names}],
        "title": "Extends",
        "description": EXTENDS_TEXT,
    }
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "finetune recipe"}


def render_json_schema() -> str:
    """Returns `docs/recipe.schema.json`."""
    return json.dumps(recipe_json_schema(), indent=2) + "\n"


def _row(name: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else _default(info)
    cells = [f"`{name}`", describe(whole_annotation(info)), default, _one_line(info.description or _section_text(info))]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    return "its own" if isinstance(value, Section) else f"`{json.dumps(value)}`".replace('"', "")


def _section_text(info: FieldInfo) -> str:
    return inspect.getdoc(info.annotation) or "" if _is_section(info.annotation) else ""


def _is_section(annotation: object) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def write_docs(folder: Path = DOCS) -> None:
    """Writes both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe_reference.md").write_text(render_reference(), encoding="utf-8")
    (folder / "recipe.schema.json").write_text(render_json_schema(), encoding="utf-8")


if __name__ == "__main__":
    write_docs()
