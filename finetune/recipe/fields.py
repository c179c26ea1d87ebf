"""What the schema says about a key: its type in words, its limits, its neighbours.

Error messages and the reference both speak from here, so they never differ.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from finetune.recipe.locate import KeyPath
from finetune.recipe.problems import choices
from finetune.recipe.schema import Recipe, Section

Annotation = Any
"""A type annotation of the schema; Python has no narrower type for one."""


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Yields every section with its dotted path, in the schema's order, nested ones after their parent."""
    yield from _sections_below("", Recipe)


def _sections_below(prefix: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, info in section.model_fields.items():
        for model, suffix in _models_in(info.annotation):
            path = f"{prefix}{name}{suffix}"
            yield path, model
            yield from _sections_below(f"{path}.", model)


def _models_in(annotation: Annotation) -> Iterator[tuple[type[Section], str]]:
    for option in _options(annotation):
        if get_origin(option) is list:
            yield from ((model, "[]" + suffix) for model, suffix in _models_in(get_args(option)[0]))
        elif _is_section(option):
            yield option, ""


def models_at(path: KeyPath, kind: object = None) -> list[type[Section]]:
    """Returns the sections that the mapping at a path may be, narrowed by the value of its `type` key."""
    models = [option for option in _options(annotation_at(path)) if _is_section(option)]
    return [model for model in models if kind in type_names(model)] or models


def annotation_at(path: KeyPath) -> Annotation:
    """Returns the annotation under a path, or None where the schema has no such key."""
    annotation: Annotation = Recipe
    for key in path:
        options = _options(annotation)
        if isinstance(key, int):
            found = [get_args(option)[0] for option in options if get_origin(option) is list]
        else:
            models = [option for option in options if _is_section(option) and key in option.model_fields]
            found = [whole_annotation(model.model_fields[key]) for model in models]
        if not found:
            return None
        annotation = found[0]
    return annotation


def owners_of(key: str) -> list[str]:
    """Returns the dotted paths of the sections that have a key; the empty path is the top level."""
    owners = [path for path, section in sections() if key in section.model_fields]
    return list(dict.fromkeys(([""] if key in Recipe.model_fields else []) + owners))


def type_names(section: type[Section]) -> tuple[str, ...]:
    """Returns the values of `type` that mean this section; empty for a section without that key."""
    info = section.model_fields.get("type")
    return get_args(info.annotation) if info else ()


def default_type(key: str) -> str | None:
    """Returns the `type` that a top-level section has when it names none."""
    info = Recipe.model_fields.get(key)
    return getattr(info.default, "type", None) if info else None


def takes_only_text(annotation: Annotation) -> bool:
    """Says whether a key takes text and nothing that could be written like it."""
    kinds = {option for option in _options(annotation) if option is not types.NoneType}
    return kinds == {str}


def describe(annotation: Annotation) -> str:
    """Returns the values that an annotation allows, in words with their limits, such as `a whole number, 1 or more`."""
    literals = [f"`{name}`" for option in _options(annotation) for name in _literal_names(option)]
    phrases = [_phrase(option) for option in _options(annotation) if not _literal_names(option)]
    limits = choices([words for item in _constraints(annotation) if (words := _limit(item))], last_word="and")
    return choices(literals + phrases) + (f", {limits}" if limits else "")


def whole_annotation(info: FieldInfo) -> Annotation:
    """Returns a field's annotation with its constraints, which Pydantic keeps apart."""
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation  # type: ignore[valid-type]


def _literal_names(option: Annotation) -> tuple[str, ...]:
    return get_args(option) if get_origin(option) is Literal else ()


def _phrase(option: Annotation) -> str:
    if get_origin(option) is list:
        item = get_args(option)[0]
        if _is_section(item):
            return f"a list of mappings ({_keys(item)})"
        if names := [f"`{name}`" for name in _literal_names(item)]:
            return f"a list of {choices(names)}"
        return "a list of whole numbers" if item is int else "a list of text"
    if _is_section(option):
        kinds = choices([f"`{name}`" for name in type_names(option)])
        return f"a mapping of type {kinds}" if kinds else f"a mapping ({_keys(option)})"
    names = {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "text", types.NoneType: "`null`"}
    return names[option]


def _keys(section: type[Section]) -> str:
    return ", ".join(f"`{key}`" for key in section.model_fields)


def _limit(constraint: object) -> str:
    match constraint:
        case annotated_types.Ge(ge=bound):
            return f"{bound:g} or more"  # type: ignore[str-format]
        case annotated_types.Gt(gt=bound):
            return f"more than {bound:g}"  # type: ignore[str-format]
        case annotated_types.Le(le=bound):
            return f"at most {bound}"
        case annotated_types.Lt(lt=bound):
            return f"less than {bound:g}"  # type: ignore[str-format]
        case annotated_types.MinLen():
            return "not empty"
    return ""


def _constraints(annotation: Annotation) -> Iterator[object]:
    """Yields the constraints of an annotation and of a union's members, but not those inside lists and sections."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from _constraints(inner)
        for item in metadata:
            yield from item.metadata if isinstance(item, FieldInfo) else [item]
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _constraints(option)


def _options(annotation: Annotation) -> list[Annotation]:
    """Returns the members of a union, seen through `Annotated`, or the annotation alone."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for option in get_args(annotation) for inner in _options(option)]
    return [annotation]


def _is_section(annotation: Annotation) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)
