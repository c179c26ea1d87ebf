"""YAML text to a tree of values that know where they were written.

Scalars follow YAML 1.2: `1e-4` and `2.0e-4` are numbers, while `no`, `off`, `1_000`, `010` (ten), `1:30` and dates
hold no surprise. Only plain data is read: a tag that would build an object is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

Scalar: TypeAlias = "bool | int | float | str | None"
Plain: TypeAlias = "Scalar | dict[str, Plain] | list[Plain]"
KeyPath: TypeAlias = tuple[str | int, ...]


_LONGEST_OVERRIDE = 160
"""Characters of an override shown as a place."""


@dataclass(frozen=True, order=True)
class Place:
    """A spot in a file, or an override of the command line; ordered as a reader meets them."""

    source_index: int
    """Position of the file (or override) among all that make the recipe."""
    line: int
    column: int
    source: str = field(compare=False)
    """File as shown to the user, or the override's text."""
    is_override: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        if not self.is_override:
            return f"{self.source}:{self.line}:{self.column}"
        is_long = len(self.source) > _LONGEST_OVERRIDE
        return f"command line: {self.source[:_LONGEST_OVERRIDE] + ' ...' if is_long else self.source}"


@dataclass(frozen=True)
class Entry:
    """One key of a mapping with its value."""

    key_place: Place
    node: Node


@dataclass(frozen=True)
class Node:
    """A value, where it was written, and the folder that its relative paths start from."""

    value: Scalar | dict[str, Entry] | list[Node]
    place: Place
    folder: Path
    text: str = ""
    """A scalar as it was written, without quotes."""
    is_quoted: bool = False

    def plain(self) -> Plain:
        """Returns the value without its places."""
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def child(self, key: str | int) -> Node | None:
        """Returns the value under a key or index, or None where there is none."""
        if isinstance(self.value, dict) and isinstance(key, str):
            entry = self.value.get(key)
            return entry.node if entry else None
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def entry_place(self, path: KeyPath) -> Place:
        """Returns where a key was written; for one that was not, where the nearest section around it was."""
        node, place = self, self.place
        for key in path:
            child = node.child(key)
            if child is None:
                break
            place = node.value[key].key_place if isinstance(node.value, dict) and isinstance(key, str) else child.place
            node = child
        return place

    def value_place(self, path: KeyPath) -> Place:
        """Returns where the value of a path was written, falling back as `entry_place` does."""
        node = self.at(path)
        return self.entry_place(path) if node is None else node.place

    def at(self, path: KeyPath) -> Node | None:
        """Returns the node at a path, or None where there is none."""
        node: Node | None = self
        for key in path:
            node = node.child(key) if node else None
        return node


class YamlProblem(Exception):
    """Text that is no readable YAML; `load.py` turns it into a `RecipeError`."""

    def __init__(self, message: str, place: Place, remedy: str) -> None:
        super().__init__(message)
        self.message, self.place, self.remedy = message, place, remedy


class _Yaml12Loader(yaml.SafeLoader):
    """Composes nodes and marks; scalars are resolved by YAML 1.2's core schema."""


_Yaml12Loader.yaml_implicit_resolvers = {}
CORE_SCHEMA: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
"""Name of the type, form of the scalar, and the characters that it may begin with."""


def scalar_pattern(form: str) -> re.Pattern[str]:
    """Compiles a form of `CORE_SCHEMA` to match whole scalars."""
    return re.compile(rf"(?:{form})\Z")


for _name, _form, _first in CORE_SCHEMA:
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", scalar_pattern(_form), _first)


@dataclass(frozen=True)
class TextSource:
    """What a text is called in messages, and the folder of its relative paths."""

    name: str
    folder: Path
    index: int = 0
    is_override: bool = False

    def place(self, line: int = 1, column: int = 1) -> Place:
        return Place(self.index, line, column, self.name, self.is_override)


def parse_yaml(text: str, source: TextSource) -> Node | None:
    """Reads one YAML document; None when it holds nothing.

    Raises:
        YamlProblem: broken syntax, a duplicate key, a tag, a key that is not text, or an alias of its own parent.
    """
    try:
        loader = _Yaml12Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = source.place(before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1)
        message = f"the character U+{ord(text[error.position]):04X} may not stand in YAML"
        raise YamlProblem(message, place, "Remove the character.") from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_problem(error, source) from error
    except RecursionError as error:
        raise YamlProblem("nested too deeply", source.place(), "Write a recipe's sections and keys.") from error
    return None if root is None else _Converter(source).convert(root, ())


def _syntax_problem(error: yaml.MarkedYAMLError, source: TextSource) -> YamlProblem:
    mark = error.problem_mark or error.context_mark
    place = source.place(mark.line + 1, mark.column + 1) if mark else source.place()
    message = "broken YAML: " + " ".join(part for part in (error.context, error.problem) if part)
    if "\\t" in message:
        return YamlProblem(message, place, "Indent with spaces; YAML allows no tabs.")
    if "single document" in message:
        return YamlProblem(message, place, "Keep one document: remove the line `---` and what follows it.")
    return YamlProblem(message, place, "Check indentation, colons, quotes and brackets at that line and the one above.")


MAX_NODES = 100_000
"""Values of a file; aliases of aliases could stand for billions."""


class _Converter:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, source: TextSource) -> None:
        self.source = source
        self._num_nodes = 0

    def place(self, node: yaml.Node) -> Place:
        return self.source.place(node.start_mark.line + 1, node.start_mark.column + 1)

    def convert(self, node: yaml.Node, parents: tuple[yaml.Node, ...]) -> Node:
        place = self.place(node)
        if any(node is parent for parent in parents):
            raise YamlProblem("an alias that contains itself", place, "Write the values out.")
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise YamlProblem(
                f"more than {MAX_NODES:,} values, aliases counted each time", place, "Write fewer values."
            )
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        inside = (*parents, node)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return Node(self._mapping(node, inside), place, self.source.folder)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return Node([self.convert(item, inside) for item in node.value], place, self.source.folder)
        if isinstance(node, yaml.ScalarNode) and kind in {"str", "null", "bool", "int", "float"}:
            try:
                value = _scalar(kind, node.value)
            except ValueError as error:
                raise YamlProblem(f"`{node.value}` is no {kind}", place, "Remove the tag.") from error
            return Node(value, place, self.source.folder, node.value, node.style is not None)
        raise YamlProblem(f"the tag `{node.tag}` is not supported", place, "Remove the tag; recipes hold plain values.")

    def _mapping(self, node: yaml.MappingNode, inside: tuple[yaml.Node, ...]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlProblem("a key must be text, found a list or mapping", place, "Write a plain key.")
            key = key_node.value
            if key in entries:
                first = entries[key].key_place
                message = f"the key `{key}` stands twice; the first is on line {first.line}"
                raise YamlProblem(message, place, "Remove one of the two.")
            entries[key] = Entry(place, self.convert(value_node, inside))
        return entries


def _scalar(kind: str, text: str) -> Scalar:
    if kind == "null":
        return None
    if kind == "bool":
        if text.lower() not in {"true", "false"}:
            raise ValueError(text)
        return text.lower() == "true"
    if kind == "int":
        return _whole_number(text)
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return text


def _whole_number(text: str) -> int | float:
    """Returns the number; one beyond the largest float as infinite, which no key takes, so that its key is named.

    Python refuses to read or print whole numbers of thousands of digits.
    """
    try:
        number = int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
        float(number)
    except (ValueError, OverflowError):
        # A tag such as `!!int x` is no number at all.
        if not re.fullmatch(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", text):
            raise
        return -math.inf if text.startswith("-") else math.inf
    return number
