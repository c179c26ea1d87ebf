"""Everything that looks on while a run trains: metrics file, live view, checkpoints, spikes, early stopping, trackers,
Ctrl-C, the first step's time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from finetune.console import Console, plural
from finetune.errors import Interrupted
from finetune.recipe.schema import Recipe
from finetune.run.checkpoints import checkpoint_step
from finetune.run.folder import RunFolder
from finetune.run.metrics import MetricsRecord, MetricsWriter, add_lost, read_metrics
from finetune.run.samples import LatestSample
from finetune.trainer.callbacks.after_evaluation import AfterEvaluationCallback
from finetune.trainer.callbacks.checkpoints import CheckpointsCallback
from finetune.trainer.callbacks.early_stopping import EarlyStoppingCallback
from finetune.trainer.callbacks.first_step import FirstStepCallback
from finetune.trainer.callbacks.interrupt import InterruptCallback
from finetune.trainer.callbacks.metrics_log import MetricsLogCallback, metrics_record
from finetune.trainer.callbacks.progress import ProgressCallback
from finetune.trainer.callbacks.spikes import Limits, SpikesCallback
from finetune.trainer.sft import SftTrainer
from finetune.trainer.trackers import make_trackers

_SHOWN_STEPS = 20


@dataclass(frozen=True)
class Watchers:
    """The callbacks of a run."""

    run: RunFolder
    callbacks: list[TrainerCallback]
    first_step: FirstStepCallback
    interrupt: InterruptCallback
    early_stopping: EarlyStoppingCallback | None

    @property
    def is_over(self) -> bool:
        """Whether the held-out loss has not fallen for as long as the recipe allows."""
        return self.early_stopping is not None and self.early_stopping.is_over

    def after_evaluations(self, trainer: SftTrainer, *actions: Callable[[int, float], None]) -> None:
        """Has the actions called, in order, with step and held-out loss after each evaluation of a trained model."""
        for action in actions:
            trainer.add_callback(AfterEvaluationCallback(action))

    def early_stop(self, trainer: SftTrainer) -> str:
        """Returns why the run ended before all of its steps; empty where it did not."""
        step, total = trainer.state.global_step, trainer.args.max_steps
        if self.early_stopping is None or not self.is_over or step >= total:
            return ""
        count = self.early_stopping.num_without_improvement
        return f"stopped early after step {step} of {total}: no better held-out loss in {plural(count, 'evaluation')}"

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Surrounds all that comes after the last step: a signal ends it at once, and is told as what it is.

        Raises:
            Interrupted: there is no result, or not all of it, and nothing of the training is lost.
        """
        self.interrupt.restore()  # where the last step was only loaded, no training has ended that would do so
        try:
            yield
        except KeyboardInterrupt as stop:
            raise Interrupted(
                "stopped while the result was being written and measured; training was finished",
                place=str(self.run.path),
                remedy="Type the same command with --resume: it goes on from the last checkpoint, without a step more.",
            ) from stop

    def raise_if_interrupted(self, trainer: SftTrainer) -> None:
        """Ends the run where the user asked for it before all of its steps were done.

        Raises:
            Interrupted: what was trained until then is in the newest checkpoint.
        """
        step, total = trainer.state.global_step, trainer.args.max_steps
        if not self.interrupt.interrupted or step >= total:
            return
        checkpoint = self.run.latest_checkpoint()
        raise Interrupted(
            f"stopped after step {step} of {total}; "
            + ("everything is saved" if checkpoint else "nothing was trained"),
            place=str(checkpoint or self.run.path),
            remedy="Type the same command with --resume to go on from there.",
        )


@contextmanager
def watch(run: RunFolder, recipe: Recipe, checkpoint: Path | None, *, console: Console) -> Iterator[Watchers]:
    """Opens metrics file, live view, signal handlers and trackers, and closes them however the run ends."""
    for passed_over in run.scan_checkpoints().incomplete:
        console.note(f"{passed_over.path} is passed over: {passed_over.reason}")
    interrupt = InterruptCallback(console.note)
    first_step = FirstStepCallback()
    resumed_step = checkpoint_step(checkpoint) if checkpoint else None
    if checkpoint is not None:
        _restore_lost(run.metrics_path, checkpoint, say=console.warning)
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(run.metrics_path, resumed_step=resumed_step))
        past = read_metrics(run.metrics_path)  # of a continued run; the writer has left out later steps
        progress = ProgressCallback(
            console.rich,
            is_live=console.can_redraw,
            title=run.path.name,
            latest_sample=LatestSample(run.samples_path),
            history=past,
        )
        stack.enter_context(progress)
        stack.enter_context(interrupt)
        early_stopping = _early_stopping(recipe, past)
        trackers = make_trackers(recipe.output.trackers, folder=run.path, say=console.warning)
        for tracker in trackers:
            stack.callback(tracker.close)
        callbacks: list[TrainerCallback] = [
            CheckpointsCallback(keep=recipe.output.keep_checkpoints),
            MetricsLogCallback(metrics),
            _spikes(recipe, past, metrics=metrics, console=console),
            *([early_stopping] if early_stopping else []),
            first_step,
            progress,
            *trackers,
            interrupt,
        ]
        yield Watchers(run, callbacks, first_step, interrupt, early_stopping)


def _restore_lost(path: Path, checkpoint: Path, *, say: Callable[[str], None]) -> None:
    """Writes lines again that the metrics file has lost, as the checkpoint tells them: the charts, early stopping and
    the spike watch are made of them."""
    history = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["log_history"]
    logged = [metrics_record(entry, step=entry["step"]) for entry in history]
    steps = add_lost(path, [record for record in logged if record is not None])
    if steps:
        say(f"{path} had lost lines of {_shown_steps(steps)}; they are written again from {checkpoint.name}")


def _shown_steps(steps: Sequence[int]) -> str:
    first = ", ".join(map(str, steps[:_SHOWN_STEPS]))
    return f"step{'s' if len(steps) > 1 else ''} {first}" + (f", ... {steps[-1]}" if len(steps) > _SHOWN_STEPS else "")


def _early_stopping(recipe: Recipe, past: list[MetricsRecord]) -> EarlyStoppingCallback | None:
    section = recipe.evaluation.early_stopping
    if section is None:
        return None
    losses = [(record["step"], record["eval_loss"]) for record in past if record.get("kind") == "eval"]
    return EarlyStoppingCallback(patience=section.patience, min_improvement=section.min_improvement, past=losses)


def _spikes(recipe: Recipe, past: list[MetricsRecord], *, metrics: MetricsWriter, console: Console) -> SpikesCallback:
    limits = Limits(**recipe.training.watch.model_dump())
    training = [record for record in past if record.get("kind") == "train"]
    return SpikesCallback(limits, writer=metrics, say=console.warning, past=training)
