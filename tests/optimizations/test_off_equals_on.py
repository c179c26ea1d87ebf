"""Every optimization flag off gives the run that it gives on: 20 steps of a tiny model, bit by bit where the maths is
the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from numerics import assert_bitwise_equal
from runs import build, losses
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.recipe.schema import OptimizationsSection

BITWISE = {"packed_metadata_cache"}


@pytest.mark.parametrize("attention", ["segments", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("flag", list(OptimizationsSection.model_fields))
def test_off_equals_on(tmp_path: Path, flag: str, kind: str, attention: str) -> None:
    assert flag in BITWISE, "say how near off and on must be"
    make_model_folder(tmp_path / "model", kind)
    make_chat_file(tmp_path / "train.jsonl", rows=40)
    runs = {}
    for value in (True, False, "auto"):
        made = make_recipe(tmp_path / "model", tmp_path / "train.jsonl", tmp_path / str(value))
        made["data"]["max_length"] = 128
        made["model"]["attention"] = attention
        made["training"] |= {"max_steps": 20, "rows_per_micro_batch": 2}
        made["optimizations"] = {flag: value}
        trainer, prepared = build(made)
        trainer.train()
        weights = {name: p for name, p in trainer.trained.state_dict().items() if "lora" in name}
        runs[value] = (losses(trainer), weights, trainer.metadata_feed.num_builds)
        assert [applied.state for applied in prepared.applied if applied.flag == flag] == ["off" if not value else "on"]
    assert runs[True][0] == runs[False][0] == runs["auto"][0]
    assert_bitwise_equal(runs[True][1], runs[False][1])
    micro_batches, layers, passes = 20 * 2, 2, 2  # forward and recompute
    assert (runs[True][2], runs[False][2]) == (micro_batches, micro_batches * layers * passes)
