"""Conversations, and what of them is learned, as text; for the tests of labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from finetune.data.chat import LossOn, Renderer, Turns
from finetune.data.types import IGNORE_INDEX, Conversation, Message, Origin, Sample
from finetune.errors import DataError

ORIGIN = Origin("data.jsonl", 3)


def user(content: str) -> Message:
    return Message("user", content)


def answer(content: str, **extra: Any) -> Message:
    return Message("assistant", content, extra)


def calls(*tool_calls: dict[str, Any], content: str = "", **extra: Any) -> Message:
    return Message("assistant", content, {"tool_calls": list(tool_calls), **extra})


def chat(*messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    return Conversation("chat", ORIGIN, messages, tools=tools)


def learned_texts(sample: Sample, tokenizer: Any) -> list[str]:
    learned = np.flatnonzero(sample.labels != IGNORE_INDEX)
    runs = np.split(learned, np.flatnonzero(np.diff(learned) != 1) + 1)
    return [tokenizer.decode(sample.input_ids[run], skip_special_tokens=False) for run in runs if len(run)]


def learned(
    conversation: Conversation, tokenizer: Any, *, loss_on: LossOn = "assistant", turns: Turns = "together"
) -> list[list[str]]:
    samples = Renderer(tokenizer).render_all(conversation, loss_on=loss_on, turns=turns)
    return [learned_texts(sample, tokenizer) for sample in samples]


def refusal(conversation: Conversation, tokenizer: Any, *, loss_on: LossOn = "assistant") -> DataError:
    with pytest.raises(DataError) as caught:
        Renderer(tokenizer).render(conversation, loss_on=loss_on)
    assert caught.value.place == "data.jsonl:3"
    assert caught.value.remedy
    return caught.value
