"""Keep tokenized samples in the user's cache folder, keyed by content.

The key is a hash of everything that the samples depend on: the bytes of each data file (not its name or its time),
the tokenizer with its chat template, the settings of the data section that change tokens or labels, and the version of
this code. So a copied file hits, and one changed byte misses. A miss says what changed since the nearest entry.

An entry is written beside its place and renamed, so a reader sees all of it or nothing. The sizes of its arrays are
checked when it is opened, not each byte, which would take as long as reading all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.data.ledger import Ledger
from finetune.data.store import SampleStore
from finetune.errors import EnvironmentProblem

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

DATA_VERSION = 1
"""Raised by one whenever this package's code would make other tokens, labels or ledgers from the same input."""

_COMPARED_ENTRIES = 50


@dataclass(frozen=True)
class CacheKey:
    """What the samples depend on, by name; each value is a plain JSON value."""

    parts: dict[str, Any]

    @property
    def digest(self) -> str:
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def cache_folder() -> Path:
    """Returns the folder of the entries, by the XDG convention: a relative `XDG_CACHE_HOME` does not count.

    Raises:
        EnvironmentProblem: there is no home folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise EnvironmentProblem(
                "there is no home folder to keep the token cache in",
                remedy="Set XDG_CACHE_HOME to a folder, or `data.cache` to false.",
            ) from error
    return base / "finetune" / "tokens"


def file_digest(path: str | Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of the vocabulary, the added tokens, all processing steps and the special tokens."""
    backend = cast("Tokenizer", tokenizer.backend_tokenizer)
    # Both are leftovers of the last call, set anew by each call; they are no part of what the tokenizer is.
    backend.no_truncation()
    backend.no_padding()
    special = json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True)
    return hashlib.sha256(f"{backend.to_str()}\n{special}".encode()).hexdigest()


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of the chat template or templates; empty without one."""
    if tokenizer.chat_template is None:
        return ""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode("utf-8")).hexdigest()


def open_entry(key: CacheKey, *, paths: Sequence[str], say: Callable[[str], None]) -> tuple[SampleStore, Ledger] | None:
    """Returns the entry of the key, its files named by `paths`; None on a miss. Says which it was, and why.

    A damaged entry is a miss too: it is said, and the entry is written again by `write_entry`.
    """
    folder = cache_folder() / key.digest
    if not folder.is_dir():
        say(f"Token cache: miss ({_explain_miss(key)})")
        return None
    try:
        store = SampleStore.load(folder)
        ledger = Ledger.from_dict(json.loads((folder / "ledger.json").read_text(encoding="utf-8")))
        if ledger.samples != len(store) or ledger.tokens_kept != store.num_tokens:
            raise ValueError("ledger.json does not fit the samples")
        found = store.with_paths(tuple(paths)), ledger.with_paths(paths)
    except (OSError, ValueError, KeyError, TypeError, AssertionError, EOFError) as error:
        say(f"Token cache: entry {folder} is damaged ({error}); building it again")
        return None
    say(f"Token cache: hit ({folder})")
    return found


def write_entry(key: CacheKey, *, store: SampleStore, ledger: Ledger, say: Callable[[str], None]) -> None:
    """Publishes an entry in one step. A cache that cannot be written costs time, so it is said and no error."""
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        try:
            store.save(aside)
            (aside / "ledger.json").write_text(json.dumps(ledger.as_dict()), encoding="utf-8")
            (aside / "key.json").write_text(json.dumps(key.parts), encoding="utf-8")
            _publish(aside, root / key.digest)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        say(f"Token cache: cannot be written ({error}); the run goes on without it")


def _publish(aside: Path, target: Path) -> None:
    """Renames the new entry to its place; an old one there (damaged, or another run's) is moved out of the way."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=target.parent))
        target.rename(old / "entry")
        shutil.rmtree(old, ignore_errors=True)
    aside.rename(target)


def _explain_miss(key: CacheKey) -> str:
    """Names the parts of the key that differ from the entry that differs least."""
    best: list[str] | None = None
    for entry in islice(cache_folder().glob("*/key.json"), _COMPARED_ENTRIES):
        parts = _parts_of(entry)
        names = sorted(parts.keys() | key.parts.keys())
        changed = [name for name in names if parts.get(name) != key.parts.get(name)]
        if best is None or len(changed) < len(best):
            best = changed
    return "the cache is empty" if best is None else f"changed: {', '.join(best)}"


def _parts_of(entry: Path) -> dict[str, Any]:
    """Returns an entry's key; nothing where it is damaged or was just removed, so that all parts count as changed."""
    try:
        parts = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parts if isinstance(parts, dict) else {}
