"""The wheel holds what an installed program needs: recipes, fragments, their data and the schema."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, of the extra `test`, builds the wheel without a network")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def test_recipes_and_fragments_are_in_it_as_in_the_checkout(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "configs"):
        for path in (ROOT / folder).rglob("*.yaml"):
            if "runs" not in path.parts:
                assert f"finetune/shipped/{path.relative_to(ROOT).as_posix()}" in names
    assert "finetune/shipped/docs/recipe.schema.json" in names
    assert "finetune/shipped/recipes/quickstart/base/model.safetensors" in names
    assert "finetune/run/report.css" in names
    assert not [name for name in names if name.startswith("tests/") or "base_tasks.jsonl" in name]


def test_the_unpacked_package_copies_a_recipe_that_loads(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import finetune; from finetune.cli import main; from finetune.recipe.load import load_recipe;"
        f"assert finetune.__file__.startswith({str(site)!r}), finetune.__file__;"
        "assert main(['recipes', 'copy', 'qwen3-14b_qlora_sft', 'own']) == 0;"
        "assert load_recipe('own/qwen3-14b_qlora_sft.yaml').model.quantization == 'nf4';"
        "assert load_recipe(finetune.__path__[0] + '/shipped/recipes/qwen3-14b_qlora_sft.yaml')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
