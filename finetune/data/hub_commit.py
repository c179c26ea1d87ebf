"""Resolve a revision of a hub dataset to the commit that decides its content, also where the hub cannot be reached.

A commit never changes, so it stands for the bytes of all files in the key of the token cache, and what is read is
pinned to it. The rule:

1. A revision that is a full commit hash is that commit; nothing is asked.
2. Otherwise the hub is asked, once a process, and its answer is noted in the user's cache folder.
3. Where the hub cannot be reached, the commit noted last for this revision is taken.
4. Without a note, the newest local copy's, but for the main branch only: a copy does not tell of which branch it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from finetune.data.cache import cache_folder
from finetune.data.hub_errors import hub_error, is_unreachable

FULL_HASH = re.compile(r"[0-9a-f]{40}")
DEFAULT_CONFIG = "default"
_ASK_SECONDS = 30.0


@dataclass(frozen=True)
class Commit:
    """A commit of a dataset, and how it was found."""

    sha: str
    is_known_offline: bool
    """The hub could not be asked, so there is nothing but local copies and the token cache."""
    origin: str
    """Says of which revision it is and, where the hub was not asked, who says so."""


@lru_cache(maxsize=64)
def resolve_commit(id: str, name: str | None, revision: str | None) -> Commit:
    """Returns the commit of a revision; the same one throughout a process.

    Args:
        id: the dataset, `org/name`.
        name: its configuration, for a local copy.
        revision: branch, tag or commit; none is the main branch.

    Raises:
        DataError: there is no such dataset or revision.
        EnvironmentProblem: the hub cannot be reached, and nothing on this machine tells the commit.
    """
    if revision is not None and FULL_HASH.fullmatch(revision):
        return Commit(revision, is_known_offline=False, origin="as the recipe says")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, httpx

    shown = revision or "main"
    try:
        sha = HfApi().dataset_info(id, revision=revision, timeout=_ASK_SECONDS).sha
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        found = _noted(id, shown) if is_unreachable(error) else None
        if found is not None:
            origin = f"{shown}, as noted when the hub was last asked; it cannot be reached now"
            return Commit(found, is_known_offline=True, origin=origin)
        copies = local_copies(id, name) if is_unreachable(error) and revision is None else []
        if copies:
            origin = "that of the newest local copy; the hub cannot be reached"
            return Commit(copies[-1].name, is_known_offline=True, origin=origin)
        raise hub_error(error, id=id, place=id, revision=revision) from error
    assert sha is not None, "the hub gives each revision's commit"
    _note(id, shown, sha)
    return Commit(sha, is_known_offline=False, origin=shown)


def local_copies(id: str, name: str | None, sha: str = "*") -> list[Path]:
    """Returns the folders of a configuration's local copies, the newest last; each is named by its commit."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, short = id.partition("/")
    root = Path(config.HF_DATASETS_CACHE, f"{owner}___{camelcase_to_snakecase(short)}", name or DEFAULT_CONFIG)
    found = [info.parent for info in root.glob(f"*/{sha}/dataset_info.json") if FULL_HASH.fullmatch(info.parent.name)]
    return sorted(found, key=lambda folder: folder.stat().st_mtime)


def _note_file(id: str, revision: str) -> Path:
    named = hashlib.sha256(f"{id}@{revision}".encode()).hexdigest()[:32]
    return cache_folder().parent / "hub" / f"{named}.json"


def _noted(id: str, revision: str) -> str | None:
    try:
        note = json.loads(_note_file(id, revision).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or not whole: as good as none
        return None
    sha = note.get("commit") if isinstance(note, dict) else None
    return sha if isinstance(sha, str) and FULL_HASH.fullmatch(sha) else None


def _note(id: str, revision: str, sha: str) -> None:
    """Writes the note in one step; without it only a start without network is poorer, so no error stops the run."""
    file = _note_file(id, revision)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=".new-", dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({"dataset": id, "revision": revision, "commit": sha}, stream)
        os.replace(aside, file)
    except OSError:
        return
