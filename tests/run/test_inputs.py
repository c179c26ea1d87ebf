"""What a run began with is told again by its content, wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from finetune.run.inputs import fingerprint, fingerprints, input_key, value_at


def make_model(folder: Path, *, seed: int = 0, rows: int = 3) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": np.random.default_rng(seed).random((rows, 1 << 10))}, folder / "model.safetensors")
    return folder


def test_a_copy_is_the_same_and_another_model_of_the_same_sizes_is_not(tmp_path: Path) -> None:
    for rows in (3, 1000):  # read whole, and in blocks
        model = make_model(tmp_path / str(rows) / "a", rows=rows)
        copy = shutil.copytree(model, tmp_path / str(rows) / "b")
        (copy / "README.md").write_text("a word")
        assert fingerprint(str(model)) == fingerprint(str(copy))
        other = make_model(tmp_path / str(rows) / "c", rows=rows, seed=1)
        assert fingerprint(str(model)) != fingerprint(str(other))
        (copy / "config.json").write_text("[]")
        assert fingerprint(str(model)) != fingerprint(str(copy))


def test_a_file_is_told_whatever_its_name(tmp_path: Path) -> None:
    for name, text in (("a.jinja", "x"), ("b.jinja", "x"), ("c.jinja", "y")):
        (tmp_path / name).write_text(text)
    a, b, c = (fingerprint(str(tmp_path / name)) for name in ("a.jinja", "b.jinja", "c.jinja"))
    assert a == b != c and a is not None


@pytest.mark.parametrize("path", ["Qwen/Qwen3-14B", "exact_match", "/no/such/folder"])
def test_what_is_not_local_or_gone_has_none(path: str) -> None:
    assert fingerprint(path) is None


def test_keys_of_inputs_are_found_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("x")
    recipe = {
        "model": {"path": str(make_model(tmp_path / "m")), "chat_template": None},
        "data": {"train": [{"path": str(tmp_path / "score.py")}], "eval": {"fraction": 0.1}},
        "adapter": {"type": "none"},
        "evaluation": {"metrics": ["exact_match", str(tmp_path / "score.py")]},
    }
    assert set(fingerprints(recipe)) == {"model.path", "evaluation.metrics[1]"}
    assert value_at(recipe, "data.train[0].path") == recipe["evaluation"]["metrics"][1]
    assert value_at(recipe, "data.train[1].path") is None and value_at(recipe, "data.eval[0].path") is None
    assert input_key("data.train[3].path") == "data.train.*.path"
    assert input_key("data.train[3].format") is None
