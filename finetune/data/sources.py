"""From a source of the recipe to its files and records: one file, a folder, a pattern, or a dataset of the hub."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.console import Say
from finetune.data.hub import HubDataset
from finetune.data.load import Record, is_data_file, read_records_and_faults
from finetune.data.shorten import shorten
from finetune.data.types import Origin
from finetune.errors import DataError
from finetune.recipe.paths import DATA_SUFFIXES, RELATIVE_TO, is_hub_dataset
from finetune.recipe.schema import DataSection, Source

_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "state.json"}
"""Files that the datasets library puts beside its data; they hold no records."""
_ANSWER_ROLES = {"completion", "output", "messages", "conversations", "text"}
_PAIR_ROLES = {"chosen", "rejected"}
_SPLITS_FILE = "dataset_dict.json"
_OPTIONAL_ROLES = {"input", "history", "system", "tools"}
_SHOWN_NAMES = 5


def source_files(source: Source) -> list[str]:
    """Returns the names of a source's parts in the order in which they are read; the paths of its records' origins.

    A folder gives all data files below it, sorted by path; a pattern all files that fit it, sorted. A file that no
    one can read is returned as it is: reading it tells what is wrong. A dataset of the hub is one part.

    Raises:
        DataError: a folder or pattern has no data file.
    """
    if (hub := hub_of(source)) is not None:
        return [hub.label]
    if os.path.isdir(source.path):
        return [str(file) for file in _data_files_below(Path(source.path))[0]]
    if not os.path.lexists(source.path) and glob.has_magic(source.path):
        return _files_of_pattern(source.path)
    return [source.path]


def hashed_files(source: Source) -> list[str]:
    """Returns the files whose bytes decide what a source holds; none for a dataset of the hub, whose commit does.

    Raises:
        DataError: as `source_files` does.
    """
    return [] if is_hub_dataset(source.path) else source_files(source)


def hub_of(source: Source) -> HubDataset | None:
    """Returns the dataset of the hub that a source names; None for files."""
    if not is_hub_dataset(source.path):
        return None
    split = source.split or "train"
    return HubDataset(source.path, source.name, split, source.revision, source.streaming, source.max_rows)


def pin_name(source: Source) -> str:
    """Returns what the commit of a dataset of the hub is kept under: the dataset and its revision."""
    return f"{source.path}@{source.revision or 'main'}"


def with_commits(data: DataSection, commits: Mapping[str, str]) -> DataSection:
    """Returns the section with the datasets of the hub at the commits that are kept under their names."""

    def pinned(source: Source) -> Source:
        sha = commits.get(pin_name(source)) if is_hub_dataset(source.path) else None
        return source if sha is None else source.model_copy(update={"revision": sha})

    lists = {"train": data.train} | ({"eval": data.eval} if isinstance(data.eval, list) else {})
    return data.model_copy(update={name: [pinned(each) for each in sources] for name, sources in lists.items()})


def read_source(source: Source, *, say: Say) -> Iterator[tuple[Origin, Record | DataError]]:
    """Yields the records of all parts of a source, `max_rows` of them at most, their columns named by role.

    In place of a record that is broken, while the rest can be read, what is wrong with it.

    Args:
        say: takes a line about files of a folder that were left alone, or where a dataset of the hub is read from.

    Raises:
        DataError: a file cannot be read, or a column that the recipe names is not there.
        EnvironmentProblem: a dataset of the hub cannot be reached.
    """
    records = islice(_records(source, say), source.max_rows)
    if source.columns is None:
        yield from records
        return
    roles: dict[str, str] = source.columns.model_dump(exclude_none=True)
    unseen = dict(roles)
    first: tuple[Origin, Record] | None = None
    for origin, record in records:
        if isinstance(record, DataError):
            yield origin, record
            continue
        if first is None:
            first = origin, record
            _require_columns(roles, record, origin)
        if isinstance(record, str):
            yield origin, record
            continue
        unseen = {role: column for role, column in unseen.items() if column not in record}
        yield origin, _with_roles(record, roles)
    if unseen and first is not None:
        role, column = next(iter(unseen.items()))
        raise _missing_column(
            role, column, first[1], place=source.path, where="a column that all records of the source lack"
        )


def _records(source: Source, say: Say) -> Iterator[tuple[Origin, Record | DataError]]:
    if (hub := hub_of(source)) is not None:
        yield from hub.records(say=say)
        return
    path = Path(source.path)
    left_alone = _data_files_below(path)[1] if os.path.isdir(path) else []
    if left_alone:
        more = ", ..." if len(left_alone) > _SHOWN_NAMES else ""
        shown = ", ".join(str(file.relative_to(path)) for file in left_alone[:_SHOWN_NAMES])
        what = (
            "1 file that is no data file"
            if len(left_alone) == 1
            else f"{len(left_alone):,} files that are no data files"
        )
        say(f"{source.path}: {what} left alone: {shown}{more}")
    for file in source_files(source):
        yield from read_records_and_faults(file, max_rows=None)


def _data_files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the data files below a folder, sorted, and the other files; hidden ones are in neither.

    Linked folders are followed, each folder once, so that links in a circle end.
    """
    data, others = [], []
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_raise_unreadable):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name == _SPLITS_FILE:
                raise DataError(
                    f"the folder holds a dataset of several splits ({', '.join(sorted(folders))})",
                    place=place,
                    remedy="Name the folder of one split, such as train.",
                )
            if not name.startswith(".") and name not in _DESCRIPTIONS:
                (data if is_data_file(name) else others).append(Path(place, name))
    if not data:
        raise DataError(
            "the folder holds no data file",
            place=str(folder),
            remedy=f"Put files in it that end in one of {', '.join(DATA_SUFFIXES)}, or correct the path.",
        )
    return sorted(data), sorted(others)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(
        f"the folder cannot be read: {error.strerror}",
        place=str(error.filename),
        remedy="Give yourself the right to read it.",
    ) from error


def _files_of_pattern(pattern: str) -> list[str]:
    files = sorted(path for path in glob.iglob(pattern, recursive=True) if not os.path.isdir(path))
    if not files:
        raise DataError(
            "no file fits this pattern",
            place=pattern,
            remedy=f"Correct it: * stands for any part of a name, ** for any folders. {RELATIVE_TO}",
        )
    return files


def _with_roles(record: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
    """Returns the record with the columns renamed to their roles.

    A column that has a role's name, and is not the one meant, is kept as `own NAME`, so that it is told as not used.
    So is what is left of a preference pair, where the recipe names the column with the answer to learn.
    """
    taken = set(roles.values())
    own = set(roles) | (_PAIR_ROLES if _ANSWER_ROLES & set(roles) else set())
    rest = {(f"own {key}" if key in own else key): value for key, value in record.items() if key not in taken}
    return rest | {role: record[column] for role, column in roles.items() if column in record}


def _require_columns(roles: dict[str, str], record: Record, origin: Origin) -> None:
    for role, column in roles.items():
        if isinstance(record, str):
            raise DataError(
                "plain text has no columns",
                place=str(origin),
                remedy="Remove `columns` from the source.",
            )
        if column not in record and role not in _OPTIONAL_ROLES:
            raise _missing_column(role, column, record, place=str(origin), where="a column that the record lacks")


def _missing_column(role: str, column: str, record: Record, *, place: str, where: str) -> DataError:
    names = [] if isinstance(record, str) else list(map(str, record))
    near = difflib.get_close_matches(column, names, n=1)
    return DataError(
        f"`columns.{role}` is {shorten(column)}, {where}; the columns are {shorten(', '.join(names))}",
        place=place,
        remedy=f"Did you mean {near[0]}?" if near else f"Correct `columns.{role}`, or remove it.",
    )
