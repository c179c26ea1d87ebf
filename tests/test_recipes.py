"""Every shipped recipe loads and holds; every recipe and fragment satisfies the schema that its first line names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml

from finetune.recipe.load import dump_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if "runs" not in path.parts)
FRAGMENTS = sorted((ROOT / "configs").rglob("*.yaml"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_recipes_and_fragments() -> None:
    assert ROOT / "recipes/qwen3-14b_qlora_sft.yaml" in RECIPES
    assert ROOT / "configs/quantization/nf4.yaml" in FRAGMENTS


@pytest.mark.parametrize("path", RECIPES, ids=shown)
def test_recipe_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    dumped = tmp_path / "recipe.yaml"
    dumped.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(dumped) == recipe


@pytest.mark.parametrize("path", [*RECIPES, *FRAGMENTS], ids=shown)
def test_first_line_names_the_schema_and_the_file_satisfies_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    first_line = text.splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first_line.startswith(prefix)
    schema_path = Path(os.path.normpath(path.parent / first_line.removeprefix(prefix)))
    assert schema_path == ROOT / "docs/recipe.schema.json"
    jsonschema.validate(yaml.safe_load(text), json.loads(schema_path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RECIPES, ids=shown)
def test_header_names_purpose_and_a_command_with_the_recipe(path: Path) -> None:
    header = "".join(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[0] == "#")
    assert "Purpose:" in header
    assert f"finetune train {shown(path)}" in header


@pytest.mark.parametrize("path", FRAGMENTS, ids=shown)
def test_fragment_fits_into_a_recipe(path: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: {path}\nmodel: {{path: a/b}}\ndata: {{train: [{{path: x}}]}}\noutput: {{dir: o}}\n")
    load_recipe(recipe)


def test_qwen3_14b_is_qlora() -> None:
    recipe = load_recipe(ROOT / "recipes/qwen3-14b_qlora_sft.yaml")
    assert recipe.model.quantization == "nf4"
    assert recipe.adapter.type == "lora"
    assert recipe.training.learning_rate == 2e-4
