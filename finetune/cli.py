"""The command line: load the recipe, call one function, print, turn errors into exit codes.

Nothing heavy is imported before the recipe is known to be right, so a wrong recipe fails at once.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

import typer

import finetune
from finetune.commands import compare, selftest, start
from finetune.commands.options import JsonOption, OverridesArgument, RecipeArgument, complete_run
from finetune.console import Console, KeptStdout
from finetune.errors import EnvironmentProblem, ExitCode, FinetuneError, Interrupted, OutOfMemory, RecipeError
from finetune.process import prepare_process, require_trackers
from finetune.recipe.load import load_recipe
from finetune.recipe.paths import is_hub_dataset
from finetune.recipe.schema import Recipe
from finetune.run.disk import is_disk_full
from finetune.run.output_folder import folder_to_continue

FAULT_EXIT_CODE = 1
"""Exit code of a fault of the program itself; no class of `errors.py` has it."""

app = typer.Typer(
    name="finetune",
    help="Fine-tune language models from a YAML recipe.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    The only place that catches every exception. Under `--json` stdout holds exactly one JSON object, of the result or
    of the error; whatever else is written there, by anyone, goes to stderr.

    Args:
        arguments: those of the command line; None takes the process's own, and keeps stdout until the process ends,
            since libraries print at its exit too.
    """
    is_whole_process = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _print_any_text()
    is_json = "--json" in arguments
    asks_for_help = not {"--help", "-h"}.isdisjoint(arguments)
    kept_stdout = KeptStdout() if is_json and not asks_for_help else None
    try:
        return _run(arguments, Console(is_json=is_json))
    finally:
        if kept_stdout is not None and not is_whole_process:
            kept_stdout.give_back()


def _run(arguments: Sequence[str], console: Console) -> int:
    """Runs a command and returns the exit code, having told what ended it."""
    try:
        code = app(args=arguments, prog_name="finetune", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # Typer's own answer to Ctrl-C, which says nothing
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _report(Interrupted("stopped", remedy="Give the command again."), console)
    except Exception as error:
        known = _known_error(error)
        return _report(known, console) if known else _report_fault(error, console)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Fine-tune language models from a YAML recipe."""
    if version:
        typer.echo(f"finetune {finetune.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop before the weights, after the data checks.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, also on a terminal.")] = False,
    is_json: JsonOption = False,
) -> None:
    """Train as the recipe says: from data and weights to a run folder."""
    started = time.perf_counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does, with its report
    console = Console(is_json=is_json, is_plain=plain)
    loaded = _load(recipe, overrides)
    place_note = ""
    if resume:
        loaded, place_note = _in_its_folder(loaded, recipe, overrides)
    require_trackers(loaded.output.trackers)
    try:
        try:
            from finetune.train import train as run_training
        except ModuleNotFoundError as error:
            raise _missing_package(error) from error
        outcome = run_training(
            loaded, console=console, dry_run=dry_run, resume=resume, place_note=place_note, started=started
        )
    except KeyboardInterrupt as stop:
        # Typer would turn this into a bare exit. During training, train() saves and raises Interrupted itself.
        remedy = "Give the command again, with --resume where the run folder holds a checkpoint."
        raise Interrupted("stopped outside the training loop", remedy=remedy) from stop
    console.result(outcome.as_dict())


@app.command()
def preview(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows to show.")] = 3,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write all of it as one page to FILE.")
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """Show rows as the model will see them, with what is learned; check the data. Needs a tokenizer, no weights."""
    console = Console(is_json=is_json)
    loaded = _load(recipe, overrides)
    try:
        try:
            from finetune.preview.run import preview as run_preview
        except ModuleNotFoundError as error:
            raise _missing_package(error) from error
        shown = run_preview(loaded, console=console, num_rows=rows, html=html)
    except KeyboardInterrupt as stop:  # Typer would turn this into a bare exit
        raise Interrupted("stopped", remedy="Give the command again.") from stop
    console.result(shown.as_dict())


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the run, whatever its status.", autocompletion=complete_run)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the page to FILE, its picture beside it.")
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """Make a run's page and picture again, also while it trains. Reads only; needs no model."""
    from finetune.run.remake import remake_report

    console = Console(is_json=is_json)
    try:
        made = remake_report(run, output=output)
    except ModuleNotFoundError as error:
        raise _missing_package(error) from error
    for line in made.lines():
        console.line(line)
    console.result(made.as_dict())


compare.register(app)
start.register(app)
selftest.register(app)


def _load(recipe: str, overrides: list[str] | None) -> Recipe:
    """Reads the recipe and, once it is known to be right, prepares the process for the heavy imports that follow."""
    loaded = load_recipe(recipe, overrides=overrides or [])
    prepare_process(needs_hub=_needs_hub(loaded))
    return loaded


def _in_its_folder(recipe: Recipe, path: str, overrides: list[str] | None) -> tuple[Recipe, str]:
    """Lets a run be continued where it lies: the `recipe.yaml` of a run folder stands for that folder.

    Returns the recipe, and a note where its `output.dir` names another folder.
    """
    folder = folder_to_continue(path, overrides or [])
    if folder is None:
        return recipe, ""
    written, note = Path(recipe.output.dir), ""
    if written.resolve() != folder.resolve():
        note = f"the run in {folder} is continued, in which the recipe lies; its output.dir says {written}"
    return recipe.model_copy(update={"output": recipe.output.model_copy(update={"dir": str(folder)})}), note


def _needs_hub(recipe: Recipe) -> bool:
    """Says whether the model, or some data, is named by a hub id."""
    data = recipe.data
    sources = [*data.train, *(data.eval if isinstance(data.eval, list) else [])]
    return not Path(recipe.model.path).is_absolute() or any(is_hub_dataset(source.path) for source in sources)


@runtime_checkable
class _UsageFault(Protocol):
    """What Typer raises for wrong arguments; its own class is private, and another one in older releases."""

    exit_code: int

    def format_message(self) -> str: ...


def _known_error(error: Exception) -> FinetuneError | None:
    """Returns the error as one that the user can mend, or None for a fault of the program."""
    if isinstance(error, FinetuneError):
        return error
    if isinstance(error, _UsageFault):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "finetune"
        return RecipeError(error.format_message(), place="command line", remedy=f"See: {command} --help")
    if isinstance(error, typer.Abort):
        return Interrupted("stopped", remedy="Give the command again.")
    if is_disk_full(error):
        remedy = "Free some space, then give the same command with --resume to go on from the last checkpoint."
        return EnvironmentProblem("the disk is full", place=str(getattr(error, "filename", "") or ""), remedy=remedy)
    if _is_out_of_memory(error):
        first_line = str(error).strip().partition("\n")[0]
        remedy = (
            "Lower training.rows_per_micro_batch, then data.max_length; keep training.gradient_checkpointing: auto; "
            "with a LoRA adapter, set model.quantization: nf4."
        )
        return OutOfMemory(f"memory ran out: {first_line or type(error).__name__}", remedy=remedy)
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Recognises the errors of torch (by name, since it may not be loaded), of its CPU allocator, and of Python."""
    from_torch = any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "torch"
        for kind in type(error).__mro__
    )
    texts = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUDA out of memory")
    return from_torch or isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _missing_package(error: ModuleNotFoundError) -> Exception:
    package = (error.name or "").partition(".")[0]
    if package in ("", "finetune"):
        return error
    remedy = f"Install it: pip install {package}"
    return EnvironmentProblem(f"the Python package `{package}` is not installed", remedy=remedy)


def _report(error: FinetuneError, console: Console) -> int:
    console.error(error)
    console.result(error.as_dict())
    return int(error.exit_code)


def _report_fault(error: Exception, console: Console) -> int:
    traceback.print_exception(error)
    remedy = "This is a fault of the program, not of your recipe; please report it with the lines above."
    print(remedy, file=sys.stderr)
    message = f"{type(error).__name__}: {error}"
    values = {"error": "Fault", "message": message, "place": "", "remedy": remedy, "exit_code": FAULT_EXIT_CODE}
    console.result(values)
    return FAULT_EXIT_CODE


def _print_any_text() -> None:
    """Lets text that the terminal's encoding lacks come out as escapes instead of stopping the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
