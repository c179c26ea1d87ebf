"""A run on a dataset of the hub is continued on the commit that it began with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hub_server import HubServer
from tiny import make_model_folder, make_recipe

from finetune.errors import ExitCode


def rows(count: int, *, first: int = 0) -> bytes:
    made = [{"instruction": f"question {index}", "output": f"answer {index}"} for index in range(first, first + count)]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


def test_resume_reads_the_commit_that_the_run_began_with(tmp_path: Path) -> None:
    """The branch went on meanwhile, and --resume refused other data that no one had chosen."""
    base = make_model_folder(tmp_path / "base", "llama")
    metric = tmp_path / "late.py"
    made = make_recipe(base, tmp_path / "none.jsonl", tmp_path / "run")
    made["data"] |= {"train": [{"path": "org/set"}], "eval": {"fraction": 0.25}}
    made["evaluation"] = {"metrics": [str(metric)], "at_start": False}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(made), encoding="utf-8")
    with HubServer() as hub:
        begun = hub.publish("org/set", {"data/train.jsonl": rows(16)})
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }

        def start(*more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "finetune", "train", str(recipe), *more]
            root = Path(__file__).parents[1]
            return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120)

        metric.write_text("def score(prediction, reference):\n    raise KeyError('late')\n", encoding="utf-8")
        failed = start()
        assert failed.returncode == ExitCode.RECIPE, failed.stderr
        metric.write_text("def score(prediction, reference):\n    return 1.0\n", encoding="utf-8")
        hub.publish("org/set", {"data/train.jsonl": rows(16, first=100)})
        done = start("--resume")
        assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))
    assert (manifest["status"], manifest["hub_commits"]) == ("done", {"org/set@main": begun})
    report = json.loads((tmp_path / "run/report.json").read_text(encoding="utf-8"))
    assert list(report["plan"]["hub_commits"].values()) == [begun]
