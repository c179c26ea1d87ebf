"""Build the data set of a run: files -> conversations -> samples, with a ledger and a cache.

Records are streamed: at any time one conversation is in memory, beside the tokens of all samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from finetune.data.cache import (
    DATA_VERSION,
    CacheKey,
    file_digest,
    open_entry,
    template_digest,
    tokenizer_digest,
    write_entry,
)
from finetune.data.chat import Renderer, prints_today
from finetune.data.formats import Format, convert, recognise
from finetune.data.ledger import Ledger, LedgerBuilder
from finetune.data.load import read_records
from finetune.data.over_length import OverLength
from finetune.data.store import SampleStore, StoreBuilder
from finetune.data.types import Conversation, PromptReference
from finetune.errors import DataError
from finetune.recipe.schema import DataSection, EvalFraction, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """The samples of a run.

    `ledger` accounts for the files of `data.train`, with what was held out of them. `eval_ledger` accounts for the
    files of `data.eval`, and is None when evaluation uses a fraction of the training data or does not happen.
    """

    train: SampleStore
    eval: SampleStore | None
    references: list[PromptReference]
    ledger: Ledger
    eval_ledger: Ledger | None


def build_dataset(
    data: DataSection, *, tokenizer: PreTrainedTokenizerBase, seed: int, say: Say, max_references: int = 0
) -> Dataset:
    """Reads, renders and splits the data of a recipe.

    Args:
        seed: decides which samples are held out when `data.eval` is a fraction.
        say: takes one line of progress at a time, such as the format recognised and the cache's hit or miss.
        max_references: prompts with their answers to return at most, from the first evaluation samples on.

    Raises:
        DataError: a file or record is wrong, nothing is left to train or evaluate on, or a sample is too long.
    """
    train, ledger = _build_samples(data.train, data=data, tokenizer=tokenizer, say=say)
    if data.eval is None:
        return Dataset(train, None, [], ledger, None)
    if isinstance(data.eval, EvalFraction):
        sources, eval_ledger = data.train, None
        is_held_out = hold_out(train, fraction=data.eval.fraction, seed=seed)
        held_out = train.select(np.flatnonzero(is_held_out))
        train = train.select(np.flatnonzero(~is_held_out))
        ledger = ledger.with_held_out(samples=len(held_out), tokens=held_out.num_tokens)
    else:
        sources = data.eval
        held_out, eval_ledger = _build_samples(sources, data=data, tokenizer=tokenizer, say=say)
    references = _references(held_out, sources, tokenizer=tokenizer, limit=max_references)
    return Dataset(train, held_out, references, ledger, eval_ledger)


def hold_out(store: SampleStore, *, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Chooses the samples to evaluate on: a share of the distinct ones, by a hash of their tokens [N].

    Equal samples have equal hashes, so they stay on one side. The choice depends on the seed and the tokens alone,
    not on the order of the files.

    Raises:
        DataError: there are not two distinct samples to part.
    """
    key = seed.to_bytes(8, "little")
    digests = [
        hashlib.blake2b(store[index].input_ids.tobytes(), digest_size=16, key=key).digest()
        for index in range(len(store))
    ]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise DataError(
            f"the training data has {len(distinct)} distinct sample, so none can be held out for evaluation",
            place=store.paths[0],
            remedy="Add data, give `data.eval` files of its own, or leave `data.eval` out.",
        )
    count = min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    chosen = set(distinct[:count])
    return np.array([digest in chosen for digest in digests], dtype=np.bool_)


def _build_samples(
    sources: Sequence[Source], *, data: DataSection, tokenizer: PreTrainedTokenizerBase, say: Say
) -> tuple[SampleStore, Ledger]:
    """Returns the samples of some files, from the cache where it has them."""
    paths = [source.path for source in sources]
    key = None
    # A missing file is left to the reader, which names it better than a failed hash.
    if data.cache and _all_readable(sources):
        key = _cache_key(sources, data=data, tokenizer=tokenizer)
        entry = open_entry(key, paths=paths, say=say)
        if entry is not None:
            return entry
    store, ledger = _tokenize(sources, data=data, tokenizer=tokenizer, say=say)
    if key is not None:
        write_entry(key, store=store, ledger=ledger, say=say)
    return store, ledger


def _tokenize(
    sources: Sequence[Source], *, data: DataSection, tokenizer: PreTrainedTokenizerBase, say: Say
) -> tuple[SampleStore, Ledger]:
    renderer = Renderer(tokenizer)
    policy = OverLength(data.over_length, data.max_length)
    builder = StoreBuilder([source.path for source in sources])
    ledger = LedgerBuilder()
    for number, source in enumerate(sources):
        ledger.open_source(source.path)
        for conversation in _conversations(source, on_format=ledger.set_format, say=say):
            sample = renderer.render(conversation, loss_on=data.loss_on)
            pieces = policy.apply(sample, conversation=conversation)
            if isinstance(pieces, str):
                ledger.drop(sample, reason=pieces)
                continue
            ledger.keep(sample, pieces=pieces)
            for piece in pieces:
                builder.add(piece, source=number)
    policy.finish()
    finished = ledger.finish()
    if finished.samples == 0:
        raise DataError(
            "no sample is left: " + "; ".join(line.strip() for line in finished.summary_lines()),
            place=sources[0].path,
            remedy="Raise `data.max_length`, or check that the files hold what they should.",
        )
    return builder.finish(), finished


def _conversations(
    source: Source, *, on_format: Callable[[Format], None] | None = None, say: Say | None = None
) -> Iterator[Conversation]:
    """Yields the conversations of one file; the first record decides the format where the recipe leaves it open."""
    format = None if source.format == "auto" else source.format
    is_announced = False
    for origin, record in read_records(source.path, max_rows=source.max_rows):
        if format is None:
            format = recognise(record, origin)
            if say is not None:
                say(f"{source.path}: recognised as {format}")
        if on_format is not None and not is_announced:
            on_format(format)
            is_announced = True
        yield convert(record, format=format, origin=origin)


def _all_readable(sources: Sequence[Source]) -> bool:
    return all(Path(source.path).is_file() for source in sources)


def _cache_key(sources: Sequence[Source], *, data: DataSection, tokenizer: PreTrainedTokenizerBase) -> CacheKey:
    import tokenizers
    import transformers

    parts = {
        "files": [file_digest(source.path) for source in sources],
        "formats": [source.format for source in sources],
        "max_rows": [source.max_rows for source in sources],
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer),
        "max_length": data.max_length,
        "over_length": data.over_length,
        "loss_on": data.loss_on,
        "data_version": DATA_VERSION,
        "libraries": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
    }
    if prints_today(tokenizer.chat_template):
        parts["date"] = date.today().isoformat()
    return CacheKey(parts)


def _references(
    held_out: SampleStore, sources: Sequence[Source], *, tokenizer: PreTrainedTokenizerBase, limit: int
) -> list[PromptReference]:
    """Returns the prompts of the first `limit` held-out samples, read again from their records.

    The store has tokens only, and may come from the cache; reading some records again costs less than keeping all.
    Plain text has no prompts.
    """
    wanted = [held_out.origin(index) for index in range(min(limit, len(held_out)))]
    remaining = set(wanted)
    found: dict[tuple[str, int], PromptReference | None] = {}
    renderer = Renderer(tokenizer)
    for source in sources:
        records = {origin.record for origin in remaining if origin.path == source.path}
        if not records:
            continue
        for conversation in _conversations(source):
            origin = conversation.origin
            if origin.record in records:
                found[origin.path, origin.record] = renderer.prompt_reference(conversation)
                records.discard(origin.record)
            if not records:
                break
    references = [found.get((origin.path, origin.record)) for origin in wanted]
    return [reference for reference in references if reference is not None]
