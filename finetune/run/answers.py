"""The page's answers: to the same prompts before and after, and over the steps. All text is escaped and cut here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from finetune.console import plural
from finetune.run.samples import SampleAnswer, group_by_prompt

_MAX_PROMPTS = 20
_MAX_STEPS = 12
_MAX_CHARACTERS = 3000
"""Of one text, where there are few."""
_ALL_CHARACTERS = 120_000
"""Of all texts of a section; six bytes each where all are escaped, which keeps the page under 2 MB."""


def render_before_and_after(samples: Sequence[Mapping[str, Any]]) -> str:
    """Returns a card a prompt, from `{"prompt", "reference", "before", "after"}`."""
    shown = samples[:_MAX_PROMPTS]
    limit = _limit(4 * len(shown))
    cards = "".join(_card(number, sample, limit) for number, sample in enumerate(shown, start=1))
    return cards + _left_out(len(samples), "report.json")


def render_over_steps(answers: Sequence[SampleAnswer]) -> str:
    """Returns, folded, a card a prompt with a line a step; of many steps the first, the last and some between."""
    groups = group_by_prompt(answers)
    shown = [_spread(group) for group in groups[:_MAX_PROMPTS]]
    limit = _limit(sum(2 + len(group) for group in shown))
    cards = "".join(_steps_card(number, group, limit) for number, group in enumerate(shown, start=1))
    if not groups:
        return ""
    longest = max(map(len, groups))
    times = f"{longest:,} times each"
    if longest > _MAX_STEPS:
        times += f"; {_MAX_STEPS} are shown, the other {longest - _MAX_STEPS:,} are in samples.jsonl"
    head = f"<summary>{plural(len(groups), 'prompt')}, answered {times}</summary>"
    return f'<details class="fold">{head}{cards}{_left_out(len(groups), "samples.jsonl")}</details>'


def _limit(num_texts: int) -> int:
    return min(_MAX_CHARACTERS, _ALL_CHARACTERS // max(1, num_texts))


def _left_out(num_prompts: int, file: str) -> str:
    rest = num_prompts - _MAX_PROMPTS
    return f'<p class="soft">{rest:,} more prompts are in {file}.</p>' if rest > 0 else ""


def _card(number: int, sample: Mapping[str, Any], limit: int) -> str:
    reference, after = sample.get("reference"), sample.get("after")
    is_equal = _are_equal(reference, after)
    match = " <span>equals the reference</span>" if is_equal else ""
    prompt, before = _text(sample.get("prompt"), limit), _text(sample.get("before"), limit)
    shown_reference = "" if reference is None else f"<div><h4>Reference</h4>{_text(reference, limit)}</div>"
    answers = (
        f"{shown_reference}<div><h4>Before</h4>{before}</div>"
        f"<div{' class=is-after' if is_equal else ''}><h4>After{match}</h4>{_text(after, limit)}</div>"
    )
    return (
        f'<article class="card sample"><div class="prompt"><h4>Prompt {number}</h4>{prompt}</div>'
        f'<div class="answers">{answers}</div></article>'
    )


def _steps_card(number: int, group: Sequence[SampleAnswer], limit: int) -> str:
    first = group[0]
    lines = ""
    if first.reference is not None:
        lines += f"<dt>reference</dt><dd>{_text(first.reference, limit)}</dd>"
    for sample in group:
        is_equal = _are_equal(sample.reference, sample.answer)
        mark = ' class="is-after"' if is_equal else ""
        name = f"step {sample.step:,}" + (" <b>equal</b>" if is_equal else "")
        lines += f"<dt{mark}>{name}</dt><dd{mark}>{_text(sample.answer, limit)}</dd>"
    return (
        f'<article class="card sample"><div class="prompt"><h4>Prompt {number}</h4>{_text(first.prompt, limit)}</div>'
        f'<dl class="steps">{lines}</dl></article>'
    )


def _spread(group: Sequence[SampleAnswer]) -> list[SampleAnswer]:
    if len(group) <= _MAX_STEPS:
        return list(group)
    last = len(group) - 1
    return [group[round(index * last / (_MAX_STEPS - 1))] for index in range(_MAX_STEPS)]


def _are_equal(reference: object, answer: object) -> bool:
    return reference is not None and answer is not None and str(reference).strip() == str(answer).strip()


def _text(value: object, limit: int) -> str:
    if value is None:
        return '<p class="soft">not generated</p>'
    text = str(value)
    if not text:
        return '<p class="soft">empty</p>'
    rest = len(text) - limit
    cut = f'<p class="soft">{rest:,} more characters</p>' if rest > 0 else ""
    return f'<div class="text" tabindex="0">{escape(text[:limit])}</div>{cut}'
