"""Take a typed value out of a record, or raise the error that names the key, what was found and the place."""

from __future__ import annotations

from typing import Any

from finetune.data.shorten import shorten
from finetune.data.strict_json import JsonFault, decode
from finetune.data.types import Origin
from finetune.errors import DataError

LEARNED_KEYS = ("weight", "loss_weight", "train", "training", "trainable", "loss", "mask")
"""Keys of a message or part that say whether it is learned: 1 or true that it is, 0 or false that it is not."""


def value_of(record: dict[str, Any], key: str, origin: Origin, *, where: str = "") -> Any:
    """Returns the value of a key that must be there."""
    if key not in record:
        found = shorten(", ".join(map(str, record)))
        raise DataError(
            f"{where or 'the record'} has no key {key!r}; its keys are {found}",
            place=str(origin),
            remedy=f"Add {key!r}, name the column that holds it in the source's `columns`, or set the source's "
            "`format` to what the file holds.",
        )
    return record[key]


def text_of(record: dict[str, Any], key: str, origin: Origin, *, where: str = "") -> str:
    """Returns the text of a key that must be there; one that cannot be encoded is refused."""
    value = value_of(record, key, origin, where=where)
    name = f"{where}.{key}" if where else key
    if not isinstance(value, str):
        raise wrong(name, "a string", value, origin)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} holds half of a surrogate pair at character {error.start}: {shorten(value[error.start :])}",
            place=str(origin),
            remedy="Write the file again with whole characters; the text was cut inside an escaped one.",
        ) from error
    return value


def optional_text_of(record: dict[str, Any], key: str, origin: Origin) -> str:
    """Returns the text of a key; empty where it is absent or null."""
    return "" if record.get(key) is None else text_of(record, key, origin)


def list_of(record: dict[str, Any], key: str, origin: Origin) -> list[Any]:
    """Returns the list of a key that must be there and not empty."""
    value = value_of(record, key, origin)
    if not isinstance(value, list):
        raise wrong(key, "a list", value, origin)
    if not value:
        raise DataError(f"{key} is an empty list", place=str(origin), remedy="Fill it, or remove the record.")
    return value


def parsed(text: str, name: str, origin: Origin) -> Any:
    """Returns the JSON value that a text inside a record holds."""
    try:
        return decode(text)
    except JsonFault as fault:
        raise DataError(
            f"{name} is not valid JSON: {fault.shown(text)}",
            place=str(origin),
            remedy=f"Correct {name}, or write it as an object instead of a string.",
        ) from fault


def is_learned_of(holder: dict[str, Any], where: str, origin: Origin) -> bool | None:
    """Returns whether a message or part says of itself that it is learned; None where it says nothing.

    Raises:
        DataError: the value is neither 0 nor 1, or two keys contradict each other.
    """
    found: dict[str, bool] = {}
    for key in LEARNED_KEYS:
        value = holder.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"{where}.{key} must be 0 or 1 (or false or true), found {shorten(value)}: a token is learned or not, "
                "there is nothing between",
                place=str(origin),
                remedy=f"Set {where}.{key} to 1 to learn it and to 0 to leave it out; to take whole files more or "
                "less often, set the source's `weight`.",
            )
        found[key] = bool(value)
    if len(set(found.values())) > 1:
        raise DataError(
            f"{where} contradicts itself: {', '.join(f'{key} is {value}' for key, value in found.items())}",
            place=str(origin),
            remedy="Keep one of the keys.",
        )
    return next(iter(found.values()), None)


def is_given(value: Any) -> bool:
    """Says whether a value holds anything: null and empty texts, lists and objects do not."""
    return value is not None and value not in ("", [], {})


def wrong(name: str, expected: str, value: Any, origin: Origin) -> DataError:
    """Returns the error for a value of the wrong type."""
    return DataError(
        f"{name} must be {expected}, found {type(value).__name__}: {shorten(value)}",
        place=str(origin),
        remedy=f"Correct {name} in this record.",
    )


def empty(name: str, origin: Origin) -> DataError:
    """Returns the error for a text that must not be empty."""
    return DataError(f"{name} is empty", place=str(origin), remedy="Fill it, or remove the record.")


def unknown_role(name: str, role: str, *, known: tuple[str, ...], origin: Origin) -> DataError:
    """Returns the error for a role that is none of those known."""
    return DataError(
        f"{name}: unknown role {shorten(role)}", place=str(origin), remedy=f"Use one of: {', '.join(known)}."
    )
