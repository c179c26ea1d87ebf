"""The run folder refuses what is not its own, and says where and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.errors import DataError, EnvironmentProblem, ExitCode, FinetuneError, RecipeError
from finetune.run.folder import RunFolder, check_output_folder, create_run_folder, differing_keys, open_run_folder

RECIPE = {"training": {"learning_rate": 0.0002, "max_steps": 5}, "data": {"train": [{"path": "/a.jsonl"}]}}
RECIPE_TEXT = "training: {learning_rate: 0.0002, max_steps: 5}\ndata: {train: [{path: /a.jsonl}]}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "run", recipe_text=RECIPE_TEXT, recipe_hash="h1", environment={"python": "3"})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def refusal(path: Path, *, recipe_hash: str = "h1", resume: bool = False, **more) -> FinetuneError:
    """Returns the error of a refused folder, having checked that nothing was written."""
    before = snapshot(path.parent)
    with pytest.raises(FinetuneError) as caught:
        check_output_folder(path, recipe_hash=recipe_hash, resume=resume, **more)
    assert snapshot(path.parent) == before
    assert caught.value.place and caught.value.remedy
    return caught.value


def test_new_and_empty_folders_are_accepted_and_not_made(tmp_path: Path) -> None:
    check_output_folder(tmp_path / "a" / "b", recipe_hash="h", resume=False)
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty").mkdir()
    check_output_folder(tmp_path / "empty", recipe_hash="h", resume=False)
    assert list((tmp_path / "empty").iterdir()) == []


def test_created_folder_holds_recipe_environment_and_manifest(run: RunFolder) -> None:
    assert run.recipe_path.read_text() == RECIPE_TEXT
    assert json.loads(run.environment_path.read_text()) == {"python": "3"}
    manifest = json.loads(run.manifest_path.read_text())
    assert (manifest["schema_version"], manifest["recipe_hash"], manifest["status"]) == (1, "h1", "running")
    assert not list(run.path.glob("*.tmp")) and not list(run.path.glob(".*.tmp"))


def test_status_is_kept_with_the_rest_of_the_manifest(run: RunFolder) -> None:
    run.set_status("done")
    assert open_run_folder(run.path).status == "done"
    assert run.manifest()["recipe_hash"] == "h1"
    with pytest.raises(ValueError, match="finished"):
        run.set_status("finished")  # pyright: ignore[reportArgumentType]


def test_another_run_is_refused_with_both_ways_out(run: RunFolder) -> None:
    run.adapter_dir.mkdir()
    error = refusal(run.path)
    assert isinstance(error, RecipeError) and error.exit_code == ExitCode.RECIPE
    assert "--resume" in error.remedy and "output.dir" in error.remedy and "deleted" not in error.remedy
    assert error.place == str(run.path)


def test_a_run_that_saved_nothing_may_be_deleted(run: RunFolder) -> None:
    run.set_status("failed")
    error = refusal(run.path)
    assert "failed" in error.message and "deleted" in error.remedy


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_text("x")
    error = refusal(folder)
    assert isinstance(error, RecipeError) and "not be touched" in error.message
    assert "--resume" not in error.remedy


def test_file_in_place_of_the_folder_or_of_a_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert isinstance(refusal(tmp_path / "file"), RecipeError)
    with pytest.raises(RecipeError, match="parent") as caught:
        check_output_folder(tmp_path / "file" / "run", recipe_hash="h", resume=False)
    assert caught.value.place == str(tmp_path / "file")


def test_resume_without_a_run_is_refused(tmp_path: Path) -> None:
    assert isinstance(refusal(tmp_path / "none", resume=True), RecipeError)
    (tmp_path / "empty").mkdir()
    assert "--resume" in refusal(tmp_path / "empty", resume=True).remedy


def test_resume_with_the_same_recipe_is_accepted(run: RunFolder) -> None:
    check_output_folder(run.path, recipe_hash="h1", resume=True)


def test_resume_with_another_recipe_names_the_keys(run: RunFolder) -> None:
    changed = {"training": {"learning_rate": 0.1, "max_steps": 9}, "data": {"train": [{"path": "/b.jsonl"}]}}
    error = refusal(run.path, recipe_hash="h2", resume=True, recipe=changed, may_differ=["training.max_steps"])
    assert isinstance(error, RecipeError)
    assert "training.learning_rate, data.train[0].path" in error.message
    assert "max_steps" not in error.message


def test_resume_may_change_the_keys_it_is_allowed_to(run: RunFolder) -> None:
    changed = {**RECIPE, "training": {"learning_rate": 0.0002, "max_steps": 9}}
    check_output_folder(run.path, recipe_hash="h2", resume=True, recipe=changed, may_differ=["training.max_steps"])


def test_resume_after_the_stored_recipe_was_edited_is_refused(run: RunFolder) -> None:
    error = refusal(run.path, recipe_hash="h2", resume=True, recipe=RECIPE)
    assert "edited" in error.message


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99, "status": "done", "recipe_hash": "h1"}'])
def test_damaged_or_unknown_manifest_is_refused(run: RunFolder, text: str) -> None:
    run.manifest_path.write_text(text)
    assert refusal(run.path, resume=True).place == str(run.manifest_path)


def test_second_creation_does_not_replace_the_first(run: RunFolder) -> None:
    with pytest.raises(RecipeError, match="already holds a run"):
        create_run_folder(run.path, recipe_text="x", recipe_hash="h9", environment={})
    assert run.recipe_path.read_text() == RECIPE_TEXT


def test_folder_without_write_permission_is_an_environment_problem(tmp_path: Path) -> None:
    """Root may write anywhere, so as root the check runs in a child that gives its rights up."""
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o755)
    sealed.chmod(0o555)
    code = (
        "import os, sys\n"
        "from finetune.errors import EnvironmentProblem\n"
        "from finetune.run.folder import check_output_folder\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: check_output_folder('run', recipe_hash='h', resume=False)\n"
        "except EnvironmentProblem as error: print(error.place, error.remedy)\n"
    )
    parents = [tmp_path, *list(tmp_path.parents)[:2]]
    modes = [parent.stat().st_mode for parent in parents]
    try:
        for parent, mode in zip(parents, modes, strict=True):
            parent.chmod(mode | 0o055)
        done = subprocess.run(
            [sys.executable, "-c", code, str(sealed)], capture_output=True, text=True, check=True, timeout=60
        )
    finally:
        for parent, mode in zip(parents, modes, strict=True):
            parent.chmod(mode)
    assert str(sealed) in done.stdout and "output.dir" in done.stdout


def test_lock_keeps_a_second_process_out_and_ends_with_its_holder(run: RunFolder) -> None:
    code = (
        "import sys, time; from pathlib import Path; from finetune.run.lock import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline().strip() == "held"
        with pytest.raises(EnvironmentProblem, match=f"process {holder.pid} ") as caught, run.lock():
            pass
        assert caught.value.place == str(run.path)
        assert isinstance(refusal(run.path, resume=True), EnvironmentProblem)
    finally:
        holder.kill()
        holder.wait()
    deadline = time.monotonic() + 5
    with run.lock():
        assert time.monotonic() < deadline
    check_output_folder(run.path, recipe_hash="h1", resume=True)


def test_differing_keys_covers_missing_keys_and_lists_of_other_length() -> None:
    assert differing_keys({"a": 1, "b": [1]}, {"a": 1, "b": [1, 2], "c": 3}) == ["b", "c"]
    assert differing_keys({"a": {"b": None}}, {"a": {}}) == ["a.b"]
    assert differing_keys({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) == []


def test_hub_commits_are_kept_and_named(run: RunFolder) -> None:
    """Other data tell at which commits the run began; runs from before they were kept have none."""
    assert run.hub_commits == {}
    commits = {"org/set@main": "a" * 40}
    run.require_same_data("digest", date=None, hub_commits=commits)
    run.require_same_data("digest", date=None, hub_commits={"org/set@main": "b" * 40})
    assert run.hub_commits == commits
    with pytest.raises(DataError) as caught:
        run.require_same_data("other", date=None, hub_commits=commits)
    assert f"The run read org/set with `revision: {'a' * 40}`." in caught.value.remedy
