"""The prompts of a run, held out or the user's own, how answers to them are scored, and what of it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.types import PromptReference
from finetune.errors import DataError
from finetune.recipe.schema import EvaluationSection
from finetune.run.samples import SampleAnswer, group_by_prompt
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
        return [
            {"step": step, "prompt": prompt, "reference": reference, "answer": answer}
            for (prompt, reference), answer in zip(self._shown_texts(), answers, strict=True)
        ]

    def samples(
        self, before: Measurement | None, after: Measurement | None, given: Sequence[SampleAnswer] = ()
    ) -> list[dict[str, Any]]:
        """Returns the shown prompts with their reference, the answers before and after, and those of each step.

        Args:
            given: the answers in `samples.jsonl`.
        """
        groups = {(group[0].prompt, group[0].reference): group for group in group_by_prompt(given)}
        answers = [self.shown_answers(each.answers) if each else None for each in (before, after)]
        return [
            {
                "prompt": prompt,
                "reference": reference,
                "before": answers[0][number] if answers[0] else None,
                "after": answers[1][number] if answers[1] else None,
                "steps": [
                    {"step": sample.step, "answer": sample.answer} for sample in groups.get((prompt, reference), ())
                ],
            }
            for number, (prompt, reference) in enumerate(self._shown_texts())
        ]

    def _shown_texts(self) -> list[tuple[str, str | None]]:
        """Prompt and reference of what is shown; the user's own prompts have none."""
        num_references = len(self.shown) - len(self.own)
        return [
            (prompt.prompt, prompt.reference if number < num_references else None)
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
