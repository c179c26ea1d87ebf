"""Disk space is asked of the disk that the folder will be on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.errors import EnvironmentProblem
from finetune.run.disk import require_disk_space


def test_more_than_any_disk_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        require_disk_space(tmp_path / "a" / "b", needed_bytes=2**60, purpose="2 checkpoints")
    assert "2 checkpoints need 1,048,576.0 TiB" in caught.value.message and "B free" in caught.value.message
    assert caught.value.place == str(tmp_path) and "output.dir" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_what_fits_is_accepted_and_nothing_is_made(tmp_path: Path) -> None:
    require_disk_space(tmp_path / "a" / "b", needed_bytes=1, purpose="the adapter")
    assert list(tmp_path.iterdir()) == []


def test_small_sizes_have_small_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said `0.000 GiB`."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2048))
    with pytest.raises(EnvironmentProblem) as caught:
        require_disk_space(tmp_path, needed_bytes=300 * 1024, purpose="checkpoints")
    assert caught.value.message == "checkpoints need 300.0 KiB, and the disk has 2.0 KiB free"
    assert "Free 298.0 KiB there" in caught.value.remedy
