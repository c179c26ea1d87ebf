"""What is shown of the held-out prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune.data.types import Origin, PromptReference
from finetune.run.metrics import append_records
from finetune.run.samples import read_samples
from finetune.trainer.held_out import HeldOut

ORIGIN = Origin("held-out.jsonl", 1)


def test_equal_prompts_with_other_references_keep_their_own_answers(tmp_path: Path) -> None:
    ids = np.array([1], dtype=np.int32)
    references = [PromptReference(ids, "p", reference, ORIGIN) for reference in ("one", "two")]
    held_out = HeldOut(references, {}, num_samples=2, own=[PromptReference(ids, "p", "", ORIGIN)])
    path = tmp_path / "samples.jsonl"
    for step in (0, 5):
        append_records(path, held_out.sample_records([f"{name} {step}" for name in ("a", "b", "own")], step=step))
    shown = held_out.samples(None, None, read_samples(path))
    assert [(sample["reference"], [given["answer"] for given in sample["steps"]]) for sample in shown] == [
        ("one", ["a 0", "a 5"]),
        ("two", ["b 0", "b 5"]),
        (None, ["own 0", "own 5"]),
    ]
