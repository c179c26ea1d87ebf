"""Take a typed value out of a record, or raise the error that names the key, what was found and the place."""

from __future__ import annotations

import re
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
_INDEX = r"\[\d+\]"


class Choice(NamedTuple):
    """What a message or part says of itself."""

    is_learned: bool | None
    """None where it says nothing."""
    weight: float = 1.0


def wrong_record(name: str, what: str, origin: Origin, *, remedy: str, found: str = "") -> DataError:
    """Returns the error `name what found`; such errors count as one kind, whatever was found and at whatever index.

    Args:
        name: where in the record, such as `messages[1].content`.
        found: what differs from record to record, with the punctuation before it.
    """
    return DataError(
        f"{name} {what}{found}", place=str(origin), remedy=remedy, kind=f"{re.sub(_INDEX, '[]', name)} {what}"
    )


def value_of(record: dict[str, Any], key: str, origin: Origin, *, where: str = "") -> Any:
    """Returns the value of a key that must be there."""
    if key not in record:
        raise wrong_record(
            where or "the record",
            f"has no key {key!r}",
            origin,
            remedy=f"Add {key!r}, name the column that holds it in the source's `columns`, or set the source's "
            "`format` to what the file holds.",
            found=f"; its keys are {shorten(', '.join(map(str, record)))}",
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
        raise wrong_record(
            name,
            "holds half of a surrogate pair",
            origin,
            remedy="Write the file again with whole characters; the text was cut inside an escaped one.",
            found=f" at character {error.start}: {shorten(value[error.start :])}",
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
        raise wrong_record(
            name,
            "is not valid JSON",
            origin,
            remedy=f"{fault.remedy or f'Correct {name}.'} In JSON files it need not be a string.",
            found=f": {fault.shown(text)}",
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
        raise wrong_record(
            where,
            "contradicts itself",
            origin,
            remedy="Keep one of the keys.",
            found=f": {', '.join(f'{key} is {weight:g}' for key, weight in found.items())}",
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
        raise wrong_record(
            name,
            "must be 0 or 1 (or false or true)",
            origin,
            found=f", found {shorten(value)}",
            remedy=f"Set {name} to 1 to learn it and to 0 to leave it out; for a number between or beyond, call the "
            f"key {' or '.join(WEIGHT_KEYS)}.",
        )
    # Compared before it is turned into a float: an integer may be too large for one. NaN fails the comparison.
    if not is_number or not SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT:
        raise wrong_record(
            name,
            f"must be 0, or a number from {SMALLEST_WEIGHT:f} to {LARGEST_WEIGHT:g}",
            origin,
            found=f", found {shorten(value)}",
            remedy=f"Set {name} to how much its tokens count in the loss: 1 is as much as others, 0 leaves it out. To "
            "take whole files more or less often, set the source's `weight`.",
        )
    return float(value)


def is_given(value: Any) -> bool:
    """Says whether a value holds anything: null and empty texts, lists and objects do not."""
    return value is not None and value not in ("", [], {})


def wrong(name: str, expected: str, value: Any, origin: Origin) -> DataError:
    """Returns the error for a value of the wrong type."""
    return wrong_record(
        name,
        f"must be {expected}, found {type(value).__name__}",
        origin,
        remedy=f"Correct {name} in this record.",
        found=f": {shorten(value)}",
    )


def empty(name: str, origin: Origin) -> DataError:
    """Returns the error for a text that must not be empty."""
    return wrong_record(name, "is empty", origin, remedy="Fill it, or remove the record.")


def unknown_role(name: str, role: str, *, known: tuple[str, ...], origin: Origin) -> DataError:
    """Returns the error for a role that is none of those known."""
    return wrong_record(
        name, f"has the unknown role {shorten(role)}", origin, remedy=f"Use one of: {', '.join(known)}."
    )
