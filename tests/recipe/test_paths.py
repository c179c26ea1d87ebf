"""Input paths: absolute, from the file that names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_files import MINIMAL, Write, failure

from finetune.recipe.load import load_recipe
from finetune.recipe.paths import is_hub_dataset


def test_input_paths_are_relative_to_the_file_that_names_them(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write("", "parts/score.py")
    write("", "home/t.jinja")
    write("data: {eval: [{path: ../e.jsonl}]}\nevaluation: {metrics: [score.py, exact_match]}", "parts/p.yaml")
    text = (
        "extends: ../parts/p.yaml\n"
        "model: {path: ./m, chat_template: ~/t.jinja}\n"
        "data: {train: [{path: a.jsonl}, {path: /abs.csv}]}\n"
        "output: {dir: out}\n"
    )
    path = write(text, "sub/r.yaml")
    recipe = load_recipe(path, overrides=["data.train.1.path=here.csv"])
    assert recipe.model.path == str(tmp_path / "sub/m")
    assert recipe.model.chat_template == str(tmp_path / "home/t.jinja")
    assert [source.path for source in recipe.data.train] == [str(tmp_path / "sub/a.jsonl"), str(tmp_path / "here.csv")]
    assert isinstance(recipe.data.eval, list)
    assert recipe.data.eval[0].path == str(tmp_path / "e.jsonl")
    assert recipe.evaluation.metrics == [str(tmp_path / "parts/score.py"), "exact_match"]
    assert recipe.output.dir == "out"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", "gpt2"),
        ("Qwen/Qwen3-14B", "Qwen/Qwen3-14B"),
        ("local", "{here}/local"),
        ("./gpt2", "{here}/gpt2"),
        ("../m", "{above}/m"),
        ("/models/m", "/models/m"),
        ("a/b/c", "{here}/a/b/c"),
    ],
)
def test_model_path_is_a_folder_or_a_hub_id(write: Write, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "local").mkdir()
    recipe = load_recipe(write(MINIMAL.replace("org/name", text)))
    assert recipe.model.path == expected.format(here=tmp_path, above=tmp_path.parent)


def test_a_linked_data_file_keeps_its_name(write: Write, tmp_path: Path) -> None:
    """Hub caches link `x.jsonl` to a file without a suffix, from which the format could not be told."""
    write("", "blobs/123")
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "blobs/123")
    assert load_recipe(write(MINIMAL)).data.train[0].path == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", "org/name"),
        ("org/data.jsonl", "{here}/org/data.jsonl"),
        ("org/data.jsonl.gz", "{here}/org/data.jsonl.gz"),
        ("local/folder", "{here}/local/folder"),
        ("./org/name", "{here}/org/name"),
        ("data/*", "{here}/data/*"),
        ("name", "{here}/name"),
    ],
)
def test_a_source_is_a_path_or_a_hub_id(write: Write, tmp_path: Path, text: str, expected: str) -> None:
    """A mistyped file must not be looked for on the hub, so a name that ends like a data file is always a path."""
    (tmp_path / "local/folder").mkdir(parents=True)
    recipe = load_recipe(write(MINIMAL.replace("a.jsonl", text)))
    assert recipe.data.train[0].path == expected.format(here=tmp_path)
    assert is_hub_dataset(recipe.data.train[0].path) is (text == "org/name")


def test_fields_of_a_hub_dataset(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL.replace("a.jsonl", "org/name, name: main, split: test, revision: v1")))
    source = recipe.data.train[0]
    assert (source.name, source.split, source.revision) == ("main", "test", "v1")


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000 + "b", "\0"])
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.path={}", "model.path"),
        ("model.chat_template={}", "model.chat_template"),
        ("data.train=[{{path: {}}}]", "data.train.0.path"),
        ("data.eval=[{{path: {}}}]", "data.eval.0.path"),
        ("evaluation.metrics=[{}]", "evaluation.metrics.0"),
        ("output.dir={}", "output.dir"),
    ],
)
def test_names_that_no_file_can_have(write: Write, override: str, key: str, name: str) -> None:
    """Some ended in a traceback of the file system's, others far from the recipe."""
    value = '"a\\0b"' if name == "\0" else name
    error = failure(write(MINIMAL), override.format(value))
    assert f"`{key}` must be a name that a file can have" in error.message
    assert key in error.remedy


@pytest.mark.parametrize("key", ["model.path", "model.chat_template", "data.train.0.path", "output.dir"])
def test_half_of_a_character_in_a_name(write: Write, key: str) -> None:
    error = failure(write(MINIMAL), f'{key}="\\ud800"')
    assert f"`{key}`" in error.message and "half of a character" in f"{error.message} {error.remedy}"
