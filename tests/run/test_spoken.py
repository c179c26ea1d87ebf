"""The question in a rendered prompt, for the templates that are common."""

from __future__ import annotations

import pytest

from finetune.run.spoken import last_question, without_control_tokens


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWho?<|im_end|><|im_start|>assistant\nI.<|im_end|><|im_start|>user\nWhere?<|im_end|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\nWhere?<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
        "<bos><start_of_turn>user\nWhere?<end_of_turn>\n<start_of_turn>model\n",
        "<|start|>developer<|message|>Be kind.<|end|><|start|>user<|message|>Where?<|end|><|start|>assistant",
        "<\uff5cUser\uff5c>Where?<\uff5cAssistant\uff5c>",
        "<s>[INST] Where? [/INST]",
    ],
)
def test_the_last_question_is_found_or_all_is_told_without_tokens(prompt: str) -> None:
    assert last_question(prompt).strip() == "Where?"


@pytest.mark.parametrize("text", ["user stories are fun", "a < b | c > d", "## Question\nWhere?\n## Answer\n", ""])
def test_text_without_marks_stays(text: str) -> None:
    assert last_question(text) == text
    assert without_control_tokens(text) == text
