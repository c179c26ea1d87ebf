"""The run folder refuses what is not its own, and says where and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from finetune.compare.record import read_run
from finetune.errors import DataError, EnvironmentProblem, ExitCode, FinetuneError, RecipeError
from finetune.recipe.load import values_hash
from finetune.run.folder import RunFolder, Status, create_run_folder, open_run_folder
from finetune.run.output_folder import check_output_folder, differing_keys, folder_to_continue
from finetune.run.remake import remake_report

RECIPE = {"training": {"learning_rate": 0.0002, "max_steps": 5}, "data": {"train": [{"path": "/a.jsonl"}]}}
H1 = values_hash(RECIPE)
RECIPE_TEXT = "training: {learning_rate: 0.0002, max_steps: 5}\ndata: {train: [{path: /a.jsonl}]}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "run", recipe_text=RECIPE_TEXT, recipe_hash=H1, environment={"python": "3"})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def refusal(path: Path, *, recipe_hash: str = H1, resume: bool = False, **more) -> FinetuneError:
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
    assert (manifest["schema_version"], manifest["recipe_hash"], manifest["status"]) == (1, H1, "running")
    assert not list(run.path.glob("*.tmp")) and not list(run.path.glob(".*.tmp"))


def test_status_is_kept_with_the_rest_of_the_manifest(run: RunFolder) -> None:
    run.set_status("done")
    assert open_run_folder(run.path).status == "done"
    assert run.manifest()["recipe_hash"] == H1
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
    check_output_folder(run.path, recipe_hash=H1, resume=True)


def test_resume_with_another_recipe_names_the_keys(run: RunFolder) -> None:
    changed = {"training": {"learning_rate": 0.1, "max_steps": 9}, "data": {"train": [{"path": "/b.jsonl"}]}}
    error = refusal(run.path, recipe_hash="h2", resume=True, recipe=changed, may_differ=["training.max_steps"])
    assert isinstance(error, RecipeError)
    assert "training.learning_rate, data.train[0].path" in error.message
    assert "max_steps" not in error.message


def test_resume_may_change_the_keys_it_is_allowed_to(run: RunFolder) -> None:
    changed = {**RECIPE, "training": {"learning_rate": 0.0002, "max_steps": 9}}
    check_output_folder(run.path, recipe_hash="h2", resume=True, recipe=changed, may_differ=["training.max_steps"])


@pytest.mark.parametrize("rest", [{}, {"output": {"dir": "other"}}], ids=["alone", "beside-what-may-differ"])
def test_resume_after_the_stored_recipe_was_edited_is_refused(run: RunFolder, rest: dict) -> None:
    """Beside a key that may differ, the edit was overlooked."""
    edited = {**RECIPE, "training": {"learning_rate": 0.5, "max_steps": 5}}
    run.recipe_path.write_text(yaml.safe_dump(edited))
    error = refusal(run.path, recipe_hash="h2", resume=True, recipe=edited | rest, may_differ=["output.dir"])
    assert "edited" in error.message and error.place == str(run.recipe_path)


def test_a_recipe_edited_to_what_json_does_not_have_is_refused(run: RunFolder) -> None:
    run.recipe_path.write_text("data: {date: 2026-01-01}\n")
    assert "edited" in refusal(run.path, recipe_hash="h2", resume=True, recipe=RECIPE).message


@pytest.mark.parametrize("status", ["done", "early-stopped"])
def test_a_run_that_ended_well_says_how(run: RunFolder, status: Status) -> None:
    """One that was stopped early was called done."""
    run.set_status(status)
    said = {"done": "the run is done;", "early-stopped": "the run was stopped early, as its recipe asks;"}
    assert said[status] in refusal(run.path, resume=True).message


def test_the_recipe_of_a_run_stands_for_its_folder(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    own = run.recipe_path
    assert folder_to_continue(own, []) == run.path
    assert folder_to_continue(own, ["training.seed=1", "output={log_every_steps: 2}"]) == run.path
    for override in ("output.dir=b", " output.dir =b", "output={dir: b}"):
        assert folder_to_continue(own, [override]) is None
    monkeypatch.chdir(run.path)
    assert folder_to_continue("recipe.yaml", []) == run.path
    assert folder_to_continue("../run/recipe.yaml", []) == run.path
    assert folder_to_continue(run.path.parent / "recipe.yaml", []) is None
    assert folder_to_continue(run.path / "environment.json", []) is None


def test_where_no_folder_can_be_made_is_told_before_the_room() -> None:
    """Root was told that /proc has 0.000 GiB free."""
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        check_output_folder(Path("/proc/x"), recipe_hash="h", resume=False)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"schema_version": 1, "status": "gone", "recipe_hash": "h1"}'])
def test_a_damaged_manifest_is_a_fault_of_the_data_with_a_remedy(run: RunFolder, text: str) -> None:
    """A torn file was to be mended by another version of the program; the class differed between commands."""
    run.manifest_path.write_text(text)
    for error in (refusal(run.path, resume=True), refusal(run.path)):
        assert isinstance(error, DataError) and error.place == str(run.manifest_path)
        assert "damaged" in error.message and "from a copy" in error.remedy and "version" not in error.remedy
    with pytest.raises(DataError) as told:
        read_run(run.path)
    with pytest.raises(DataError) as remade:
        remake_report(run.path)
    assert str(told.value) == str(remade.value) == str(refusal(run.path))


def test_a_manifest_of_another_version_names_it(run: RunFolder) -> None:
    run.manifest_path.write_text('{"schema_version": 99, "status": "done", "recipe_hash": "h1"}')
    error = refusal(run.path, resume=True)
    assert "version 99" in error.message and "Use the version" in error.remedy


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
        "from finetune.run.output_folder import check_output_folder\n"
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
    check_output_folder(run.path, recipe_hash=H1, resume=True)


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
