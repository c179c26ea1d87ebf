"""What is learned of tool calls, reasoning and templates of many shapes, and what is refused with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from label_cases import ORIGIN, answer, calls, chat, learned, learned_texts, refusal, user
from label_templates import SHAPES, call, special_tokenizer

from finetune.data.chat import Renderer
from finetune.data.collate import RowCollator
from finetune.data.gate import Gate
from finetune.data.notes import LeftOut
from finetune.data.rows import RowTokens
from finetune.data.types import IGNORE_INDEX, Conversation, Message, Sample
from finetune.trainer.generate import stop_tokens


def stops(samples: Sequence[Sample], tokenizer: Any) -> set[str]:
    """Returns the tokens at which generation stops after training on the samples, for a model that names none."""
    model = torch.nn.Module()
    model.generation_config = SimpleNamespace(eos_token_id=None)  # type: ignore[assignment]
    _, ends = Gate(tokenizer, loss_on="assistant").look(samples, conversation=chat(user("q"), answer("a")))
    return set(tokenizer.convert_ids_to_tokens(list(stop_tokens(tokenizer, model, ends))))


TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},)
TOOL_TURNS = chat(
    user("Hi there"),
    calls(call("f", {"a": "x", "n": 5})),
    Message("tool", "1"),
    answer("done"),
    user("more"),
    calls(call("f", {"n": 5, "m": [1, None]}, as_text=True), call("g", {})),
)


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no-definitions", "definitions"])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            "mistral",
            [
                '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x", "n": 5}}]</s>',
                " done</s>",
                '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 5, "m": [1, null]}}, '
                '{"name": "g", "arguments": {}}]</s>',
            ],
        ),
        (
            "opens-think",
            [
                '<|calls|><|call|>f\n{"a": "x", "n": 5}<|/call|><|/calls|><|end|>',
                "done<|end|>",
                '<|calls|><|call|>f\n{"n": 5, "m": [1, null]}<|/call|><|call|>g\n{}<|/call|><|/calls|><|end|>',
            ],
        ),
        (
            "items",
            [
                "<function=f><a>x</a><n>5</n></function><|im_end|>",
                "done<|im_end|>",
                "<function=f><n>5</n><m>[1, null]</m></function><function=g></function><|im_end|>",
            ],
        ),
    ],
)
def test_tool_calls_are_learned_with_the_token_that_ends_the_turn(
    shape: str, expected: list[str], tools: tuple[dict[str, Any], ...]
) -> None:
    """P25 too: no argument appears that the data does not have, in templates that join, dump or list arguments."""
    tokenizer = SHAPES[shape].tokenizer()
    conversation = Conversation("chat", ORIGIN, TOOL_TURNS.messages, tools=tools)
    assert learned(conversation, tokenizer) == [expected]
    assert learned(conversation, tokenizer, turns="separate") == [[text] for text in expected]


@pytest.mark.parametrize("value", [True, None, 1.5, "", [], {}, "\u6c49\n\"'", {"deep": [{"x": False}]}], ids=repr)
def test_any_argument_can_be_the_only_one(value: Any) -> None:
    for shape in ("mistral", "opens-think", "items"):
        tokenizer = SHAPES[shape].tokenizer()
        (texts,) = learned(chat(user("u"), calls(call("f", {"a": value}))), tokenizer)
        assert len(texts) == 1
        assert texts[0].endswith(SHAPES[shape].end)
        assert texts[0].startswith(("[TOOL_CALLS]", "<|calls|>", "<function=f>"))


def test_call_after_a_name_alone_is_refused_where_its_end_is_not_known() -> None:
    """Booleans written the template's way leave only the name to mark; the token after it is the call's own."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}<|sep|>{% for k, v in c.function.arguments | items %}{{ v | string }}{% endfor %}"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    shape = SHAPES["smollm"]
    tokenizer = special_tokenizer(template, (*shape.special, "<|sep|>"), bos=None, eos=shape.eos)
    assert "never learn to stop" in refusal(chat(user("u"), calls(call("f", {"a": True}))), tokenizer).message
    assert learned(chat(user("u"), calls(call("f", {"a": "y"}))), tokenizer) == [["f<|sep|>y<|im_end|>"]]


def test_qwen_tool_calls_and_empty_think_blocks(qwen: Any) -> None:
    """P24: the empty think block that the template puts before a last turn is not learned."""
    two = (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n'
    )
    two += "</tool_call><|im_end|>"
    conversation = chat(user("u"), calls(call("f", {"a": 1}), call("g", {})), tools=TOOLS)
    sample = Renderer(qwen).render(conversation, loss_on="assistant")
    assert "<think>\n\n</think>\n\n<tool_call>" in qwen.decode(sample.input_ids)
    assert learned_texts(sample, qwen) == [two]
    with_text = chat(user("u"), calls(call("f", {"a": "1"}, as_text=True), content="Let me see."), Message("tool", "2"))
    assert learned(with_text, qwen) == [
        ['Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call><|im_end|>']
    ]
    assert learned(chat(user("u"), answer("A")), qwen) == [["A<|im_end|>"]]


def test_qwen_keeps_reasoning_after_the_last_question_only(qwen: Any) -> None:
    """P24: the turns that lose their reasoning are counted, and one sample a turn keeps all of it."""
    conversation = chat(
        user("u"),
        answer("<think>\nfirst\n</think>\n\nA"),
        user("v"),
        calls(call("f", {"x": 1}), reasoning_content="second"),
        Message("tool", "1"),
        answer("B", thinking="third"),
    )
    calling = '<think>\nsecond\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    last = "<think>\nthird\n</think>\n\nB<|im_end|>"
    renderer = Renderer(qwen)
    (sample,) = renderer.render_all(conversation, loss_on="assistant", turns="together")
    assert learned_texts(sample, qwen) == ["A<|im_end|>", calling, last]
    assert renderer.left_out == LeftOut(reasoning_turns=1, reasoning_turns_with_place=1)
    samples = renderer.render_all(conversation, loss_on="assistant", turns="separate")
    first = "<think>\nfirst\n</think>\n\nA<|im_end|>"
    assert [learned_texts(sample, qwen) for sample in samples] == [[first], [calling], [last]]
    assert renderer.left_out == LeftOut()


def test_gpt_oss_ends_each_kind_of_turn_with_its_own_token(gpt_oss: Any) -> None:
    conversation = chat(
        user("u"),
        answer("A", thinking="first"),
        user("v"),
        calls(call("f", {"x": 1}, as_text=True), thinking="second"),
        Message("tool", "1"),
        answer("B", reasoning_content="third"),
        tools=TOOLS,
    )
    calling = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    last = analysis.format("third") + final + "B<|return|>"
    assert learned(conversation, gpt_oss) == [["A<|end|>", calling, last]]
    assert learned(conversation, gpt_oss, turns="separate") == [
        [analysis.format("first") + final + "A<|return|>"],
        [analysis.format("second") + calling],
        [last],
    ]
    samples = Renderer(gpt_oss).render_all(conversation, loss_on="assistant", turns="separate")
    assert stops(samples, gpt_oss) == {"<|call|>", "<|return|>"}


def test_calls_that_a_template_leaves_out_are_refused(gpt_oss: Any, llama: Any) -> None:
    """gpt-oss writes the first call of a turn only, without a word; Llama 3.1 refuses itself."""
    conversation = chat(user("u"), calls(call("f", {}), call("g", {})), Message("tool", "1"), answer("A"), tools=TOOLS)
    assert refusal(conversation, gpt_oss).message == "the chat template leaves out tool call 2 of message 2"
    assert "single tool-calls at once" in refusal(conversation, llama).message
    assert learned(conversation, gpt_oss, loss_on="last_assistant") == [["A<|return|>"]]


def test_llama_3_1_calls_and_reasoning_without_a_place(llama: Any) -> None:
    conversation = chat(
        user("u"),
        calls(call("f", {"x": 1}, as_text=True), content="Hm."),
        Message("tool", "1"),
        answer("A", thinking="t"),
    )
    renderer = Renderer(llama)
    sample = renderer.render(conversation, loss_on="assistant")
    assert learned_texts(sample, llama) == ['{"name": "f", "parameters": {"x": 1}}<|eot_id|>', "A<|eot_id|>"]
    assert renderer.left_out == LeftOut(reasoning_turns=1, content_turns=1)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_templates(name: str) -> None:
    """P20: no template here has generation marks; each is learned to exactly its answers and end tokens.

    P18: where generation stops is the template's end of turn, also where EOS is another token. P26: one BOS where the
    template writes one. P31: nothing precedes the first token, in a packed row or alone.
    """
    shape = SHAPES[name]
    tokenizer, blank = shape.tokenizer(), shape.words_before[0]
    renderer = Renderer(tokenizer)
    conversation = chat(user("Hi"), answer("and so"), user("x"), answer("foo."))
    sample = renderer.render(conversation, loss_on="assistant")
    assert learned_texts(sample, tokenizer) == [f"{blank}and so{shape.end}", f"{blank}foo.{shape.end}"]
    assert 0 < sample.num_supervised_tokens < len(sample)
    if shape.bos is not None:
        assert sample.input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert sample.labels[0] == IGNORE_INDEX
    assert stops([sample], tokenizer) == {shape.end, tokenizer.eos_token}


def test_pad_that_equals_eos_does_not_hide_the_end() -> None:
    """P17: the true EOS of each answer is learned, the pads after shorter rows are not."""
    shape = SHAPES["smollm"]
    tokenizer = shape.tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    renderer = Renderer(tokenizer)
    samples = [renderer.render(chat(user("u"), answer("A" * size)), loss_on="assistant") for size in (1, 5, 9, 2)]
    rows = [
        RowTokens(input_ids=sample.input_ids, labels=sample.labels, lengths=np.array([len(sample)]), row=index)
        for index, sample in enumerate(samples)
    ]
    labels = RowCollator(row_length=None, pad_token_id=tokenizer.pad_token_id)(rows)["labels"].numpy()
    assert (labels == tokenizer.eos_token_id).sum() == len(samples)
    for row, sample in zip(labels, samples, strict=True):
        assert (row[len(sample) :] == IGNORE_INDEX).all()


def test_generation_stops_at_no_token_that_a_cut_left_last() -> None:
    """P18: a stretch that was cut ends with an ordinary token, at which generation must not stop."""
    tokenizer = SHAPES["base-chatml"].tokenizer()
    sample = Renderer(tokenizer).render(chat(user("u"), answer("long answer")), loss_on="assistant")
    cut = Sample(sample.input_ids[:-4], sample.labels[:-4], ORIGIN)
    assert stops([cut], tokenizer) == {"<|endoftext|>"}
    assert stops([cut, sample], tokenizer) == {"<|endoftext|>", "<|im_end|>"}


@pytest.mark.parametrize(
    ("name", "roles", "reason"),
    [("gemma", ["system", "user", "assistant"], "System role"), ("gemma", ["user", "user", "assistant"], "alternate")],
)
def test_what_a_template_says_is_shown(name: str, roles: list[Any], reason: str) -> None:
    conversation = chat(*(Message(role, "x") for role in roles))
    assert reason in refusal(conversation, SHAPES[name].tokenizer()).message


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 'abc'.index('x') }}", "ValueError: substring not found"),
        ("{{ messages[0]['content'].__class__.__mro__ }}", "unsafe"),
    ],
)
def test_template_that_fails_is_an_error_of_the_data(template: str, reason: str) -> None:
    assert reason in refusal(chat(user("u"), answer("A")), SHAPES["smollm"].tokenizer(template)).message


@pytest.mark.parametrize(
    "expression",
    ["m.content | upper", "m.content ~ m.content", "m.content[:3]", "m.content | tojson", "m.content | reverse", "'x'"],
)
def test_template_that_rewrites_answers_is_refused(expression: str) -> None:
    """P20, P21: what is learned would not be what the data says."""
    template = SHAPES["smollm"].template.replace("m.content", f"({expression})")
    error = refusal(chat(user("u"), answer('An "answer" of words')), SHAPES["smollm"].tokenizer(template))
    assert "changes or leaves out message 2: 'An" in error.message


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m.content | trim", "foo"),
        ("m.content.strip('\\n')", " foo "),
        ("m.content.lstrip()", "foo \n"),
        ("m.content.rstrip()", "\n\n foo"),
    ],
)
def test_template_that_strips_is_followed(expression: str, expected: str) -> None:
    template = SHAPES["smollm"].template.replace("m.content", f"({expression})")
    tokenizer = SHAPES["smollm"].tokenizer(template)
    conversation = chat(user("u"), answer("\n\n foo \n"))
    assert learned(conversation, tokenizer) == [[f"{expected}<|im_end|>"]]
    without_prompt = SHAPES["smollm"].tokenizer(template.replace("add_generation_prompt", "false"))
    assert learned(conversation, without_prompt) == [[f"{expected}<|im_end|>"]]


def test_blank_answer() -> None:
    """No words tell where it stands; it is refused where it would be learned only."""
    tokenizer = SHAPES["smollm"].tokenizer()
    conversation = chat(user("u"), answer(" \n"), user("v"), answer("A"))
    assert "message 2 has no words" in refusal(conversation, tokenizer).message
    assert learned(conversation, tokenizer, loss_on="last_assistant") == [["A<|im_end|>"]]


def test_unknown_control_token_in_a_tool_definition() -> None:
    """Text is never read as a token of the model's, wherever it stands; the place is said."""
    tokenizer = SHAPES["mistral"].tokenizer()
    tools = ({"type": "function", "function": {"name": "f", "description": "[INST] x"}},)
    assert (
        "the definition of a tool contains the control token [INST]"
        in refusal(chat(user("u"), answer("A"), tools=tools), tokenizer).message
    )
    in_call = chat(user("u"), calls(call("f", {"a": {"b": ["</s>"]}})))
    assert "message 2 contains the control token </s>" in refusal(in_call, tokenizer).message
