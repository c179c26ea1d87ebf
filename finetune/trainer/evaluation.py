"""Before and after: held-out loss, generated answers, their scores, and the samples that the report shows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from finetune.optimizations.attention.interface import attention_set_to
from finetune.recipe.schema import Recipe
from finetune.run.atomic import write_json
from finetune.run.folder import RunFolder
from finetune.trainer.generate import Generator, stop_tokens
from finetune.trainer.measurement import Measurement
from finetune.trainer.prepare import Prepared
from finetune.trainer.scores import mean_score
from finetune.trainer.sft import SftTrainer

BEFORE_FILE = "before.json"


class Evaluator:
    """Measures the model in training. Does nothing where the run has no held-out data."""

    def __init__(self, recipe: Recipe, prepared: Prepared, trainer: SftTrainer, run: RunFolder) -> None:
        self._section = recipe.evaluation
        self._held_out = prepared.held_out
        self._trainer = trainer
        self._before_path = run.path / BEFORE_FILE
        self._generator = Generator(
            model=trainer.trained,
            tokenizer=prepared.tokenizer,
            stop_ids=stop_tokens(prepared.tokenizer, trainer.trained, prepared.dataset.train),
            pad_token_id=prepared.pad_token_id,
            max_new_tokens=recipe.evaluation.max_new_tokens,
            max_positions=getattr(prepared.model.config.get_text_config(), "max_position_embeddings", None),
            context=lambda: _generating(trainer, prepared.model.attention),
        )
        self.stop_ids = self._generator.stop_ids
        """Tokens that end an answer."""
        self.seconds = 0.0
        """Time spent measuring."""

    def before(self, checkpoint: Path | None) -> Measurement | None:
        """Measures the untrained model; a continued run reads what was measured when it began."""
        if checkpoint is not None:
            if not self._before_path.is_file():
                return None
            return Measurement.from_dict(json.loads(self._before_path.read_text(encoding="utf-8")))
        measurement = self.measure() if self._section.at_start else None
        if measurement is not None:
            write_json(self._before_path, measurement.as_dict())
        return measurement

    def require_finite_loss(self) -> None:
        """Computes the held-out loss, which `measure` takes over.

        Raises:
            GateStopped: it is not finite.
        """
        if self._trainer.eval_dataset is not None:
            self._trainer.held_out_loss()

    def measure(self) -> Measurement | None:
        """Evaluates the model as it is; loss and scores go to the metrics as one record."""
        if self._trainer.eval_dataset is None:
            return None
        begun = time.perf_counter()
        references = self._held_out.references
        answers = self._generator.answer([reference.prompt_ids for reference in references])
        wanted = [reference.reference for reference in references]
        scores = {name: mean_score(score, answers, wanted) for name, score in self._held_out.scores.items()}
        loss = self._trainer.evaluate(scores=scores)["eval_loss"]
        self.seconds += time.perf_counter() - begun
        return Measurement(loss, scores, answers)


@contextmanager
def _generating(trainer: SftTrainer, attention: str) -> Iterator[None]:
    """The surroundings of generation: training's number format, and attention that takes a cache and padding."""
    model = trainer.trained
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    with trainer.accelerator.autocast(), attention_set_to(base, attention):
        yield
