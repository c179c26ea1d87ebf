"""The prompts of held-out samples with their answers: read again from their records once, then kept in the cache."""

from __future__ import annotations

import datetime
import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.chat import Renderer
from finetune.data.entry import Say, read_attachment, write_attachment
from finetune.data.prepared import PreparedSources
from finetune.data.reading import open_source
from finetune.data.store import SampleStore
from finetune.data.types import Origin, PromptReference

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
