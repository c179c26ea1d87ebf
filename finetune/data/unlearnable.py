"""Recognise the formats of other training methods, which supervised training would learn wrongly."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from finetune.data.shorten import shorten
from finetune.data.types import Origin
from finetune.errors import DataError

Unlearnable = Literal["preference", "kto", "prompt_answer"]

ANSWER_KEYS = ("answer", "solution", "ground_truth")
"""Where prompts for GRPO keep the answer that a reward compares with."""
_VERDICTS = (True, False, 0, 1, "true", "false", "True", "False", "0", "1")


def unlearnable_format(record: dict[str, Any]) -> Unlearnable | None:
    """Returns which of these formats a record has, if any."""
    if "chosen" in record or "rejected" in record:
        return "preference"
    if "kto_tag" in record:
        return "kto"
    has_answer = any(key in record for key in ("completion", "messages", "conversations", "output"))
    label = record.get("label")
    if has_answer and isinstance(label, bool | int | str) and label in _VERDICTS:
        return "kto"
    if "prompt" in record and not has_answer and any(key in record for key in ANSWER_KEYS):
        return "prompt_answer"
    return None


def describe_unlearnable(record: dict[str, Any], format: Unlearnable) -> str:
    """Returns the format with the shape that this record has."""
    if format == "preference":
        prompts = [key for key in ("prompt", "conversations", "messages", "instruction") if key in record]
        answers = [key for key in ("chosen", "rejected") if key in record]
        if not prompts:
            return "preference (implicit: chosen and rejected hold whole conversations)"
        is_text = isinstance(record[prompts[0]], str)
        return f"preference ({'strings' if is_text else 'conversational'}: {', '.join([prompts[0], *answers])})"
    if format == "kto":
        return f"kto (answers with a verdict in {'kto_tag' if 'kto_tag' in record else 'label'})"
    answer = next((key for key in ANSWER_KEYS if key in record), "answer")
    return f"prompt_answer (prompt, {answer})"


def refuse_unlearnable(record: dict[str, Any], format: Unlearnable, origin: Origin) -> NoReturn:
    """Raises the error that says why supervised training does not take this format.

    Raises:
        DataError: always.
    """
    if unlearnable_format(record) != format:
        raise DataError(
            f"the source's `format` is {format}, which this record does not have; its keys are "
            f"{shorten(', '.join(map(str, record)))}",
            place=str(origin),
            remedy="Leave `format` out to have it recognised, or set it to what the file holds.",
            kind=f"the source's `format` is {format}, which the record does not have",
        )
    shown = describe_unlearnable(record, format)
    if format == "prompt_answer":
        answer = next((key for key in ANSWER_KEYS if key in record), "answer")
        message = f"this is {shown} data: prompts with an answer for a reward to compare with, not a text to learn"
        remedy = f"To learn the answers as they are, {_mapped('completion', answer)}."
    elif format == "kto":
        message = f"this is {shown} data, and `training.method: sft` would learn the bad answers as if they were right"
        remedy = (
            "Write the records whose verdict is true to a file without the verdict, and name that; `columns` cannot "
            "choose records. Rename the key if it means another thing."
        )
    else:
        message = f"this is preference data, {shown}, and `training.method: sft` would learn the rejected answers too"
        role = _role_of_chosen(record)
        remedy = (
            f"To learn the preferred answers alone, {_mapped(role, 'chosen')}."
            if role is not None
            else "Keep only the wanted answers, and store them as messages or as prompt and completion."
        )
    raise DataError(message, place=str(origin), remedy=remedy)


def _mapped(role: str, column: str) -> str:
    return (
        f"set the source's `columns` to {{{role}: {column}}} (or to that column's own name, in place of `{column}` "
        "there), and leave `format` out"
    )


def _role_of_chosen(record: dict[str, Any]) -> str | None:
    """Returns the role in which supervised training learns the preferred answer as it stands; None where it cannot."""
    chosen, prompt = record.get("chosen"), record.get("prompt")
    if isinstance(chosen, str):
        if isinstance(prompt, str | list):
            return "completion"
        if "instruction" in record:
            return "output"
        return None
    if not isinstance(chosen, list):
        return None
    if isinstance(prompt, list):
        return "completion"
    # Beside a prompt that is text, and without one, the list holds the whole conversation.
    return "messages" if not {"conversations", "messages", "instruction"} & record.keys() else None
