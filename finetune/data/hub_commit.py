"""Resolve a revision of a hub dataset to the commit that decides its content, also where the hub cannot be reached.

A commit never changes, so it stands for the bytes of all files in the key of the token cache, and what is read is
pinned to it. The rule:

1. A revision that is a full commit hash is that commit; nothing is asked.
2. Otherwise the hub is asked, once a process. Its answer is noted beside the token cache, where that is used.
3. Where the hub cannot be reached, the commit noted last for this revision is taken.
4. Without a note, the newest local copy's, but for the main branch only: a copy does not tell of which branch it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from finetune.data.cache import cache_folder, replace_json
from finetune.data.hub_errors import hub_error, is_unreachable
from finetune.errors import EnvironmentProblem

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
        return Commit(revision, is_known_offline=False, origin="pinned by its hash")
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
    except (OSError, ValueError, EnvironmentProblem):  # none, not whole, or no home folder: as good as none
        return None
    sha = note.get("commit") if isinstance(note, dict) else None
    return sha if isinstance(sha, str) and FULL_HASH.fullmatch(sha) else None


def note_commit(id: str, revision: str | None, commit: Commit, *, say: Callable[[str], None]) -> None:
    """Notes the commit that the hub gave for a revision; without a note only a start without a network is poorer, so
    one that cannot be written is said and no error."""
    if commit.is_known_offline or commit.sha == revision:
        return
    file = _note_file(id, revision or "main")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_json(file, {"dataset": id, "revision": revision or "main", "commit": commit.sha})
    except OSError as error:
        say(f"{id}: the commit cannot be noted in {file.parent} ({error}); a start without a network may not find it")
