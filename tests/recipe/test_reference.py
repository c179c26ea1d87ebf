"""The generated reference and JSON Schema: fresh, complete, and of one mind with the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from finetune.recipe.fields import sections
from finetune.recipe.load import dump_recipe, load_recipe
from finetune.recipe.reference import DOCS, recipe_json_schema, render_json_schema, render_reference, write_docs

STALE = "stale; run: python -m finetune.recipe.reference"
MINIMAL: dict[str, Any] = {"model": {"path": "a"}, "data": {"train": [{"path": "x"}]}, "output": {"dir": "o"}}


def is_valid(values: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(recipe_json_schema()).is_valid(values)


def test_written_files_are_fresh() -> None:
    assert (DOCS / "recipe_reference.md").read_text(encoding="utf-8") == render_reference(), STALE
    assert (DOCS / "recipe.schema.json").read_text(encoding="utf-8") == render_json_schema(), STALE


def test_write_docs_writes_both(tmp_path: Path) -> None:
    write_docs(tmp_path / "docs")
    assert (tmp_path / "docs/recipe_reference.md").read_text(encoding="utf-8") == render_reference()
    assert (tmp_path / "docs/recipe.schema.json").read_text(encoding="utf-8") == render_json_schema()


def test_every_field_has_a_line_with_a_text() -> None:
    lines = render_reference().splitlines()
    for path, section in sections():
        assert any(line.startswith(f"## `{path}`") for line in lines), path
        for name in section.model_fields:
            rows = [line for line in lines if line.startswith(f"| `{name}` |")]
            assert rows, f"{path}.{name}"
            assert all(len(row.split(" | ")[-1].strip(" |")) > 5 for row in rows), rows


@pytest.mark.parametrize(
    "line",
    [
        "| `rank` | a whole number, 1 or more and at most 4096 | `16` | Rank of each adapter. |",
        "| `max_rows` | a whole number or `null`, 1 or more | `null` | Use only the first so many records. |",
        "## `adapter` with `type: none`",
    ],
)
def test_lines_of_the_reference(line: str) -> None:
    assert line in render_reference().splitlines()


def test_schema_is_valid_and_every_property_is_described() -> None:
    schema = recipe_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for name, definition in [("recipe", schema), *schema["$defs"].items()]:
        assert definition["additionalProperties"] is False, name
        assert definition["description"], name
        for key, value in definition["properties"].items():
            assert "description" in value or "$ref" in value or "oneOf" in value, f"{name}.{key}"


@pytest.mark.parametrize(
    "values",
    [
        MINIMAL,
        {"model": {"quantization": "nf4"}},
        {"extends": "a.yaml"},
        {"extends": ["a.yaml", "b.yaml"], "adapter": {"rank": 8}},
        {"adapter": {"type": "none"}},
        {"data": {"eval": {"fraction": 0.1}}},
        {"data": {"eval": None}},
    ],
)
def test_schema_takes_recipes_and_fragments(values: dict[str, Any]) -> None:
    assert is_valid(values)


@pytest.mark.parametrize(
    "values",
    [
        {"modle": {}},
        {"training": {"lerning_rate": 1}},
        {"training": {"seed": "7"}},
        {"extends": 5},
        {"adapter": {"type": "none", "rank": 8}},
        {"adapter": {"rank": 0}},
        {"data": {"train": [{"format": "text"}]}},
        {"data": {"train": []}},
        {"data": {"eval": {}}},
        {"data": {"eval": []}},
    ],
)
def test_schema_refuses_what_the_loader_refuses(values: dict[str, Any]) -> None:
    assert not is_valid(values)


def test_a_dumped_recipe_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert is_valid(yaml.safe_load(dump_recipe(load_recipe(path))))
