"""New tokens: their ids, and the rows of the embedding and the LM head that they get.

A model often has more rows than its tokenizer has tokens; new tokens take these spare rows, and only where they do not
suffice does the embedding grow, to the last new id. Rows begin as the mean of the rows of all known tokens, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.errors import EnvironmentProblem
from finetune.model.load import vocabulary_rows
from finetune.recipe.schema import ModelSection


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of a recipe on one model."""

    texts: tuple[str, ...]
    ids: tuple[int, ...]
    num_known: int
    """Rows before the first new one: those of the tokens that the model knows."""
    rows_before: int
    """Rows of the model as it is stored."""
    rows_after: int
    """Rows with the new tokens; the same where spare rows suffice."""

    def line(self) -> str:
        """Says in words where the rows are."""
        where = (
            f"in spare rows of the embedding, which keeps its {self.rows_before:,}"
            if self.rows_after == self.rows_before
            else f"for which the embedding grows from {self.rows_before:,} to {self.rows_after:,} rows"
        )
        ids = f"id {self.ids[0]}" if len(self.ids) == 1 else f"ids {self.ids[0]} to {self.ids[-1]}"
        return f"{len(self.ids)} new ({ids}), {where}"


def plan_new_tokens(
    section: ModelSection, tokenizer: PreTrainedTokenizerBase, skeleton: PreTrainedModel
) -> NewTokens | None:
    """Returns the rows of the recipe's new tokens, and gives the skeleton as many rows; None without new tokens.

    Args:
        tokenizer: of `load_tokenizer`, which has them already.

    Raises:
        EnvironmentProblem: the tokenizer had more tokens than the model has rows.
    """
    texts = (*section.new_tokens, *section.new_special_tokens)
    if not texts:
        return None
    vocabulary = tokenizer.get_vocab()
    ids = tuple(vocabulary[text] for text in texts)
    num_known = max(set(vocabulary.values()) - set(ids)) + 1
    rows = vocabulary_rows(skeleton)
    if num_known > rows or min(ids) < num_known:
        raise EnvironmentProblem(
            f"the tokenizer has ids up to {num_known - 1} before the new tokens ({min(ids)} to {max(ids)}), and the "
            f"model has {rows} rows: they do not belong together",
            place=f"model.path: {section.path}",
            remedy="Use the tokenizer that belongs to the model, or remove the new tokens.",
        )
    planned = NewTokens(texts, ids, num_known, rows, max(rows, max(ids) + 1))
    _grow(skeleton, planned)
    return planned


@torch.no_grad()
def add_rows(model: PreTrainedModel, new_tokens: NewTokens) -> None:
    """Gives the model the planned rows and sets those of the new tokens to the mean of all known ones."""
    _grow(model, new_tokens)
    ids = list(new_tokens.ids)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None:
            continue
        for tensor in (module.weight, getattr(module, "bias", None)):
            if isinstance(tensor, torch.Tensor):
                tensor[ids] = tensor[: new_tokens.num_known].float().mean(0).to(tensor.dtype)


def _grow(model: PreTrainedModel, new_tokens: NewTokens) -> None:
    if vocabulary_rows(model) < new_tokens.rows_after:
        model.resize_token_embeddings(new_tokens.rows_after, mean_resizing=False)
