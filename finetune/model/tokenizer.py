"""The tokenizer; apart from the model's loading, so that a look at the data needs neither torch nor bitsandbytes."""

from __future__ import annotations

from pathlib import Path

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.schema import ModelSection


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, with the recipe's chat template and new tokens where it names some.

    Raises:
        EnvironmentProblem: the folder or hub id has no tokenizer.
        RecipeError: the chat template's file cannot be read, or a new token is a token already.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(section.path, revision=section.revision)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(
            f"the model's tokenizer cannot be read: {str(error).strip().splitlines()[0]}",
            place=f"model.path: {section.path}",
            remedy="The folder needs tokenizer.json and tokenizer_config.json beside config.json.",
        ) from error
    if section.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(section.chat_template))
    _add_tokens(tokenizer, section)
    return tokenizer


def _add_tokens(tokenizer: PreTrainedTokenizerBase, section: ModelSection) -> None:
    """Adds the recipe's new tokens, matched as they are written, without space stripped around them."""
    known = tokenizer.get_vocab()
    for key, is_special in (("new_tokens", False), ("new_special_tokens", True)):
        texts = getattr(section, key)
        if there := [text for text in texts if text in known]:
            raise RecipeError(
                f"{', '.join(f'`{text}` (id {known[text]})' for text in there)}: a token of this tokenizer already",
                place=f"model.{key}",
                remedy=f"Remove it from model.{key}. Its row is there, and is trained in full fine-tuning, or through "
                "adapter.modules_to_save=[embed_tokens, lm_head].",
            )
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special) for text in texts])


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"the chat template cannot be read: {error}",
            place=f"model.chat_template: {path}",
            remedy="Name a Jinja file in UTF-8, or leave model.chat_template out to use the tokenizer's own.",
        ) from error
