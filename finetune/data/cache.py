"""The key of the token cache: a hash of everything that tokens and labels depend on, and why an entry was missed.

The key is made of the bytes of each data file (not its name or its time), the tokenizer with its chat template, the
settings of the data section that change tokens or labels, and the version of this code. So a copied file hits, and one
changed byte misses. A miss says what changed since the entry that differs least, of up to 50 that are compared in no
particular order. `entry.py` reads and writes the entries.

A file may be changed while it is read, and then its hash does not tell what was read. So its size and times are kept
from before the hash and compared after the reading; where they differ it is hashed again, and another hash is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

DATA_VERSION = 9
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


def replace_json(path: Path, value: Any) -> None:
    """Writes a JSON value in one step; where that fails nothing is left beside it.

    Raises:
        OSError: it cannot be written.
    """
    handle, aside = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


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


@dataclass(frozen=True)
class FileState:
    """A data file as it was when it was hashed."""

    path: str
    sha256: str
    stat: tuple[int, int, int, int]
    """Inode, size, time of change of the content, time of change of anything."""

    @classmethod
    def of(cls, path: str) -> FileState:
        """Hashes a file.

        Raises:
            DataError: it changes all the while.
        """
        before = _stat(path)
        digest = file_digest(path)
        if _stat(path) != before:
            raise changed_while_read(path)
        return cls(path, digest, before)

    def require_unchanged(self) -> None:
        """Raises where the file holds other bytes than it did.

        Raises:
            DataError: the file was changed.
        """
        if _stat(self.path) != self.stat and file_digest(self.path) != self.sha256:
            raise changed_while_read(self.path)


def changed_while_read(path: str) -> DataError:
    """Returns the error for a file that did not hold still."""
    return DataError(
        "the file was changed while it was read",
        place=path,
        remedy="Wait until whatever writes the file has finished, then give the command again.",
    )


def _stat(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(
            "the file went away while it was read", place=path, remedy="Put it back, then give the command again."
        ) from error
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def explain_miss(key: CacheKey, files: Sequence[str]) -> str:
    """Names the parts of the key that differ from the entry that differs least, of those compared; of data that no
    entry has, by name or content, only that.

    Args:
        files: the data files, which the key does not name.
    """
    best: list[str] | None = None
    entries = list(islice(cache_folder().glob("*/key.json"), _COMPARED_ENTRIES))
    is_new = bool(key.parts.get("files")) and len(entries) < _COMPARED_ENTRIES
    for entry in entries:
        parts = _parts_of(entry)
        if set(parts.get("files") or ()) & set(key.parts.get("files") or ()) or _names_of(entry) & set(files):
            is_new = False
        names = sorted(parts.keys() | key.parts.keys())
        changed = [name for name in names if parts.get(name) != key.parts.get(name)]
        if best is None or len(changed) < len(best):
            best = changed
    if best is None:
        return "the cache is empty"
    return "the data are new to it" if is_new else f"changed: {', '.join(best)}"


def _names_of(entry: Path) -> set[str]:
    """Returns the names of the files that an entry was made of; none where it is damaged or was just removed."""
    try:
        names = json.loads(entry.with_name("files.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _parts_of(entry: Path) -> dict[str, Any]:
    """Returns an entry's key; nothing where it is damaged or was just removed, so that all parts count as changed."""
    try:
        parts = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parts if isinstance(parts, dict) else {}
