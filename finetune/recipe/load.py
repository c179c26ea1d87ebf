"""Recipe files to a `Recipe`, and back.

    file -> YAML nodes with places -> laid over what it extends -> overrides -> absolute input paths -> `Recipe`
    with the settings of the adapter that it continues

Everything that can be wrong is a `RecipeError` that names file, line and column and what to change.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from finetune.errors import RecipeError
from finetune.recipe.locate import CORE_SCHEMA, Node, Place, TextSource, YamlProblem, parse_yaml, scalar_pattern
from finetune.recipe.merge import apply_override, extended_files, merge
from finetune.recipe.paths import absolute, resolve_paths
from finetune.recipe.problems import Problem, found
from finetune.recipe.schema import Recipe
from finetune.recipe.validate import validate


def load_recipe(path: str | Path, *, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, what it extends, and overrides such as `training.learning_rate=1e-4`.

    Later layers win: the files under `extends` in their order, the file itself, then the overrides. Mappings merge key
    by key; lists and scalars replace. Input paths come out absolute, relative ones read from the file that names them
    (from the current folder in an override). Text such as `${HOME}` is taken as it stands.

    Raises:
        RecipeError: the first file that cannot be read or is no YAML; else every override, key and value that is
            wrong; else every rule that does not hold.
    """
    reader = _Reader()
    root = reader.read(absolute(os.fspath(path), Path.cwd()), named_at=None, parents=())
    root, problems = _apply_overrides(root, overrides, first_index=reader.num_files)
    return validate(resolve_paths(root), known=problems)


def dump_recipe(recipe: Recipe) -> str:
    """Returns a recipe as YAML with every key written out; `load_recipe` reads it back to an equal recipe."""
    values = recipe.model_dump(mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def recipe_hash(recipe: Recipe) -> str:
    """Returns the SHA-256 of a recipe's values as canonical JSON: equal recipes, equal hashes."""
    return values_hash(recipe.model_dump(mode="json"))


def values_hash(values: Mapping[str, object]) -> str:
    """Returns the same of the values that `dump_recipe` wrote, as YAML reads them."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or 1.2 would read as something else."""

    def text(self, text: str) -> yaml.Node:
        # PyYAML writes U+0085 and its like bare in other styles and reads them back as line feeds.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.text)

for _name, _form, _first in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", scalar_pattern(_form), _first)


def _apply_overrides(root: Node, overrides: Sequence[str], *, first_index: int) -> tuple[Node, list[Problem]]:
    """Applies overrides in order; returns the tree and what was wrong with those that could not be applied."""
    problems: list[Problem] = []
    for index, text in enumerate(overrides, start=first_index):
        source = TextSource(text, Path.cwd(), index, is_override=True)
        try:
            root = apply_override(root, text, source)
        except YamlProblem as fault:
            problems.append(Problem(source.place(), fault.message, fault.remedy))
    return root, problems


class _Reader:
    """Reads a recipe and, depth first, the files that it extends."""

    def __init__(self) -> None:
        self.num_files = 0

    def read(self, path: str, *, named_at: Place | None, parents: tuple[str, ...]) -> Node:
        """Returns one file laid over the files that it extends, without its `extends` key."""
        source = TextSource(_shown(path), Path(path).parent, self.num_files)
        self.num_files += 1
        root = _mapping(_read_text(path, source, named_at), source)
        chain = (*parents, path)
        try:
            files = extended_files(root)
        except YamlProblem as fault:
            raise _as_error(fault) from fault
        merged: Node | None = None
        for base in files:
            base_path = absolute(str(base.value), source.folder)
            if os.path.realpath(base_path) in map(os.path.realpath, chain):
                names = " -> ".join(_shown(file) for file in (*chain, base_path))
                remedy = "Remove one of these `extends`."
                raise RecipeError(f"`extends` goes in a circle: {names}", place=str(base.place), remedy=remedy)
            layer = self.read(base_path, named_at=base.place, parents=chain)
            merged = merge(merged, layer) if merged else layer
        own = _without_extends(root)
        return merge(merged, own) if merged else own


def _without_extends(root: Node) -> Node:
    assert isinstance(root.value, dict)
    return replace(root, value={key: entry for key, entry in root.value.items() if key != "extends"})


def _mapping(text: str, source: TextSource) -> Node:
    """Parses a file's text, which must be a mapping with something in it."""
    try:
        root = parse_yaml(text, source)
    except YamlProblem as fault:
        raise _as_error(fault) from fault
    needs = "A recipe needs the sections `model`, `data` and `output`."
    if root is None or root.value is None:
        raise RecipeError("the file is empty", place=str(source.place()), remedy=needs)
    if not isinstance(root.value, dict):
        message = f"the file must hold a mapping of sections, found {found(root.plain())}"
        raise RecipeError(message, place=str(root.place), remedy=needs)
    return root


def _read_text(path: str, source: TextSource, named_at: Place | None) -> str:
    """Reads a file as UTF-8; what `extends` names is reported where it is named."""
    place = str(named_at) if named_at else str(source.place())
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecipeError(f"there is no file {_shown(path)}", place=place, remedy=_near_files(path)) from error
    except IsADirectoryError as error:
        remedy = "Name a YAML file in it."
        raise RecipeError(f"{_shown(path)} is a folder, not a file", place=place, remedy=remedy) from error
    except (OSError, ValueError) as error:
        remedy = "Check the path and its permissions."
        raise RecipeError(f"{_shown(path)} cannot be read: {error}", place=place, remedy=remedy) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        where = source.place(before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1)
        message = f"the file is not UTF-8: the byte 0x{content[error.start]:02X} fits nowhere"
        remedy = "Save it as UTF-8, for example: iconv -f latin1 -t utf-8 OLD > NEW"
        raise RecipeError(message, place=str(where), remedy=remedy) from error


def _near_files(path: str) -> str:
    folder = Path(path).parent
    names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() and os.access(folder, os.R_OK) else []
    near = difflib.get_close_matches(Path(path).name, names, n=1, cutoff=0.8)
    if near:
        return f"Did you mean {_shown(str(folder / near[0]))}?"
    return "Check the path." if names else f"Check the path; there is no folder {_shown(str(folder))} with files in it."


def _shown(path: str) -> str:
    """Returns a path as messages show it: relative to the current folder when it lies in it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _as_error(fault: YamlProblem) -> RecipeError:
    return RecipeError(fault.message, place=str(fault.place), remedy=fault.remedy)
