"""What tells a run's inputs again where they lie at another place: model, template, earlier adapter, metrics.

A project that moved as a whole has other absolute paths and the same files. Data are told by the hash of their samples
(`RunFolder.require_same_data`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from finetune.recipe.paths import PATHS

_WHOLE_BYTES = 4 << 20
"""Of larger files the fingerprint covers `_NUM_BLOCKS` blocks, evenly spread: two models' weights differ in each."""
_BLOCK_BYTES = 64 << 10
_NUM_BLOCKS = _WHOLE_BYTES // _BLOCK_BYTES
_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Files of a model's folder that decide what it is."""


def input_key(key: str) -> str | None:
    """Returns the pattern (`data.train.*.path`) of a recipe key that holds an input path, or None for other keys."""
    pattern = re.sub(r"\[\d+\]", ".*", key)
    return pattern if pattern in PATHS else None


def fingerprints(recipe: Mapping[str, object]) -> dict[str, str]:
    """Returns the fingerprint of each input of a resolved recipe that lies on a local disk, by its key; data apart."""
    found = {key: fingerprint(path) for key, path in _inputs(recipe).items() if not key.startswith("data.")}
    return {key: value for key, value in found.items() if value is not None}


def fingerprint(path: str) -> str | None:
    """Returns a hash of a file, or of the files of a model's folder; None where the path names nothing local."""
    place = Path(path)
    if not place.is_absolute():
        return None  # a hub id, or the name of a metric
    try:
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.is_file() and file.suffix in _SUFFIXES)
        else:
            files = [place]
        digest = hashlib.blake2b(digest_size=16)
        for file in files:
            digest.update(f"{file.name if place.is_dir() else ''}\0{file.stat().st_size}\0".encode())
            _add_content(digest, file)
    except OSError:  # gone or not readable: nothing that could be told again
        return None
    return digest.hexdigest()


def _add_content(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _WHOLE_BYTES:
            digest.update(stream.read())
            return
        for number in range(_NUM_BLOCKS):
            stream.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))


def value_at(recipe: object, key: str) -> object:
    """Returns the value of a dotted key such as `evaluation.metrics[0]`; None where there is none."""
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(recipe, Mapping):
            recipe = recipe.get(part)
        elif isinstance(recipe, list) and int(part) < len(recipe):
            recipe = recipe[int(part)]
        else:
            return None
    return recipe


def _inputs(recipe: Mapping[str, object]) -> dict[str, str]:
    """Returns the text of every key of `PATHS`, by the key with its numbers."""
    result: dict[str, str] = {}
    for pattern in PATHS:
        found: dict[str, object] = {"": recipe}
        for part in pattern.split("."):
            found = {
                below: value for key, holder in found.items() for below, value in _below(key, holder, part).items()
            }
        result |= {key: value for key, value in found.items() if isinstance(value, str)}
    return result


def _below(key: str, holder: object, part: str) -> dict[str, object]:
    if part == "*":
        return {f"{key}[{index}]": item for index, item in enumerate(holder)} if isinstance(holder, list) else {}
    name = f"{key}.{part}" if key else part
    return {name: holder[part]} if isinstance(holder, Mapping) and part in holder else {}
