"""What differs between two runs, and that nothing is called the same that was not compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import ENVIRONMENT, LEDGER, TRAINED, full_report, make_run, recipe_of

from finetune.compare.diff import RunDiff, diff_runs
from finetune.compare.record import read_run
from finetune.compare.text import show_diff
from finetune.console import Console
from finetune.run.folder import RunFolder


def compared(a: RunFolder, b: RunFolder) -> RunDiff:
    return diff_runs(read_run(a.path), read_run(b.path))


def verdicts(diff: RunDiff) -> dict[str, str]:
    return {part.name: part.verdict for part in diff.parts}


def found(diff: RunDiff, name: str) -> dict[str, tuple[object, object]]:
    part = next(part for part in diff.parts if part.name == name)
    return {item.key: (item.a, item.b) for item in part.differences}


def test_a_rerun_with_the_same_figures_differs_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", report=full_report(), recipe=recipe_of(output={"dir": "runs/a"}))
    b = make_run(tmp_path / "b", report=full_report(), recipe=recipe_of(output={"dir": "runs/b"}))
    diff = compared(a, b)
    assert diff.is_same
    show_diff(Console(), diff)
    assert capsys.readouterr().out.endswith("\nnothing differs (output.dir and the command typed are not compared)\n")


def test_a_recipe_differs_key_by_key(tmp_path: Path) -> None:
    sources = [{"path": "/a.jsonl", "weight": 2.0}, {"path": "/b.jsonl"}]
    changed = recipe_of(training={"learning_rate": 1e-3}, data={"train": sources, "eval": {"fraction": 0.1}})
    diff = compared(make_run(tmp_path / "a"), make_run(tmp_path / "b", recipe=changed))
    differences = found(diff, "recipe")
    assert list(differences) == ["data.train[0].weight", "data.train[1]", "data.eval", "training.learning_rate"]
    assert differences["training.learning_rate"] == (2e-4, 1e-3)
    assert differences["data.eval"] == (None, {"fraction": 0.1})


def test_defaults_written_out_or_left_out_are_the_same(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    b.recipe_path.write_text("model: {path: org/tiny}\ndata: {train: [{path: /a.jsonl}]}\noutput: {dir: elsewhere}\n")
    assert verdicts(compared(a, b))["recipe"] == "same"


def test_other_data_are_told_by_hash_and_counts(tmp_path: Path) -> None:
    ledger = {**LEDGER, "records": 41, "dropped": [{"reason": "duplicate", "records": 3}]}
    a = make_run(tmp_path / "a", report=full_report())
    b = make_run(tmp_path / "b", report=full_report(ledgers={"train": ledger}), data_digest="d2")
    differences = found(compared(a, b), "data")
    assert differences["hash of all samples"] == ("d1", "d2")
    assert differences["train: records"] == (40, 41)
    assert "train: dropped (duplicate)" in differences
    assert len(differences) == 3


def test_the_same_samples_from_a_moved_file_are_the_same_data(tmp_path: Path) -> None:
    moved = {**LEDGER, "sources": [{"path": "/elsewhere.jsonl", "records": 40}]}
    a = make_run(tmp_path / "a", report=full_report())
    b = make_run(tmp_path / "b", report=full_report(ledgers={"train": moved}))
    assert verdicts(compared(a, b))["data"] == "same"


def test_environment_trained_weights_and_figures(tmp_path: Path) -> None:
    trained = {**TRAINED, "groups": [{**TRAINED["groups"][0], "dtype": "bfloat16"}]}
    environment = {**ENVIRONMENT, "packages": {"torch": "2.11.0"}, "command": ["another"]}
    a = make_run(tmp_path / "a", report=full_report(), eval_losses=[5.0, 4.0, 4.5])
    b = make_run(
        tmp_path / "b", report=full_report(trained=trained), environment=environment, eval_losses=[5.0, 3.0, 3.5]
    )
    diff = compared(a, b)
    assert found(diff, "environment") == {"packages.torch": ("2.13.0", "2.11.0")}
    assert found(diff, "trained") == {"q_proj: dtype": ("float32", "bfloat16")}
    assert found(diff, "metrics") == {"eval_loss_after": (4.5, 3.5), "eval_loss_best": (4.0, 3.0)}


def test_what_a_run_has_not_written_is_not_called_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on or was killed has no report: no ledger and no table of trained weights."""
    a, b = make_run(tmp_path / "a", report=full_report()), make_run(tmp_path / "b", status="running", losses=[])
    diff = compared(a, b)
    assert verdicts(diff) == {
        "recipe": "same",
        "data": "unknown",
        "environment": "same",
        "trained": "unknown",
        "metrics": "different",
    }
    assert not diff.is_same
    show_diff(Console(), diff)
    out = capsys.readouterr().out
    assert "not known: b wrote no report yet, which holds the ledger's counts" in out
    assert "nothing differs" not in out
    assert out.endswith("different: figures\nnot compared in full: data, trained weights\n")
    assert found(diff, "metrics")["status"] == ("done", "killed")


def test_two_runs_without_a_report_are_not_declared_equal(tmp_path: Path) -> None:
    diff = compared(make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    assert not diff.is_same
    assert verdicts(diff)["data"] == "unknown"


def test_losses_that_differ_late_are_shown_with_all_their_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", losses=[2.0]), make_run(tmp_path / "b", losses=[2.00000001])
    show_diff(Console(), compared(a, b))
    assert "2.00000001" in capsys.readouterr().out


def test_absent_has_no_key_in_json(tmp_path: Path) -> None:
    sources = [{"path": "/a.jsonl"}, {"path": "/b.jsonl"}]
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", recipe=recipe_of(data={"train": sources}))
    values = json.loads(json.dumps(compared(a, b).as_dict()))
    (difference,) = values["parts"]["recipe"]["differences"]
    assert set(difference) == {"key", "b"}
    assert (values["run_a"], values["is_same"]) == (str(a.path), False)
