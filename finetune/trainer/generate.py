"""Answers of the model in training to held-out prompts: greedy, batched, through the ids that training rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.trainer.memory import halved_when_out_of_memory, random_state_kept

MAX_BATCH_TOKENS = 16_384
"""Prompt and answer slots of one batch, which bounds the key-value cache."""
MAX_BATCH_PROMPTS = 64


@dataclass(frozen=True)
class Generator:
    """Answers prompts with the model as it is at the moment.

    Args:
        model: base or PEFT model.
        stop_ids: tokens that end an answer.
        max_new_tokens: longest answer.
        max_positions: where the model's positions end; answers end there too.
        context: makes what a forward pass of generation runs in.
        say: is told when memory does not suffice for a batch.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    pad_token_id: int
    max_new_tokens: int
    max_positions: int | None = None
    context: Callable[[], AbstractContextManager[None, bool | None]] = nullcontext
    say: Callable[[str], None] = lambda text: None

    @torch.no_grad()
    def answer(self, prompts: Sequence[NDArray[np.int32]]) -> list[str]:
        """Returns the answer's text for each prompt (int32 `[T]`), in order, without the stop token.

        Training goes on afterwards as if nothing had been generated: mode and random state are put back.
        """
        answers = [""] * len(prompts)
        with _generation_mode(self.model), random_state_kept(next(self.model.parameters()).device):
            for batch in _batches([len(prompt) + self.max_new_tokens for prompt in prompts]):
                texts = self._answer_in_parts([prompts[index] for index in batch])
                for index, text in zip(batch, texts, strict=True):
                    answers[index] = text
        return answers

    def _answer_in_parts(self, prompts: list[NDArray[np.int32]]) -> list[str]:
        """Answers a batch, in parts where memory does not suffice for the whole."""

        def answer(size: int) -> list[str]:
            parts = (prompts[start : start + size] for start in range(0, len(prompts), size))
            return [text for part in parts for text in self._answer_batch(part)]

        return halved_when_out_of_memory(
            answer,
            len(prompts),
            say=lambda size: self.say(f"generation ran out of memory; going on with {size} prompts at a time"),
        )

    def _answer_batch(self, prompts: list[NDArray[np.int32]]) -> list[str]:
        device = next(self.model.parameters()).device
        longest = max(len(prompt) for prompt in prompts)
        input_ids = np.full((len(prompts), longest), self.pad_token_id, dtype=np.int64)
        mask = np.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):  # padded on the left: answers start in one column
            input_ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        room = self.max_new_tokens if self.max_positions is None else max(1, self.max_positions - longest)
        with self.context():
            tokens = self.model.generate(  # pyright: ignore[reportCallIssue] - nn.Module to the checker
                input_ids=torch.from_numpy(input_ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device),
                max_new_tokens=min(self.max_new_tokens, room),
                do_sample=False,
                eos_token_id=list(self.stop_ids),
                pad_token_id=self.pad_token_id,
                use_cache=True,
            )
        return [self._text(row[longest:].tolist()) for row in tokens]

    def _text(self, tokens: list[int]) -> str:
        end = next((i for i, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        return str(self.tokenizer.decode(tokens[:end], skip_special_tokens=True))


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: nn.Module, end_ids: Iterable[int]) -> tuple[int, ...]:
    """Returns the ids that end an answer: the tokenizer's end, the generation config's, and those that end the last
    answers of the data (`Dataset.end_ids`; a base model's own end is often another one)."""
    configured = model.generation_config.eos_token_id  # pyright: ignore[reportAttributeAccessIssue]
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured]), *end_ids]
    return tuple(sorted({token for token in ids if isinstance(token, int)}))


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Groups prompt indices from long to short, so that a batch holds prompts of like length."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        size = max(1, min(MAX_BATCH_PROMPTS, MAX_BATCH_TOKENS // lengths[order[0]]))
        yield order[:size]
        order = order[size:]


@contextmanager
def _generation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without router logits: with them, a batched `generate` fails in the load-balancing loss, whose
    attention mask does not fit the one new token (transformers 5.17 to 5.24)."""
    was_training = model.training
    text_config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    router_logits = getattr(text_config, "output_router_logits", None)
    model.eval()
    if router_logits:
        text_config.output_router_logits = False
    try:
        yield
    finally:
        if router_logits:
            text_config.output_router_logits = router_logits
        model.train(was_training)
