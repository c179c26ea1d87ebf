"""The best weights are replaced as a whole, wherever a kill falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.run.best import copy_weights, fault_of_best, read_best, replace_best, settle_best
from finetune.run.checkpoints import mark_complete


def put(folder: Path, step: int, eval_loss: float) -> None:
    def write(path: Path) -> None:
        (path / "model.safetensors").write_text(f"weights of {step}")
        (path / "config.json").write_text("{}")

    replace_best(folder, step=step, eval_loss=eval_loss, write=write)


def test_the_record_says_of_which_step_the_weights_are(tmp_path: Path) -> None:
    assert settle_best(tmp_path / "best") is None
    put(tmp_path / "best", 2, 1.5)
    put(tmp_path / "best", 4, 1.25)
    best = settle_best(tmp_path / "best")
    assert best is not None and (best.step, best.eval_loss) == (4, 1.25)
    assert (best.path / "model.safetensors").read_text() == "weights of 4"


def test_a_kill_while_writing_leaves_the_old_ones(tmp_path: Path) -> None:
    put(tmp_path / "best", 2, 1.5)
    with pytest.raises(KeyboardInterrupt):
        replace_best(tmp_path / "best", step=4, eval_loss=1.0, write=stop)
    assert (tmp_path / "best.new").exists()
    best = settle_best(tmp_path / "best")
    assert best is not None and best.step == 2
    assert not (tmp_path / "best.new").exists()


def stop(path: Path) -> None:
    (path / "model.safetensors").write_text("a part")
    raise KeyboardInterrupt


@pytest.mark.parametrize("point", ["remove", "rename"])
def test_a_kill_while_replacing_leaves_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    put(tmp_path / "best", 2, 1.5)
    name = "finetune.run.best.shutil.rmtree" if point == "remove" else "pathlib.Path.rename"

    def kill(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(name, kill)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path / "best", 4, 1.25)
    best = settle_best(tmp_path / "best")
    assert best is not None and best.step == 4


def test_a_damaged_folder_holds_no_best(tmp_path: Path) -> None:
    put(tmp_path / "best", 2, 1.5)
    (tmp_path / "best" / "model.safetensors").write_text("short")
    assert read_best(tmp_path / "best") is None


def test_damage_of_full_size_and_of_the_record_is_a_fault(tmp_path: Path) -> None:
    """Sizes alone were compared, so damaged weights were delivered; a damaged record ended in a traceback."""
    folder = tmp_path / "best"
    put(folder, 2, 1.5)
    assert fault_of_best(folder) is None
    (folder / "model.safetensors").write_text("weights of 3")
    assert "model.safetensors was damaged" in str(fault_of_best(folder))
    for junk in (b"\xff\xfe\xfd", b"[]", b'{"step": "2", "eval_loss": 1.5}', b'{"step": 2, "eval_loss": NaN}', b"{"):
        put(folder, 2, 1.5)
        (folder / "best.json").write_bytes(junk)
        assert "best.json" in str(fault_of_best(folder)) and settle_best(folder) is None
        mark_complete(folder)
        assert "best.json is damaged" in str(fault_of_best(folder)) and settle_best(folder) is None


def test_a_copy_holds_the_weights_and_no_record(tmp_path: Path) -> None:
    put(tmp_path / "best", 2, 1.5)
    for _ in range(2):  # a second time over the first, as after a run that was cut off
        copy_weights(tmp_path / "best", tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"model.safetensors", "config.json"}
    put(tmp_path / "best", 4, 1.25)
    assert (tmp_path / "adapter" / "model.safetensors").read_text() == "weights of 2"
