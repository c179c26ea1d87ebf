"""Copy a shipped recipe to where its user works, with all that it names, so that it runs there.

recipes/NAME.yaml           DEST/NAME.yaml              first line, `extends` and header adjusted to the new place
configs/<what it extends>   DEST/configs/...            fragments stay files of their own: comments are kept
recipes/<data and models>   DEST/<same path>            where they are shipped
                            DEST/recipe.schema.json     for editors
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.paths import DATA_FILE
from finetune.run.atomic import write_text
from finetune.start.editor import SCHEMA_LINE, SCHEMA_NAME, require_own_schema, schema_line, write_schema
from finetune.start.shipped import Shipped, shipped_root

_MENTION = re.compile(r"\brecipes/([\w./-]*[\w-])")
"""A file of `recipes/` that a header names, such as the script that makes the data."""


@dataclass(frozen=True)
class Copied:
    """What was copied."""

    recipe: Path
    files: tuple[Path, ...]
    """All files, the recipe first."""
    missing: tuple[Path, ...]
    """Inputs that the recipe names and that are not shipped: the user's own data goes there."""

    def as_dict(self) -> dict[str, object]:
        return {
            "recipe": str(self.recipe),
            "files": [str(path) for path in self.files],
            "missing": [str(path) for path in self.missing],
        }


def copy_shipped(shipped: Shipped, destination: Path, *, force: bool) -> Copied:
    """Copies a recipe or fragment.

    Args:
        destination: a folder, made where it is not there, or the name of the copy, ending in `.yaml` or `.yml`.
        force: replace files that differ from what would be written.

    Raises:
        RecipeError: a file is there already and differs, and `force` is false.
        EnvironmentProblem: a file cannot be written.
    """
    is_name = destination.suffix in (".yaml", ".yml")
    folder = destination.parent if is_name else destination
    target = destination if is_name else folder / shipped.path.name
    schema = folder / SCHEMA_NAME
    texts = dict(_adjusted(shipped, target, folder, schema))
    inputs, missing = _inputs(shipped, folder)
    try:
        require_own_schema(schema)
        if not force:
            _require_no_other(texts, inputs)
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        for path, source in inputs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        write_schema(schema)
    except OSError as error:
        reason, place = error.strerror or str(error), str(error.filename or folder)
        remedy = "Name another folder, or change the permissions of this one."
        raise EnvironmentProblem(f"the copy cannot be written: {reason}", place=place, remedy=remedy) from error
    return Copied(target, (*texts, *inputs, schema), tuple(missing))


def _adjusted(shipped: Shipped, target: Path, folder: Path, schema: Path) -> Iterator[tuple[Path, str]]:
    """Yields the copy of a file with its text, then those of the fragments that it extends, depth first."""
    root, text = shipped_root(), shipped.text
    fragments: list[Path] = []
    for named in _extended(text):
        source = Path(os.path.normpath(shipped.path.parent / named))
        fragment = folder / source.relative_to(root)
        text = text.replace(named, Path(os.path.relpath(fragment, target.parent)).as_posix())
        fragments.append(source)
    lines = text.split("\n")
    if lines[0].startswith(SCHEMA_LINE):
        lines[0] = schema_line(target, schema)
    own, prefix = shipped.path.relative_to(root).as_posix(), f"{folder.as_posix()}/" if folder != Path() else ""
    new = {own: _shell_word(target.as_posix()), "recipes/": _shell_word(prefix) if prefix else ""}
    for index, line in enumerate(lines):
        if line.startswith("#"):
            lines[index] = re.sub(rf"{re.escape(own)}|\brecipes/", lambda found: new[found.group()], line)
    yield target, "\n".join(lines)
    for source in fragments:
        below = Shipped(source.stem, source, "fragment")
        yield from _adjusted(below, folder / source.relative_to(root), folder, schema)


def _shell_word(text: str) -> str:
    """Returns text as one word of a shell command on one line; what does not print, a line end too, is spelled out."""
    if text.isprintable():
        return shlex.quote(text)
    spelled = (f"\\{char}" if char in "\\'" else char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)
    return f"$'{''.join(spelled)}'"


def _extended(text: str) -> list[str]:
    named = (yaml.safe_load(text) or {}).get("extends", [])
    return [named] if isinstance(named, str) else named


def _inputs(shipped: Shipped, folder: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Returns the files to copy by their new path, and the new paths of inputs that are not shipped."""
    values, base = yaml.safe_load(shipped.text) or {}, shipped.path.parent
    texts = _texts(values.get("model"), values.get("data"), values.get("evaluation"))
    named = [text for text in texts if "/" in text or DATA_FILE.search(text)]
    mentioned = [match for line in shipped.text.split("\n") if line[:1] == "#" for match in _MENTION.findall(line)]
    inputs: dict[Path, Path] = {}
    missing: list[Path] = []
    for text in dict.fromkeys([*named, *mentioned]):
        source = base / text
        if source.is_dir():
            inputs |= {folder / file.relative_to(base): file for file in sorted(source.rglob("*")) if file.is_file()}
        elif source.is_file() and source != shipped.path:
            inputs[folder / text] = source
        elif text in named and DATA_FILE.search(text):
            missing.append(folder / text)
    return inputs, missing


def _texts(*values: object) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _texts(*value.values())
        elif isinstance(value, list):
            yield from _texts(*value)


def _require_no_other(texts: dict[Path, str], inputs: dict[Path, Path]) -> None:
    others = [path for path, text in texts.items() if _differs(path, text.encode())]
    others += [path for path, source in inputs.items() if _differs(path, source.read_bytes())]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        message = f"the file is there already and differs from what would be copied{more}"
        remedy = "Name another folder or file, or add --force to replace it."
        raise RecipeError(message, place=str(others[0]), remedy=remedy)


def _differs(path: Path, content: bytes) -> bool:
    return os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content)
