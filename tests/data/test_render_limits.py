"""Templates that never end, or make a huge text, are stopped with their name and the record's place."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from label_cases import answer, chat, user
from label_templates import SHAPES

from finetune.data import render_limits
from finetune.data.build import build_dataset
from finetune.data.chat import Renderer
from finetune.errors import EnvironmentProblem
from finetune.recipe.schema import DataSection

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CONVERSATION = chat(user("u"), answer("A"))


def problem(template: str) -> EnvironmentProblem:
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    tokenizer = SHAPES["smollm"].tokenizer(template)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(EnvironmentProblem) as caught:
        Renderer(tokenizer).render(CONVERSATION, loss_on="assistant")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getsignal(signal.SIGALRM) is handler
    assert "the chat template of some/model" in caught.value.message
    assert caught.value.remedy
    return caught.value


def test_endless_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limits, "MAX_SECONDS", 0.2)
    error = problem(ENDLESS)
    assert "did not end within 0.2 s" in error.message
    assert error.place == "data.jsonl:3"


@pytest.mark.parametrize(
    "template", ["{{ 'x' * 10**10 }}", "{{ '%10000000000s' % 'x' }}", "{{ 'x'.ljust(10**10) }}"], ids=str
)
def test_huge_text_takes_no_memory(template: str) -> None:
    error = problem(template)
    assert "more than 2 GiB of memory" in error.message
    assert error.place == "data.jsonl:3"


def test_large_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limits, "MAX_CHARACTERS", 1000)
    assert "made a text of 1,001 characters" in problem("{{ 'x' * 1001 }}").message


def test_invalid_template_is_no_fault_of_a_record() -> None:
    error = problem("{{ 1 }}\n{% for m in %}")
    assert "is not valid Jinja" in error.message
    assert error.place == "line 2 of the template"


@pytest.mark.parametrize("workers", [1, 2])
def test_endless_template_stops_the_run(monkeypatch: pytest.MonkeyPatch, write_jsonl: Callable, workers: int) -> None:
    """Also from a worker, through which an error must pass whole; `malformed: drop` would wait for each record."""
    monkeypatch.setattr(render_limits, "MAX_SECONDS", 0.2)
    path = write_jsonl([{"instruction": "q", "output": "a"}] * 3)
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, "malformed": "drop"})
    tokenizer: Any = SHAPES["smollm"].tokenizer(ENDLESS)
    with pytest.raises(EnvironmentProblem, match="did not end within") as caught:
        build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None, workers=workers)
    assert caught.value.place == f"{path}:1"
    assert caught.value.remedy


def test_timer_of_others_goes_on() -> None:
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with render_limits.limited():
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= render_limits.MAX_SECONDS
        assert signal.getitimer(signal.ITIMER_REAL)[0] > render_limits.MAX_SECONDS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_other_threads_render_without_limits() -> None:
    done: list[int] = []

    def render() -> None:
        done.append(len(Renderer(SHAPES["smollm"].tokenizer()).render(CONVERSATION, loss_on="assistant")))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert done
