"""The tokens of an earlier adapter that is trained on.

Its tensors know rows by number only, so the same number must be the same token in the tokenizer that was saved beside
it and in the run's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.new_tokens import NewTokens
from finetune.recipe.earlier_adapter import CONFIG_FILE

# Where tokenizers keep their added tokens: the first file that is there has all of them.
FAST_FILE, SLOW_FILE, OLD_FILE = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"


def check_earlier_tokens(tokenizer: PreTrainedTokenizerBase, folder: str, *, new_tokens: NewTokens | None) -> list[str]:
    """Compares the added tokens of the tokenizer in an adapter's folder with the run's, by text and id.

    Ids that the base's own tokenizer has are left out: they are the base's, which is compared elsewhere.

    Args:
        tokenizer: the run's, which has the recipe's new tokens already.

    Returns:
        Warnings: the folder has no tokenizer, or one with a token that this run lacks and the adapter has no row for.

    Raises:
        RecipeError: a token of the earlier run is missing here, or is another one.
        EnvironmentProblem: the tokenizer's file cannot be read.
    """
    path = _tokens_file(Path(folder))
    if path is None:
        return [
            f"the adapter in {folder} has no tokenizer beside it ({FAST_FILE}), so nothing can compare the tokens that "
            "it was trained with to those of this run"
        ]
    warnings: list[str] = []
    here = tokenizer.get_vocab()
    texts = {token_id: text for text, token_id in here.items()}
    base_ids = texts.keys() - set(new_tokens.ids if new_tokens is not None else ())
    for text, token_id in sorted(_added_tokens(path).items(), key=lambda item: item[1]):
        if token_id in base_ids or here.get(text) == token_id:
            continue
        if text not in here and token_id not in texts and not _has_rows(Path(folder)):
            # Such as a pad token that another program added: no weight of the adapter is its own.
            warnings.append(f"the token `{text}` (id {token_id}) of the earlier adapter's tokenizer is none here")
            continue
        found = f"here id {here[text]}" if text in here else "here no token"
        taken = f", and id {token_id} here `{texts[token_id]}`" if token_id in texts else ""
        raise RecipeError(
            f"the earlier adapter was trained with the token `{text}` as id {token_id}; it is {found}{taken}",
            place=str(path),
            remedy="Name the same tokens in model.new_tokens and model.new_special_tokens, in the same order.",
        )
    return warnings


def _tokens_file(folder: Path) -> Path | None:
    return next((folder / name for name in (FAST_FILE, OLD_FILE, SLOW_FILE) if (folder / name).is_file()), None)


def _has_rows(folder: Path) -> bool:
    """Says whether the adapter may hold rows of tokens; its config is known to be an object by now."""
    values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return bool(values.get("trainable_token_indices") or values.get("modules_to_save"))


def _added_tokens(path: Path) -> dict[str, int]:
    """Returns the added tokens of a tokenizer's file by their text, special ones too."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        if path.name == FAST_FILE:
            return {token["content"]: int(token["id"]) for token in values.get("added_tokens") or []}
        if path.name == SLOW_FILE:
            tokens = values.get("added_tokens_decoder") or {}
            return {token["content"]: int(token_id) for token_id, token in tokens.items()}
        return {text: int(token_id) for text, token_id in values.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(
            f"the tokenizer of the earlier adapter cannot be read: {error}",
            place=str(path),
            remedy="Put the file back as it was saved with the adapter.",
        ) from error
