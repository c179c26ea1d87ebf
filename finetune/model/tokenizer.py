"""The tokenizer; apart from the model's loading, so that a look at the data needs neither torch nor bitsandbytes."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.schema import ModelSection


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, with the recipe's chat template and new tokens where it names some.

    Raises:
        EnvironmentProblem: the folder or hub id has no tokenizer, or one whose chat template is no Jinja.
        RecipeError: the chat template's file cannot be read, or is no Jinja; or a new token is a token already.
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
    else:
        _require_jinja(tokenizer.chat_template, place=f"model.path: {section.path}")
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


def _require_jinja(templates: str | dict[str, str] | None, *, place: str) -> None:
    """Raises where a template of the tokenizer's own, of which there may be several by name, is no Jinja."""
    for template in templates.values() if isinstance(templates, dict) else [templates or ""]:
        error = _syntax_error(template)
        if error is not None:
            raise EnvironmentProblem(
                f"the tokenizer's chat template is not valid Jinja: {error.message} (line {error.lineno} of it)",
                place=place,
                remedy="Correct it, or set `model.chat_template` to a Jinja file.",
            )


class _Generation(Extension):
    """The block `{% generation %}`, by which some templates mark answers; an extension of transformers."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _syntax_error(template: str) -> TemplateSyntaxError | None:
    """Returns what keeps a template from being Jinja. It is parsed only: compiling would run its constants."""
    try:
        ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        ).parse(template)
    except TemplateSyntaxError as error:
        return error
    return None


def _read_template(path: Path) -> str:
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"the chat template cannot be read: {error}",
            place=f"model.chat_template: {path}",
            remedy="Name a Jinja file in UTF-8, or leave model.chat_template out to use the tokenizer's own.",
        ) from error
    error = _syntax_error(template)
    if error is not None:
        raise RecipeError(
            f"the chat template is not valid Jinja: {error.message}",
            place=f"{path}:{error.lineno}",
            remedy="Correct the template, or leave model.chat_template out to use the tokenizer's own.",
        )
    return template
