"""From what the hub's libraries raise to errors that name the dataset, what is wrong with it, and what to do."""

from __future__ import annotations

from finetune.data.shorten import shorten
from finetune.data.types import Origin
from finetune.errors import DataError, EnvironmentProblem, FinetuneError
from finetune.recipe.paths import RELATIVE_TO

NETWORK_REMEDY = (
    "Connect to the network and load it once (later runs use the local copy or the token cache), or name a local file "
    f"or folder. {RELATIVE_TO}"
)


def is_unreachable(error: BaseException) -> bool:
    """Says whether the network, or the hub itself, is the cause of an error; causes of causes count.

    An answer such as "no such dataset" came over the network, so it is none.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import httpx

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, HfHubHTTPError):
            status = getattr(seen.response, "status_code", 0)
            return status >= 500 or status == 429
        if isinstance(seen, httpx.HTTPError | ConnectionError | TimeoutError | LocalEntryNotFoundError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def hub_error(
    error: Exception, *, id: str, place: str, revision: str | None = None, num_read: int = 0
) -> FinetuneError:
    """Returns the error to raise in place of one of the libraries.

    Args:
        id: the dataset.
        place: the dataset with its split, where that is known.
        revision: as the recipe has it.
        num_read: rows that came before the error.
    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    text = shorten(" ".join(str(error).split()) or type(error).__name__)
    if isinstance(error, RevisionNotFoundError):
        return DataError(
            f"the dataset has no revision {revision or 'main'}: {text}",
            place=place,
            remedy="Set the source's `revision` to a branch, tag or full commit hash of the dataset, or remove it.",
        )
    if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError | HFValidationError):
        return DataError(
            f"there is no file or folder of this name, and no such dataset on the hub: {text}",
            place=place,
            remedy="Correct `path`: a dataset is named org/name, and a private one needs `hf auth login`. "
            f"{RELATIVE_TO}",
        )
    if is_unreachable(error):
        return unreachable(text, place=place, num_read=num_read)
    if isinstance(error, PermissionError):
        return EnvironmentProblem(
            f"the local copy cannot be read or written: {text}",
            place=place,
            remedy="Give yourself the right to it, or set HF_HOME to a folder of yours.",
        )
    if num_read:
        return DataError(
            f"the split cannot be read after row {num_read:,}: {text}",
            place=str(Origin(place, num_read + 1)),
            remedy="Its files may be broken, or their columns differ: name another `revision`, or set `max_rows` to "
            f"{num_read} to do without the rest.",
        )
    # The library's message lists the configurations or splits that there are.
    return DataError(
        "the dataset has no such configuration or split, or its files are broken: " + " ".join(str(error).split()),
        place=place,
        remedy="Set the source's `name` and `split` to ones that the dataset has.",
    )


def unreachable(text: str, *, place: str, num_read: int = 0) -> EnvironmentProblem:
    """Returns the error for a hub that does not answer, or no longer."""
    if num_read:
        return EnvironmentProblem(
            f"the connection to the hub broke off after {num_read:,} rows: {text}",
            place=place,
            remedy="Give the command again once the network is back; nothing half read was kept. To continue from a "
            "local copy instead, remove `streaming`.",
        )
    return EnvironmentProblem(
        f"there is no file or folder of this name, and the hub's dataset cannot be reached: {text}",
        place=place,
        remedy=NETWORK_REMEDY,
    )
