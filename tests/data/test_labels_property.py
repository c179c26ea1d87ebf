"""Over seeded random conversations: the tokens are the template's own, and what is learned is what would be generated.

The oracle is generation itself: the template's text of all before a turn, with its generation prompt, and what the text
of all up to that turn has after it, an empty think block and the header of a plain answer apart.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from label_cases import ORIGIN, learned_texts
from label_templates import SHAPES, call

from finetune.data.chat import Renderer
from finetune.data.template import turns_of
from finetune.data.types import IGNORE_INDEX, Conversation, Message, Sample

WORDS = [
    *("foo", " an", "Yes", "a {b}", '"q"', "\\n", "C:\\x", "1", "0", "zzz", "%Y"),
    *("\n", "\n\n", " ", "\t", "\r\n"),
    *("\u6c49\u5b57", "\U0001f600", "e\u0301", "\u05d0", "\u2028", "\ue000"),
    *(
        "<|im_start",
        "|im_end|>",
        "<|",
        "assistant\n",
        "user:",
        "[INST",
        "/INST]",
        "<start_of_turn",
        "{{ x }}",
        "{% if %}",
    ),
]
TOOLS = (
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "f", "description": "e", "parameters": {"type": "object"}}},
)


def words(draw: random.Random, *, least: int = 0) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(least, 6)))


def said(draw: random.Random) -> str:
    """Returns words that are not white space alone."""
    text = words(draw, least=1)
    return text if text.strip() else text + "x"


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(7 if depth < 2 else 5)
    if kind < 5:
        return (words(draw), draw.randint(-5, 99), draw.random(), draw.random() < 0.5, None)[kind]
    if kind == 5:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {f"k{index}": value(draw, depth + 1) for index in range(draw.randint(0, 3))}


def tool_call(draw: random.Random) -> dict[str, Any]:
    arguments = {f"a{index}": value(draw) for index in range(draw.randint(0, 3))}
    return call(draw.choice(["look", "f"]), arguments, as_text=draw.random() < 0.3)


def conversation(
    draw: random.Random, *, system: bool, tools: bool, reasoning: bool, max_calls: int = 2
) -> Conversation:
    """Returns a random conversation: one to four questions, some answered after tool calls, some with reasoning."""

    def extra() -> dict[str, Any]:
        key = draw.choice(["reasoning_content", "thinking"])
        return {key: said(draw)} if reasoning and draw.random() < 0.5 else {}

    messages = [Message("system", said(draw))] if system and draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 4)):
        messages.append(Message("user", words(draw)))
        for _ in range(draw.randint(1, 2) if tools and draw.random() < 0.5 else 0):
            made = [tool_call(draw) for _ in range(draw.randint(1, max_calls))]
            messages.append(Message("assistant", "", {"tool_calls": made, **extra()}))
            messages += [Message("tool", words(draw), {"name": made[0]["function"]["name"]}) for _ in made]
        messages.append(Message("assistant", said(draw), extra()))
    has_calls = any(message.role == "tool" for message in messages)
    return Conversation(
        "chat", ORIGIN, tuple(messages), tools=TOOLS if has_calls or (tools and draw.random() < 0.3) else ()
    )


class Own:
    """What the tokenizer makes of a conversation by itself."""

    def __init__(self, tokenizer: Any, made: Conversation, *, joins_arguments: bool) -> None:
        self.tokenizer = tokenizer
        self.tools = list(made.tools) or None
        self.turns = turns_of(made)
        for turn in self.turns if joins_arguments else []:
            for made_call in turn.get("tool_calls", []):
                made_call["function"]["arguments"] = json.dumps(made_call["function"]["arguments"], ensure_ascii=False)

    def text(self, num_turns: int, *, prompt: bool = False) -> str:
        turns = self.turns[:num_turns]
        text = self.tokenizer.apply_chat_template(turns, tools=self.tools, tokenize=False, add_generation_prompt=prompt)
        return self.through_tokens(text)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def through_tokens(self, text: str) -> str:
        """Returns a text as the tokenizer keeps it: some normalise it first."""
        return self.tokenizer.decode(self.ids(text))


def check(made: Conversation, own: Own, renderer: Renderer, *, end: str, joined: str = "") -> None:
    """Checks one conversation as a whole and turn by turn.

    Args:
        end: what ends a plain last turn.
        joined: first characters of an answer, beside white space, that the tokenizer joins with its header's end.
    """
    tokenizer, turns = own.tokenizer, own.turns
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    whole = renderer.render(made, loss_on="assistant")
    assert tokenizer.decode(whole.input_ids) == own.text(len(turns))
    if not any(turns[index]["content"][:1] in f"{joined}\n\t\r \u2028" for index in answers if turns[index]["content"]):
        assert whole.input_ids.tolist() == own.ids(own.text(len(turns)))
    learned = learned_texts(whole, tokenizer)
    assert len(learned) == len(answers)
    for index, span in zip(answers, learned, strict=True):
        if "tool_calls" not in turns[index]:
            assert own.through_tokens(turns[index]["content"].strip()) in span
        assert all(made_call["function"]["name"] in span for made_call in turns[index].get("tool_calls", []))
    samples = renderer.render_all(made, loss_on="assistant", turns="separate")
    for index, sample in zip(answers, samples, strict=True):
        check_generated(own, index, sample, end=end)


def check_generated(own: Own, index: int, sample: Sample, *, end: str) -> None:
    """Checks that a sample is generation's prompt, its tokens too, and what the template writes after it."""
    before, after = own.text(index, prompt=True), own.text(index + 1)
    turn = own.turns[index]
    whole = own.tokenizer.decode(sample.input_ids)
    (span,) = learned_texts(sample, own.tokenizer)
    if before.endswith("<think>\n") and not whole.startswith(before):
        before = before.removesuffix("<think>\n")
    assert whole.startswith(before)
    generated = whole[len(before) :]
    assert after.endswith(generated)
    is_plain = "tool_calls" not in turn and "reasoning_content" not in turn
    if is_plain:
        generated = generated.removeprefix("<|channel|>final<|message|>")
    if "reasoning_content" not in turn:
        generated = generated.removeprefix("<think>\n\n</think>\n\n")
    closing = end if end in generated else "<|call|>"
    assert span == generated[: generated.rindex(closing) + len(closing)]
    first = int((sample.labels != IGNORE_INDEX).argmax())
    if len(own.tokenizer.decode(sample.input_ids[:first])) == len(before):
        assert sample.input_ids[:first].tolist() == own.ids(before)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    """P20, P26: labels and tokens of templates in the shapes of Gemma, Mistral, SmolLM, Llama 3.2, Phi and others."""
    shape = SHAPES[name]
    tokenizer = shape.tokenizer()
    renderer = Renderer(tokenizer)
    draw = random.Random(f"labels-{name}")
    for _ in range(60):
        made = conversation(draw, system=shape.has_system, tools=shape.has_tools, reasoning=False)
        check(made, Own(tokenizer, made, joins_arguments=name == "opens-think"), renderer, end=shape.end, joined="f")


@pytest.mark.parametrize(
    ("name", "end", "max_calls"), [("qwen", "<|im_end|>", 3), ("llama", "<|eot_id|>", 1), ("gpt_oss", "<|return|>", 1)]
)
def test_real_tokenizers(name: str, end: str, max_calls: int, request: pytest.FixtureRequest) -> None:
    """P20, P24, P25: the same with the real templates, with tools and reasoning."""
    tokenizer = request.getfixturevalue(name)
    renderer = Renderer(tokenizer)
    draw = random.Random(f"labels-{name}")
    for number in range(120):
        made = conversation(draw, system=True, tools=number % 2 == 0, reasoning=name != "llama", max_calls=max_calls)
        check(made, Own(tokenizer, made, joins_arguments=False), renderer, end=end)
