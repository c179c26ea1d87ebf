"""Before a run begins: may it use its folder, as a new one or to continue the run in it? Writes nothing that stays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import RecipeError
from finetune.recipe.load import values_hash
from finetune.recipe.paths import absolute
from finetune.run.disk import nearest_existing_folder
from finetune.run.folder import ENDED_WELL, RunFolder, occupied, read_manifest, unwritable
from finetune.run.inputs import fingerprint, input_key, value_at
from finetune.run.lock import require_unlocked


def check_output_folder(
    path: Path,
    *,
    recipe_hash: str,
    resume: bool,
    recipe: Mapping[str, object] | None = None,
    may_differ: Collection[str] = (),
) -> None:
    """Checks that a run may use this folder, in which nothing is left behind.

    Args:
        path: the run folder; it need not exist.
        recipe_hash: hash of the resolved recipe.
        resume: whether the run in the folder is to be continued.
        recipe: the resolved recipe as plain dicts and lists, to name the keys that differ from the run's.
        may_differ: dotted keys (`training.max_steps`) that a continued run may change; a key stands for those below.

    Raises:
        RecipeError: the folder belongs to something else, or there is no such run to continue.
        DataError: the manifest of the run is damaged.
        EnvironmentProblem: the folder cannot be written, or another process trains into it.
    """
    path = Path(path).absolute()
    _require_writable(path)
    if path.exists() and not path.is_dir():
        raise RecipeError("output.dir is a file", place=str(path), remedy="Set output.dir to a folder.")
    if resume:
        _check_resume(path, recipe_hash=recipe_hash, recipe=recipe, may_differ=may_differ)
    elif path.exists() and any(path.iterdir()):
        raise occupied(path)
    else:
        _require_makeable(path)


def folder_to_continue(recipe_path: str | Path, overrides: Sequence[str]) -> Path | None:
    """Returns the run folder that a recipe lies in, where it is the run's own `recipe.yaml` and no override sets
    `output.dir`; else None.

    A run is continued where it lies: a folder that was moved or copied still has the old place in its recipe, which is
    relative to the folder that the first command was given in.
    """
    path = Path(absolute(os.fspath(recipe_path), Path.cwd()))
    run = RunFolder(path.parent)
    is_own = path.name == run.recipe_path.name and run.manifest_path.is_file()
    return None if not is_own or any(map(_sets_output_dir, overrides)) else run.path


def _sets_output_dir(override: str) -> bool:
    key, _, value = override.partition("=")
    if key.strip() != "output":
        return key.strip() == "output.dir"
    values = yaml.safe_load(value)
    return isinstance(values, dict) and "dir" in values


def differing_keys(old: object, new: object, *, prefix: str = "") -> list[str]:
    """Returns the dotted keys whose values differ between two nested structures, such as `data.train[0].path`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        missing = object()
        pairs = [
            (f"{prefix}.{key}" if prefix else str(key), old.get(key, missing), new.get(key, missing)) for key in keys
        ]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{prefix}[{index}]", left, right) for index, (left, right) in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new else [prefix]
    return [found for key, left, right in pairs for found in differing_keys(left, right, prefix=key)]


def _check_resume(
    path: Path, *, recipe_hash: str, recipe: Mapping[str, object] | None, may_differ: Collection[str]
) -> None:
    run = RunFolder(path)
    manifest = read_manifest(path)
    stored_hash = manifest["recipe_hash"]
    require_unlocked(path)
    if manifest["status"] in ENDED_WELL:
        how = "was stopped early, as its recipe asks" if manifest["status"] == "early-stopped" else "is done"
        raise RecipeError(
            f"the run {how}; there is nothing to continue",
            place=str(path),
            remedy="Look at its report.html, or start a new run with another output.dir; adapter.continue_from there "
            "trains this run's adapter on.",
        )
    if stored_hash == recipe_hash:
        return
    named, remedy = "", "Continue with the run's own recipe.yaml, or start a new run with another output.dir."
    if recipe is not None:
        stored = _read_recipe(run.recipe_path)
        if values_hash(stored) != stored_hash:
            raise RecipeError(
                "recipe.yaml was edited since the run began with it",
                place=str(run.recipe_path),
                remedy="Put it back as it was, or start a new run with another output.dir.",
            )
        strict = [
            key
            for key in differing_keys(stored, recipe)
            if not _is_covered(key, may_differ) and not _is_moved(key, recipe, manifest)
        ]
        if not strict:
            return
        named = ": " + ", ".join(strict)
        if all(map(input_key, strict)):
            remedy = _remedy_of_paths(strict[0], stored, recipe, manifest)
    raise RecipeError(
        f"the recipe differs from that of the run to continue{named}", place=str(run.recipe_path), remedy=remedy
    )


def _is_moved(key: str, recipe: Mapping[str, object], manifest: Mapping[str, Any]) -> bool:
    """Says whether a key that differs names the same input at another place; of data, whether that is asked once they
    are read."""
    pattern = input_key(key)
    if pattern is not None and pattern.startswith("data."):
        return manifest.get("data_digest") is not None
    recorded = _recorded_inputs(manifest).get(key)
    return pattern is not None and recorded is not None and recorded == fingerprint(str(value_at(recipe, key)))


def _recorded_inputs(manifest: Mapping[str, Any]) -> dict[str, str]:
    inputs = manifest.get("inputs")
    return inputs if isinstance(inputs, dict) else {}


def _remedy_of_paths(
    key: str, stored: Mapping[str, object], recipe: Mapping[str, object], manifest: Mapping[str, Any]
) -> str:
    """Says how to continue a run of whose recipe only input paths differ, `key` first of all."""
    old, new = value_at(stored, key), value_at(recipe, key)
    if key in _recorded_inputs(manifest) or not (str(old).startswith("/") and str(new).startswith("/")):
        why = f"{key} is not what the run began with. Name that ({old}, or a copy of it)."
    else:
        why = (
            f"Nothing recorded tells whether {key} is what the run began with. If it is, make it readable at the old "
            f"place, for example: ln -s {new} {old}"
        )
    return f"{why}\nOr start a new run with another output.dir."


def _is_covered(key: str, allowed: Collection[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in allowed)


def _read_recipe(path: Path) -> Mapping[str, object]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(
            "the run's recipe cannot be read",
            place=str(path),
            remedy="Start a new run with another output.dir.",
        ) from error
    return values if isinstance(values, dict) else {}


def _require_writable(path: Path) -> None:
    try:
        existing = nearest_existing_folder(path)
        is_writable = not existing.is_dir() or os.access(existing, os.W_OK | os.X_OK)
        # A file further up in place of a folder: nothing can be made below it.
        is_below_file = existing.is_file() and existing != path
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from error
    if is_below_file:
        raise RecipeError("a parent of output.dir is a file", place=str(existing), remedy="Set another output.dir.")
    if not is_writable:
        raise unwritable(existing, "no permission to write there")


def _require_makeable(path: Path) -> None:
    """Makes a folder where the run's would be, and removes it: below /proc, say, permissions do not tell."""
    existing = nearest_existing_folder(path)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".finetune-", dir=existing))
    except OSError as error:
        raise unwritable(path, f"no folder can be made in {existing} ({error.strerror})") from error
