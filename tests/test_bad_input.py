"""Bad input through the command line: exit code, place, remedy, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.cli import main
from finetune.errors import ExitCode


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    make_model_folder(root / "model", "qwen3")
    make_model_folder(root / "no_weights", "qwen3", weights=False)
    make_model_folder(root / "moe", "gpt_oss")
    make_model_folder(
        root / "huge", "qwen3", weights=False, hidden_size=65536, intermediate_size=262144, num_hidden_layers=120
    )
    make_chat_file(root / "good.jsonl", rows=6)
    good = (root / "good.jsonl").read_text(encoding="utf-8").splitlines()
    (root / "broken.jsonl").write_text("\n".join([*good[:2], '{"messages": [', *good[2:]]), encoding="utf-8")
    (root / "binary.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    (root / "empty.jsonl").write_text("", encoding="utf-8")
    return root


class Case:
    """One bad recipe: what is changed, and what must be said about it."""

    def __init__(self, change: Callable[[dict, Path], None], code: ExitCode, place: str, remedy: str) -> None:
        self.change, self.code, self.place, self.remedy = change, code, place, remedy


def _set(section: str, **values: object) -> Callable[[dict, Path], None]:
    return lambda recipe, root: recipe[section].update(values)


def _data(name: str) -> Callable[[dict, Path], None]:
    return lambda recipe, root: recipe["data"].update(train=[{"path": str(root / name)}])


def _model(name: str, **values: object) -> Callable[[dict, Path], None]:
    return lambda recipe, root: recipe["model"].update(path=str(root / name), **values)


CASES = {
    "unknown key": Case(_set("training", lerning_rate=1e-4), ExitCode.RECIPE, "recipe.yaml:", "learning_rate"),
    "wrong type": Case(_set("training", learning_rate="fast"), ExitCode.RECIPE, "recipe.yaml:", "number"),
    "missing file": Case(_data("nowhere.jsonl"), ExitCode.DATA, "nowhere.jsonl", ""),
    "broken JSON line": Case(_data("broken.jsonl"), ExitCode.DATA, "broken.jsonl:3", ""),
    "binary file": Case(_data("binary.jsonl"), ExitCode.DATA, "binary.jsonl", ""),
    "empty data set": Case(_data("empty.jsonl"), ExitCode.DATA, "empty.jsonl", ""),
    "over-long rows": Case(_set("data", max_length=16), ExitCode.DATA, "", "over_length"),
    "target that matches nothing": Case(
        _set("adapter", targets=["q_porj"]), ExitCode.RECIPE, "adapter.targets", "q_proj"
    ),
    "model folder that is not there": Case(_model("nowhere"), ExitCode.ENVIRONMENT, "nowhere", "model.path"),
    "model folder without weights": Case(_model("no_weights"), ExitCode.ENVIRONMENT, "no_weights", "init=random"),
    "packed gpt-oss": Case(_model("moe", attention="eager"), ExitCode.RECIPE, "model.attention", "data.packing=false"),
    "disk too small": Case(_model("huge", init="random"), ExitCode.ENVIRONMENT, "", "output.dir"),
    "rows longer than the model's positions": Case(
        _set("data", max_length=100_000), ExitCode.RECIPE, "data.max_length", "512"
    ),
}
CUDA_CASE = Case(_set("model", device="cuda"), ExitCode.ENVIRONMENT, "model.device", "model.device=cpu")


def _run(case: Case, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    recipe = make_recipe(parts / "model", parts / "good.jsonl", tmp_path / "out" / "run")
    recipe["data"]["max_length"] = 128
    if case is CASES["disk too small"]:
        recipe["adapter"] = {"type": "none"}
    case.change(recipe, parts)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    capsys.readouterr()
    assert main(["train", str(tmp_path / "recipe.yaml"), "--json"]) == case.code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name: str, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    error = _run(case, parts, tmp_path, capsys)
    assert error["exit_code"] == case.code
    assert case.place in error["place"] + error["message"]
    assert error["remedy"]
    assert case.remedy in error["remedy"] + error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml"], "something was written"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_and_not_there(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = _run(CUDA_CASE, parts, tmp_path, capsys)
    assert error["place"] == "model.device"
    assert "CUDA" in error["message"]
    assert "model.device=cpu" in error["remedy"]
    assert not (tmp_path / "out").exists()


def test_output_folder_of_another_run(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(parts / "model", parts / "good.jsonl", tmp_path / "run")
    recipe["data"]["max_length"] = 128
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["train", str(tmp_path / "recipe.yaml"), "training.max_steps=1"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    assert main(["train", str(tmp_path / "recipe.yaml"), "training.max_steps=1", "--json"]) == ExitCode.RECIPE
    error = json.loads(capsys.readouterr().out)
    assert str(tmp_path / "run") in error["place"]
    assert "output.dir" in error["remedy"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
