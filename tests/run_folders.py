"""Run folders as a run leaves them, written without a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.recipe.load import dump_recipe
from finetune.recipe.schema import Recipe
from finetune.run.folder import RunFolder, Status, create_run_folder

ENVIRONMENT = {"finetune": "0.1.0", "packages": {"torch": "2.13.0"}, "num_cpus": 2, "command": ["finetune", "train"]}
LEDGER = {"records": 40, "records_kept": 40, "dropped": [], "sources": [{"path": "/a.jsonl", "records": 40}]}
TRAINED = {
    "trainable_parameters": 100,
    "total_parameters": 1000,
    "groups": [{"name": "q_proj", "num_tensors": 2, "num_parameters": 100, "dtype": "float32"}],
}


def recipe_of(**sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {
        "model": {"path": "org/tiny"},
        "data": {"train": [{"path": "/a.jsonl"}]},
        "output": {"dir": "runs/x"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def make_run(
    path: Path,
    *,
    status: Status = "done",
    recipe: Recipe | None = None,
    losses: Sequence[float] = (3.0, 2.0),
    eval_losses: Sequence[float] = (),
    report: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **manifest: object,
) -> RunFolder:
    """Writes a run; `report=None` writes none, as of a run that has not ended, `eval_losses` begin before step 1."""
    run = create_run_folder(
        path,
        recipe_text=dump_recipe(recipe or recipe_of()),
        recipe_hash="h",
        environment=ENVIRONMENT if environment is None else environment,
    )
    records: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": loss, "real_tokens_per_second": 100.0 * step}
        for step, loss in enumerate(losses, start=1)
    ]
    records += [{"kind": "eval", "step": step, "eval_loss": loss} for step, loss in enumerate(eval_losses)]
    run.metrics_path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if report is not None:
        run.report_json.write_text(json.dumps(report))
    run.set_status(status)
    values = {**json.loads(run.manifest_path.read_text()), "data_digest": "d1", **manifest}
    run.manifest_path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return run


def full_report(**sections: Any) -> dict[str, Any]:
    report: dict[str, Any] = {
        "ledgers": {"train": LEDGER},
        "trained": TRAINED,
        "plan": {"total_steps": 2},
        "timings": {"total_seconds": 12.5},
        "scores": {"exact_match": {"before": 0.0, "after": 0.5}},
    }
    return {**report, **sections}
