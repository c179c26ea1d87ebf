"""The model at one moment, on the held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """Held-out loss, scores by name, and the answers to the first references, in order."""

    loss: float | None
    scores: dict[str, float]
    answers: list[str]

    def as_dict(self) -> dict[str, object]:
        return {"loss": self.loss, "scores": self.scores, "answers": self.answers}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        return cls(values["loss"], values["scores"], values["answers"])
