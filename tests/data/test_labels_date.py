"""A template that prints today's date gives the same tokens on every day of a run, and touches nobody else's."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from label_cases import answer, chat, user
from label_templates import SHAPES

from finetune.data.chat import Renderer
from finetune.data.template import ChatTemplate, prints_today

DAY, OTHER = datetime.date(2025, 1, 5), datetime.date(2031, 12, 24)


def ids_of(tokenizer: Any, date: datetime.date | None) -> list[int]:
    renderer = Renderer(tokenizer, date=date)
    return renderer.render(chat(user("u"), answer("A")), loss_on="assistant").input_ids.tolist()


def check_pinned(tokenizer: Any, *, shown: str) -> None:
    assert ids_of(tokenizer, DAY) == ids_of(tokenizer, DAY)
    assert ids_of(tokenizer, DAY) != ids_of(tokenizer, OTHER)
    assert shown in tokenizer.decode(ids_of(tokenizer, DAY))
    assert Renderer(tokenizer, date=DAY).pinned_date == DAY


def test_gpt_oss(gpt_oss: Any) -> None:
    """Its date comes from a function inside a macro; transformers passes no other function to templates."""
    assert prints_today(gpt_oss.chat_template)
    check_pinned(gpt_oss, shown="Current date: 2025-01-05")
    today = datetime.date.today()
    assert Renderer(gpt_oss).pinned_date == today
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "A"}]
    assert ids_of(gpt_oss, None) == gpt_oss.apply_chat_template(turns, return_dict=False)
    # Another user of the same tokenizer, after ours: today, as ever.
    assert today.isoformat() in gpt_oss.apply_chat_template(turns, tokenize=False)


def test_llama_3_1(llama: Any) -> None:
    """It has a variable with a default of its own, which stays unless the recipe names a date."""
    assert not prints_today(llama.chat_template)
    check_pinned(llama, shown="Today Date: 05 Jan 2025")
    assert "Today Date: 26 Jul 2024" in llama.decode(ids_of(llama, None))
    assert Renderer(llama).pinned_date is None


def test_shape_of_llama_3_2() -> None:
    """It asks whether the function is there before it calls it."""
    tokenizer = SHAPES["llama3.2"].tokenizer()
    check_pinned(tokenizer, shown="Today Date: 05 Jan 2025")
    assert datetime.date.today().strftime("%d %b %Y") in tokenizer.decode(ids_of(tokenizer, None))


def test_template_without_a_date() -> None:
    tokenizer = SHAPES["smollm"].tokenizer()
    assert np.array_equal(ids_of(tokenizer, DAY), ids_of(tokenizer, OTHER))
    assert Renderer(tokenizer, date=DAY).pinned_date is None


@pytest.mark.parametrize(
    "format",
    ["%Y-%m-%d", "%d %B %Y", "%A, %b %-d", "%y/%j %H:%M:%S", "100%% of %%d", "%e %I %p|%U", "", "no code", "%x"],
)
def test_the_clock_writes_what_strftime_writes(format: str) -> None:
    tokenizer = SHAPES["smollm"].tokenizer("{{ strftime_now(" + repr(format) + ") }}<|im_end|>")
    text = ChatTemplate(tokenizer, date=DAY).render([{"role": "user", "content": "u"}], tools=(), place="p")
    assert text == datetime.datetime(2025, 1, 5).strftime(format) + "<|im_end|>"
