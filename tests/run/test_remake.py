"""`finetune report`: the page of a run that is done, goes on, or was killed, from what lies in its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.compare.record import read_run
from finetune.errors import DataError, EnvironmentProblem, RecipeError
from finetune.run.folder import RunFolder, create_run_folder
from finetune.run.remake import remake_report
from finetune.run.report import ReportInputs, build_report

RECIPE = "model: {path: base}\noutput: {dir: runs/one}\n"


def train_line(step: int) -> str:
    record: dict[str, Any] = {"kind": "train", "step": step, "loss": 3.0 / step, "elapsed_seconds": 2.0 * step}
    return json.dumps(record | {"real_tokens_per_second": 1000.0, "peak_memory_bytes": 2**30}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that has begun and logged three steps."""
    run = create_run_folder(tmp_path / "one", recipe_text=RECIPE, recipe_hash="0", environment={"python": "3.12"})
    inputs = ReportInputs(
        status="running",
        recipe={"output": {"dir": "runs/one"}},
        plan={"total_steps": 9},
        samples=[{"prompt": "p", "reference": "r", "before": "b", "after": None}],
        checks=[{"name": "documents", "ok": True, "detail": "compared"}],
    )
    run.report_json.write_text(json.dumps(build_report(inputs)))
    run.metrics_path.write_text("".join(train_line(step) for step in (1, 2, 3)))
    return run


def test_a_running_run_is_shown_as_it_stands_and_stays_untouched(run: RunFolder) -> None:
    stored = run.report_json.read_bytes()
    with run.metrics_path.open("a") as stream:
        stream.write(train_line(4)[:25])
    run.samples_path.write_text(json.dumps({"step": 3, "prompt": "p", "reference": "r", "answer": "r"}) + '\n{"step"')
    with run.lock():  # as the training process holds it
        made = remake_report(run.path)
    assert (made.status, made.steps, made.total_steps) == ("running", 3, 9)
    page = run.report_html.read_text()
    for wanted in ("Running", "Step 3 of 9", "step 3 <b>equal</b>", "compared", "GPU memory, GiB"):
        assert wanted in page, wanted
    assert run.curves_png.read_bytes().startswith(b"\x89PNG")
    assert run.report_json.read_bytes() == stored and run.status == "running"
    assert not [name for name in os.listdir(run.path) if name.endswith(".tmp")]


def test_a_killed_run_without_a_report_is_made_of_its_other_files(run: RunFolder) -> None:
    run.report_json.unlink()
    run.metrics_path.unlink()
    made = remake_report(run.path)
    assert (made.steps, made.total_steps, made.picture) == (0, None, None)
    page = run.report_html.read_text()
    assert made.status == "killed" and "Killed" in page
    assert "no step is logged yet" in page and "3.12" in page and "path: base" in page
    assert not run.curves_png.exists()


@pytest.mark.parametrize(("status", "word"), [("failed", "Failed"), ("interrupted", "Interrupted"), ("done", "Done")])
def test_a_run_that_ended_keeps_its_date_and_message(run: RunFolder, status: Any, word: str) -> None:
    report = json.loads(run.report_json.read_text()) | {"message": "memory ran out", "created": "2020-02-03T04:05:06"}
    run.report_json.write_text(json.dumps(report | {"status": status}))
    run.set_status(status)
    assert remake_report(run.path).status == status
    page = run.report_html.read_text()
    assert word in page and "memory ran out" in page and "2020-02-03 04:05:06" in page


@pytest.mark.parametrize("where", ["result.json", "report.json"])
def test_the_loss_after_is_that_of_the_delivered_weights(run: RunFolder, where: str) -> None:
    """Three steps, the first the best, as after an early stop; a killed run may have its result and no report of it."""
    losses = {step: {"step": step, "eval_loss": 1.0 + step} for step in (1, 2, 3)}
    with run.metrics_path.open("a") as stream:
        stream.writelines(json.dumps({"kind": "eval", **record}) + "\n" for record in losses.values())
    result = {"delivered": "best", "best": losses[1], "last": losses[3], "path": "adapter"}
    if where == "result.json":
        run.result_path.write_text(json.dumps(result))
    else:
        run.report_json.write_text(json.dumps(json.loads(run.report_json.read_text()) | {"result": result}))
    assert remake_report(run.path).summary["eval_loss_after"] == 2.0
    assert read_run(run.path).summary["eval_loss_after"] == 2.0


def test_output_names_the_page_and_leaves_the_run_alone(run: RunFolder, tmp_path: Path) -> None:
    before = sorted(os.listdir(run.path))
    made = remake_report(run.path, output=tmp_path / "page.html")
    assert (made.page, made.picture) == (str(tmp_path / "page.html"), str(tmp_path / "page.png"))
    assert Path(made.page).is_file() and Path(made.picture).is_file()
    assert sorted(os.listdir(run.path)) == before


def test_what_cannot_be_read_or_written_is_named(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no run in this folder"):
        remake_report(tmp_path)
    with pytest.raises(EnvironmentProblem) as missing:
        remake_report(run.path, output=tmp_path / "missing" / "page.html")
    assert "missing" in missing.value.place
    run.report_json.write_text("[1]")
    with pytest.raises(DataError) as damaged:
        remake_report(run.path)
    assert damaged.value.place == str(run.report_json)


def test_command_prints_where_things_are_or_one_object(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with run.lock():
        assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "status   running, step 3 of 9",
        f"page     {run.report_html}",
    ]
    assert main(["report", str(run.path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["status"] == "killed" and made["summary"]["train_loss_last"] == 1.0
    assert main(["report", str(run.path / "nothing"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)
    assert error["error"] == "RecipeError" and "finetune runs" in error["remedy"] and "resume" not in error["remedy"]


def test_command_needs_no_torch(run: RunFolder) -> None:
    code = (
        "import sys; from finetune.cli import main\n"
        f"main(['report', {str(run.path)!r}])\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_output_replaces_pages_of_ours_only(run: RunFolder, tmp_path: Path) -> None:
    """`--output` replaced whatever it named: the run's manifest, its weights, as root a device."""
    run.adapter_dir.mkdir()
    weights = run.adapter_dir / "adapter_model.safetensors"
    (tmp_path / "notes.html").write_text("<p>mine</p>")
    (tmp_path / "photo.png").write_text("no picture")
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "null.html").symlink_to("/dev/null")
    (tmp_path / "dangling.html").symlink_to(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(run.path)
    weights.write_bytes(b"weights")
    names = ["notes.html", "photo.html", "folder.html", "null.html", "dangling.html", "page", "page.txt", "link/a.html"]
    taken = [tmp_path / name for name in names]
    for output in [*taken, run.manifest_path, weights, run.path / "other.html", Path("/dev/null")]:
        with pytest.raises(RecipeError) as refused:
            remake_report(run.path, output=output)
        assert refused.value.place in (str(output), str(output.with_suffix(".png"))) and refused.value.remedy
    assert weights.read_bytes() == b"weights" and run.status == "running"
    assert (tmp_path / "notes.html").read_text() == "<p>mine</p>" and (tmp_path / "null.html").is_symlink()
    for _ in range(2):
        made = remake_report(run.path, output=tmp_path / "own.HTM")
    assert made.picture == str(tmp_path / "own.png")
    assert remake_report(run.path, output=tmp_path / "link/report.html").picture == str(run.curves_png)


def test_a_damaged_manifest_is_a_fault_of_the_data(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.manifest_path.write_text("{")
    assert main(["report", str(run.path), "--json"]) == 3
    error = json.loads(capsys.readouterr().out)
    assert (error["error"], error["place"]) == ("DataError", str(run.manifest_path))
