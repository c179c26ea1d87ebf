"""Where a live view may be drawn, and where warnings go, on a real pseudo terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import yaml
from tiny import make_chat_file, make_model_folder, make_recipe


def run_on_terminal(
    arguments: list[str], *, cwd: Path, is_stderr_piped: bool = False, **environment: str
) -> tuple[int, str, str]:
    """Runs Python on a terminal of 80 by 24; returns exit code, what the terminal got, and what stderr's pipe got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE if is_stderr_piped else theirs,
        env=clean | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | environment,
        cwd=cwd,
    )
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux tells that the other side is closed
            break
        if not part:
            break
        shown += part
    errors = process.stderr.read().decode() if process.stderr else ""
    os.close(ours)
    return process.wait(), shown.decode(), errors


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ("", {}, "True"),
        ("is_plain=True", {}, "False"),
        ("is_json=True", {}, "False"),
        ("", {"NO_COLOR": "1"}, "False"),
        ("", {"TERM": "dumb"}, "False"),
    ],
)
def test_a_live_view_needs_a_terminal_that_wants_one(options: str, environment: dict[str, str], expected: str) -> None:
    code = f"from finetune.console import Console; print(Console({options}).can_redraw)"
    assert run_on_terminal(["-c", code], cwd=Path.cwd(), **environment) == (0, f"{expected}\r\n", "")


def test_no_live_view_into_a_pipe_even_where_colour_is_forced() -> None:
    code = "from finetune.console import Console; print(Console().can_redraw)"
    forced = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=forced, check=True)
    assert result.stdout == "False\n"


def test_warnings_go_above_the_live_view_on_one_screen_and_to_stderr_elsewhere() -> None:
    code = (
        "from finetune.console import Console; from rich.live import Live\n"
        "console = Console()\n"
        "with Live('picture', console=console.rich, auto_refresh=False): console.warning('careful')"
    )
    _, shown, _ = run_on_terminal(["-c", code], cwd=Path.cwd())
    assert shown.count("careful") == 1 and shown.index("careful") < shown.rindex("picture")
    _, shown, errors = run_on_terminal(["-c", code], cwd=Path.cwd(), is_stderr_piped=True)
    assert "careful" not in shown and errors == "warning: careful\n"


def test_a_run_with_the_dashboard_ends_in_the_same_weights(tmp_path: Path) -> None:
    """The whole command on a terminal and in lines: equal adapters, and the cursor is back in the end."""
    make_model_folder(tmp_path / "model", "qwen3")
    make_chat_file(tmp_path / "train.jsonl")
    recipe = make_recipe(tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "run", data={"max_length": 128})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    screens = {}
    for name, option in (("live", []), ("lines", ["--plain"])):
        command = ["-m", "finetune", "train", str(tmp_path / "recipe.yaml"), f"output.dir={tmp_path / name}", *option]
        code, screens[name], _ = run_on_terminal(command, cwd=Path.cwd())
        assert code == 0, screens[name]
    adapters = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in screens]
    assert adapters[0] == adapters[1]
    assert screens["live"].count("\x1b[?25l") == screens["live"].count("\x1b[?25h") == 1
    assert "step 4/4  100%" in screens["live"] and "step 4/4  loss" in screens["lines"]
    assert "\x1b[?25l" not in screens["lines"]
