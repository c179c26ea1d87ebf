"""What a template leaves out or changes of the messages around the answers, and of the definitions of tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from label_cases import answer, calls, chat, learned, refusal, user
from label_templates import SHAPES, call

from finetune.data.build import Dataset, build_dataset
from finetune.data.chat import Renderer
from finetune.data.faults import DataFaults
from finetune.data.types import Message
from finetune.recipe.schema import DataSection

SMOLLM = SHAPES["smollm"]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
ASSISTANT_ONLY = SMOLLM.template.replace("messages %}", "messages if m.role == 'assistant' %}")
FIRST_TOO = SMOLLM.template.replace(
    "messages %}{{", "messages %}{% if m.role == 'assistant' or loop.first %}{{"
).replace("{% endfor", "{% endif %}{% endfor")
NO_SYSTEM = SMOLLM.template.replace("messages %}", "messages if m.role in ('user', 'assistant') %}")
NO_RESULTS = SHAPES["items"].template.replace("m in messages %}", "m in messages if m.role != 'tool' %}")
NO_TOOLS = SHAPES["items"].template.replace("{{ tools | tojson }}", "")
# Another text where a question begins with a character of the marks, so that the template takes no marks.
UNMARKABLE = "{% if messages[0].content[0] not in 'qQBr' %}x{% endif %}"


def changed(expression: str, before: str = "") -> Any:
    """A tokenizer whose template writes questions by another expression."""
    template = SMOLLM.template.replace("m.content", f"(m.content if m.role == 'assistant' else {expression})")
    return SMOLLM.tokenizer(before + template)


def build(tokenizer: Any, path: Path, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


@pytest.mark.parametrize("before", ["", UNMARKABLE], ids=["marked", "searched"])
@pytest.mark.parametrize(
    "expression", ["m.content[:2]", "m.content | lower", "m.content | reverse", "m.content | e", "''", "'Q'"]
)
def test_changed_question_is_refused(expression: str, before: str) -> None:
    conversation = chat(user("Question <one>?"), answer("A"))
    assert "message 1 (user)" in refusal(conversation, changed(expression, before)).message


def test_doubled_question_is_refused() -> None:
    error = refusal(chat(user("Question?"), answer("A")), changed("m.content ~ m.content"))
    assert error.message == "left out by the chat template: the exact words of message 1 (user), 'Question?'"


@pytest.mark.parametrize("before", ["", UNMARKABLE], ids=["marked", "searched"])
@pytest.mark.parametrize("template", [ASSISTANT_ONLY, FIRST_TOO], ids=["all-questions", "later-questions"])
def test_question_that_is_left_out_is_refused(template: str, before: str) -> None:
    conversation = chat(user("q"), answer("A"), user("r, then q"), answer("r, then q"))
    number = 1 if template == ASSISTANT_ONLY else 3
    error = refusal(conversation, SMOLLM.tokenizer(before + template))
    assert error.message.startswith("left out by the chat template: ")
    assert f"message {number} (user)" in error.message


@pytest.mark.parametrize("before", ["", UNMARKABLE], ids=["marked", "searched"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instruction_that_is_left_out_is_refused(role: Any, before: str) -> None:
    """The same words inside a question are not the message."""
    conversation = chat(Message(role, "Be brief."), user("So: Be brief. Why?"), answer("A"))
    error = refusal(conversation, SMOLLM.tokenizer(before + NO_SYSTEM))
    assert f"message 1 ({role}), 'Be brief.'" in error.message
    assert "model.chat_template" in error.remedy
    assert learned(conversation, SMOLLM.tokenizer()) == [["A<|im_end|>"]]


def test_tool_result_that_is_left_out_is_refused() -> None:
    conversation = chat(user("u"), calls(call("f", {"a": "x"})), Message("tool", '{"r": 1}'), answer("A"))
    error = refusal(conversation, SHAPES["items"].tokenizer(NO_RESULTS))
    assert error.message.startswith("left out by the chat template: message 3 (tool)")
    as_json = SHAPES["items"].template.replace(
        "(m.content or '')", "(m.content | tojson if m.role == 'tool' else m.content or '')"
    )
    assert len(learned(conversation, SHAPES["items"].tokenizer(as_json))[0]) == 2


def test_developer_message_with_qwen(qwen: Any) -> None:
    error = refusal(chat(Message("developer", "Be brief."), user("u"), answer("A")), qwen)
    assert error.message == "left out by the chat template: message 1 (developer), 'Be brief.'"
    assert "Give it the role system" in error.remedy


def test_developer_message_with_other_tokenizers(llama: Any, gpt_oss: Any) -> None:
    conversation = chat(Message("developer", " Be brief.\n"), user("u"), answer("A"))
    assert [len(learned(conversation, tokenizer)) for tokenizer in (llama, gpt_oss)] == [1, 1]


def test_question_like_a_tool_result_with_qwen(qwen: Any) -> None:
    """Qwen3 looks at how a question begins, which marks would change."""
    conversation = chat(
        user("u"), answer("A", thinking="why"), user("<tool_response>1</tool_response>"), answer("B", thinking="so")
    )
    assert len(learned(conversation, qwen)[0]) == 2


def test_equal_messages_are_each_found() -> None:
    conversation = chat(*[user("q"), answer("q")] * 5)
    assert learned(conversation, SMOLLM.tokenizer()) == [["q<|im_end|>"] * 5]


def test_more_messages_than_marks() -> None:
    """Answers and questions together are more than there are marks, each of the two is not."""
    conversation = chat(*[user("q"), answer("a")] * 2100)
    assert len(learned(conversation, SMOLLM.tokenizer())[0]) == 2100


def test_more_questions_than_marks() -> None:
    conversation = chat(*[user(f"q{number}") for number in range(4200)], answer("a"))
    assert learned(conversation, SMOLLM.tokenizer()) == [["a<|im_end|>"]]
    error = refusal(conversation, SMOLLM.tokenizer(FIRST_TOO))
    assert "message 2 (user)" in error.message


def test_left_out_is_a_fault_that_can_be_dropped(write_jsonl: Callable) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    late = [{"role": "system", "content": "Be brief."}, *turns]
    path = write_jsonl([{"messages": turns}, {"messages": late}, {"messages": late}])
    tokenizer = SMOLLM.tokenizer(NO_SYSTEM)
    with pytest.raises(DataFaults) as caught:
        build(tokenizer, path)
    (fault,) = caught.value.as_dict()["faults"]
    assert (fault["kind"], fault["records"]) == ("left out by the chat template", 2)
    assert fault["examples"][0]["place"] == f"{path}:2"
    (dropped,) = build(tokenizer, path, malformed="drop").ledger.dropped
    assert (dropped.reason, dropped.records) == ("malformed: left out by the chat template", 2)


def test_hidden_tools_of_a_record_with_calls_are_refused() -> None:
    conversation = chat(
        user("u"), calls(call("look_up", {"a": "x"})), Message("tool", "r"), answer("look_up"), tools=(TOOL,)
    )
    error = refusal(conversation, SHAPES["items"].tokenizer(NO_TOOLS))
    assert error.message.startswith("left out by the chat template: the definition of the tool 'look_up'")
    assert len(learned(conversation, SHAPES["items"].tokenizer())[0]) == 2


def test_hidden_tools_of_a_record_without_calls_are_told(write_jsonl: Callable) -> None:
    turns = [{"role": "user", "content": "look_up?"}, {"role": "assistant", "content": "a"}]
    path = write_jsonl([{"messages": turns, "tools": [TOOL]}, {"messages": turns}])
    dataset = build(SHAPES["items"].tokenizer(NO_TOOLS), path)
    (warning,) = [check.line() for check in dataset.gate.warnings if check.name == "definitions of tools"]
    assert "(1 of 2 records)" in warning
    assert f"{path}:1" in warning
    (note,) = dataset.ledger.notes
    assert (note.what, note.records) == ("the chat template leaves out the definitions of tools", 1)
    assert build(SHAPES["items"].tokenizer(), path).ledger.notes == ()


@pytest.mark.parametrize(
    ("content", "num_trimmed"), [("  indented\n", 1), ("\nline", 1), ("end \n", 1), ("plain", 0)], ids=repr
)
def test_trimmed_answers_are_noted(write_jsonl: Callable, content: str, num_trimmed: int) -> None:
    path = write_jsonl([{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}])
    trims = SMOLLM.tokenizer(SMOLLM.template.replace("m.content", "m.content | trim"))
    notes = build(trims, path).ledger.notes
    assert [(note.turns, "white space" in note.what) for note in notes] == [(1, True)] * num_trimmed
    assert build(SMOLLM.tokenizer(), path).ledger.notes == ()


def test_template_without_a_generation_prompt_is_a_warning(write_jsonl: Callable) -> None:
    path = write_jsonl([{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}])
    without = SMOLLM.tokenizer(SMOLLM.template.partition("{% if add_generation_prompt")[0])
    (warning,) = build(without, path).gate.warnings
    assert warning.name == "no generation prompt"
    assert "(1 of 1 record)" in warning.line()
    assert build(SMOLLM.tokenizer(), path).gate.warnings == ()
    mistral = SHAPES["mistral"].tokenizer()  # its prompt is the end of the question
    assert not [check for check in build(mistral, path).gate.warnings if "prompt" in check.name]


def test_gpt_oss_refusal_names_what_to_keep(gpt_oss: Any) -> None:
    conversation = chat(user("u"), calls(call("f", {"a": "x"}), content="c", thinking="why", reasoning_content="why"))
    error = refusal(conversation, gpt_oss)
    assert "Cannot pass both content and thinking" in error.message
    assert "Message 2 has content and reasoning beside tool calls" in error.remedy


def test_context_costs_no_rendering_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation is rendered plainly and with marks, whatever its messages."""
    tokenizer = SHAPES["items"].tokenizer()
    renderer = Renderer(tokenizer)
    conversation = chat(Message("system", "s"), *[user("q"), answer("a")] * 4, tools=(TOOL,))
    renderer.render(conversation, loss_on="assistant")  # learns the template
    renderings: list[int] = []
    render = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer),
        "apply_chat_template",
        lambda self, turns, **options: renderings.append(len(turns)) or render(self, turns, **options),
    )
    renderer.render(conversation, loss_on="assistant")
    assert renderings == [9, 9]
