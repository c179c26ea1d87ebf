"""Prompts for generation: those of held-out samples with their answers, read again from their records once and then
kept in the cache, and a user's own."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.chat import Renderer
from finetune.data.entry import Say, read_attachment, write_attachment
from finetune.data.prepared import PreparedSources
from finetune.data.reading import open_source
from finetune.data.store import SampleStore
from finetune.data.types import Conversation, Message, Origin, PromptReference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_references(
    held_out: SampleStore,
    prepared: PreparedSources,
    *,
    tokenizer: PreTrainedTokenizerBase,
    date: datetime.date | None,
    limit: int,
    say: Say,
) -> list[PromptReference]:
    """Returns the prompts of the first `limit` held-out samples; plain text has none.

    The store has tokens only; reading some records again costs less than keeping the text of all. What was read is
    kept beside the cache entry, so that a later run does not read the sources at all.
    """
    wanted = [held_out.origin(index) for index in range(min(limit, len(held_out)))]
    if not wanted:
        return []
    places = [[held_out.paths.index(origin.path), origin.record] for origin in wanted]
    name = f"references-{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]}.json"
    kept = read_attachment(prepared.key, name, say=say) if prepared.key is not None else None
    if kept is not None:
        try:
            return [_from_json(value, held_out.paths) for value in kept]
        except (KeyError, TypeError, ValueError, IndexError):
            say(f"Token cache: {name} is damaged; making it again")
    references = _read(wanted, prepared, Renderer(tokenizer, date=date))
    if prepared.key is not None:
        values = [_to_json(reference, held_out.paths) for reference in references]
        write_attachment(prepared.key, name, values, say=say)
    return references


def render_prompts(
    prompts: Sequence[str], *, tokenizer: PreTrainedTokenizerBase, date: datetime.date | None
) -> list[PromptReference]:
    """Returns each text as the prompt that training would see of it: a user's message before an answer, or, where the
    tokenizer has no chat template, a prompt to be completed. Their `reference` is empty.

    Raises:
        DataError: a prompt cannot be rendered; the place is its number in `evaluation.prompts`.
    """
    if not prompts:
        return []
    renderer = Renderer(tokenizer, date=date)
    rendered: list[PromptReference] = []
    for number, text in enumerate(prompts, start=1):
        origin = Origin("evaluation.prompts", number)
        if tokenizer.chat_template is None:
            conversation = Conversation(kind="completion", origin=origin, text=text, completion="answer")
        else:
            messages = (Message("user", text), Message("assistant", "answer"))
            conversation = Conversation(kind="chat", origin=origin, messages=messages)
        prompt = renderer.prompt_reference(conversation)
        assert prompt is not None  # only text and tool calls have none
        rendered.append(replace(prompt, prompt=text, reference=""))
    return rendered


def _read(wanted: list[Origin], prepared: PreparedSources, renderer: Renderer) -> list[PromptReference]:
    remaining = set(wanted)
    found: dict[Origin, PromptReference | None] = {}
    for number, source in enumerate(prepared.sources):
        if not remaining:
            break
        for conversation in open_source(source, number, say=lambda text: None).conversations():
            if conversation.origin in remaining:
                found[conversation.origin] = renderer.prompt_reference(conversation)
                remaining.discard(conversation.origin)
            if not remaining:
                break
    references = [found.get(origin) for origin in wanted]
    return [reference for reference in references if reference is not None]


def _to_json(reference: PromptReference, paths: tuple[str, ...]) -> dict[str, Any]:
    origin = reference.origin
    return {
        "prompt_ids": reference.prompt_ids.tolist(),
        "prompt": reference.prompt,
        "reference": reference.reference,
        "origin": [paths.index(origin.path), origin.record, origin.line],
    }


def _from_json(value: dict[str, Any], paths: tuple[str, ...]) -> PromptReference:
    path, record, line = value["origin"]
    prompt_ids = np.asarray(value["prompt_ids"], dtype=np.int32)
    return PromptReference(prompt_ids, str(value["prompt"]), str(value["reference"]), Origin(paths[path], record, line))
