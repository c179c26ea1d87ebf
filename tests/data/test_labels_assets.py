"""Every file of real data against every real tokenizer: labels that are right, or a refusal that a user understands."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import learned_texts

from finetune.data.chat import Renderer, Turns
from finetune.data.formats import convert, recognise
from finetune.data.load import read_records
from finetune.data.types import Conversation, Sample
from finetune.errors import DataError

REASONS = [
    r"the chat template leaves out tool call \d of message \d+",
    r"the chat template refuses this conversation: This model only supports single tool-calls at once!",
    r"this is \w+ (\(.*\) )?data",
    r"has a reasoning of its own and another as <think> text in its content",
    r"must be (a part of type text|a string)",
    r"unknown role",
    r"is empty",
]
"""What may be said of a record of these files; each says which record, and what to do, beside this."""

ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>")


def check(samples: list[Sample], conversation: Conversation, tokenizer: Any) -> None:
    """Checks that each turn is learned once, to its end token, with its words and not those of a question."""
    for sample in samples:
        assert 0 < sample.num_supervised_tokens < len(sample)
        assert np.array_equal(sample.labels[sample.labels >= 0], sample.input_ids[sample.labels >= 0])
        if tokenizer.bos_token_id is not None:
            assert sample.input_ids.tolist().count(tokenizer.bos_token_id) <= 1
    spans = [span for sample in samples for span in learned_texts(sample, tokenizer)]
    assert all(span.endswith(ENDS) for span in spans)
    answers = [message for message in conversation.messages if message.role == "assistant"]
    assert len(spans) == len(answers) or conversation.kind != "chat"
    for message, span in zip(answers, spans, strict=False):
        for made_call in message.extra.get("tool_calls", []):
            assert made_call["function"]["name"] in span
        if not message.extra.get("tool_calls"):
            said = message.content.rpartition("</think>")[2].strip()
            assert tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"]) in span
    for message in conversation.messages:
        if message.role == "user" and len(message.content) > 40:
            assert not any(message.content in span for span in spans)


def table_row(path: Path, tokenizer: Any, turns: Turns) -> tuple[int, int, Counter[str]]:
    """Returns records that are learned, their samples, and the refusals by reason."""
    renderer = Renderer(tokenizer)
    num_records = num_samples = 0
    refused: Counter[str] = Counter()
    for origin, record in read_records(path, max_rows=300):
        try:
            conversation = convert(record, format=recognise(record, origin), origin=origin)
            samples = renderer.render_all(conversation, loss_on="assistant", turns=turns)
        except DataError as error:
            assert error.place.startswith(str(path))
            assert error.remedy
            reason = next((reason for reason in REASONS if re.search(reason, error.message)), None)
            assert reason is not None, error.message
            refused[reason] += 1
            continue
        if conversation.kind != "text":
            check(samples, conversation, tokenizer)
        num_records, num_samples = num_records + 1, num_samples + len(samples)
    return num_records, num_samples, refused


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["together", "separate"])
def test_every_file_with_every_tokenizer(real_tokenizer: Any, assets: Path, turns: Turns) -> None:
    """P20, P24, P25, P26 over real data; run with -s for the table."""
    learned = 0
    for path in sorted((assets / "data").iterdir()):
        num_records, num_samples, refused = table_row(path, real_tokenizer, turns)
        print(f"{path.name:36} {turns:9} records {num_records:4} samples {num_samples:4} refused {dict(refused)}")
        assert num_records + sum(refused.values()) > 0
        learned += num_records
    assert learned > 3000
