"""One run, top to bottom: recipe -> dataset -> batch -> model -> trainer -> artifacts."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from finetune.console import Console
from finetune.errors import FinetuneError, GateStopped, Interrupted
from finetune.model.adapter import add_adapter
from finetune.model.load import load_model, vocabulary_rows
from finetune.model.quantize import unquantized_bytes
from finetune.recipe.load import dump_recipe, recipe_hash
from finetune.recipe.schema import Recipe
from finetune.run.environment import collect_environment
from finetune.run.folder import RunFolder, check_output_folder, create_run_folder, open_run_folder
from finetune.run.metrics import MetricsWriter
from finetune.trainer.build import TrainerParts, build_trainer
from finetune.trainer.callbacks.checkpoints import CheckpointsCallback
from finetune.trainer.callbacks.first_step import FirstStepCallback
from finetune.trainer.callbacks.interrupt import InterruptCallback
from finetune.trainer.callbacks.metrics_log import MetricsLogCallback
from finetune.trainer.callbacks.progress import ProgressCallback
from finetune.trainer.checks import Check, check_documents_are_separate, check_weights_are_finite
from finetune.trainer.evaluation import Measurement
from finetune.trainer.generate import Generator, stop_tokens
from finetune.trainer.prepare import Prepared, prepare
from finetune.trainer.sft import SftTrainer
from finetune.trainer.summary import Ending, save_result, show_plan, show_result, write_report

MAY_DIFFER_ON_RESUME = ("output.save_every_steps", "output.keep_checkpoints", "output.log_every_steps")
BEFORE_FILE = "before.json"


@dataclass(frozen=True)
class TrainOutcome:
    """What `finetune train` did, for `--json`."""

    status: str
    run_dir: str | None
    plan: dict[str, object] = field(default_factory=dict)
    report: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {"status": self.status, "run_dir": self.run_dir, "plan": self.plan, **self.report}


def train(
    recipe: Recipe, *, console: Console, dry_run: bool = False, resume: bool = False, started: float | None = None
) -> TrainOutcome:
    """Runs a recipe.

    Args:
        started: `time.perf_counter` when the command began, from which times are counted; none takes now.
        dry_run: stop before the weights, after data and plan were checked; nothing is written but the data cache.
        resume: continue the run in `output.dir` from its newest complete checkpoint.

    Raises:
        FinetuneError: of the class that says what went wrong; a run that had begun keeps its folder and report.
    """
    started = time.perf_counter() if started is None else started
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = Path(recipe.output.dir)
    digest = recipe_hash(recipe)
    check_output_folder(
        folder,
        recipe_hash=digest,
        resume=resume,
        recipe=recipe.model_dump(mode="json"),
        may_differ=MAY_DIFFER_ON_RESUME,
    )
    prepared = prepare(recipe, say=console.line)
    show_plan(console, prepared)
    if dry_run:
        return TrainOutcome("dry-run", None, prepared.plan_dict(), {"trained": prepared.trained_dict()})
    if resume:
        run = _run_to_continue(folder, console)
    else:
        run = create_run_folder(
            folder, recipe_text=dump_recipe(recipe), recipe_hash=digest, environment=collect_environment()
        )
    with run.lock():
        report = _Session(recipe, prepared, run, console, started).run_to_end(resume=resume)
    return TrainOutcome(str(report["status"]), str(run.path), prepared.plan_dict(), report)


def _run_to_continue(folder: Path, console: Console) -> RunFolder:
    run = open_run_folder(folder)
    for checkpoint in run.scan_checkpoints().incomplete:
        console.note(f"{checkpoint.path} is passed over: {checkpoint.reason}")
    return run


@dataclass
class _Session:
    """A run that writes: from the weights to the report."""

    recipe: Recipe
    prepared: Prepared
    run: RunFolder
    console: Console
    started: float
    ending: Ending = field(default_factory=Ending)

    def run_to_end(self, *, resume: bool) -> dict[str, Any]:
        """Trains and writes the report, also where the run fails; returns the report."""
        self.run.set_status("running")
        try:
            self._train(resume=resume)
            self.ending.status = "done"
        except BaseException as error:
            self.ending.status = _status_of(error)
            self.ending.message = error.message if isinstance(error, FinetuneError) else type(error).__name__
            raise
        finally:
            self.ending.timings["total_seconds"] = time.perf_counter() - self.started
            self.run.set_status(self.ending.status)
            report = write_report(self.run, self.recipe, self.prepared, self.ending)
        show_result(self.console, self.run, report)
        return report

    def _train(self, *, resume: bool) -> None:
        checkpoint = self.run.latest_checkpoint() if resume else None
        model = self._load_model()
        first_step = FirstStepCallback()
        interrupt = InterruptCallback(self.console.note)
        resumed_step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else None
        with (
            MetricsWriter(self.run.metrics_path, resumed_step=resumed_step) as metrics,
            ProgressCallback(self.console.rich) as progress,
            interrupt,
        ):
            callbacks = [
                CheckpointsCallback(keep=self.recipe.output.keep_checkpoints),
                MetricsLogCallback(metrics),
                first_step,
                progress,
                interrupt,
            ]
            trainer = self._build_trainer(model, callbacks)
            generator = self._generator(trainer)
            self.ending.before = self._measure_before(trainer, generator, checkpoint)
            self.console.line(_start_line(self.prepared, checkpoint))
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self._note_training(trainer, first_step)
            if interrupt.interrupted:
                raise self._interrupted(trainer)
            self.ending.after = self._measure(trainer, generator)
            self.ending.checks.append(check_weights_are_finite(trainer.trained))
        with trainer.config_as_loaded():
            self.ending.artifacts = save_result(self.run, trainer.trained, self.prepared.tokenizer)

    def _load_model(self) -> nn.Module:
        begun = time.perf_counter()
        prepared, recipe = self.prepared, self.recipe
        base = load_model(prepared.model, seed=recipe.training.seed)
        if recipe.model.quantization == "nf4" and (left := unquantized_bytes(base)):
            self.console.warning(
                f"nf4 covers linear layers only: the experts' weights stay as they are ({left / 2**30:.2f} GiB)."
            )
        model = add_adapter(base, recipe.adapter, targets=prepared.targets)
        self.ending.timings["load_seconds"] = time.perf_counter() - begun
        if recipe.data.packing:
            check = check_documents_are_separate(model, num_rows=vocabulary_rows(base))
        else:
            check = Check("packed documents do not see each other", None, "not packed: one document a row")
        self.ending.checks.append(check)
        return model

    def _build_trainer(self, model: nn.Module, callbacks: list[transformers.TrainerCallback]) -> SftTrainer:
        prepared = self.prepared
        return build_trainer(
            self.recipe,
            TrainerParts(
                model=model,
                plan=prepared.model,
                tokenizer=prepared.tokenizer,
                train_rows=prepared.train_rows,
                eval_rows=prepared.eval_rows,
                steps=prepared.steps,
                pad_token_id=prepared.pad_token_id,
                checkpoints_dir=self.run.checkpoints_dir,
                failure_dir=self.run.path,
                callbacks=callbacks,
            ),
        )

    def _generator(self, trainer: SftTrainer) -> Generator:
        prepared = self.prepared
        return Generator(
            model=trainer.trained,
            tokenizer=prepared.tokenizer,
            stop_ids=stop_tokens(prepared.tokenizer, trainer.trained, prepared.dataset.train),
            pad_token_id=prepared.pad_token_id,
            max_new_tokens=self.recipe.evaluation.max_new_tokens,
            autocast=lambda: trainer.accelerator.autocast(),
        )

    def _measure_before(self, trainer: SftTrainer, generator: Generator, checkpoint: Path | None) -> Measurement | None:
        """Measures the untrained model; a continued run reads what it measured when it began."""
        path = self.run.path / BEFORE_FILE
        if checkpoint is not None:
            return Measurement.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
        if not self.recipe.evaluation.at_start:
            return None
        before = self._measure(trainer, generator)
        if before is not None:
            path.write_text(json.dumps(before.as_dict()), encoding="utf-8")
        return before

    def _measure(self, trainer: SftTrainer, generator: Generator) -> Measurement | None:
        if self.prepared.eval_rows is None:
            return None
        begun = time.perf_counter()
        measurement = self.prepared.held_out.measure(trainer, generator)
        seconds = self.ending.timings.get("evaluation_seconds", 0.0) + time.perf_counter() - begun
        self.ending.timings["evaluation_seconds"] = seconds
        return measurement

    def _note_training(self, trainer: SftTrainer, first_step: FirstStepCallback) -> None:
        meter, timings = trainer.meter, self.ending.timings
        timings["training_seconds"] = meter.elapsed_seconds
        timings["real_tokens_per_second"] = meter.real_tokens / meter.elapsed_seconds if meter.elapsed_seconds else 0.0
        if first_step.finished_at is not None:
            timings["seconds_to_first_step"] = first_step.finished_at - self.started

    def _interrupted(self, trainer: SftTrainer) -> Interrupted:
        checkpoint = self.run.latest_checkpoint()
        return Interrupted(
            f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; everything is saved",
            place=str(checkpoint or self.run.path),
            remedy="Type the same command with --resume to go on from there.",
        )


def _status_of(error: BaseException) -> Any:
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "interrupted"
    return "stopped" if isinstance(error, GateStopped) else "failed"


def _start_line(prepared: Prepared, checkpoint: Path | None) -> str:
    steps = prepared.steps
    how = f"continuing from {checkpoint.name}" if checkpoint else "training"
    what = "adapter" if prepared.targets is not None else "all weights"
    return f"{how}: {what}, {steps.total_steps} steps of {steps.rows_per_step} rows"
