"""What a record itself says of what is learned."""

from __future__ import annotations

from typing import Any

import pytest
from label_cases import answer, chat, learned, refusal, user
from label_templates import SHAPES, call

from finetune.data.chat import LossOn
from finetune.data.types import ContentPart, Conversation, Message
from finetune.errors import DataError


def choosing(*choices: bool | None) -> Conversation:
    roles: list[Any] = ["user", "assistant"] * len(choices)
    messages = [Message(role, f"m{index}.", is_learned=None) for index, role in enumerate(roles)]
    for number, choice in enumerate(choices):
        messages[2 * number + 1] = Message("assistant", f"A{number}.", is_learned=choice)
    return chat(*messages)


@pytest.mark.parametrize(
    ("loss_on", "choices", "expected"),
    [
        ("assistant", (None, False, None), ["A0.", "A2."]),
        ("assistant", (False, False, True), ["A2."]),
        ("last_assistant", (None, True, None), ["A1.", "A2."]),
        ("last_assistant", (True, None, False), ["A0."]),
    ],
)
def test_a_message_that_chooses_comes_before_loss_on(
    loss_on: LossOn, choices: tuple[bool | None, ...], expected: list[str]
) -> None:
    tokenizer = SHAPES["smollm"].tokenizer()
    texts = [f"{text}<|im_end|>" for text in expected]
    assert learned(choosing(*choices), tokenizer, loss_on=loss_on) == [texts]
    assert learned(choosing(*choices), tokenizer, loss_on=loss_on, turns="separate") == [[text] for text in texts]


def test_a_message_taken_out_of_all() -> None:
    tokenizer = SHAPES["smollm"].tokenizer()
    ((before, after),) = learned(choosing(False, None), tokenizer, loss_on="all")
    assert before.endswith("<|im_start|>assistant\n")
    assert after.startswith("\n<|im_start|>user\nm2.")
    assert "A0." not in before + after
    assert after.endswith("A1.<|im_end|>\n")


def test_a_record_that_takes_all_its_turns_out_is_an_error() -> None:
    assert "no token of this record" in refusal(choosing(False, False), SHAPES["smollm"].tokenizer()).message


def test_parts_that_choose() -> None:
    tokenizer = SHAPES["smollm"].tokenizer()

    def parts(*pairs: tuple[str, bool | None], is_learned: bool | None = None) -> Conversation:
        made = tuple(ContentPart(text, choice) for text, choice in pairs)
        content = "".join(text for text, _ in pairs)
        return chat(user("u"), Message("assistant", content, is_learned=is_learned, parts=made))

    assert learned(parts(("Wrong. ", False), ("Right.", True)), tokenizer) == [["Right.<|im_end|>"]]
    assert learned(parts(("Good, ", None), ("bad", False)), tokenizer) == [["Good, "]]
    assert learned(parts((" a", None), ("n", True), (" x", None)), tokenizer) == [[" an x<|im_end|>"]]
    assert learned(parts(("a", None), ("b", True), ("c", None), is_learned=False), tokenizer) == [["b"]]
    with_reasoning = parts(("a", False), ("b", True))
    message = Message(
        "assistant", "ab", {"tool_calls": [call("f", {"x": "y"})]}, parts=with_reasoning.messages[1].parts
    )
    items = SHAPES["items"].tokenizer()
    assert "chooses for parts" in refusal(chat(user("u"), message), items).message


def test_only_answers_can_choose() -> None:
    tokenizer = SHAPES["smollm"].tokenizer()
    wanted = chat(Message("user", "u", is_learned=True), answer("A"))
    assert "message 1 (user) is marked to be learned" in refusal(wanted, tokenizer).message
    unwanted = chat(Message("user", "u", is_learned=False), answer("A"))
    assert learned(unwanted, tokenizer) == [["A<|im_end|>"]]
    assert "marked not to be learned" in refusal(unwanted, tokenizer, loss_on="all").message


def test_separate_turns_of_all_are_refused() -> None:
    with pytest.raises(DataError, match="once for each turn"):
        learned(choosing(None), SHAPES["smollm"].tokenizer(), loss_on="all", turns="separate")


def test_characters_that_serve_as_marks() -> None:
    """Another range of the private planes marks the answers then; a text with some of each is refused."""
    tokenizer = SHAPES["smollm"].tokenizer()
    assert learned(chat(user("\U000f0000"), answer("\U000f8000A\U000f0001")), tokenizer) == [
        ["\U000f8000A\U000f0001<|im_end|>"]
    ]
    everywhere = "".join(chr(plane + at) for plane in (0xF0000, 0x100000) for at in (0, 0x4000, 0x8000))
    assert "private planes" in refusal(chat(user(everywhere), answer("A")), tokenizer).message
