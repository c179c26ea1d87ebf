"""Recipes through the command line whose held-out loss falls, or rises from an early step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.run.metrics import read_metrics


def make_parts(root: Path) -> Path:
    """Models, data, and held-out data unlike them."""
    for kind in ("qwen3", "qwen3_moe"):
        make_model_folder(root / kind, kind)
    make_chat_file(root / "train.jsonl", rows=40)
    make_chat_file(root / "eval.jsonl", rows=6, seed=9)
    turns = [{"role": "user", "content": "say: @#%&"}, {"role": "assistant", "content": "@#%&*" * 8}]
    (root / "unlike.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    return root


def write_recipe(parts: Path, folder: Path, kind: str = "qwen3", **sections: dict[str, Any]) -> Path:
    recipe = make_recipe(parts / kind, parts / "train.jsonl", folder / "run", **sections)
    recipe["data"] |= {"max_length": 128, "eval": [{"path": str(parts / "eval.jsonl")}]}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


UPHILL = {"learning_rate": 0.05, "max_steps": 12, "schedule": "constant"}


def write_uphill(parts: Path, folder: Path, kind: str = "qwen3", **sections: dict[str, Any]) -> Path:
    """A recipe whose held-out answers are made of characters that are never learned: their loss rises at once."""
    sections["training"] = UPHILL | sections.get("training", {})
    path = write_recipe(parts, folder, kind, **sections)
    text = path.read_text(encoding="utf-8").replace("eval.jsonl", "unlike.jsonl")
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def eval_losses(run: Path) -> dict[int, float]:
    records = read_metrics(run / "metrics.jsonl")
    return {record["step"]: record["eval_loss"] for record in records if record["kind"] == "eval" and record["step"]}
