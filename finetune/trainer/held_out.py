"""The prompts of a run, held out or the user's own, how answers to them are scored, and what of it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.types import PromptReference
from finetune.errors import DataError
from finetune.recipe.schema import EvaluationSection
from finetune.trainer.measurement import Measurement
from finetune.trainer.scores import Score, load_scores


@dataclass(frozen=True)
class HeldOut:
    """Prompts with their references, in the order of the held-out data, and prompts without.

    A measurement answers `prompts`: all references, then the user's own. Of these the *shown* ones are the first
    references and the own ones.

    Args:
        scores: what is computed of each answer to a reference, by name.
        num_samples: references whose answers are shown, from the first on.
        own: the user's prompts; their `reference` is empty.
    """

    references: Sequence[PromptReference]
    scores: dict[str, Score]
    num_samples: int
    own: Sequence[PromptReference] = ()

    @classmethod
    def of(
        cls, section: EvaluationSection, references: Sequence[PromptReference], own: Sequence[PromptReference] = ()
    ) -> HeldOut:
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
        return cls(references[: num_answers(section)], load_scores(section.metrics), section.samples, own)

    @property
    def prompts(self) -> list[NDArray[np.int32]]:
        """The tokens (int32 `[T]`) of all prompts."""
        return [prompt.prompt_ids for prompt in (*self.references, *self.own)]

    @property
    def shown(self) -> list[PromptReference]:
        """The prompts whose answers are shown."""
        return [*self.references[: self.num_samples], *self.own]

    def shown_answers(self, answers: Sequence[str]) -> list[str]:
        """Returns the shown ones of the answers to `prompts`."""
        return [*answers[: min(self.num_samples, len(self.references))], *answers[len(self.references) :]]

    def sample_records(self, answers: Sequence[str], *, step: int) -> list[dict[str, Any]]:
        """Returns the lines of `samples.jsonl` for the answers to the shown prompts at one step."""
        num_references = len(self.shown) - len(self.own)
        return [
            {
                "step": step,
                "prompt": prompt.prompt,
                "reference": prompt.reference if number < num_references else None,
                "answer": answer,
            }
            for number, (prompt, answer) in enumerate(zip(self.shown, answers, strict=True))
        ]

    def samples(
        self, before: Measurement | None, after: Measurement | None, records: Iterable[Mapping[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """Returns the shown prompts with their reference, the answers before and after, and those of each step.

        Args:
            records: the lines of `samples.jsonl`.
        """
        by_prompt: dict[str, dict[int, str]] = {}
        for record in records:
            by_prompt.setdefault(record["prompt"], {})[record["step"]] = record["answer"]
        answers = [self.shown_answers(each.answers) if each else None for each in (before, after)]
        num_references = len(self.shown) - len(self.own)
        return [
            {
                "prompt": prompt.prompt,
                "reference": prompt.reference if number < num_references else None,
                "before": answers[0][number] if answers[0] else None,
                "after": answers[1][number] if answers[1] else None,
                "steps": [
                    {"step": step, "answer": answer}
                    for step, answer in sorted(by_prompt.get(prompt.prompt, {}).items())
                ],
            }
            for number, prompt in enumerate(self.shown)
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
