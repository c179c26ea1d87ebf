"""Several layers of values to one: files that a recipe extends, the recipe itself, overrides of the command line."""

from __future__ import annotations

from dataclasses import replace

from finetune.recipe.fields import annotation_at, default_type, takes_only_text
from finetune.recipe.locate import Entry, KeyPath, Node, Place, TextSource, YamlProblem, parse_yaml
from finetune.recipe.paths import can_be_path
from finetune.recipe.problems import found, shortened


def merge(base: Node, over: Node, *, path: KeyPath = ()) -> Node:
    """Lays one value over another.

    Mappings merge key by key. Lists and scalars replace. A mapping whose `type` differs from the one below replaces
    it too, since the keys of one type mean nothing to another.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)) or _changes_type(base, over, path):
        return over
    merged = dict(base.value)
    for key, entry in over.value.items():
        below = merged.get(key)
        merged[key] = Entry(entry.key_place, merge(below.node, entry.node, path=(*path, key))) if below else entry
    return replace(over, value=merged)


def _changes_type(base: Node, over: Node, path: KeyPath) -> bool:
    new = over.child("type")
    if new is None or len(path) != 1:
        return False
    old = base.child("type")
    return new.value != (old.value if old else default_type(str(path[0])))


def apply_override(root: Node, text: str, source: TextSource) -> Node:
    """Applies one `key.key=value` of the command line.

    The value is YAML, except where the schema takes only text: there `model.revision=20240101` is the text that it
    looks like. A number in the key names an item of a list, from 0.

    Raises:
        YamlProblem: no `=`, an empty key or value, a value that is no YAML, or a list item that is not there.
    """
    place = source.place()
    dotted_key, equals, value_text = text.partition("=")
    keys = dotted_key.strip().split(".")
    if not equals or not all(keys):
        message = f"an override is written `section.key=value`, found `{shortened(text)}`"
        raise YamlProblem(message, place, "For example: training.learning_rate=1e-4")
    if keys[0] == "extends":
        remedy = "Write `extends` in the recipe, or override the keys themselves."
        raise YamlProblem("`extends` cannot be set on the command line", place, remedy)
    value = parse_yaml(value_text, source)
    if value is None:
        remedy = f"Give a value after `=`; `{dotted_key}=null` means none."
        raise YamlProblem(f"the override of `{dotted_key}` has no value", place, remedy)
    return _assign(root, keys, _pinned(value, place), path=())


def _pinned(node: Node, place: Place) -> Node:
    """Gives a value parsed from an override the override's own place, at every depth."""
    if isinstance(node.value, dict):
        entries = {key: Entry(place, _pinned(entry.node, place)) for key, entry in node.value.items()}
        return replace(node, value=entries, place=place)
    if isinstance(node.value, list):
        return replace(node, value=[_pinned(item, place) for item in node.value], place=place)
    return replace(node, place=place)


def _assign(node: Node | None, keys: list[str], value: Node, *, path: KeyPath) -> Node:
    """Returns `node` with the value laid over what stands under the keys."""
    if not keys:
        value = _as_text(value, path)
        return merge(node, value, path=path) if node else value
    key, rest = keys[0], keys[1:]
    if node is not None and isinstance(node.value, list):
        index = _index(key, node.value, value.place, path)
        items = list(node.value)
        items[index] = _assign(items[index], rest, value, path=(*path, index))
        return replace(node, value=items)
    below = node.child(key) if node else None
    entry = Entry(value.place, _assign(below, rest, value, path=(*path, key)))
    wrapped = Node({key: entry}, value.place, value.folder)
    return merge(node, wrapped, path=path) if node else wrapped


def _index(key: str, items: list[Node], place: Place, path: KeyPath) -> int:
    name = ".".join(str(part) for part in path)
    if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(items)):
        allowed = f"0 to {len(items) - 1}" if items else "none, the list is empty"
        remedy = f"Name an item that is there, or give the whole list: {name}=[...]"
        raise YamlProblem(f"`{shortened(key)}` is no item of the list `{name}`; allowed: {allowed}", place, remedy)
    return int(key)


def _as_text(node: Node, path: KeyPath) -> Node:
    """Reads an unquoted scalar as the text it is written as, where the schema takes only text."""
    if isinstance(node.value, list):
        return replace(node, value=[_as_text(item, (*path, 0)) for item in node.value])
    if isinstance(node.value, bool | int | float) and takes_only_text(annotation_at(path)):
        return replace(node, value=node.text)
    return node


def extended_files(root: Node) -> list[Node]:
    """Returns the file names under `extends`, in order.

    Raises:
        YamlProblem: `extends` is neither a file name nor a list of them.
    """
    node = root.child("extends")
    if node is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str) or not can_be_path(item.value):
            message = f"`extends` must be a file name or a list of file names, found {found(item.plain())}"
            raise YamlProblem(message, item.place, "For example: extends: [../configs/quantization/nf4.yaml]")
    return items
