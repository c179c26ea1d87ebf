"""The shipped recipes: found, told apart from fragments, copied so that the copy is the same run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

import finetune
from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.load import load_recipe
from finetune.start import shipped as module
from finetune.start.copying import copy_shipped
from finetune.start.editor import SCHEMA_LINE
from finetune.start.shipped import find_shipped, shipped_files, shipped_root

NAMES = [item.name for item in shipped_files() if item.kind == "recipe"]


def test_every_file_has_a_name_of_its_own_and_a_purpose() -> None:
    files = shipped_files()
    assert len({item.name for item in files}) == len(files)
    assert {"quickstart", "qwen3-14b_qlora_sft", "configs/quantization/nf4"} <= {item.name for item in files}
    assert [item.name for item in files if not item.purpose] == []
    assert [item.name for item in files if not item.purpose.endswith((".", ":"))] == []
    assert [item.name for item in files if "Command:" in item.purpose or "Memory and time" in item.purpose] == []


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml"])
def test_a_recipe_is_found_by_any_of_its_names(name: str) -> None:
    assert find_shipped(name).path == shipped_root() / "recipes/quickstart.yaml"


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(RecipeError) as caught:
        find_shipped("quikstart")
    assert caught.value.remedy == "Did you mean quickstart?"


def test_an_installed_package_has_them_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages/finetune"
    for name in ("recipes", "configs"):
        (package / "shipped" / name).mkdir(parents=True)
    (package / "shipped/recipes/a.yaml").write_text("# Purpose: see.\n")
    monkeypatch.setattr(module.finetune, "__file__", str(package / "__init__.py"))
    assert [item.name for item in shipped_files()] == ["a"]
    (package / "shipped/configs").rmdir()
    with pytest.raises(EnvironmentProblem, match="not part of this installation"):
        shipped_root()


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_same_run_with_its_inputs_beside_it(name: str, tmp_path: Path) -> None:
    shipped = find_shipped(name)
    copied = copy_shipped(shipped, tmp_path / "own", force=False)
    assert copied.recipe == tmp_path / "own" / shipped.path.name
    before, after = (json.dumps(load_recipe(path).model_dump(mode="json")) for path in (shipped.path, copied.recipe))
    assert after.replace(str(tmp_path / "own"), str(shipped.path.parent)) == before
    for path in copied.files:
        assert path.is_file() and path.is_relative_to(tmp_path / "own")
    for path in copied.missing:
        assert not path.exists() and str(path) in after


@pytest.mark.parametrize("name", [*NAMES, "configs/quantization/nf4"])
def test_every_copied_file_names_the_schema_beside_it(name: str, tmp_path: Path) -> None:
    copied = copy_shipped(find_shipped(name), tmp_path / "own", force=False)
    schema = tmp_path / "own/recipe.schema.json"
    for path in copied.files:
        if path.suffix == ".yaml":
            first_line, _, text = path.read_text().partition("\n")
            assert (path.parent / first_line.removeprefix(SCHEMA_LINE)).resolve() == schema
            jsonschema.validate(yaml.safe_load(text), json.loads(schema.read_text()))


def test_the_header_names_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = copy_shipped(find_shipped("qwen3-14b_qlora_sft"), Path("own/q.yaml"), force=False).recipe.read_text()
    assert "# Command: finetune train own/q.yaml " in text
    assert "own/data/support.jsonl" in text
    assert "extends: [configs/quantization/nf4.yaml]" in text
    assert "recipes/" not in text


def test_a_second_copy_changes_nothing_and_an_edited_file_is_kept(tmp_path: Path) -> None:
    shipped = find_shipped("qwen3-14b_qlora_sft")
    first = copy_shipped(shipped, tmp_path, force=False)
    assert copy_shipped(shipped, tmp_path, force=False) == first
    first.recipe.write_text("mine: 1\n")
    with pytest.raises(RecipeError, match="there already") as caught:
        copy_shipped(shipped, tmp_path, force=False)
    assert caught.value.place == str(first.recipe)
    assert first.recipe.read_text() == "mine: 1\n"
    copy_shipped(shipped, tmp_path, force=True)
    assert first.recipe.read_text() != "mine: 1\n"


def test_another_file_of_the_schemas_name_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "recipe.schema.json").write_text('{"title": "mine"}')
    with pytest.raises(RecipeError, match="no schema of this program"):
        copy_shipped(find_shipped("quickstart"), tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.schema.json"]


def test_a_schema_of_another_version_is_renewed(tmp_path: Path) -> None:
    (tmp_path / "recipe.schema.json").write_text('{"title": "finetune recipe", "properties": {}}')
    copy_shipped(find_shipped("configs/quantization/nf4"), tmp_path, force=False)
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["properties"]


def test_a_folder_that_cannot_be_written_is_an_environment_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        copy_shipped(find_shipped("quickstart"), tmp_path / "file" / "below", force=False)


def test_the_root_is_the_checkout() -> None:
    assert shipped_root() == Path(finetune.__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["i/a: #b\n.yaml", "it's\u2028.yaml", "with space.yaml", "my/recipes/q.yaml"])
def test_the_header_names_any_path_on_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line end in the name stood raw in the comment, and the rest of the name was read as YAML."""
    monkeypatch.chdir(tmp_path)
    copied = copy_shipped(find_shipped("quickstart"), Path(name), force=False)
    assert load_recipe(copied.recipe).model.path == str((tmp_path / name).parent / "quickstart/base")
    text = copied.recipe.read_text(encoding="utf-8")
    command = next(line for line in text.split("\n") if line.startswith("# Command: "))
    shown = ["bash", "-c", f"printf %s {command.partition('finetune train ')[2]}"]
    printed = subprocess.run(shown, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8", "PATH": os.defpath})
    assert printed.stdout.decode() == name
