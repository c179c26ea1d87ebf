"""The types that data flows through: Conversation -> Sample -> Row -> Batch.

Each stage of the data layer is a function from one of these to the next. Only `collate.py` makes tensors; the other
stages hold numpy arrays, so that millions of samples stay compact and cheap to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IGNORE_INDEX = -100
"""Label of a token that is not learned; the value that torch's cross entropy skips."""

_LINE_NUMBERED = (".jsonl", ".csv", ".tsv")
"""Files whose records are numbered by the line that they start on; they may be compressed."""
_COMPRESSED = (".gz", ".zst")

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Origin:
    """Where a record came from, for messages and the ledger."""

    path: str
    record: int
    """Number of the record in its file: in JSONL, CSV and TSV the line that it starts on, else its position; from 1."""
    line: int | None = field(default=None, compare=False)
    """The line that a record of a JSON array starts on, where it is known."""

    def __str__(self) -> str:
        """Returns `FILE:LINE` where the line is known, and `FILE (record N)` elsewhere."""
        if self.line is not None:
            return f"{self.path}:{self.line} (record {self.record})"
        return f"{self.path}:{self.record}" if _has_line_numbers(self.path) else f"{self.path} (record {self.record})"

    def as_dict(self) -> dict[str, str | int | None]:
        """Returns the place as plain JSON values: the record's number in its file, the line that it starts on, or both,
        with None for what is not known."""
        if self.line is None and _has_line_numbers(self.path):
            return {"path": self.path, "record": None, "line": self.record}
        return {"path": self.path, "record": self.record, "line": self.line}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Origin:
        """Reads what `as_dict` gave.

        Raises:
            KeyError: a value is missing.
        """
        path, record, line = values["path"], values["record"], values["line"]
        return cls(path, line) if record is None else cls(path, record, line)


def _has_line_numbers(path: str) -> bool:
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _LINE_NUMBERED


@dataclass(frozen=True)
class ContentPart:
    """A stretch of a message's content with its own choice of whether it is learned."""

    text: str
    is_learned: bool | None = None
    """None leaves the choice to the message, and through it to the recipe."""
    weight: float = 1.0
    """How much each of its tokens counts in the loss, where `is_learned` is true."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    extra: dict[str, Any] = field(default_factory=dict)
    """Template variables beside the content, such as `tool_calls` or `reasoning_content`."""
    is_learned: bool | None = None
    """The record's own choice for this message; None leaves it to the recipe's `data.loss_on`."""
    parts: tuple[ContentPart, ...] = ()
    """The stretches that make up `content`, where the record chooses for some of them; else empty."""
    weight: float = 1.0
    """How much each of its tokens counts in the loss, where `is_learned` is true."""


@dataclass(frozen=True)
class Conversation:
    """One record of any chat-like or plain format, in one shape.

    `kind` says how it is rendered: `chat` through the chat template; `completion` as prompt and completion text
    without a template; `text` as one document.
    """

    kind: Literal["chat", "completion", "text"]
    origin: Origin
    messages: tuple[Message, ...] = ()
    text: str = ""
    """The document of kind `text`, or the prompt of kind `completion`."""
    completion: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    num_prompt_messages: int | None = None
    """Of a prompt/completion record made of messages: how many of them are the prompt."""
    unused_keys: tuple[str, ...] = ()
    """Keys of the record that had no part in the conversation, such as `id`."""

    @property
    def calls_undefined_tools(self) -> bool:
        """Whether it calls tools and defines none, so that the model would not be told of what it calls."""
        return not self.tools and any(message.extra.get("tool_calls") for message in self.messages)


@dataclass(frozen=True)
class Sample:
    """One conversation, tokenized.

    `input_ids` and `labels` are int32 of the same length L; a label is the token itself where it is learned and
    `IGNORE_INDEX` elsewhere. The shift by one happens in the loss, so `labels[i]` belongs to `input_ids[i]`. The first
    label is always `IGNORE_INDEX`: nothing precedes it. `loss_weights` is float32 [L], 0 where the token is not
    learned, or None where each learned token has the weight 1.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    origin: Origin
    loss_weights: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Row:
    """One training row: the samples that share it, by index into the sample list, and its length in tokens."""

    sample_indices: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class PromptReference:
    """A held-out prompt for generation, with the answer that the data gives.

    `prompt_ids` are exactly the training tokens up to the answer, so generation sees what training saw.
    """

    prompt_ids: NDArray[np.int32]
    prompt: str
    reference: str
    origin: Origin
