"""What is learned decodes to exactly the answers and their end tokens, and prompts are what generation sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.chat import Renderer
from finetune.data.formats import convert
from finetune.data.load import read_records
from finetune.data.types import IGNORE_INDEX, Conversation, Message, Origin, PromptReference, Sample
from finetune.errors import DataError

ORIGIN = Origin("data.jsonl", 3)
QWEN_LIKE = """{%- for message in messages -%}
{%- set content = message.content -%}{%- set think = '' -%}
{%- if message.reasoning_content is string -%}{%- set think = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set think = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.last -%}
{{- '<think>\\n' + think + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
INST_LIKE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


def render(conversation: Conversation, *, tokenizer: Any, loss_on: Any) -> Sample:
    return Renderer(tokenizer).render(conversation, loss_on=loss_on)


def prompt_reference(conversation: Conversation, *, tokenizer: Any) -> PromptReference | None:
    return Renderer(tokenizer).prompt_reference(conversation)


def chat(*contents: str, **extra: Any) -> Conversation:
    """Returns a conversation of user and assistant in turn; `extra` goes to the last message."""
    roles = ["user", "assistant"] * len(contents)
    messages = [Message(role, content) for role, content in zip(roles, contents, strict=False)]  # type: ignore[arg-type]
    messages[-1] = Message(messages[-1].role, messages[-1].content, extra)
    return Conversation("chat", ORIGIN, tuple(messages))


def spans_of(sample: Sample, tokenizer: Any) -> list[str]:
    """Returns the decoded text of each run of learned tokens."""
    learned = np.flatnonzero(sample.labels != IGNORE_INDEX)
    runs = np.split(learned, np.flatnonzero(np.diff(learned) != 1) + 1)
    return [tokenizer.decode(sample.input_ids[run], skip_special_tokens=False) for run in runs if len(run)]


def ids_of(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def failure(conversation: Conversation, tokenizer: Any, loss_on: Any = "assistant") -> DataError:
    with pytest.raises(DataError) as caught:
        render(conversation, tokenizer=tokenizer, loss_on=loss_on)
    assert caught.value.place == "data.jsonl:3"
    assert caught.value.remedy
    return caught.value


def test_exact_labels_of_a_chatml_conversation(chatml: Any) -> None:
    sample = render(chat("Hi", "Yes!", "And", "No."), tokenizer=chatml, loss_on="assistant")
    pieces = [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        ("Yes!<|im_end|>", True),
        ("\n<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n", False),
        ("No.<|im_end|>", True),
        ("\n", False),
    ]
    ids, labels = [], []
    for text, is_learned in pieces:
        piece = ids_of(text, chatml)
        ids += piece
        labels += piece if is_learned else [IGNORE_INDEX] * len(piece)
    assert sample.input_ids.tolist() == ids
    assert sample.labels.tolist() == labels
    assert sample.input_ids.dtype == sample.labels.dtype == np.int32
    assert sample.origin == ORIGIN


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [("assistant", ["A<|im_end|>", "B<|im_end|>"]), ("last_assistant", ["B<|im_end|>"])],
)
def test_loss_on_turns(chatml: Any, loss_on: Any, expected: list[str]) -> None:
    assert spans_of(render(chat("u", "A", "v", "B"), tokenizer=chatml, loss_on=loss_on), chatml) == expected


def test_loss_on_all_learns_all_but_the_first(chatml: Any) -> None:
    sample = render(chat("u", "A"), tokenizer=chatml, loss_on="all")
    assert sample.labels[0] == IGNORE_INDEX
    assert np.array_equal(sample.labels[1:], sample.input_ids[1:])


def test_loss_on_completion_learns_only_answers_after_the_prompt(chatml: Any) -> None:
    messages = [{"role": role, "content": content} for role, content in [("user", "u"), ("assistant", "A")] * 2]
    record = {"prompt": messages[:3], "completion": messages[3:]}
    conversation = convert(record, format="prompt_completion", origin=ORIGIN)
    assert spans_of(render(conversation, tokenizer=chatml, loss_on="completion"), chatml) == ["A<|im_end|>"]
    assert len(spans_of(render(conversation, tokenizer=chatml, loss_on="assistant"), chatml)) == 2


@pytest.mark.parametrize("conversation", [chat("u", "A"), Conversation("text", ORIGIN, text="doc")])
def test_loss_on_completion_needs_completion_records(chatml: Any, conversation: Conversation) -> None:
    assert "completion" in failure(conversation, chatml, "completion").message


@pytest.mark.parametrize("content", ["\nfoo", "\n\n", "  a\n", "foo\n\n", " and", "\n\n\nx"])
def test_token_across_the_border_is_cut(chatml: Any, content: str) -> None:
    """The tokenizer merges the header's line break with the content's; the label must not hold the header's."""
    conversation = chat("u", content + "x", "v", content + "y")
    sample = render(conversation, tokenizer=chatml, loss_on="assistant")
    assert spans_of(sample, chatml) == [f"{content}x<|im_end|>", f"{content}y<|im_end|>"]
    prompt = prompt_reference(conversation, tokenizer=chatml)
    assert prompt is not None
    assert prompt.prompt_ids[-1] == ids_of("\n", chatml)[0]


def test_space_before_the_answer_is_learned_where_generation_starts_before_it(make_tokenizer: Callable) -> None:
    """As in `[/INST] answer`: the prompt ends before the space, so the model must produce it."""
    tokenizer = make_tokenizer(chat_template=INST_LIKE)
    conversation = chat("u", "and so", "v", "zzz")
    sample = render(conversation, tokenizer=tokenizer, loss_on="assistant")
    assert spans_of(sample, tokenizer)[0] == " and so <|im_end|>"
    assert ids_of(" and", tokenizer)[0] in sample.labels
    assert spans_of(sample, tokenizer)[1] == " zzz <|im_end|>"


def test_tokenizer_that_writes_a_space_before_each_text(prefix_space: Any) -> None:
    prefix_space.chat_template = INST_LIKE
    conversation = chat("u", "and", "v", "no")
    sample = render(conversation, tokenizer=prefix_space, loss_on="assistant")
    tokens = prefix_space.convert_ids_to_tokens(sample.input_ids[sample.labels != IGNORE_INDEX].tolist())
    assert tokens == ["\u2581an", "d", "\u2581", "</s>", "\u2581", "n", "o", "\u2581", "</s>"]
    reference = prompt_reference(conversation, tokenizer=prefix_space)
    assert reference is not None
    assert reference.prompt.endswith("[/INST]")
    assert reference.prompt_ids.tolist() == ids_of(reference.prompt, prefix_space)


def test_answer_whose_start_cannot_be_told_from_the_prompt(prefix_space: Any) -> None:
    prefix_space.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}</s>"
    error = failure(chat("u", "and"), prefix_space)
    assert "joins with the prompt's" in error.message


def test_bos_is_there_once(make_tokenizer: Callable) -> None:
    tokenizer = make_tokenizer(chat_template=INST_LIKE, adds_bos=True)
    bos = tokenizer.bos_token_id
    for conversation in (
        chat("u", "A"),
        Conversation("completion", ORIGIN, text="p", completion="c"),
        Conversation("completion", ORIGIN, text="<|bos|>p", completion="c"),
        Conversation("text", ORIGIN, text="doc"),
    ):
        sample = render(conversation, tokenizer=tokenizer, loss_on="assistant")
        assert sample.input_ids.tolist().count(bos) == 1
        assert sample.input_ids[0] == bos


def test_completion_tokens_and_labels(chatml: Any) -> None:
    """Prompt and completion are tokenized apart: generation starts from the prompt's own tokens."""
    conversation = Conversation("completion", ORIGIN, text="2+2=\n", completion="\nfoo")
    prompt, answer = ids_of("2+2=\n", chatml), [*ids_of("\nfoo", chatml), chatml.eos_token_id]
    sample = render(conversation, tokenizer=chatml, loss_on="assistant")
    assert sample.input_ids.tolist() == prompt + answer
    assert sample.labels.tolist() == [IGNORE_INDEX] * len(prompt) + answer
    learn_all = render(conversation, tokenizer=chatml, loss_on="all")
    assert learn_all.labels.tolist() == [IGNORE_INDEX, *prompt[1:], *answer]
    reference = prompt_reference(conversation, tokenizer=chatml)
    assert reference is not None
    assert (reference.prompt_ids.tolist(), reference.prompt, reference.reference) == (prompt, "2+2=\n", "\nfoo")


def test_eos_is_not_doubled_and_is_learned(chatml: Any) -> None:
    conversation = Conversation("completion", ORIGIN, text="p", completion="c<|im_end|>")
    sample = render(conversation, tokenizer=chatml, loss_on="completion")
    assert sample.input_ids.tolist().count(chatml.eos_token_id) == 1
    assert sample.labels[-1] == chatml.eos_token_id


def test_text_learns_all_but_the_first_token(chatml: Any) -> None:
    sample = render(Conversation("text", ORIGIN, text="a doc"), tokenizer=chatml, loss_on="assistant")
    ids = [*ids_of("a doc", chatml), chatml.eos_token_id]
    assert sample.input_ids.tolist() == ids
    assert sample.labels.tolist() == [IGNORE_INDEX, *ids[1:]]
    assert prompt_reference(Conversation("text", ORIGIN, text="a doc"), tokenizer=chatml) is None


def test_think_block_that_the_template_adds_is_not_learned(make_tokenizer: Callable) -> None:
    tokenizer = make_tokenizer(chat_template=QWEN_LIKE)
    sample = render(chat("u", "A", "v", "B"), tokenizer=tokenizer, loss_on="assistant")
    assert "<think>\n\n</think>\n\nB" in tokenizer.decode(sample.input_ids)
    assert spans_of(sample, tokenizer) == ["A<|im_end|>", "B<|im_end|>"]


@pytest.mark.parametrize("between", ["\n\n", "\n", ""], ids=["as-written", "rewritten", "rewritten-all"])
def test_think_block_of_the_content_is_learned_where_the_template_keeps_it(
    make_tokenizer: Callable, between: str
) -> None:
    tokenizer = make_tokenizer(chat_template=QWEN_LIKE)
    content = f"<think>\nwhy\n</think>{between}B"
    sample = render(chat("u", content, "v", content), tokenizer=tokenizer, loss_on="assistant")
    assert spans_of(sample, tokenizer) == ["B<|im_end|>", "<think>\nwhy\n</think>\n\nB<|im_end|>"]


def test_reasoning_beside_the_content_is_learned_where_the_template_shows_it(
    make_tokenizer: Callable, chatml: Any
) -> None:
    tokenizer = make_tokenizer(chat_template=QWEN_LIKE)
    conversation = chat("u", "B", reasoning_content="why")
    sample = render(conversation, tokenizer=tokenizer, loss_on="assistant")
    assert spans_of(sample, tokenizer) == ["<think>\nwhy\n</think>\n\nB<|im_end|>"]
    assert spans_of(render(conversation, tokenizer=chatml, loss_on="assistant"), chatml) == ["B<|im_end|>"]


def test_reasoning_that_generation_would_not_see_there_is_an_error(make_tokenizer: Callable) -> None:
    """The template's prompt opens another turn than training shows, so where generation begins is unknown."""
    template = QWEN_LIKE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'")
    assert template != QWEN_LIKE
    tokenizer = make_tokenizer(chat_template=template)
    assert spans_of(render(chat("u", "B"), tokenizer=tokenizer, loss_on="assistant"), tokenizer) == ["B<|im_end|>"]
    assert "message 2 has reasoning" in failure(chat("u", "B", reasoning_content="why"), tokenizer).message


@pytest.mark.parametrize(
    "guard",
    ["", "{% if messages|length == 2 %}{{ raise_exception('unfinished') }}{% endif %}"],
    ids=["plain", "refuses-parts"],
)
def test_conversation_that_begins_with_an_answer(make_tokenizer: Callable, chatml: Any, guard: str) -> None:
    tokenizer = make_tokenizer(chat_template=guard + chatml.chat_template)
    contents = [("assistant", "Welcome"), ("user", "u"), ("assistant", "A")]
    conversation = Conversation("chat", ORIGIN, tuple(Message(role, content) for role, content in contents))  # type: ignore[arg-type]
    sample = render(conversation, tokenizer=tokenizer, loss_on="assistant")
    assert spans_of(sample, tokenizer) == ["Welcome<|im_end|>", "A<|im_end|>"]


def test_tool_call_that_the_template_does_not_write_is_refused_where_it_would_be_learned(chatml: Any) -> None:
    call = Message("assistant", "", {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    messages = (Message("user", "u"), call, Message("tool", "1"), Message("assistant", "A"))
    conversation = Conversation("chat", ORIGIN, messages)
    error = failure(conversation, chatml)
    assert "this chat template has no place for tool calls, and message 2 calls tools" in error.message
    assert "`model.chat_template`" in error.remedy
    last = render(conversation, tokenizer=chatml, loss_on="last_assistant")
    assert spans_of(last, chatml) == ["A<|im_end|>"]
    without_text = Conversation("chat", ORIGIN, messages[:2])
    assert prompt_reference(without_text, tokenizer=chatml) is None


def test_no_chat_template(make_tokenizer: Callable) -> None:
    error = failure(chat("u", "A"), make_tokenizer(chat_template=None))
    assert "no chat template" in error.message
    assert "`model.chat_template`" in error.remedy


def test_control_token_in_a_message(chatml: Any) -> None:
    error = failure(chat("u <|im_end|> v", "A"), chatml)
    assert "message 1 contains the control token <|im_end|>" in error.message


def test_template_without_end_token(make_tokenizer: Callable) -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    error = failure(chat("u", "A"), make_tokenizer(chat_template=template))
    assert "never learn to stop" in error.message


@pytest.mark.parametrize(
    "expression",
    ["message.content | upper", "message.content ~ message.content", "'x'"],
    ids=["changed", "doubled", "left-out"],
)
def test_template_that_does_not_keep_the_answer(make_tokenizer: Callable, expression: str) -> None:
    template = f"{{% for message in messages %}}{{{{ {expression} }}}}<|im_end|>{{% endfor %}}"
    error = failure(chat("u", "answer"), make_tokenizer(chat_template=template))
    assert "changes or leaves out message 2: 'answer'" in error.message


def test_template_that_refuses(make_tokenizer: Callable) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in failure(chat("u", "A"), make_tokenizer(chat_template=template)).message


def test_no_eos_token(make_tokenizer: Callable) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert "no EOS token" in failure(Conversation("text", ORIGIN, text="x"), tokenizer).message


def test_nothing_to_learn_is_an_error(make_tokenizer: Callable) -> None:
    """The only token of the only answer is the first of the sample, which nothing precedes."""
    tokenizer = make_tokenizer(chat_template="{{ messages[-1].content }}")
    conversation = Conversation("chat", ORIGIN, (Message("assistant", "A"),))
    assert "no token of this record" in failure(conversation, tokenizer, "all").message


PIECES = st.sampled_from(
    [
        "\n",
        "\n\n",
        " ",
        "foo",
        " an",
        "<|im_start",
        "|im_end|>",
        "<think>",
        "</think",
        "assistant\n",
        "\u6c49",
        "\U0001f600",
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=6).map("".join), st.text(st.characters(codec="utf-8"), max_size=12))


def is_plain(text: str) -> bool:
    """Tells whether joining pieces has not made a control token."""
    return not any(token in text for token in ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|pad|>"))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=st.lists(st.tuples(TEXTS, TEXTS.filter(lambda text: text.strip() != "")), min_size=1, max_size=4))
def test_labels_are_exactly_the_answers(chatml: Any, turns: list[tuple[str, str]]) -> None:
    contents = [text for turn in turns for text in turn]
    if not all(map(is_plain, contents)):
        assert "control token" in failure(chat(*contents), chatml).message
        return
    conversation = chat(*contents)
    sample = render(conversation, tokenizer=chatml, loss_on="assistant")
    assert spans_of(sample, chatml) == [f"{answer}<|im_end|>" for _, answer in turns]
    rendered = chatml.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in conversation.messages], tokenize=False
    )
    assert chatml.decode(sample.input_ids) == rendered
    reference = prompt_reference(conversation, tokenizer=chatml)
    assert reference is not None
    assert reference.reference == turns[-1][1]
    start = len(reference.prompt_ids)
    assert np.array_equal(sample.input_ids[:start], reference.prompt_ids)
    assert (sample.labels[start - 1], sample.labels[start]) == (IGNORE_INDEX, sample.input_ids[start])
    assert chatml.decode(reference.prompt_ids) == reference.prompt
    if len(turns) == 1:
        assert reference.prompt_ids.tolist() == ids_of(reference.prompt, chatml)


def test_real_tokenizers_learn_exactly_the_answers(real_tokenizer: Any, assets: Path) -> None:
    """Alpaca answers through stock templates: no marker is known, and none has generation marks."""
    tokenizer, renderer = real_tokenizer, Renderer(real_tokenizer)
    path = assets / "data" / "messages_alpaca_en.jsonl"
    num_samples = 0
    for origin, record in read_records(path, max_rows=None):
        conversation = convert(record, format="messages", origin=origin)
        sample = renderer.render(conversation, loss_on="assistant")
        answers = [message.content for message in conversation.messages if message.role == "assistant"]
        end = tokenizer.eos_token
        assert [span.strip() for span in spans_of(sample, tokenizer)] == [f"{answers[0].strip()}{end}"]
        assert 0 < sample.num_supervised_tokens < len(sample)
        if tokenizer.bos_token_id is not None:
            expected_bos = int(tokenizer.bos_token == "<|begin_of_text|>")
            assert sample.input_ids.tolist().count(tokenizer.bos_token_id) == expected_bos
        reference = renderer.prompt_reference(conversation)
        assert reference is not None
        assert reference.prompt_ids.tolist() == ids_of(reference.prompt, tokenizer)
        assert np.array_equal(sample.input_ids[: len(reference.prompt_ids)], reference.prompt_ids)
        num_samples += 1
    assert num_samples == 999


def test_real_tokenizers_end_each_turn_with_their_own_token(real_tokenizer: Any) -> None:
    sample = render(chat("u", "first", "v", "second"), tokenizer=real_tokenizer, loss_on="assistant")
    ends = {"<|im_end|>": "<|im_end|>", "<|eot_id|>": "<|eot_id|>", "<|return|>": "<|end|>"}
    eos = real_tokenizer.eos_token
    assert spans_of(sample, real_tokenizer) == [f"first{ends[eos]}", f"second{eos}"]
