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
    def from_dict(cls, values: Any) -> Measurement:
        """Returns what `as_dict` gave.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(values, dict) or not {"loss", "scores", "answers"} <= values.keys():
            raise ValueError("not a measurement")
        loss, scores, answers = values["loss"], values["scores"], values["answers"]
        is_score = isinstance(scores, dict) and all(isinstance(value, int | float) for value in scores.values())
        is_text = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
        if not (loss is None or isinstance(loss, int | float)) or not is_score or not is_text:
            raise ValueError("not a measurement")
        return cls(loss, scores, answers)
