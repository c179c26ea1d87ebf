"""The command line: its start, its exit codes, and what goes to stdout and stderr."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import finetune
from finetune.cli import _known_error, app, main
from finetune.console import Console
from finetune.errors import DataError, EnvironmentProblem, FinetuneError, GateStopped, Interrupted
from finetune.recipe.schema import Recipe

MINIMAL = "model: {path: org/name}\ndata: {train: [{path: a.jsonl}]}\noutput: {dir: out}\n"
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "numpy")


class Outcome:
    """What a training function returns, as far as the command line looks at it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def as_dict(self) -> dict[str, Any]:
        return self.values


Train = Callable[..., Outcome]
UseTrain = Callable[[Train], None]


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """The command sets variables for the libraries that it loads; they must not reach other tests."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def use_train(monkeypatch: pytest.MonkeyPatch) -> UseTrain:
    """Puts a function in place of the run, so that the edge around it is seen without loading torch."""

    def _use(train: Train) -> None:
        module = ModuleType("finetune.train")
        module.train = train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "finetune.train", module)

    return _use


def raising(error: BaseException) -> Train:
    def train(recipe: Recipe, **options: Any) -> Outcome:
        raise error

    return train


def run_fresh(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(finetune.__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": root, **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


# ---- start ----


def test_nothing_heavy_is_imported(recipe_file: Path) -> None:
    code = (
        "import sys, finetune.cli, finetune.recipe.load as load, finetune.recipe.reference as reference\n"
        "load.load_recipe('r.yaml'); reference.render_reference()\n"
        "code = finetune.cli.main(['recipes', 'list', '--json']) or finetune.cli.main(['runs', '--json'])\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = run_fresh("-c", code, cwd=recipe_file.parent)
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr


def test_init_loads_no_torch(recipe_file: Path) -> None:
    """It uses the data layer, which needs numpy, and nothing heavier."""
    (recipe_file.parent / "a.csv").write_text("question,answer\n" + "a,b\n" * 20)
    code = (
        "import sys, finetune.cli\n"
        "code = finetune.cli.main(['init', 'a.csv', '--model', 'org/tiny', '--card', 'cpu', '--json'])\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules and name != 'numpy'])"
    )
    result = run_fresh("-c", code, cwd=recipe_file.parent)
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr


def test_wrong_recipe_exits_2_at_once(recipe_file: Path) -> None:
    """Under a second on an idle machine; the limit leaves room for a busy one."""
    recipe_file.write_text(MINIMAL + "training:\n  lerning_rate: 1\n")
    begin = time.perf_counter()
    result = run_fresh("-m", "finetune", "train", "r.yaml", cwd=recipe_file.parent)
    seconds = time.perf_counter() - begin
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: r.yaml:5:3: unknown key `training.lerning_rate`, found 1; did you mean")
    assert "\nremedy: Correct or remove `training.lerning_rate`" in result.stderr
    assert seconds < 3


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"finetune {finetune.__version__}\n"
    for arguments in ([], ["--help"], ["train", "--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert out.startswith("Usage: finetune")
        assert max(map(len, out.splitlines())) <= 80


def test_shell_completion_is_offered(recipe_file: Path) -> None:
    environment = {"_FINETUNE_COMPLETE": "complete_bash", "COMP_WORDS": "finetune tr", "COMP_CWORD": "1"}
    result = run_fresh("-m", "finetune", cwd=recipe_file.parent, **environment)
    assert "train" in result.stdout.split()


# ---- arguments ----


def test_options_may_follow_overrides(recipe_file: Path, use_train: UseTrain) -> None:
    seen: dict[str, Any] = {}

    def train(recipe: Recipe, *, console: Console, dry_run: bool, resume: bool, **options: Any) -> Outcome:
        seen.update(recipe=recipe, dry_run=dry_run, resume=resume, is_json=console.is_json)
        return Outcome({})

    use_train(train)
    assert main(["train", "r.yaml", "training.max_steps=3", "--dry-run", "training.seed=9", "--resume"]) == 0
    assert (seen["recipe"].training.max_steps, seen["recipe"].training.seed) == (3, 9)
    assert (seen["dry_run"], seen["resume"], seen["is_json"]) == (True, True, False)


def test_flags_are_off_by_default_and_text_goes_to_stdout(
    recipe_file: Path, use_train: UseTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(recipe: Recipe, *, console: Console, dry_run: bool, resume: bool, **options: Any) -> Outcome:
        console.line(f"{dry_run} {resume}")
        return Outcome({"loss": 1.0})

    use_train(train)
    assert main(["train", "r.yaml"]) == 0
    assert capsys.readouterr().out == "False False\n"


def test_json_result_is_alone_on_stdout(
    recipe_file: Path, use_train: UseTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(recipe: Recipe, *, console: Console, **options: Any) -> Outcome:
        console.line("loading")
        console.table("t", ["a"], [["b"]])
        return Outcome({"dir": Path("out"), "loss": 0.5, "text": "\u00fc", "list": [float("nan"), 1]})

    use_train(train)
    assert main(["train", "r.yaml", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"dir": "out", "loss": 0.5, "text": "\u00fc", "list": [None, 1]}
    assert captured.out.count("\n") == 1
    assert captured.err == "loading\nt\na\nb\n"


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "r.yaml", "--dry"], "No such option: --dry"),
        (["trian"], "No such command 'trian'"),
        (["train", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["train", "r.yaml", "model.path"], "an override is written `section.key=value`"),
    ],
)
@pytest.mark.parametrize("is_json", [False, True], ids=["text", "json"])
def test_wrong_arguments_exit_2(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, is_json: bool
) -> None:
    assert main([*arguments, "--json"] if is_json else arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "remedy: " in captured.err
    if is_json:
        values = json.loads(captured.out)
        assert message in values["message"]
        assert (values["error"], values["exit_code"]) == ("RecipeError", 2)
        assert values["remedy"]
    else:
        assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (DataError("empty", place="a.jsonl:3", remedy="Fill it."), 3),
        (EnvironmentProblem("no disk", remedy="Free some."), 4),
        (GateStopped("loss is NaN", remedy="Lower the rate."), 6),
        (Interrupted("stopped at step 3", remedy="Add --resume."), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, FinetuneError) else str(value),
)
def test_typed_errors_have_their_exit_codes(
    recipe_file: Path, use_train: UseTrain, capsys: pytest.CaptureFixture[str], error: FinetuneError, exit_code: int
) -> None:
    use_train(raising(error))
    assert main(["train", "r.yaml", "--json"]) == exit_code
    captured = capsys.readouterr()
    assert json.loads(captured.out) == error.as_dict()
    place = f"{error.place}: " if error.place else ""
    head = f"error: {place}{error.message}"
    if isinstance(error, Interrupted):  # what one asks for is no error
        head = "stopped: at step 3"
    assert captured.err == f"{head}\nremedy: {error.remedy}\n"


TORCH_OOM = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})


@pytest.mark.parametrize(
    "error",
    [
        TORCH_OOM("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        type("Derived", (TORCH_OOM,), {})("x"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["torch", "derived", "python", "cpu"],
)
def test_out_of_memory_exits_5_with_the_keys_to_change(
    recipe_file: Path, use_train: UseTrain, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    use_train(raising(error))
    assert main(["train", "r.yaml", "--json"]) == 5
    values = json.loads(capsys.readouterr().out)
    assert values["error"] == "OutOfMemory"
    assert values["message"].startswith("memory ran out: ")
    assert "\n" not in values["message"]
    for key in ("rows_per_micro_batch", "data.max_length", "nf4"):
        assert key in values["remedy"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_name_of_torchs_own_error_is_the_one_looked_for(recipe_file: Path, use_train: UseTrain) -> None:
    import torch

    use_train(raising(torch.OutOfMemoryError("x")))
    assert main(["train", "r.yaml"]) == 5


def test_interrupt_exits_130(recipe_file: Path, use_train: UseTrain, capsys: pytest.CaptureFixture[str]) -> None:
    use_train(raising(KeyboardInterrupt()))
    assert main(["train", "r.yaml", "--json"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == "Interrupted"
    assert "--resume" in captured.err


def test_a_fault_of_the_program_shows_its_traceback_and_exits_1(
    recipe_file: Path, use_train: UseTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    use_train(raising(ZeroDivisionError("boom")))
    assert main(["train", "r.yaml", "--json"]) == 1
    captured = capsys.readouterr()
    assert "Traceback (most recent call last)" in captured.err
    assert captured.err.splitlines()[-1].startswith("This is a fault of the program")
    values = json.loads(captured.out)
    assert (values["message"], values["exit_code"]) == ("ZeroDivisionError: boom", 1)


def test_a_missing_package_is_an_environment_problem(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The import of the run fails the way it does where a dependency is not installed."""
    folder = recipe_file.parent / "package"
    folder.mkdir()
    (folder / "train.py").write_text("import package_that_is_not_installed\n")
    monkeypatch.setattr(finetune, "__path__", [str(folder)])
    monkeypatch.delitem(sys.modules, "finetune.train", raising=False)
    assert main(["train", "r.yaml", "--json"]) == 4
    values = json.loads(capsys.readouterr().out)
    assert values["message"] == "the Python package `package_that_is_not_installed` is not installed"
    assert values["remedy"].startswith("Install it: pip install")


# ---- console ----


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("plain")
def test_console_prints_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]x[/bold] :smile: /" + "long/" * 60 + "end 123"
    console = Console()
    console.line(text)
    console.note(text)
    console.warning(text)
    console.error(DataError(text, place="[a]", remedy=text))
    captured = capsys.readouterr()
    assert captured.out == f"{text}\nnote: {text}\n"
    assert captured.err == f"warning: {text}\nerror: [a]: {text}\nremedy: {text}\n"


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device", "/runs/a"), RuntimeError("PytorchStreamWriter failed writing file")],
    ids=["python", "torch"],
)
def test_a_full_disk_is_told(error: Exception) -> None:
    known = _known_error(error)
    assert isinstance(known, EnvironmentProblem)
    assert "--resume" in known.remedy


@pytest.mark.usefixtures("plain")
def test_table_aligns_and_stays_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("Data", ["file", "rows"], [["a.jsonl", 5], ["\u6a21\u578b", 1234]])
    assert capsys.readouterr().out.splitlines() == [
        "Data",
        "file      rows",
        "a.jsonl      5",
        "\u6a21\u578b     1,234",
    ]


@pytest.mark.usefixtures("plain")
def test_wide_table_becomes_blocks_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/data/" + "x" * 90
    Console().table("", ["path", "rows"], [[path, 1], ["b", 2]])
    assert capsys.readouterr().out.splitlines() == [f"path  {path}", "rows  1", "", "path  b", "rows  2"]


@pytest.mark.usefixtures("plain")
def test_table_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("Empty", ["a", "b"], [])
    assert capsys.readouterr().out == "Empty\na  b\n"


@pytest.mark.usefixtures("plain")
def test_escape_characters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Console().line("\x1b[2Jgone")
    assert capsys.readouterr().out == "\\x1b[2Jgone\n"


def test_colour_on_a_terminal_only_and_never_under_no_color(recipe_file: Path) -> None:
    code = "from finetune.console import Console; Console().note('x')"
    as_terminal = {"FORCE_COLOR": "1", "TERM": "xterm"}
    assert "\x1b[" in run_fresh("-c", code, cwd=recipe_file.parent, **as_terminal).stdout
    # NO_COLOR leaves weight and underline alone by its definition; a colour's code is 3x, 4x or 9x.
    assert "\x1b[3" not in run_fresh("-c", code, cwd=recipe_file.parent, **as_terminal, NO_COLOR="1").stdout
    assert run_fresh("-c", code, cwd=recipe_file.parent, FORCE_COLOR="", TERM="dumb").stdout == "note: x\n"


def test_text_that_the_terminal_cannot_show_is_escaped(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL + "adapter: {type: \u00fc}\n", encoding="utf-8")
    result = run_fresh("-m", "finetune", "train", "r.yaml", cwd=recipe_file.parent, PYTHONIOENCODING="ascii")
    assert result.returncode == 2
    assert 'found "\\xfc"' in result.stderr


def test_every_command_is_in_the_table_of_the_docs() -> None:
    """`selftest` was missing."""
    text = (Path(finetune.__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
    commands = set(typer.main.get_command(app).commands)
    assert {"train", "selftest", "recipes"} <= commands
    assert [name for name in commands if f"\n| [`{name}`](#finetune-{name}) |" not in text] == []
