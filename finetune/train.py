"""One run, top to bottom: recipe -> dataset -> batch -> model -> trainer -> artifacts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import transformers

from finetune.console import Console
from finetune.data.sources import with_commits
from finetune.recipe.load import dump_recipe, recipe_hash
from finetune.recipe.schema import Recipe
from finetune.run.environment import collect_environment
from finetune.run.folder import RunFolder, create_run_folder, open_run_folder
from finetune.run.output_folder import check_output_folder
from finetune.trainer.activations import end_activations, plan_activations
from finetune.trainer.build import build_model, build_trainer
from finetune.trainer.checks import check_weights_are_finite
from finetune.trainer.ending import Ending
from finetune.trainer.evaluation import Evaluator
from finetune.trainer.prepare import Prepared, prepare
from finetune.trainer.result import Results
from finetune.trainer.summary import closing_report, folder_in_place, note_report, show_plan, show_result, show_start
from finetune.trainer.watch import watch

MAY_DIFFER_ON_RESUME = (
    "output.dir",  # a folder that was moved, copied or is spelled otherwise holds the same run
    "output.save_every_steps",
    "output.keep_checkpoints",
    "output.log_every_steps",
    "output.trackers",
    "training.watch",
    # Where activations lie between forward and backward changes no number.
    "optimizations.activation_memory",
    "optimizations.host_memory",
    "optimizations.double_buffered_reload",
)


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
    recipe: Recipe,
    *,
    console: Console,
    dry_run: bool = False,
    resume: bool = False,
    place_note: str = "",
    started: float | None = None,
) -> TrainOutcome:
    """Runs a recipe.

    Args:
        started: `time.perf_counter` when the command began, from which times are counted; none takes now.
        dry_run: stop before the weights, after data and plan were checked; nothing is written but the data cache.
        resume: continue the run in `output.dir` from its newest complete checkpoint.
        place_note: printed once it is sure that the run is continued: where, if that is not where the recipe says.

    Raises:
        FinetuneError: of the class that says what went wrong; a run that had begun keeps its folder and report.
    """
    started = time.perf_counter() if started is None else started
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, digest = Path(recipe.output.dir), recipe_hash(recipe)
    values = recipe.model_dump(mode="json")
    check_output_folder(folder, recipe_hash=digest, resume=resume, recipe=values, may_differ=MAY_DIFFER_ON_RESUME)

    if resume:
        recipe = _as_begun(recipe, open_run_folder(folder))

    # Everything that can be wrong without weights: config, targets, labels, lengths, disk.
    prepared = prepare(recipe, say=console.line, warn=console.warning)
    show_plan(console, prepared)
    if dry_run:
        if place_note:
            console.note(place_note)
        console.line(f"dry run: nothing wrong was found; the run would write into {folder}", style="bold")
        details = {"trained": prepared.trained_dict(), "ledgers": prepared.ledgers_dict()}
        return TrainOutcome("dry-run", None, prepared.plan_dict(), details)

    run = open_run_folder(folder) if resume else _new_run(folder, recipe, digest)
    run.require_same_data(prepared.data_digest(), date=prepared.dataset.date, hub_commits=prepared.dataset.hub_commits)
    run.record_inputs(values)
    if place_note:
        console.note(place_note)

    ending = _train_into(run, recipe, prepared, console=console, resume=resume, started=started)
    show_result(console, run, ending.report)
    return TrainOutcome(ending.status, str(run.path), prepared.plan_dict(), ending.report)


def _new_run(folder: Path, recipe: Recipe, digest: str) -> RunFolder:
    environment = collect_environment()
    return create_run_folder(folder, recipe_text=dump_recipe(recipe), recipe_hash=digest, environment=environment)


def _train_into(
    run: RunFolder, recipe: Recipe, prepared: Prepared, *, console: Console, resume: bool, started: float
) -> Ending:
    """Trains into the run's folder and returns how it ended; whatever happens here, the run's report says so."""
    with run.lock(), folder_in_place(run), closing_report(run, recipe, prepared, started=started) as ending:
        checkpoint = run.settle_checkpoints(say=console.note).latest if resume else None
        model = build_model(recipe, prepared, say=console.warning, ending=ending)
        with watch(run, recipe, checkpoint, console=console) as watchers:
            trainer = build_trainer(recipe, prepared, model=model, run=run, callbacks=watchers.callbacks)
            trainer.say = console.warning
            plan_activations(recipe, prepared, trainer, ending, say=console.prose)
            evaluator = Evaluator(recipe, prepared, trainer, run, say=console.line)
            results = Results(prepared, trainer, run, stop_ids=evaluator.stop_ids)
            # The best weights are kept before an answer could fail.
            watchers.after_evaluations(trainer, results.offer, evaluator.sample)
            ending.before = evaluator.before(checkpoint)
            note_report(run, recipe, prepared, ending)
            watchers.raise_if_interrupted(trainer)
            show_start(console, prepared, checkpoint)
            try:
                trainer.train_from(checkpoint, is_over=watchers.is_over)
            finally:
                ending.note_training(trainer.meter, first_step_at=watchers.first_step.finished_at)
                end_activations(recipe, trainer, ending)
            watchers.raise_if_interrupted(trainer)
            ending.stopped_early = watchers.early_stop(trainer)
            with watchers.finishing():
                # The result is saved once it is known to be sound, and before a score could fail.
                ending.checks.append(check_weights_are_finite(trainer.trained))
                ending.result = results.finish(evaluator.last_loss())
                ending.after = evaluator.measure_result(ending)
            ending.timings["evaluation_seconds"] = evaluator.seconds
    return ending


def _as_begun(recipe: Recipe, run: RunFolder) -> Recipe:
    """Returns the recipe with what may differ by the day fixed to that on which the run began.

    A template that prints today's date writes that day's, and datasets of the hub are read at the commits of then.
    """
    data = with_commits(recipe.data, run.hub_commits)
    if run.date is not None:
        data = data.model_copy(update={"date": run.date})
    return recipe.model_copy(update={"data": data})
