"""Only a checkpoint whose marker fits its files is resumed from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from finetune.run.checkpoints import (
    MARKER,
    keep_newest,
    mark_complete,
    remove_checkpoint,
    scan_checkpoints,
    settle_checkpoints,
)


def make(folder: Path, step: int, *, complete: bool = True) -> Path:
    path = folder / f"checkpoint-{step}"
    (path / "nested").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"w" * 1000)
    (path / "nested" / "optimizer.pt").write_bytes(b"o" * 500)
    if complete:
        mark_complete(path)
    return path


def test_newest_step_wins_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make(tmp_path, step)
    (tmp_path / "checkpoint-old").mkdir()
    assert [path.name for path in scan_checkpoints(tmp_path).complete] == [
        "checkpoint-9",
        "checkpoint-20",
        "checkpoint-100",
    ]


def test_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert scan_checkpoints(tmp_path / "none").latest is None


def test_marker_lists_every_file_with_its_size(tmp_path: Path) -> None:
    marker = json.loads((make(tmp_path, 3) / MARKER).read_text())
    assert marker["files"] == {"model.safetensors": 1000, "nested/optimizer.pt": 500}
    assert marker["step"] == 3


def _no_marker(path: Path) -> None:
    (path / MARKER).unlink()


def _cut_file(path: Path) -> None:
    (path / "nested" / "optimizer.pt").write_bytes(b"o" * 499)


def _lost_file(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _cut_marker(path: Path) -> None:
    (path / MARKER).write_text((path / MARKER).read_text()[:-5])


def _foreign_marker(path: Path) -> None:
    (path / MARKER).write_text("[]")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_no_marker, "did not end"),
        (_cut_file, "499"),
        (_lost_file, "model.safetensors is missing"),
        (_cut_marker, "damaged"),
        (_foreign_marker, "damaged"),
    ],
)
def test_damaged_checkpoint_is_passed_over_and_reported(tmp_path: Path, damage, word: str) -> None:
    good, bad = make(tmp_path, 1), make(tmp_path, 2)
    damage(bad)
    scan = scan_checkpoints(tmp_path)
    assert scan.latest == good
    assert [item.path for item in scan.incomplete] == [bad] and word in scan.incomplete[0].reason


def test_kill_in_the_middle_of_writing_is_passed_over(tmp_path: Path) -> None:
    good = make(tmp_path, 10)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from finetune.run.checkpoints import mark_complete\n"
        "path = Path(sys.argv[1]); path.mkdir()\n"
        "stream = (path / 'model.safetensors').open('wb', buffering=0); stream.write(b'w' * 4096)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
        "stream.write(b'w' * 4096); mark_complete(path)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "checkpoint-20")], timeout=60)
    assert killed.returncode == -9 and (tmp_path / "checkpoint-20" / "model.safetensors").exists()
    scan = scan_checkpoints(tmp_path)
    assert scan.latest == good and len(scan.incomplete) == 1


def test_removal_takes_the_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the marker and the files must leave an incomplete checkpoint."""
    path = make(tmp_path, 1)

    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.run.checkpoints.shutil.rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(path)
    assert scan_checkpoints(tmp_path).latest is None and path.exists()


def test_keep_newest_counts_complete_ones_and_clears_older_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 4):
        make(tmp_path, step)
    leftover, being_written = make(tmp_path, 3, complete=False), make(tmp_path, 5, complete=False)
    keep_newest(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", being_written.name}
    assert not leftover.exists()
    with pytest.raises(ValueError):
        keep_newest(tmp_path, 0)


def test_damage_of_full_size_is_found_before_a_run_goes_on_and_kept(tmp_path: Path) -> None:
    """Sizes alone were compared; the older checkpoint is not read, since it is not gone on from."""
    older, newer = make(tmp_path, 2), make(tmp_path, 4)
    assert settle_checkpoints(tmp_path).latest == newer
    for path in (older, newer):
        (path / "nested" / "optimizer.pt").write_bytes(b"o" * 499 + b"x")
    assert scan_checkpoints(tmp_path).latest == newer
    third = make(tmp_path, 6)
    assert settle_checkpoints(tmp_path).complete == (older, newer, third)
    (third / "model.safetensors").write_bytes(b"x" * 1000)
    scan = settle_checkpoints(tmp_path)
    assert scan.complete == ()
    assert [item.reason.split()[0] for item in scan.incomplete] == ["nested/optimizer.pt"] * 2 + ["model.safetensors"]
    assert scan_checkpoints(tmp_path).incomplete == scan.incomplete
    mark_complete(third)
    assert settle_checkpoints(tmp_path).latest == third


def make_old(folder: Path, step: int) -> Path:
    """A checkpoint of an earlier version: files of each kind that is read again, and no checksums."""
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    save_file({"a": np.ones(9)}, path / "adapter_model.safetensors")
    torch.save({"b": torch.ones(9)}, path / "optimizer.pt")
    torch.save({"c": 1}, path / "rng_state.pth")
    (path / "meter.json").write_text('{"slots": 3}')
    mark_complete(path)
    marker = json.loads((path / MARKER).read_text())
    del marker["checksums"]
    (path / MARKER).write_text(json.dumps(marker))
    return path


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "meter.json"])
@pytest.mark.parametrize("content", [b"\xff", b"\0", b"{"])
def test_of_a_checkpoint_without_checksums_each_file_is_looked_at(tmp_path: Path, name: str, content: bytes) -> None:
    """Damage of full size ended in the traceback of a reader, on every try."""
    good, bad = make_old(tmp_path, 2), make_old(tmp_path, 4)
    assert settle_checkpoints(tmp_path).latest == bad
    (bad / name).write_bytes(content * (bad / name).stat().st_size)
    scan = settle_checkpoints(tmp_path)
    assert scan.latest == good
    assert scan.incomplete[0].reason.startswith(f"{name} is damaged")


def test_one_byte_of_what_torch_saved_is_told_without_checksums_of_ours(tmp_path: Path) -> None:
    path = make_old(tmp_path, 2) / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[content.index(np.ones(9, np.float32).tobytes())] ^= 1
    path.write_bytes(content)
    assert "checksum" in settle_checkpoints(tmp_path).incomplete[0].reason


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        '{"files": {"model.safetensors": null}, "checksums": 3}',
        '{"files": {"model.safetensors": 1000}, "checksums": 3}',
        '{"files": {"model.safetensors": 1000}, "checksums": {"model.safetensors": null}}',
        '{"files": [], "checksums": {}}',
        '{"damage": 3}',
    ],
)
def test_a_marker_of_wrong_types_is_damaged(tmp_path: Path, text: str) -> None:
    """Comparing them ended in a traceback."""
    good, bad = make(tmp_path, 2), make(tmp_path, 4)
    (bad / MARKER).write_text(text)
    scan = settle_checkpoints(tmp_path)
    assert scan.latest == good and "complete.json is damaged" in scan.incomplete[0].reason


def test_what_a_removal_left_is_removed_when_a_run_goes_on(tmp_path: Path) -> None:
    """It stayed beside the others, and was said not to have been written to the end."""
    left, _, being_written = make(tmp_path, 2), make(tmp_path, 4), make(tmp_path, 6, complete=False)
    (left / MARKER).unlink()
    said: list[str] = []
    scan = settle_checkpoints(tmp_path, say=said.append)
    assert not left.exists() and len(said) == 1 and f"{left}, whose removal" in said[0]
    assert [item.path for item in scan.incomplete] == [being_written]


@pytest.mark.parametrize("place", [0, 1234, -1], ids=["first", "between", "last"])
def test_of_a_large_file_blocks_are_covered_from_the_first_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr("finetune.run.checkpoints._BLOCK_BYTES", 100)
    monkeypatch.setattr("finetune.run.checkpoints._WHOLE_BYTES", 300)
    path = tmp_path / "checkpoint-1"
    path.mkdir()
    content = bytearray(2567)
    (path / "model.safetensors").write_bytes(content)
    mark_complete(path)
    content[place] = 1
    (path / "model.safetensors").write_bytes(content)
    assert settle_checkpoints(tmp_path).latest is None
