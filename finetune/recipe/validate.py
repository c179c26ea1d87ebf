"""A located tree to a `Recipe`, or to every fault in it, each with its place and the values allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from finetune.recipe import rules
from finetune.recipe.earlier_adapter import take_earlier_adapter
from finetune.recipe.fields import annotation_at, describe, models_at, owners_of, sections
from finetune.recipe.locate import KeyPath, Node
from finetune.recipe.problems import Problem, dotted, found, recipe_error, shortened
from finetune.recipe.schema import Recipe

REFERENCE = "docs/recipe_reference.md"


def validate(root: Node, *, known: Sequence[Problem] = ()) -> Recipe:
    """Checks types and limits first, then the rules that span keys, also for what an earlier adapter brings.

    Values are taken strictly: `true` is no number, `"8"` is no whole number, `8.0` neither.

    Args:
        known: faults found before, reported together with those found here.

    Raises:
        RecipeError: everything that is wrong, in the order it is written.
    """
    try:
        recipe = Recipe.model_validate(root.plain(), strict=True)
    except ValidationError as error:
        raise recipe_error([*_problems(error, root), *known]) from error
    violations = rules.check(recipe)
    if not violations:
        recipe = take_earlier_adapter(recipe)
        violations = [_of_earlier_adapter(violation) for violation in rules.check(recipe)]
    problems = [*(_violation_problem(violation, root) for violation in violations), *known]
    if problems:
        raise recipe_error(problems)
    return recipe


def _of_earlier_adapter(violation: rules.Violation) -> rules.Violation:
    """Tells of a value that the recipe does not hold itself where it comes from."""
    keys = (*violation.keys, "adapter.continue_from")
    return replace(violation, keys=keys, reason=f"{violation.reason} (the value is that of `adapter.continue_from`)")


def _problems(error: ValidationError, root: Node) -> list[Problem]:
    """Returns one problem a key.

    Pydantic reports every member of a union that did not fit. A fault deeper inside one member tells more than
    another member's "this is no list", so faults above another fault are left out.
    """
    faults: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        path = _real_path(detail, root)
        meant = _list_meant(path, root)
        faults.setdefault(path if meant is None else meant, detail["type"] if meant is None else "list_type")
    above = {path[:length] for path in faults for length in range(len(path))}
    return [_problem(path, kind, root) for path, kind in faults.items() if path not in above]


def _list_meant(path: KeyPath, root: Node) -> KeyPath | None:
    """Returns the key above a fault that holds one mapping where a list of such mappings was meant; else None."""
    for length in range(1, len(path)):
        node = root.at(path[:length])
        if node is None or not isinstance(node.value, dict):
            continue
        own = {name for model in models_at(path[:length]) for name in model.model_fields}
        items = {name for model in models_at((*path[:length], 0)) for name in model.model_fields}
        if items & node.value.keys() and not own & node.value.keys():
            return path[:length]
    return None


def _real_path(detail: Mapping[str, Any], root: Node) -> KeyPath:
    """Returns the keys of the file that lead to a fault; Pydantic's location also holds names of union members."""
    path: KeyPath = ()
    node = root
    *parents, last = detail["loc"]
    for part in parents:
        child = node.child(part)
        if child is not None and annotation_at((*path, part)) is not None:
            path, node = (*path, part), child
    is_key = detail["type"] == "extra_forbidden" or annotation_at((*path, last)) is not None
    if is_key and (child := node.child(last)) is not None:
        path, node = (*path, last), child
    if detail["type"] == "missing":
        return (*path, last)
    is_unknown_type = detail["type"].startswith("union_tag") and node.child("type") is not None
    return (*path, "type") if is_unknown_type else path


def _problem(path: KeyPath, kind: str, root: Node) -> Problem:
    name = dotted(path)
    if kind == "extra_forbidden":
        return _unknown_key(path, root)
    if kind == "missing":
        message = f"`{name}` is missing; it must be {describe(annotation_at(path))}"
        return Problem(root.entry_place(path), message, f"Add `{name}`.")
    node = root.at(path) or root
    allowed = _allowed(path)
    message = f"`{name}` must be {allowed}, found {_found(node)}"
    options = allowed.split("`")[1::2]
    near = difflib.get_close_matches(str(node.value), options, n=1) if isinstance(node.value, str) else []
    if near:
        message += f"; did you mean `{near[0]}`?"
    return Problem(node.place, message, _value_remedy(name, node, allowed))


def _allowed(path: KeyPath) -> str:
    """Describes what a key allows; `type` allows the names of every section that may stand there."""
    if path and path[-1] == "type":
        names = [describe(model.model_fields["type"].annotation) for model in models_at(path[:-1])]
        return " or ".join(names)
    return describe(annotation_at(path))


def _found(node: Node) -> str:
    """Describes a value; a number as it was written, so that `1e5` is not shown as 100000.0."""
    return shortened(node.text) if isinstance(node.value, bool | int | float) else found(node.plain())


def _value_remedy(name: str, node: Node, allowed: str) -> str:
    if isinstance(node.value, bool | int | float) and "text" in allowed:
        return f'Put quotes around the value of `{name}`: "{shortened(node.text)}".'
    if isinstance(node.value, str) and any("\ud800" <= character <= "\udfff" for character in node.value):
        return f"Remove the half of a character (a surrogate) from `{name}`."
    if isinstance(node.value, str) and "list of mappings" in allowed:
        return f"Write `{name}: [{{path: {node.value}}}]`."
    if isinstance(node.value, dict) and "list of mappings" in allowed:
        return f"Write a list, with each mapping as one item: `{name}: [{{path: ...}}]`."
    if isinstance(node.value, str) and "`true`" in allowed:
        return f"Set `{name}` to `true` or `false`, without quotes; `yes`, `no`, `on`, `off` are text in YAML 1.2."
    if isinstance(node.value, str) and "number" in allowed:
        return f"Set `{name}` to a number without quotes, units or separators, such as 8192 or 2.0e-4."
    if node.value is None:
        return f"Give `{name}` a value, or remove the key to keep its default."
    return f"Set `{name}` to a value allowed; {REFERENCE} describes the key."


def _unknown_key(path: KeyPath, root: Node) -> Problem:
    *parents, key = path
    section = root.at(tuple(parents)) or root
    kind = section.child("type")
    models = models_at(tuple(parents), kind.value if kind else None)
    keys = list(dict.fromkeys(name for model in models for name in model.model_fields))
    value = root.at(path)
    message = f"unknown key `{dotted(path)}`, found {_found(value) if value else 'nothing'}"
    message += f"; {hint}" if (hint := _nearest(str(key), keys, dotted(tuple(parents)))) else ""
    message += f"; allowed here: {', '.join(keys)}"
    return Problem(root.entry_place(path), message, f"Correct or remove `{dotted(path)}`; {REFERENCE} lists every key.")


def _nearest(key: str, keys: list[str], parent: str) -> str:
    """Says where an unknown key belongs, or which key looks most like it; empty when none does."""
    if owners := owners_of(key):
        return f"`{key}` is a key of {_owner_names(owners, parent)}"
    if near := difflib.get_close_matches(key, keys, n=1):
        return f"did you mean `{near[0]}`?"
    everywhere = [*Recipe.model_fields, *(name for _, section in sections() for name in section.model_fields)]
    if near := difflib.get_close_matches(key, everywhere, n=1, cutoff=0.7):
        return f"did you mean `{near[0]}`, a key of {_owner_names(owners_of(near[0]), parent)}"
    return ""


def _owner_names(owners: Iterable[str], parent: str) -> str:
    names = {"": "the top level", parent: f"`{parent}` of another type"}
    return " and ".join(names.get(owner, f"`{owner}`") for owner in owners)


def _violation_problem(violation: rules.Violation, root: Node) -> Problem:
    written = [key for key in violation.keys if root.at(tuple(key.split("."))) is not None]
    key = written[0] if written else violation.keys[0]
    message = f"`{violation.keys[0]}` must be {violation.allowed}, found {found(violation.found)}: {violation.reason}"
    return Problem(root.value_place(tuple(key.split("."))), message, violation.remedy)
