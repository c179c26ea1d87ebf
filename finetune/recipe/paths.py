"""Input paths of a recipe, made absolute from the file that names them.

`output.dir` is no input: it stays relative to the folder that the command is given in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finetune.recipe.locate import Entry, Node

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
HUB_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
"""Names of data files end in one of these."""
COMPRESSED_SUFFIXES = (".gz", ".zst")
"""Suffixes that may follow those of text files."""
RELATIVE_TO = "A path is relative to the recipe that names it, one given on the command line to the current folder."
"""What the message for a missing file says, wherever the path came from."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4096
"""Limits of Linux's file systems, in bytes."""
DATA_FILE = re.compile("(" + "|".join(map(re.escape, DATA_SUFFIXES + COMPRESSED_SUFFIXES)) + ")$", re.IGNORECASE)


def resolve_paths(root: Node) -> Node:
    """Returns the tree with every input path absolute; values that are no text are left for validation to refuse."""
    for pattern, resolve in PATHS.items():
        root = _at(root, pattern.split("."), resolve)
    return root


def absolute(text: str, folder: Path) -> str:
    """Returns a path as absolute text, `~` expanded, `..` folded where no symbolic link is crossed.

    The last part is never replaced by what it links to: a linked file keeps its name and so its suffix.
    """
    joined = os.path.join(folder, os.path.expanduser(text))
    folded = os.path.normpath(joined)
    return folded if os.path.realpath(folded) == os.path.realpath(joined) else joined


def can_be_path(text: str) -> bool:
    """Says whether a file system can be asked for a name: not empty, no NUL, no half of a character, not too long."""
    if not text or "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return False
    return len(text.encode()) < _LONGEST_PATH and all(len(part.encode()) <= _LONGEST_NAME for part in text.split("/"))


def is_hub_id(model_path: str) -> bool:
    """Says whether a resolved `model.path` is a hub id; a folder is absolute."""
    return not os.path.isabs(model_path)


def is_hub_dataset(source_path: str) -> bool:
    """Says whether a resolved `path` of a source is a hub id: it is no absolute path, and nothing of that name is here.

    A name that ends like a data file is always a path, so a mistyped file is not looked for on the hub.
    """
    return _can_be_hub_dataset(source_path) and not os.path.lexists(source_path)


def _can_be_hub_dataset(text: str) -> bool:
    return HUB_DATASET.fullmatch(text) is not None and not DATA_FILE.search(text)


def _source(text: str, folder: Path) -> str:
    if _can_be_hub_dataset(text) and not os.path.lexists(folder / text):
        return text
    return absolute(text, folder)


def _model(text: str, folder: Path) -> str:
    looks_like_path = text.startswith(("/", ".", "~"))
    if not looks_like_path and not os.path.isdir(folder / text) and HUB_ID.fullmatch(text):
        return text
    return absolute(text, folder)


def _metric(text: str, folder: Path) -> str:
    return absolute(text, folder) if text.endswith(".py") or "/" in text else text


PATHS: dict[str, Callable[[str, Path], str]] = {
    "model.path": _model,
    "model.chat_template": absolute,
    "adapter.continue_from": absolute,
    "data.train.*.path": _source,
    "data.eval.*.path": _source,
    "evaluation.metrics.*": _metric,
}
"""Keys that hold input paths; `*` stands for every item of a list."""


def _at(node: Node, keys: list[str], resolve: Callable[[str, Path], str]) -> Node:
    if not keys:
        if not isinstance(node.value, str) or not can_be_path(node.value):
            return node
        return replace(node, value=resolve(node.value, node.folder))
    key, rest = keys[0], keys[1:]
    if key == "*" and isinstance(node.value, list):
        return replace(node, value=[_at(item, rest, resolve) for item in node.value])
    if isinstance(node.value, dict) and (entry := node.value.get(key)):
        return replace(node, value={**node.value, key: Entry(entry.key_place, _at(entry.node, rest, resolve))})
    return node
