"""Evaluation beside a training: bounded memory, and nothing that the training would notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import assert_bitwise_equal
from runs import build, losses
from tiny import make_chat_file, make_model_folder, make_recipe
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.references import render_prompts
from finetune.trainer.callbacks.after_evaluation import AfterEvaluationCallback
from finetune.trainer.evaluation import generating
from finetune.trainer.generate import Generator
from finetune.trainer.memory import halved_when_out_of_memory

VOCABULARY = 70_000  # wider than the tiles that the fused head works in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    make_model_folder(root / "qwen3", "qwen3")
    make_model_folder(root / "wide", "qwen3", vocab_size=VOCABULARY)
    make_chat_file(root / "train.jsonl", rows=43)
    make_chat_file(root / "eval.jsonl", rows=40, seed=5)
    return root


def recipe(folder: Path, out: Path, kind: str = "qwen3", **sections: Any) -> dict[str, Any]:
    made = make_recipe(folder / kind, folder / "train.jsonl", out, **sections)
    made["data"] |= {"max_length": 128, "eval": [{"path": str(folder / "eval.jsonl")}]}
    return made


class LargestWithVocabulary(TorchDispatchMode):
    """Notes the most positions for which a tensor holds a value of every token of the vocabulary."""

    most_positions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor) and each.dim() > 1 and each.shape[-1] == VOCABULARY:
                self.most_positions = max(self.most_positions, each.numel() // VOCABULARY)
        return out


def test_evaluation_builds_no_logits_of_all_tokens(folder: Path, tmp_path: Path) -> None:
    """P52: no tensor of the evaluation has a value for each token of the vocabulary at each position."""
    trainer, _ = build(recipe(folder, tmp_path / "run", "wide", training={"rows_per_micro_batch": 4}))
    with LargestWithVocabulary() as seen:
        trainer.evaluate()
    batch = next(iter(trainer.get_eval_dataloader()))
    assert batch["input_ids"].numel() >= 500
    assert seen.most_positions <= 64  # the hidden size: the head's own weight, transposed
    with LargestWithVocabulary() as seen, torch.no_grad():
        metadata = batch["packed_metadata"]
        trainer.model(
            input_ids=batch["input_ids"],
            position_ids=metadata.position_ids,
            packed_metadata=metadata,
            use_cache=False,
        )
    assert seen.most_positions >= 500, "the plain forward is to be seen building them"


def test_evaluation_goes_on_with_a_smaller_batch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P52: out of memory in an evaluation costs a retry and not the run; the loss stays the same."""
    trainer, _ = build(recipe(folder, tmp_path / "run", training={"rows_per_micro_batch": 4}))
    expected = trainer.evaluate()["eval_loss"]
    said: list[str] = []
    trainer.say = said.append
    trainer._evaluated_step = -1
    whole = trainer._loss_sum

    def limited(model: Any, inputs: dict[str, Any]) -> Any:
        if len(inputs["input_ids"]) > 1:
            raise torch.OutOfMemoryError("not enough")
        return whole(model, inputs)

    monkeypatch.setattr(trainer, "_loss_sum", limited)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert said == [
        "evaluation ran out of memory with 4 rows a batch; going on with 2",
        "evaluation ran out of memory with 2 rows a batch; going on with 1",
    ]


def test_a_batch_of_one_that_does_not_fit_is_an_error() -> None:
    def run(size: int) -> None:
        raise torch.OutOfMemoryError("not enough")

    with pytest.raises(torch.OutOfMemoryError):
        halved_when_out_of_memory(run, 4, say=lambda size: None)


def test_generation_goes_on_with_fewer_prompts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P52: as for the loss."""
    generator = answerer(*build(recipe(folder, tmp_path / "run")))
    prompts = prompt_ids(generator, ["say: red", "say: cat dog", "say: one"])
    expected = generator.answer(prompts)
    whole = Generator._answer_batch

    def limited(self: Generator, part: list[Any]) -> list[str]:
        if len(part) > 1:
            raise torch.OutOfMemoryError("not enough")
        return whole(self, part)

    monkeypatch.setattr(Generator, "_answer_batch", limited)
    assert generator.answer(prompts) == expected


def test_evaluations_and_samples_change_no_weight(folder: Path, tmp_path: Path) -> None:
    """With dropout: a data loader's seed or a sampled token would move the random state of the next step."""
    adapter = {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.2}
    plain, _ = build(recipe(folder, tmp_path / "plain", adapter=adapter))
    plain.train()
    made = recipe(folder, tmp_path / "watched", adapter=adapter, evaluation={"every_steps": 1})
    watched, prepared = build(made)
    generator = answerer(watched, prepared)
    answered: list[int] = []

    def sample(step: int, loss: float) -> None:
        answered.append(len(generator.answer(prompt_ids(generator, ["say: red"]))))

    watched.add_callback(AfterEvaluationCallback(sample))
    watched.train()
    assert answered == [1, 1, 1]
    assert losses(watched) == losses(plain)
    assert_bitwise_equal(dict(watched.model.state_dict()), dict(plain.model.state_dict()))


def answerer(trainer: Any, prepared: Any) -> Generator:
    return Generator(
        model=trainer.trained,
        tokenizer=prepared.tokenizer,
        stop_ids=(258,),
        pad_token_id=256,
        max_new_tokens=4,
        context=lambda: generating(trainer, prepared.model.attention),
    )


def prompt_ids(generator: Generator, texts: list[str]) -> list[Any]:
    return [prompt.prompt_ids for prompt in render_prompts(texts, tokenizer=generator.tokenizer, date=None)]
