"""Recognise the formats of other training methods, which supervised training would learn wrongly."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

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
        if not prompts:
            return "preference (implicit: chosen and rejected hold whole conversations)"
        is_text = isinstance(record[prompts[0]], str)
        return f"preference ({'strings' if is_text else 'conversational'}: {prompts[0]}, chosen, rejected)"
    if format == "kto":
        return f"kto (answers with a verdict in {'kto_tag' if 'kto_tag' in record else 'label'})"
    answer = next((key for key in ANSWER_KEYS if key in record), "answer")
    return f"prompt_answer (prompt, {answer})"


def refuse_unlearnable(record: dict[str, Any], format: Unlearnable, origin: Origin) -> NoReturn:
    """Raises the error that says why supervised training does not take this format.

    Raises:
        DataError: always.
    """
    shown = describe_unlearnable(record, format)
    if format == "prompt_answer":
        answer = next((key for key in ANSWER_KEYS if key in record), "answer")
        message = f"this is {shown} data: prompts with an answer for a reward to compare with, not a text to learn"
        remedy = f"To learn the answers as they are, set the source's `columns` to {{completion: {answer}}}"
        remedy += ", with the prompt as a string." if isinstance(record.get("prompt"), list) else "."
    elif format == "kto":
        message = f"this is {shown} data, and `training.method: sft` would learn the bad answers as if they were right"
        remedy = (
            "Keep the records whose verdict is true, without the verdict; rename the key if it means another thing."
        )
    else:
        message = f"this is preference data, {shown}, and `training.method: sft` would learn the rejected answers too"
        remedy = "Keep only the wanted answers, and store them as messages or as prompt and completion."
    raise DataError(message, place=str(origin), remedy=remedy)
