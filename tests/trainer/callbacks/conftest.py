"""What every callback is called with."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path / "checkpoints"), use_cpu=True)
