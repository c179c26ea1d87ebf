"""The held-out prompts of a run, how answers to them are scored, and what of it the report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.data.types import PromptReference
from finetune.errors import DataError
from finetune.recipe.schema import EvaluationSection
from finetune.trainer.measurement import Measurement
from finetune.trainer.scores import Score, load_scores


@dataclass(frozen=True)
class HeldOut:
    """Prompts with their references, in the order of the held-out data.

    Args:
        scores: what is computed of each answer, by name.
        num_samples: prompts whose answers the report shows, from the first on.
    """

    references: Sequence[PromptReference]
    scores: dict[str, Score]
    num_samples: int

    @classmethod
    def of(cls, section: EvaluationSection, references: Sequence[PromptReference]) -> HeldOut:
        """Takes as many references as the recipe scores or shows.

        Raises:
            DataError: scores are asked for, and no held-out record has a prompt and an answer.
            RecipeError: a metric's file cannot be used.
        """
        if section.metrics and not references:
            raise DataError(
                f"{', '.join(section.metrics)} cannot be computed: no held-out record has a prompt and an answer",
                place="evaluation.metrics",
                remedy="Leave evaluation.metrics out, or name held-out conversations in data.eval.",
            )
        return cls(references[: num_answers(section)], load_scores(section.metrics), section.samples)

    def samples(self, before: Measurement | None, after: Measurement | None) -> list[dict[str, str | None]]:
        """Returns the first prompts with their reference and the answers before and after."""
        return [
            {
                "prompt": reference.prompt,
                "reference": reference.reference,
                "before": before.answers[index] if before else None,
                "after": after.answers[index] if after else None,
            }
            for index, reference in enumerate(self.references[: self.num_samples])
        ]

    def score_table(self, before: Measurement | None, after: Measurement | None) -> dict[str, dict[str, float | None]]:
        """Returns each score before and after, and over how many prompts."""
        return {
            name: {
                "before": before.scores.get(name) if before else None,
                "after": after.scores.get(name) if after else None,
                "rows": len(self.references),
            }
            for name in self.scores
        }


def num_answers(section: EvaluationSection) -> int:
    """Returns how many held-out prompts are answered: those that are scored, or those that are shown."""
    return max(section.metric_rows if section.metrics else 0, section.samples)
