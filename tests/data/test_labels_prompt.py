"""Think blocks of the data, reasoning that has a place or none, and prompts that differ from what was trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from label_cases import answer, calls, chat, learned, user
from label_templates import SHAPES, call

from finetune.data.build import Dataset, build_dataset
from finetune.recipe.schema import DataSection

EMPTY = "<think>\n\n</think>\n\n"
OWN_BLOCK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ (m.content.split('</think>') | last).strip() + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWS_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.thinking and loop.last %}{{ '<think>\n' + m.thinking + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
THINKING = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thinking": "why"}]


def build(tokenizer: Any, path: Any, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


def prompt_warnings(dataset: Dataset) -> list[str]:
    return [check.line() for check in dataset.gate.warnings if check.name == "generation prompt"]


@pytest.mark.parametrize("turns", ["together", "separate"])
def test_empty_think_block_of_the_data_is_learned(turns: Any) -> None:
    """Generation's prompt does not hold it, so the model must produce it."""
    conversation = chat(user("u"), answer(f"{EMPTY}A"), user("v"), answer("B"))
    texts = learned(conversation, SHAPES["smollm"].tokenizer(), turns=turns)
    assert [text for sample in texts for text in sample] == [f"{EMPTY}A<|im_end|>", "B<|im_end|>"]


def test_empty_think_block_before_a_tool_call_is_learned() -> None:
    conversation = chat(user("u"), calls(call("f", {"a": "x"}), content=f"{EMPTY}A"))
    ((text,),) = learned(conversation, SHAPES["items"].tokenizer())
    assert text == f"{EMPTY}A<function=f><a>x</a></function><|im_end|>"


def test_empty_think_block_that_the_template_writes_is_not_learned() -> None:
    tokenizer = SHAPES["smollm"].tokenizer(OWN_BLOCK)
    for content in ("A", f"{EMPTY}A"):
        assert learned(chat(user("u"), answer(content)), tokenizer) == [["A<|im_end|>"]]


def test_empty_think_block_of_the_data_with_qwen(qwen: Any) -> None:
    assert learned(chat(user("u"), answer(f"{EMPTY}A")), qwen) == [["A<|im_end|>"]]


def test_what_stands_after_the_prompt_is_noted(write_jsonl: Callable) -> None:
    dataset = build(SHAPES["smollm"].tokenizer(OWN_BLOCK), write_jsonl([PLAIN] * 3))
    (note,) = dataset.ledger.notes
    assert "between generation's prompt and learned answers" in note.what
    assert "<think>" in note.what
    assert note.records == 3
    assert prompt_warnings(dataset) == []


@pytest.mark.parametrize("turns", ["together", "separate"])
def test_prompt_that_opens_a_think_block_is_a_warning(write_jsonl: Callable, turns: str) -> None:
    path = write_jsonl([PLAIN] * 3)
    (line,) = prompt_warnings(build(SHAPES["opens-think"].tokenizer(), path, turns=turns))
    assert "generation's prompt ends otherwise" in line
    assert "(3 of 3 records)" in line
    assert f"{path}:1" in line


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "opens-think"])
def test_other_prompts_are_not_warned_of(shape: str, write_jsonl: Callable) -> None:
    dataset = build(SHAPES[shape].tokenizer(), write_jsonl([PLAIN]))
    assert prompt_warnings(dataset) == []
    assert dataset.ledger.notes == ()


@pytest.mark.parametrize(("think", "noted"), [("why", False), ("", True)])
def test_prompts_of_real_templates(real_tokenizer: Any, write_jsonl: Callable, think: str, noted: bool) -> None:
    """With reasoning, Qwen3 and gpt-oss are learned from generation's prompt on; without, they write more after it."""
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"} | ({"thinking": think} if think else {}),
    ]
    dataset = build(real_tokenizer, write_jsonl([{"messages": turns}]))
    assert prompt_warnings(dataset) == []
    is_llama = "start_header_id" in str(real_tokenizer.chat_template)
    assert any("between generation's prompt" in note.what for note in dataset.ledger.notes) == (noted and not is_llama)


@pytest.mark.parametrize("turns", ["together", "separate"])
def test_separate_turns_are_named_where_they_help(chatml: Any, write_jsonl: Callable, turns: str) -> None:
    path = write_jsonl([{"messages": THINKING * 2}])
    (note,) = build(chatml, path, turns=turns).ledger.notes
    assert "has no place for it" in note.what
    assert "separate" not in note.what
    assert note.turns == 2
    notes = build(SHAPES["smollm"].tokenizer(SHOWS_LAST), path, turns=turns).ledger.notes
    assert [(note.turns, "`data.turns: separate`" in note.what) for note in notes] == (
        [(1, True)] if turns == "together" else []
    )
