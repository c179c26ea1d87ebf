"""Before and after: held-out loss, generated answers, their scores, and the samples that the report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.data.types import PromptReference
from finetune.recipe.schema import EvaluationSection
from finetune.trainer.generate import Generator
from finetune.trainer.scores import Score, load_scores, mean_score
from finetune.trainer.sft import SftTrainer


@dataclass(frozen=True)
class Measurement:
    """The model at one moment, on the held-out data."""

    loss: float | None
    scores: dict[str, float]
    answers: list[str]
    """Answers to the first references, in order."""

    def as_dict(self) -> dict[str, object]:
        return {"loss": self.loss, "scores": self.scores, "answers": self.answers}

    @classmethod
    def from_dict(cls, values: dict) -> Measurement:
        return cls(values["loss"], values["scores"], values["answers"])


@dataclass(frozen=True)
class HeldOut:
    """The held-out prompts of a run and how answers to them are scored."""

    references: Sequence[PromptReference]
    scores: dict[str, Score]
    num_samples: int
    """Prompts whose answers the report shows."""

    @classmethod
    def of(cls, section: EvaluationSection, references: Sequence[PromptReference]) -> HeldOut:
        return cls(references[: num_answers(section)], load_scores(section.metrics), section.samples)

    def measure(self, trainer: SftTrainer, generator: Generator) -> Measurement:
        """Evaluates the model as it is; loss and scores go to the metrics as one record."""
        answers = generator.answer([reference.prompt_ids for reference in self.references])
        wanted = [reference.reference for reference in self.references]
        scores = {name: mean_score(score, answers, wanted) for name, score in self.scores.items()}
        loss = trainer.evaluate(scores=scores)["eval_loss"] if trainer.eval_dataset is not None else None
        return Measurement(loss, scores, answers)

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
