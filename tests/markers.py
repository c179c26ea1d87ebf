"""Marks for tests that need what not every machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ASSETS = Path(os.environ.get("FINETUNE_TEST_ASSETS", "/nonexistent"))
requires_assets = pytest.mark.skipif(
    not ASSETS.is_dir(), reason="needs real tokenizers and data in the folder named by FINETUNE_TEST_ASSETS"
)
