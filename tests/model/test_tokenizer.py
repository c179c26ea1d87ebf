"""Chat templates that are no Jinja are refused as the tokenizer is loaded, by their file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import CHATML, make_tokenizer

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.schema import ModelSection

BROKEN = "{{ 1 }}\n{% for m in %}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_template_of_the_recipe(model: Path, tmp_path: Path) -> None:
    """It was told as a fault of each record, at the record's place."""
    path = tmp_path / "template.jinja"
    path.write_text(BROKEN, encoding="utf-8")
    with pytest.raises(RecipeError, match="not valid Jinja") as caught:
        load_tokenizer(ModelSection(path=str(model), chat_template=str(path)))
    assert caught.value.place == f"{path}:2"
    assert caught.value.remedy


def test_template_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    make_tokenizer(template=BROKEN).save_pretrained(tmp_path / "broken")
    with pytest.raises(EnvironmentProblem, match=r"not valid Jinja: .* \(line 2 of it\)") as caught:
        load_tokenizer(ModelSection(path=str(tmp_path / "broken")))
    assert caught.value.place == f"model.path: {tmp_path / 'broken'}"
    mended = tmp_path / "mended.jinja"
    mended.write_text(CHATML, encoding="utf-8")
    section = ModelSection(path=str(tmp_path / "broken"), chat_template=str(mended))
    assert load_tokenizer(section).chat_template == CHATML


def test_blocks_of_transformers_are_valid(model: Path, tmp_path: Path) -> None:
    """What marks answers, and the controls of loops; a constant is not computed."""
    path = tmp_path / "template.jinja"
    text = (
        "{% for m in messages %}{% if not m %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% break %}{% endfor %}{{ 'x' * 10**12 }}"
    )
    path.write_text(text, encoding="utf-8")
    assert load_tokenizer(ModelSection(path=str(model), chat_template=str(path))).chat_template == text


def test_model_without_a_template(tmp_path: Path) -> None:
    make_tokenizer(template=None).save_pretrained(tmp_path)
    assert load_tokenizer(ModelSection(path=str(tmp_path))).chat_template is None
