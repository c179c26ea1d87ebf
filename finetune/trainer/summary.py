"""What a run leaves behind and says: the plan before, the result, the report, the closing lines."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from finetune.console import Console, plural
from finetune.errors import FinetuneError, GateStopped, Interrupted, RecipeError
from finetune.model.quantize import unquantized_bytes
from finetune.recipe.schema import Recipe
from finetune.run.atomic import write_json, write_text
from finetune.run.best import settle_best
from finetune.run.checkpoints import remove_checkpoint
from finetune.run.disk import disk_full, is_disk_full
from finetune.run.folder import RunFolder, Status
from finetune.run.fragments import format_seconds
from finetune.run.html import render_html
from finetune.run.metrics import read_metrics, run_folder_gone
from finetune.run.plots import write_curves_png
from finetune.run.report import ReportInputs, build_report
from finetune.run.samples import read_samples
from finetune.run.spoken import last_question, without_control_tokens
from finetune.trainer.callbacks.interrupt import signals_ignored
from finetune.trainer.ending import NOT_WORSE, Ending
from finetune.trainer.evaluation import one_line
from finetune.trainer.prepare import Prepared
from finetune.trainer.result import artifacts_of

SAMPLE_CHARACTERS = 160
FEW_STEPS = 10
"""Runs of fewer steps are warned of: packing turns a small data set into a handful of rows."""


def show_plan(console: Console, prepared: Prepared) -> None:
    """Prints what is about to be trained, on what, for how long."""
    model, train, steps, table = prepared.model, prepared.train_rows.plan, prepared.steps, prepared.table
    console.prose(
        f"model   {type(model.skeleton).__name__}, {_count(table.num_base)} weights, "
        f"{str(model.dtype).removeprefix('torch.')}, quantization {model.section.quantization}, "
        f"on {model.device}"
    )
    _show_attention(console, prepared)
    counts, *others = prepared.dataset.ledger.summary_lines()
    console.prose(f"data    {counts}")
    for line in others:  # with paths, which stay whole
        console.line(f"data    {line}")
    for check in prepared.dataset.gate.warnings:
        console.warning(f"data: {check.line()}")
    if prepared.new_tokens is not None:
        console.line(f"tokens  {prepared.new_tokens.line()}; {prepared.uses.line()}")
    console.prose(
        f"rows    {len(train):,} of {train.max_length:,} tokens: {train.num_tokens:,} real, {train.fill:.2%} filled, "
        f"{train.num_pad_tokens:,} padding"
        if prepared.is_packed
        else f"rows    {len(train):,}, one sample each: {plural(train.num_tokens, 'real token')}"
    )
    console.prose(
        f"steps   {steps.total_steps:,} of {plural(steps.rows_per_step, 'row')} "
        f"({plural(steps.micro_batches_per_step, 'micro-batch')} of {steps.rows_per_micro_batch}), "
        f"{steps.warmup_steps} of them warm-up"
    )
    if prepared.delivers == "best":
        console.prose("result  the weights of the lowest held-out loss; the last ones are kept beside them")
    console.prose(
        f"trained {table.num_trainable:,} weights beside {table.num_frozen:,} frozen ones ({table.share:.3%} of all), "
        f"{table.checkpoint_bytes / 2**20:,.1f} MiB a checkpoint"
    )
    _warn_of_plan(console, prepared)
    console.table(
        "",
        ("what is trained", "tensors", "weights", "dtype"),
        [(group.name, group.num_tensors, group.num_parameters, group.dtype) for group in table.groups],
    )


def _warn_of_plan(console: Console, prepared: Prepared) -> None:
    """Prints what the user may want to change before hours are spent."""
    model, train, steps = prepared.model, prepared.train_rows.plan, prepared.steps
    if steps.total_steps < FEW_STEPS:
        console.warning(
            f"only {plural(steps.total_steps, 'step')}, too few to learn much: the data make "
            f"{plural(len(train), 'row')}. {steps.how_to_have_more}"
        )
    if prepared.uses.unused:
        console.warning(
            f"{', '.join(prepared.uses.unused)}: a new token that never occurs in the training data, so nothing is "
            "learned of it. Check its spelling in model.new_tokens or model.new_special_tokens against the data."
        )
    if prepared.idle_early_stopping:
        console.warning(prepared.idle_early_stopping)
    if model.section.quantization != "none" and (left := unquantized_bytes(model.skeleton)):
        console.warning(
            f"{model.section.quantization} covers linear layers only: the experts' weights stay as they are "
            f"({left / 2**30:.2f} GiB)."
        )
    in_full = "all weights" if prepared.targets is None else ", ".join(prepared.targets.saved[:3])
    if in_full and model.dtype != torch.float32:
        console.warning(
            f"{in_full}: trained in {str(model.dtype).removeprefix('torch.')}, where small updates round away; "
            "model.dtype=fp32 keeps them, for twice the memory."
        )


def _show_attention(console: Console, prepared: Prepared) -> None:
    """Prints what computes attention, what would be faster, and what becomes of each flag."""
    console.prose(f"attends {prepared.attention.name}: {prepared.attention.reason}")
    if prepared.attention.faster:
        console.prose(f"        {prepared.attention.faster}")
    for applied in prepared.applied:
        console.prose(f"flag    {applied.flag} {applied.state}: {applied.reason}")


def show_start(console: Console, prepared: Prepared, checkpoint: Path | None) -> None:
    """Prints that training begins, or where it goes on."""
    what = "an adapter" if prepared.targets is not None else "all weights"
    how = f"continuing from {checkpoint.name}" if checkpoint else "training from the first step"
    console.line(f"{how}: {what}, {plural(prepared.steps.total_steps, 'step')}")


@contextmanager
def closing_report(run: RunFolder, recipe: Recipe, prepared: Prepared, *, started: float) -> Iterator[Ending]:
    """Gives the run's ending to be filled, and writes status and report of it, also where the run fails."""
    ending = Ending(started)
    run.set_status("running")
    try:
        with full_disk_told(run):
            note_report(run, recipe, prepared, ending)
            yield ending
            ending.status, ending.message = (
                ("early-stopped", ending.stopped_early) if ending.stopped_early else ("done", "")
            )
            ending.compare_with_before()
            _close(run, recipe, prepared, ending)
    except BaseException as error:
        ending.status = _status_of(error)
        ending.message = error.message if isinstance(error, FinetuneError) else type(error).__name__
        _close_failed(run, recipe, prepared, ending, error)
        raise


def _close_failed(run: RunFolder, recipe: Recipe, prepared: Prepared, ending: Ending, error: BaseException) -> None:
    """Writes what can be written of the end of a run that failed; `error`, the first one, is the one to tell."""
    try:
        _close(run, recipe, prepared, ending)
    except (OSError, FinetuneError) as second:
        error.add_note(f"the report could not be written: {second}")
        try:
            run.set_status(ending.status)  # a run whose report has no room has ended all the same
        except (OSError, FinetuneError) as third:
            error.add_note(f"the status could not be written: {third}")


def _close(run: RunFolder, recipe: Recipe, prepared: Prepared, ending: Ending) -> None:
    # A second signal, such as a scheduler sends, would leave the run with the status `running`.
    with signals_ignored():
        ending.timings["total_seconds"] = time.perf_counter() - ending.started
        ending.report = write_report(run, recipe, prepared, ending)
        run.set_status(ending.status)  # last: a run without its report is not done


@contextmanager
def full_disk_told(run: RunFolder) -> Iterator[None]:
    """Names the cause where the block fails because nothing more can be written, and how to go on.

    The checkpoint and the best weights that were being written are removed: they cannot be used, and without them there
    is room for the report.

    Raises:
        EnvironmentProblem: the disk is full, or a quota or limit of file sizes reached.
    """
    try:
        yield
    except Exception as error:  # of a full disk torch raises RuntimeError, safetensors an error of its own
        if isinstance(error, FinetuneError) or not is_disk_full(error):
            raise
        free_bytes = shutil.disk_usage(run.path).free
        for unfinished in run.scan_checkpoints().incomplete:
            remove_checkpoint(unfinished.path)
        settle_best(run.best_dir)
        raise disk_full(run.path, free_bytes=free_bytes, checkpoint=run.latest_checkpoint()) from error


@contextmanager
def folder_in_place(run: RunFolder) -> Iterator[None]:
    """Names the cause where the block fails because the run folder was moved or deleted.

    Raises:
        EnvironmentProblem: the run's manifest is gone, so a file error, or a note that all is saved, would mislead.
    """
    try:
        yield
    except (OSError, RecipeError, Interrupted) as error:
        if run.manifest_path.exists():
            raise
        raise run_folder_gone(run.path) from error


def _status_of(error: BaseException) -> Status:
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "interrupted"
    return "stopped" if isinstance(error, GateStopped) else "failed"


def note_report(run: RunFolder, recipe: Recipe, prepared: Prepared, ending: Ending) -> None:
    """Writes report.json of a run that goes on, for `finetune report`: the page of a run need not wait for its end."""
    write_json(run.report_json, _make_report(run, recipe, prepared, ending, status="running"))


def write_report(run: RunFolder, recipe: Recipe, prepared: Prepared, ending: Ending) -> dict[str, Any]:
    """Writes report.json, report.html and curves.png from what is known now; returns the report."""
    report = _make_report(run, recipe, prepared, ending, status=ending.status)
    metrics = read_metrics(run.metrics_path)
    write_json(run.report_json, report)
    write_text(run.report_html, render_html(report, metrics, answers=read_samples(run.samples_path)))
    if metrics:
        write_curves_png(metrics, run.curves_png)
    return report


def _make_report(
    run: RunFolder, recipe: Recipe, prepared: Prepared, ending: Ending, *, status: Status
) -> dict[str, Any]:
    return build_report(
        ReportInputs(
            status=status,
            message=ending.message,
            recipe=recipe.model_dump(mode="json"),
            plan=plan_of(prepared, ending),
            trained=prepared.trained_dict(),
            ledgers=prepared.ledgers_dict(),
            environment=_read_environment(run),
            metrics=read_metrics(run.metrics_path),
            samples=prepared.held_out.samples(ending.before, ending.after, read_samples(run.samples_path)),
            scores=prepared.held_out.score_table(ending.before, ending.after),
            timings=ending.timings,
            checkpoints=[{"path": str(path)} for path in run.scan_checkpoints().complete],
            result=ending.result,
            artifacts=artifacts_of(ending.result) if ending.result else [],
            checks=[
                *prepared.dataset.gate.check_dicts(),
                *(check.as_dict() for check in ending.checks),
            ],
        )
    )


def plan_of(prepared: Prepared, ending: Ending) -> dict[str, object]:
    """The plan with what was settled once the model was there: flags, and the plan of its activations."""
    plan = prepared.plan_dict()
    flags = [applied.as_dict() for applied in (*prepared.applied, *ending.applied)]
    return plan | {"optimizations": flags, "activations": ending.activation_plan}


def show_result(console: Console, run: RunFolder, report: Mapping[str, Any]) -> None:
    """Prints scores and samples before and after, where things are and what to type next."""
    summary = report["summary"]
    if report["message"]:
        console.line(report["message"], style="bold")
    if summary["eval_loss_after"] is not None and summary["eval_loss_before"] is not None:
        console.line(f"held-out loss {summary['eval_loss_before']:.4f} -> {summary['eval_loss_after']:.4f}")
    for check in report["checks"]:
        if check["name"] == NOT_WORSE and not check["ok"]:
            console.warning(f"{check['detail']}. Lower training.learning_rate, or check that the data are alike.")
    for name, score in report["scores"].items():
        before = "not measured" if score["before"] is None else f"{score['before']:.1%}"
        console.line(
            f"{name} on {plural(score['rows'], 'held-out sample')}: {before} -> {score['after']:.1%}", style="bold"
        )
    for sample in report["samples"]:
        console.line()
        console.line(f"prompt    {one_line(last_question(sample['prompt']), limit=SAMPLE_CHARACTERS)}")
        for name in ("before", "after", "reference"):
            if sample[name] is not None or name == "after":
                said = without_control_tokens(sample[name] or "")
                console.line(f"{name:<9} {one_line(said, limit=SAMPLE_CHARACTERS)}")
    console.line()
    for artifact in report["artifacts"]:
        console.line(
            f"{artifact['name']:<10}{_shown(Path(artifact['path']))} ({artifact['bytes'] / 2**20:.1f} MiB, "
            f"{artifact['weights']} weights, step {artifact['step']})"
        )
    console.line(f"report    {_shown(run.report_html)}")
    console.line(f"metrics   {_shown(run.metrics_path)}")
    _show_times(console, report["timings"])
    _show_next(console, run, report)


def _show_times(console: Console, timings: Mapping[str, Any]) -> None:
    """Prints the time of the steps, which a continued run sums over all of its starts, and of this command."""
    in_steps = timings.get("training_seconds")
    steps = f"{format_seconds(in_steps)} in steps, over all starts; " if in_steps is not None else ""
    console.line(f"time      {steps}{format_seconds(timings['total_seconds'])} for this command")


def _show_next(console: Console, run: RunFolder, report: Mapping[str, Any]) -> None:
    """Prints what to do next: after the shipped quick start, how to train on data of one's own."""
    command = _command()
    if Path(report["recipe"]["model"]["path"]).parts[-2:] != ("quickstart", "base"):
        console.line(f"next      open the report; `{command} runs` lists this run beside the others")
        return
    console.line("next      open the report, or train on your own file:")
    console.line(f"          {command} train {_shown(run.recipe_path)} \\")
    console.line("              'data.train=[{path: FILE.jsonl}]' 'data.eval={fraction: 0.1}' \\")
    console.line("              output.dir=runs/NAME")


def _read_environment(run: RunFolder) -> dict[str, Any]:
    return yaml.safe_load(run.environment_path.read_text(encoding="utf-8"))


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _command() -> str:
    """The program as the user called it, so that the line can be pasted."""
    called = Path(sys.argv[0])
    return _shown(called) if called.name == "finetune" and shutil.which("finetune") is None else "finetune"


def _shown(path: Path) -> str:
    """A path as the user would type it: relative where it lies below the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
