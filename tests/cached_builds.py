"""Data sets built through the token cache: what the tests of the cache and of its entries share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.build import Dataset, build_dataset
from finetune.recipe.schema import DataSection

RECORDS = [{"instruction": f"q{index}", "output": f"a{index}"} for index in range(4)]


def build(tokenizer: Any, path: Path, *, max_rows: int | None = None, **settings: Any) -> tuple[Dataset, str]:
    """Returns the data set and what was said of the cache."""
    source = {"path": str(path), "max_rows": max_rows}
    data = DataSection.model_validate({"train": [source], **settings})
    said: list[str] = []
    dataset = build_dataset(data, tokenizer=tokenizer, seed=7, say=said.append)
    return dataset, "\n".join(line for line in said if line.startswith("Token cache"))


def assert_same(left: Dataset, right: Dataset) -> None:
    """Equal training samples, array by array."""
    for name in ("input_ids", "labels", "starts", "lengths", "supervised", "digests", "records", "origins"):
        assert np.array_equal(getattr(left.train, name), getattr(right.train, name)), name
