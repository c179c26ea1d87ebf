"""Held-out loss, generated answers, their scores, and the samples that the report shows: before, during and after."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from finetune.optimizations.attention.interface import attention_set_to
from finetune.recipe.schema import Recipe
from finetune.run.atomic import write_json
from finetune.run.checkpoints import checkpoint_step
from finetune.run.folder import RunFolder
from finetune.run.metrics import append_records, keep_until, read_metrics
from finetune.run.spoken import last_question, without_control_tokens
from finetune.trainer.checks import check_loss_again, check_weights_are_those_in
from finetune.trainer.ending import Ending
from finetune.trainer.generate import Generator, stop_tokens
from finetune.trainer.measurement import Measurement
from finetune.trainer.prepare import Prepared
from finetune.trainer.scores import mean_score
from finetune.trainer.sft import SftTrainer

BEFORE_FILE = "before.json"
SHOWN_CHARACTERS = 100


class Evaluator:
    """Measures the model in training. Does nothing where the run has no held-out data and no prompts.

    Args:
        say: prints a line.
    """

    def __init__(
        self, recipe: Recipe, prepared: Prepared, trainer: SftTrainer, run: RunFolder, *, say: Callable[[str], None]
    ) -> None:
        self._section = recipe.evaluation
        self._held_out = prepared.held_out
        self._trainer = trainer
        self._before_path = run.path / BEFORE_FILE
        self._samples_path = run.samples_path
        self._say = say
        self._generator = Generator(
            model=trainer.trained,
            tokenizer=prepared.tokenizer,
            stop_ids=stop_tokens(prepared.tokenizer, trainer.trained, prepared.dataset.end_ids),
            pad_token_id=prepared.pad_token_id,
            max_new_tokens=recipe.evaluation.max_new_tokens,
            max_positions=getattr(prepared.model.config.get_text_config(), "max_position_embeddings", None),
            context=lambda: generating(trainer, prepared.model.attention),
            say=trainer.say,
        )
        self.stop_ids = self._generator.stop_ids
        """Tokens that end an answer."""
        self._answer_seconds = 0.0
        self._delivers = prepared.delivers
        self._metrics_path = run.metrics_path
        self._sampled_step = -1
        self._resumed_step = 0
        self._recorded_step = -1
        self._scored_step = -1

    @property
    def seconds(self) -> float:
        """Time spent measuring: held-out losses, during training too, and answers."""
        return self._trainer.held_out_seconds + self._answer_seconds

    def before(self, checkpoint: Path | None) -> Measurement | None:
        """Measures the untrained model; a continued run reads what was measured when it began."""
        if checkpoint is not None:
            self._resumed_step = checkpoint_step(checkpoint) or 0
            keep_until(self._samples_path, self._resumed_step)
            self._note_recorded()
            return self._read_before() if self._before_path.is_file() else None
        keep_until(self._samples_path, -1)
        measurement = self.measure() if self._section.at_start else None
        if measurement is not None:
            write_json(self._before_path, measurement.as_dict())
        return measurement

    def _read_before(self) -> Measurement | None:
        """Returns what was measured when the run began; of a damaged file, what the metrics tell of it."""
        try:
            return Measurement.from_dict(json.loads(self._before_path.read_text(encoding="utf-8")))
        except ValueError:
            begun = [record for record in read_metrics(self._metrics_path) if record["step"] == 0]
        figures = {key: float(value) for each in begun for key, value in each.items() if isinstance(value, int | float)}
        left = "loss and scores are read from metrics.jsonl" if "eval_loss" in figures else "nothing else tells of it"
        self._trainer.say(
            f"{self._before_path} is damaged: the report lacks answers of the model before training; {left}."
        )
        names = [name for name in self._held_out.scores if f"eval_{name}" in figures]
        scores = {name: figures[f"eval_{name}"] for name in names}
        return Measurement(figures.get("eval_loss"), scores, []) if figures else None

    def last_loss(self) -> float | None:
        """Returns the held-out loss of the last weights; None without held-out data.

        It is recorded here where the result may be other weights; else `measure` records it, with the scores.

        Raises:
            GateStopped: it is not finite.
        """
        if self._trainer.eval_dataset is None:
            return None
        if self._delivers == "best" and self._recorded_step != self._trainer.state.global_step:
            self._trainer.evaluate()
        return self._trainer.held_out_loss()["loss"]

    def sample(self, step: int, eval_loss: float) -> None:
        """Answers the shown prompts after an evaluation, unless `measure` has done so at this step."""
        self._recorded_step = step
        if step == self._sampled_step or not self._held_out.shown:
            return
        begun = time.perf_counter()
        answers = self._generator.answer([prompt.prompt_ids for prompt in self._held_out.shown])
        self._keep(answers, step=step)
        self._answer_seconds += time.perf_counter() - begun
        asked = one_line(last_question(self._held_out.shown[-1].prompt), limit=60)
        self._say(f"sample at step {step}: {asked} -> {one_line(without_control_tokens(answers[-1]))}")

    def measure_result(self, ending: Ending) -> Measurement | None:
        """Measures the weights that are delivered, and compares them with what was saved, and their loss with the one
        that they were chosen by.

        Raises:
            GateStopped: they or it differ: what was saved is not what was measured.
        """
        part = ending.result[ending.result["delivered"]]
        is_last = part["step"] == self._trainer.state.global_step
        if not is_last:
            ending.checks.append(check_weights_are_those_in(Path(ending.result["path"]), self._trainer.trained))
        measurement = self.measure(is_recorded=is_last)
        if not is_last and measurement is not None:
            check = check_loss_again(measurement.loss, expected=part["eval_loss"], folder=ending.result["path"])
            ending.checks.append(check)
        return measurement

    def measure(self, *, is_recorded: bool = True) -> Measurement | None:
        """Evaluates the model as it is.

        Args:
            is_recorded: loss and scores go to the metrics, and the answers to the samples.
        """
        has_loss = self._trainer.eval_dataset is not None
        if not has_loss and not self._held_out.own:
            return None
        begun = time.perf_counter()
        references, step = self._held_out.references, self._trainer.state.global_step
        answers = self._generator.answer(self._held_out.prompts)
        wanted = [reference.reference for reference in references]
        answered = answers[: len(references)]
        scores = {name: mean_score(score, answered, wanted) for name, score in self._held_out.scores.items()}
        if is_recorded and step != self._sampled_step:
            self._keep(self._held_out.shown_answers(answers), step=step)
        self._answer_seconds += time.perf_counter() - begun
        if has_loss and is_recorded:
            self._record(scores, step=step)
        loss = self._trainer.held_out_loss()["loss"] if has_loss else None
        return Measurement(loss, scores, answers)

    def _record(self, scores: dict[str, float], *, step: int) -> None:
        """Records loss and scores; where the loss of this step is recorded, as in training, the scores alone."""
        if step != self._recorded_step:
            self._trainer.evaluate(scores=scores)
        elif scores and step != self._scored_step:
            self._trainer.log({f"eval_{name}": score for name, score in scores.items()})

    def _note_recorded(self) -> None:
        """Takes over which step was recorded last before a run is continued."""
        for record in read_metrics(self._metrics_path):
            if record.get("kind") == "eval":
                self._recorded_step = record["step"]
            if any(f"eval_{name}" in record for name in self._held_out.scores):
                self._scored_step = record["step"]

    def _keep(self, answers: list[str], *, step: int) -> None:
        self._sampled_step = step
        if step == self._resumed_step > 0:  # a run that was killed after its last step may have written them, or some
            keep_until(self._samples_path, step - 1)
        append_records(self._samples_path, self._held_out.sample_records(answers, step=step))


def one_line(text: str, *, limit: int = SHOWN_CHARACTERS) -> str:
    """Returns a text as one line of at most `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


@contextmanager
def generating(trainer: SftTrainer, attention: str) -> Iterator[None]:
    """The surroundings of generation: training's number format, and attention that takes a cache and padding."""
    model = trainer.trained
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    with trainer.accelerator.autocast(), attention_set_to(base, attention):
        yield
