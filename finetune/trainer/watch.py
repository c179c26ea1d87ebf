"""Everything that looks on while a run trains: metrics file, live view, checkpoints, Ctrl-C, the first step's time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback

from finetune.console import Console
from finetune.errors import Interrupted
from finetune.recipe.schema import Recipe
from finetune.run.checkpoints import checkpoint_step
from finetune.run.folder import RunFolder
from finetune.run.metrics import MetricsWriter, read_metrics
from finetune.run.samples import LatestSample
from finetune.trainer.callbacks.checkpoints import CheckpointsCallback
from finetune.trainer.callbacks.first_step import FirstStepCallback
from finetune.trainer.callbacks.interrupt import InterruptCallback
from finetune.trainer.callbacks.metrics_log import MetricsLogCallback
from finetune.trainer.callbacks.progress import ProgressCallback
from finetune.trainer.sft import SftTrainer


@dataclass(frozen=True)
class Watchers:
    """The callbacks of a run."""

    run: RunFolder
    callbacks: list[TrainerCallback]
    first_step: FirstStepCallback
    interrupt: InterruptCallback

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
    """Opens the metrics file, the live view and the signal handlers, and closes them however the run ends."""
    for passed_over in run.scan_checkpoints().incomplete:
        console.note(f"{passed_over.path} is passed over: {passed_over.reason}")
    interrupt = InterruptCallback(console.note)
    first_step = FirstStepCallback()
    resumed_step = checkpoint_step(checkpoint) if checkpoint else None
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(run.metrics_path, resumed_step=resumed_step))
        progress = ProgressCallback(
            console.rich,
            is_live=console.can_redraw,
            title=run.path.name,
            latest_sample=LatestSample(run.samples_path),
            history=read_metrics(run.metrics_path),
        )
        stack.enter_context(progress)
        stack.enter_context(interrupt)
        callbacks: list[TrainerCallback] = [
            CheckpointsCallback(keep=recipe.output.keep_checkpoints),
            MetricsLogCallback(metrics),
            first_step,
            progress,
            interrupt,
        ]
        yield Watchers(run, callbacks, first_step, interrupt)
