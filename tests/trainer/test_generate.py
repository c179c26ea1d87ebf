"""Generation: the same greedy answer alone and in a batch, stop tokens, and nothing left changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import make_config, make_tokenizer

from finetune.trainer.generate import Generator, _batches


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(request.param, output_router_logits=True))


def generator(model: torch.nn.Module, *, stop_ids: tuple[int, ...] = (258,)) -> Generator:
    return Generator(model=model, tokenizer=make_tokenizer(), stop_ids=stop_ids, pad_token_id=256, max_new_tokens=8)


def greedy(model: torch.nn.Module, prompt: np.ndarray, steps: int) -> list[int]:
    """Full forward passes, without a cache and without padding."""
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    for _ in range(steps):
        with torch.no_grad():
            following = model(input_ids=tokens, use_cache=False, output_router_logits=False).logits[0, -1].argmax()
        tokens = torch.cat((tokens, following[None, None]), dim=1)
    return tokens[0, len(prompt) :].tolist()


PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 17, 1, 9)]


def test_a_batch_answers_as_each_prompt_alone(model: torch.nn.Module) -> None:
    tokenizer = make_tokenizer()
    expected = [tokenizer.decode(greedy(model.eval(), prompt, 8), skip_special_tokens=True) for prompt in PROMPTS]
    assert generator(model, stop_ids=()).answer(PROMPTS) == expected
    assert len(set(expected)) > 1


def test_an_answer_ends_before_its_stop_token(model: torch.nn.Module) -> None:
    tokens = greedy(model.eval(), PROMPTS[1], 8)
    stop = tokens[3]
    (answer,) = generator(model, stop_ids=(stop,)).answer([PROMPTS[1]])
    assert answer == make_tokenizer().decode(tokens[: tokens.index(stop)], skip_special_tokens=True)


def test_answers_end_where_the_models_positions_do(model: torch.nn.Module) -> None:
    short = replace(generator(model, stop_ids=()), max_positions=20)
    tokens = greedy(model.eval(), PROMPTS[1], 3)
    assert short.answer([PROMPTS[1]]) == [make_tokenizer().decode(tokens, skip_special_tokens=True)]


def test_mode_and_router_logits_are_put_back(model: torch.nn.Module) -> None:
    model.train()
    generator(model).answer(PROMPTS[:1])
    assert model.training
    assert getattr(model.config, "output_router_logits", True) is True


def test_no_prompts_no_answers(model: torch.nn.Module) -> None:
    assert generator(model).answer([]) == []


def test_batches_hold_every_prompt_once_and_bound_the_cache() -> None:
    lengths = [10, 5_000, 20_000, 40, 10, 9_000]
    batches = list(_batches(lengths))
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 16_384 for batch in batches)
