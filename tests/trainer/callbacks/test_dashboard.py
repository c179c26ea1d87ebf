"""The dashboard fits the terminal, leaves it as it found it, and lets other output through above itself."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
import warnings
from itertools import pairwise

import pytest
from drive import drive, train_logs
from rich.console import Console, ConsoleDimensions
from transformers import TrainerControl, TrainerState, TrainingArguments

from finetune.run.samples import SampleAnswer
from finetune.trainer.callbacks import live_view
from finetune.trainer.callbacks.dashboard import View, render_dashboard
from finetune.trainer.callbacks.progress import ProgressCallback
from finetune.trainer.callbacks.text_chart import History, draw_chart

SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"
SAMPLE = SampleAnswer(50, "<|im_start|>user\nsay \x1b[2J red<|im_end|>", "red", "red " * 50)


def terminal(*, width: int = 80, height: int = 24) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width, height=height, force_terminal=True, color_system=None), stream


def full_view(num_steps: int = 60) -> View:
    logs = train_logs(num_steps) | {"aux_loss": 2.0, "memory_bytes": 2**29, "host_memory_bytes": 2**32}
    view = View("run", num_steps, 100, logs, elapsed_seconds=75, seconds_left=3700)
    for step in range(1, num_steps + 1):
        view.training.add(step, 10 / step)
    view.held_out.add(0, 10.0)
    view.held_out.add(50, 0.5)
    view.sample = SAMPLE
    return view


def picture(view: View, *, width: int, height: int, ascii_only: bool = False) -> list[str]:
    console, stream = terminal(width=width, height=height)
    console.print(render_dashboard(view, width=width, height=height, ascii_only=ascii_only))
    return stream.getvalue().splitlines()


def test_dashboard_shows_all_parts_within_80_by_24() -> None:
    lines = picture(full_view(), width=80, height=24)
    assert len(lines) <= 22 and max(map(len, lines)) == 80
    text = "\n".join(lines)
    for part in (
        "step 60/100  60%  1:15  left 1:01:40", "training 2.4000", "held out 0.5000", "lr", "1.00e-04",
        "grad norm", "12,345", "GPU now", "0.5 GiB", "peak", "2.0 GiB", "prompt", "step 50", "wanted",
    ):  # fmt: skip
        assert part in text, part
    assert "say [2J red" in text and "user" not in text
    assert re.search("[\u2801-\u28ff]", text) and "\u25cf" in text
    assert "\x1b" not in text and "im_start" not in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (40, 24), (20, 8), (200, 60), (10, 4)])
@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_dashboard_is_never_larger_than_its_terminal(width: int, height: int, num_steps: int) -> None:
    view = full_view(num_steps) if num_steps else View("a" * 300)
    lines = picture(view, width=width, height=height)
    assert max(map(len, lines)) <= width and len(lines) <= max(3, height - 2)


@pytest.mark.parametrize(("width", "height"), [(50, 12), (80, 8), (30, 6), (20, 5), (80, 3)])
def test_the_loss_is_the_last_thing_to_go(width: int, height: int) -> None:
    lines = picture(full_view(), width=width, height=height)
    assert len(lines) <= max(3, height - 2)
    assert "2.4000" in "\n".join(lines)


def test_dashboard_of_an_ascii_terminal_is_ascii_inside_its_frame() -> None:
    chart = draw_chart([(0, 1.0), (5, 0.0)], [(5, 0.5)], width=40, height=8, last_step=10, ascii_only=True)
    text = "\n".join(line.plain for line in chart)
    assert text.isascii() and "*" in text and "o" in text


def test_chart_puts_points_where_they_belong() -> None:
    chart = [
        line.plain for line in draw_chart([], [(0, 0.0), (10, 4.0)], width=50, height=6, last_step=10, ascii_only=True)
    ]
    assert chart[0].endswith("o") and chart[0].split()[0] == "4"
    assert chart[4].split() == ["0", "o"] and chart[5].split() == ["step", "0", "10"]


def test_history_keeps_the_course_in_bounded_memory() -> None:
    history = History(limit=64)
    for step in range(100_000):
        history.add(step, 2.0 * step)
    assert 32 <= len(history.points) <= 64 and history.last == 199_998
    assert all(value == pytest.approx(2 * step) for step, value in history.points)
    steps = [step for step, _ in history.points]
    gaps = [after - before for before, after in pairwise(steps)]
    assert steps[0] < 2000 and steps[-1] > 98_000 and min(gaps[:-1]) == max(gaps[:-1]) >= gaps[-1] > 0


def test_live_view_ends_with_all_steps_and_the_cursor_back(arguments: TrainingArguments) -> None:
    console, stream = terminal()
    drive(ProgressCallback(console, is_live=True, latest_sample=lambda: SAMPLE), arguments, num_steps=20)
    text = stream.getvalue()
    final = text[text.rindex("training") - 300 :]
    assert "step 20/20" in final and "100%" in final and "2.8000" in final and "12,345" in final
    assert text.count(HIDE) == text.count(SHOW) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_terminal_is_given_back_when_an_exception_passes(
    arguments: TrainingArguments,
    error: type[BaseException],
) -> None:
    console, stream = terminal()
    streams = sys.stdout, sys.stderr
    callback = ProgressCallback(console, is_live=True)
    with pytest.raises(error), callback:
        callback.on_train_begin(arguments, TrainerState(max_steps=3), TrainerControl())
        assert sys.stderr is not streams[1]
        raise error
    assert stream.getvalue().endswith(SHOW) and (sys.stdout, sys.stderr) == streams


def test_terminal_is_given_back_when_the_picture_itself_fails(arguments: TrainingArguments) -> None:
    console, stream = terminal()
    calls: list[int] = []

    def sample() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise OSError("gone")

    callback = ProgressCallback(console, is_live=True, latest_sample=sample)
    callback.on_train_begin(arguments, TrainerState(max_steps=3), TrainerControl())
    with pytest.raises(OSError, match="gone"):
        callback.close()
    assert stream.getvalue().endswith(SHOW)


def test_other_output_appears_above_the_view(
    arguments: TrainingArguments,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prints, warnings and log lines during a run, those of handlers that were made before it included."""
    monkeypatch.setattr(live_view, "_REFRESH_SECONDS", 0.0)
    console, stream = terminal()
    real = io.StringIO()
    monkeypatch.setattr(sys, "stderr", real)
    handler = logging.StreamHandler()
    logger = logging.getLogger("some.package")
    logger.addHandler(handler)

    def speak(step: int) -> None:
        if step == 3:
            print("printed")
            warnings.warn_explicit("warned", UserWarning, "x.py", 1)
            logger.warning("logged")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
        drive(ProgressCallback(console, is_live=True), arguments, num_steps=5, before_step=speak)
    logger.removeHandler(handler)
    text = stream.getvalue()
    assert real.getvalue() == "" and handler.stream is real
    for word in ("printed", "warned", "logged"):
        assert text.count(word) == 1 and text.index(word) < text.rindex("step 5/5")
        # The picture is erased before the line and drawn again after it, so the line stands above.
        assert "\u256d" in text[text.index(word) :] and text[: text.index(word)].rstrip("\n").endswith(
            ("\x1b[2K", "\n")
        )


def test_a_new_size_clears_the_screen_and_draws_for_it(
    arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "_REFRESH_SECONDS", 0.0)
    console, stream = terminal(width=100, height=30)

    def resize(step: int) -> None:
        if step == 3:
            console.size = ConsoleDimensions(60, 20)

    drive(ProgressCallback(console, is_live=True), arguments, num_steps=3, before_step=resize)
    text = stream.getvalue()
    assert "\x1b[2J" in text
    after = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text[text.index("\x1b[2J") :])
    assert max(len(line) for line in re.split("[\r\n]", after)) == 60
    assert text.count(HIDE) == text.count(SHOW) == 2


def test_slow_steps_are_shown_with_their_own_figures(arguments: TrainingArguments) -> None:
    """The trainer logs after it tells that a step ended; a picture drawn between the two would show the step before."""
    console, stream = terminal()
    callback = ProgressCallback(console, is_live=True)
    state, control = TrainerState(max_steps=9), TrainerControl()
    callback.on_train_begin(arguments, state, control)
    for state.global_step in (1, 2):
        callback._live._drawn = -1e9  # as after a step that took long
        control.should_log = True
        callback.on_step_end(arguments, state, control)
        callback.on_log(arguments, state, control, logs=train_logs(state.global_step))
    shown = stream.getvalue()
    callback.close()
    assert shown.index("step 1/9") < shown.index("2.9900") < shown.index("step 2/9") < shown.index("2.9800")
    assert shown.count("step 1/9") == shown.count("step 2/9") == 1


def test_time_left_is_told_from_the_steps_after_the_first(
    arguments: TrainingArguments,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("finetune.trainer.callbacks.progress.time.monotonic", lambda: now[0])

    def work(step: int) -> None:
        now[0] += 100.0 if step == 1 else 2.0

    stream = io.StringIO()
    drive(ProgressCallback(Console(file=stream, width=200)), arguments, num_steps=10, before_step=work)
    lines = stream.getvalue().splitlines()
    assert "left" not in lines[0] and lines[3].endswith("elapsed 1:46  left 0:12")


def test_a_continued_run_shows_what_went_before() -> None:
    console, _ = terminal()
    history = [{"kind": "eval", "step": 0, "eval_loss": 5.0}, {"kind": "train", "step": 1, **train_logs(1)}]
    callback = ProgressCallback(console, history=history)
    assert callback._view.training.points == [(1, 2.99)] and callback._view.held_out.points == [(0, 5.0)]


def test_drawing_takes_a_small_part_of_the_time() -> None:
    """A picture of 80 by 24, at most twice a second: 2 ms on an idle core; the limit leaves room for a busy one."""
    view = full_view()
    begun = time.process_time()
    for _ in range(10):
        picture(view, width=80, height=24)
    assert (time.process_time() - begun) / 10 < 0.05
    assert live_view._REFRESH_SECONDS >= 0.25
