"""Take a typed value out of a record, or raise the error that names the key, what was found and the place."""

from __future__ import annotations

from typing import Any, NamedTuple

from finetune.data.loss_weights import LARGEST_WEIGHT, SMALLEST_WEIGHT
from finetune.data.shorten import shorten
from finetune.data.strict_json import JsonFault, decode
from finetune.data.types import Origin
from finetune.errors import DataError

LEARNED_KEYS = ("weight", "loss_weight", "train", "training", "trainable", "loss", "mask")
"""Keys of a message or part that say whether it is learned: 1 or true that it is, 0 or false that it is not."""
WEIGHT_KEYS = ("weight", "loss_weight")
"""Those of them that take other numbers too, and then say how much each token counts."""


class Choice(NamedTuple):
    """What a message or part says of itself."""

    is_learned: bool | None
    """None where it says nothing."""
    weight: float = 1.0


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


def choice_of(holder: dict[str, Any], where: str, origin: Origin) -> Choice:
    """Returns whether a message or part says of itself that it is learned, and with what weight.

    Raises:
        DataError: a value is no weight (of a key that takes none: neither 0 nor 1), or two keys contradict each other.
    """
    found = {
        key: _weight_of(key, holder[key], f"{where}.{key}", origin)
        for key in LEARNED_KEYS
        if holder.get(key) is not None
    }
    weights = {found[key] for key in WEIGHT_KEYS if key in found}
    if len(set(map(bool, found.values()))) > 1 or len(weights) > 1:
        raise DataError(
            f"{where} contradicts itself: {', '.join(f'{key} is {weight:g}' for key, weight in found.items())}",
            place=str(origin),
            remedy="Keep one of the keys.",
        )
    if not found:
        return Choice(None)
    weight = next(iter(weights or found.values()))
    return Choice(weight > 0, weight or 1.0)


def _weight_of(key: str, value: Any, name: str, origin: Origin) -> float:
    """Returns the weight under a key, 0 where it is not learned."""
    is_number = isinstance(value, bool | int | float)
    if is_number and value in (0, 1):
        return float(value)
    if key not in WEIGHT_KEYS:
        raise DataError(
            f"{name} must be 0 or 1 (or false or true), found {shorten(value)}",
            place=str(origin),
            remedy=f"Set {name} to 1 to learn it and to 0 to leave it out; for a number between or beyond, call the "
            f"key {' or '.join(WEIGHT_KEYS)}.",
        )
    # Compared before it is turned into a float: an integer may be too large for one. NaN fails the comparison.
    if not is_number or not SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT:
        raise DataError(
            f"{name} must be 0, or a number from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}, found {shorten(value)}",
            place=str(origin),
            remedy=f"Set {name} to how much its tokens count in the loss: 1 is as much as others, 0 leaves it out. To "
            "take whole files more or less often, set the source's `weight`.",
        )
    return float(value)


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
