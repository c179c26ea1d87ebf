"""The recipes and fragments that come with the program: where they are, what they are called, what they are for.

In a checkout they lie in `recipes/` and `configs/` beside the package; an installed package has copies of both inside,
in `finetune/shipped/`, in the same order, so that `extends: [../configs/...]` means the same in both.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import finetune
from finetune.errors import EnvironmentProblem, RecipeError

_PURPOSE = re.compile(r"^# (?:Purpose|Fragment for `extends`): *(.+(?:\n#(?:  +| (?![A-Z][\w ]*:)).+)*)", re.MULTILINE)
"""The whole paragraph, indented or not; a line that begins with a heading of its own, such as `Command:`, ends it."""


@dataclass(frozen=True)
class Shipped:
    """One shipped file."""

    name: str
    """Name on the command line: the path below `recipes/` without its suffix; of a fragment, with `configs/` before."""
    path: Path
    kind: Literal["recipe", "fragment"]

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def purpose(self) -> str:
        """What the header says that it is for; empty where it says nothing."""
        found = _PURPOSE.search(self.text)
        return " ".join(found.group(1).replace("\n#", " ").split()) if found else ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "purpose": self.purpose, "path": str(self.path)}


def shipped_root() -> Path:
    """Returns the folder that holds `recipes` and `configs`.

    Raises:
        EnvironmentProblem: the installation is without them.
    """
    package = Path(finetune.__file__).resolve().parent
    for root in (package / "shipped", package.parent):
        if (root / "recipes").is_dir() and (root / "configs").is_dir():
            return root
    remedy = "Install the package again, or take recipes/ and configs/ from the repository."
    raise EnvironmentProblem("the recipes are not part of this installation", place=str(package), remedy=remedy)


def shipped_files() -> list[Shipped]:
    """Returns all recipes, then all fragments, each sorted by name."""
    root = shipped_root()
    recipes = [Shipped(_name(path, root / "recipes"), path, "recipe") for path in _yaml_files(root / "recipes")]
    fragments = [Shipped(_name(path, root), path, "fragment") for path in _yaml_files(root / "configs")]
    return recipes + fragments


def find_shipped(name: str) -> Shipped:
    """Returns a recipe or fragment by its name, with or without its suffix.

    Raises:
        RecipeError: there is none of this name.
    """
    files = {item.name: item for item in shipped_files()}
    found = files.get(re.sub(r"\.ya?ml$", "", name.removeprefix("recipes/")))
    if found is None:
        near = difflib.get_close_matches(name, files, n=1, cutoff=0.4)
        remedy = f"Did you mean {near[0]}?" if near else "See: finetune recipes list"
        raise RecipeError(f"there is no shipped recipe `{name}`", place="command line", remedy=remedy)
    return found


def _yaml_files(folder: Path) -> list[Path]:
    """Returns the YAML files below a folder, but for those of runs that someone made in it."""
    return sorted(path for path in folder.rglob("*.yaml") if "runs" not in path.relative_to(folder).parts)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()
