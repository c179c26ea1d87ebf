"""The entries of the token cache: opened with proof that they are whole, written aside and renamed, one at a time.

An entry is a folder: the arrays of a store, the ledger, what the gate counted, the key, checksums, and the prompts that
runs took from it. A reader sees all of an entry or nothing. A lock makes a second process wait for the first one's
entry instead of making it again; where the file system knows no locks both make it, and one of the two stays.

Checksums are of blocks of 16 MiB. Up to 1 GiB of arrays all blocks are compared when an entry is opened (half a second
a GiB); of a larger entry the small arrays, and 64 blocks of the tokens and of the labels, evenly spread with the first
and the last. Sizes are compared always, and the index of the samples has to make sense.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.console import Say
from finetune.data.cache import CacheKey, cache_folder, explain_miss, replace_json
from finetune.data.gate import GateCounts
from finetune.data.ledger import Ledger
from finetune.data.store import SampleStore

BLOCK_BYTES = 16 << 20
VERIFIED_WHOLE_BYTES = 1 << 30
_BLOCKS_OF_LARGE = 64
_LOCK_SECONDS = 0.2
_LEFTOVER_SECONDS = 86_400
_BIG = ("input_ids.npy", "labels.npy")


@dataclass(frozen=True)
class Tokenized:
    """The samples of some sources with their ledger and what the gate counted."""

    store: SampleStore
    ledger: Ledger
    counts: GateCounts
    shapes: tuple[str, ...]
    """What each source was recognised as; empty for one whose format the recipe names."""


def open_entry(key: CacheKey, *, files: Sequence[str], sources: Sequence[str], say: Say) -> Tokenized | None:
    """Returns the entry of the key, under the names `files` and `sources`; None on a miss. Says which it was, and why.

    A damaged entry is a miss too: it is said, and the entry is written again by `write_entry`.
    """
    folder = entry_folder(key)
    if not folder.is_dir():
        say(f"Token cache: miss ({explain_miss(key, files)})")
        return None
    try:
        _verify(folder)
        store = SampleStore.load(folder)
        _require_plausible(store)
        renamed = _renaming(json.loads((folder / "files.json").read_text(encoding="utf-8")), files)
        ledger = Ledger.from_dict(json.loads((folder / "ledger.json").read_text(encoding="utf-8")))
        if ledger.samples != len(store) or ledger.tokens_kept != store.num_tokens:
            raise ValueError("ledger.json does not fit the samples")
        values = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
        found = Tokenized(
            store.with_paths(tuple(renamed[path] for path in store.paths)),
            ledger.with_paths(renamed, sources=sources),
            GateCounts.from_dict(values, paths=renamed),
            tuple(map(str, json.loads((folder / "shapes.json").read_text(encoding="utf-8")))),
        )
        if len(found.shapes) != len(sources):
            raise ValueError("shapes.json is of other sources")
    except (OSError, ValueError, KeyError, TypeError, AssertionError, EOFError) as error:
        say(f"Token cache: entry {folder} is damaged ({error}); building it again")
        return None
    for source, shape in zip(sources, found.shapes, strict=True):
        if shape:
            say(recognised(source, shape))
    say(f"Token cache: hit ({folder})")
    return found


def recognised(source: str, shape: str) -> str:
    """Returns the line that says what a source was recognised as."""
    return f"{source}: recognised as {shape}"


def entry_folder(key: CacheKey) -> Path:
    """Returns where the entry of a key lies, or would lie."""
    return cache_folder() / key.digest


def write_entry(key: CacheKey, entry: Tokenized, *, files: Sequence[str], say: Say) -> bool:
    """Publishes an entry in one step. A cache that cannot be written costs time, so it is said and no error."""
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        try:
            entry.store.save(aside)
            _write_json(aside / "ledger.json", entry.ledger.as_dict())
            _write_json(aside / "gate.json", entry.counts.as_dict())
            _write_json(aside / "files.json", list(files))
            _write_json(aside / "shapes.json", entry.shapes)
            _write_json(aside / "key.json", key.parts)
            names = sorted(path.name for path in aside.iterdir())
            _write_json(aside / "checksums.json", {name: _blocks(aside / name) for name in names})
            _publish(aside, root / key.digest)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        say(f"Token cache: cannot be written ({error}); the run goes on without it")
        return False
    return True


@contextmanager
def entry_lock(key: CacheKey, *, say: Say) -> Iterator[None]:
    """Holds the key's lock, so that two processes do not make the same entry; the second waits and says so.

    The operating system releases the lock of a process that dies. Without locks (some network file systems, a folder
    that cannot be written) it goes on at once: entries stay whole either way.
    """
    path = cache_folder() / f".lock-{key.digest}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab")
    except OSError:
        yield
        return
    with stream:
        is_locked = _wait_for_lock(stream.fileno(), say)
        try:
            yield
        finally:
            if is_locked:
                # While it is held: a process that waits on the removed file makes the entry once more at worst.
                path.unlink(missing_ok=True)


def read_attachment(key: CacheKey, name: str, *, say: Say) -> Any | None:
    """Returns the JSON value that was attached to an entry under this name; None where there is none, and, after a
    line that says so, where it cannot be read."""
    path = entry_folder(key) / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"Token cache: {path} cannot be read ({error}); making it again")
        return None


def write_attachment(key: CacheKey, name: str, value: Any, *, say: Say) -> None:
    """Attaches a JSON value to an entry, in one step. Where that fails it costs time, so it is said and no error."""
    folder = entry_folder(key)
    try:
        replace_json(folder / name, value)
    except OSError as error:
        say(f"Token cache: {name} cannot be added to {folder} ({error}); the run goes on without it")


def _wait_for_lock(handle: int, say: Say) -> bool:
    is_said = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return False
        if not is_said:
            say("Token cache: another process prepares the same data; waiting for it")
            is_said = True
        time.sleep(_LOCK_SECONDS)


def _renaming(old: Sequence[str], new: Sequence[str]) -> Mapping[str, str]:
    if len(old) != len(new):
        raise ValueError(f"the entry is of {len(old)} files, not {len(new)}")
    return dict(zip(old, new, strict=True))


def _require_plausible(store: SampleStore) -> None:
    """Raises ValueError where numbers of the index cannot be right; the checksums speak for the tokens."""
    if len(store) and (store.lengths.min() < 1 or (store.supervised > store.lengths).any()):
        raise ValueError("a sample has an impossible length")
    if len(store) and not 0 <= int(store.origins[:, 0].max()) < len(store.paths):
        raise ValueError("a sample comes from an unknown file")


def _verify(folder: Path) -> None:
    """Raises ValueError where a file is not what was written."""
    written: dict[str, list[str]] = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
    total = sum((folder / name).stat().st_size for name in written)
    for name, blocks in written.items():
        path = folder / name
        if path.stat().st_size > len(blocks) * BLOCK_BYTES or path.stat().st_size <= (len(blocks) - 1) * BLOCK_BYTES:
            raise ValueError(f"{name} has another size")
        chosen = list(range(len(blocks)))
        if total > VERIFIED_WHOLE_BYTES and name in _BIG and len(blocks) > _BLOCKS_OF_LARGE:
            chosen = np.linspace(0, len(blocks) - 1, _BLOCKS_OF_LARGE).astype(int).tolist()
        if _blocks(path, chosen) != [blocks[number] for number in chosen]:
            raise ValueError(f"{name} does not have its checksum")


def _blocks(path: Path, chosen: Sequence[int] | None = None) -> list[str]:
    """Returns the hash of each block of a file, of the chosen ones only where some are; two at a time."""
    if chosen is None:
        chosen = range(-(-path.stat().st_size // BLOCK_BYTES))

    def digest(number: int) -> str:
        with path.open("rb") as stream:
            stream.seek(number * BLOCK_BYTES)
            return hashlib.blake2b(stream.read(BLOCK_BYTES), digest_size=16).hexdigest()

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(digest, chosen))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _publish(aside: Path, target: Path) -> None:
    """Renames the new entry to its place; an old one there (damaged, or another run's) is moved out of the way."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=target.parent))
        target.rename(old / "entry")
        shutil.rmtree(old, ignore_errors=True)
    try:
        aside.rename(target)
    except OSError as error:
        # Another process without the lock was faster; its entry has the same key, so it is as good.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _remove_leftovers(root: Path) -> None:
    """Removes what processes that were killed left aside more than a day ago."""
    for path in [*root.glob(".new-*"), *root.glob(".old-*")]:
        try:
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # another process removes it too
            continue
