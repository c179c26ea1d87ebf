"""Fixtures of the recipe's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_files import Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the test's folder, which is the current one, so that places are short."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str | bytes, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return _write
