"""Errors of the hub's libraries: which of them mean that the hub cannot be reached, and where they are placed."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx

from finetune.data.hub_errors import hub_error, is_unreachable
from finetune.errors import DataError, EnvironmentProblem

REQUEST = httpx.Request("GET", "https://hub.example/api/datasets/org/set")


def answer(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    return kind("no", response=httpx.Response(status, request=REQUEST))


def caused(error: BaseException, *, by: BaseException, is_explicit: bool = True) -> BaseException:
    """Returns the error as it is raised while another one is handled, or explicitly from it."""
    if is_explicit:
        error.__cause__ = by
    else:
        error.__context__ = by
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answer(429), True),
        (answer(500), True),
        (answer(503), True),
        (answer(400), False),
        (answer(401, RepositoryNotFoundError), False),
        (answer(403), False),
        (answer(403, GatedRepoError), False),
        (answer(404, RemoteEntryNotFoundError), False),
        (httpx.ConnectError("no route"), True),
        (httpx.ReadTimeout("slow"), True),
        (httpx.RemoteProtocolError("broke off"), True),
        (ConnectionResetError("reset"), True),
        (TimeoutError("slow"), True),
        (LocalEntryNotFoundError("not in the cache, and offline"), True),
        (FileNotFoundError("no file"), False),
        (PermissionError("not yours"), False),
        (ValueError("Bad split"), False),
        (caused(ValueError("cannot load"), by=httpx.ConnectError("no route")), True),
        (caused(ValueError("cannot load"), by=httpx.ConnectError("no route"), is_explicit=False), True),
        (caused(RuntimeError("a"), by=caused(OSError("b"), by=TimeoutError("c"), is_explicit=False)), True),
        (caused(RuntimeError("a"), by=ValueError("b")), False),
        # The nearest answer of the hub decides: it was reached, whatever was tried before.
        (caused(answer(403), by=httpx.ConnectError("no route"), is_explicit=False), False),
        (caused(ValueError("cannot load"), by=answer(403)), False),
        (caused(ValueError("cannot load"), by=answer(503)), True),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}" if isinstance(value, BaseException) else str(value),
)
def test_is_unreachable(error: BaseException, expected: bool) -> None:
    assert is_unreachable(error) is expected


@pytest.mark.parametrize(
    ("error", "num_read", "kind", "place", "words"),
    [
        (answer(503), 0, EnvironmentProblem, "org/set[train]", "cannot be reached"),
        (answer(503), 20, EnvironmentProblem, "org/set[train]", "broke off after 20 rows"),
        (answer(403), 0, DataError, "org/set[train]", "its files are broken"),
        (ValueError("bad JSON"), 20, DataError, "org/set[train] (record 21)", "after row 20"),
        (PermissionError("not yours"), 0, EnvironmentProblem, "org/set[train]", "local copy"),
    ],
    ids=["unreachable", "broke-off", "forbidden", "broken-row", "permission"],
)
def test_places_and_kinds(error: Exception, num_read: int, kind: type, place: str, words: str) -> None:
    found = hub_error(error, id="org/set", place="org/set[train]", num_read=num_read)
    assert (type(found), found.place) == (kind, place)
    assert words in found.message
    assert found.remedy
