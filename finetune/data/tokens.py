"""Tokenize text so that given borders lie between tokens, and prove it by decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from unicodedata import normalize

import numpy as np

from finetune.data.load import shorten
from finetune.data.spans import AnswerSpan
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextTokenizer:
    """Tokenizes plain and rendered text with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.bos = cast("int | None", tokenizer.bos_token_id)
        self.eos = cast("int | None", tokenizer.eos_token_id)
        with_specials = self.ids_of("a", add_special_tokens=True)
        self._adds_bos = self.bos is not None and with_specials[:1] == [self.bos]

    def ids_of(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]  # type: ignore[return-value]

    def with_bos(self, ids: list[int]) -> list[int]:
        """Puts BOS first where the tokenizer does so and it is not there."""
        return [cast("int", self.bos), *ids] if self._adds_bos and ids[:1] != [self.bos] else ids

    def with_eos(self, ids: list[int], *, place: str) -> list[int]:
        """Puts EOS last where it is not there.

        Raises:
            DataError: the tokenizer has none.
        """
        if self.eos is None:
            raise DataError(
                "the tokenizer has no EOS token, so the model would never learn to stop",
                place=place,
                remedy="Set `eos_token` in the model's tokenizer_config.json.",
            )
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def rendered_ids(self, text: str, spans: Sequence[AnswerSpan], *, place: str) -> list[int]:
        """Tokenizes rendered text and sets the tokens of the spans, which stand in order and do not overlap.

        Raises:
            DataError: the learned tokens would not decode to the text of their span.
        """
        ids = self._whole(text, spans)
        if ids is None:
            ids = self._pieces(text, spans, place)
            self._verify(text, ids, spans, place)
        return ids

    def _whole(self, text: str, spans: Sequence[AnswerSpan]) -> list[int] | None:
        """Tokenizes in one go; None when a token lies across a span's border."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoded["input_ids"]  # type: ignore[assignment]
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        for span in spans:
            first = int(np.searchsorted(offsets[:, 1], span.start, side="right"))
            last = int(np.searchsorted(offsets[:, 0], span.end, side="left"))
            span.first_token, span.last_token = first, last
            # Decoding is the proof; offsets alone are not, as some tokenizers trim spaces from them.
            if not self._decodes_to(ids[first:last], text[span.start : span.end]):
                return None
        return ids

    def _pieces(self, text: str, spans: Sequence[AnswerSpan], place: str) -> list[int]:
        """Tokenizes the stretches between the spans' borders one by one, so that no token lies across a border.

        Raises:
            DataError: the pieces do not add up to the text, as with tokenizers that put a space before every piece.
        """
        ids: list[int] = []
        position = 0
        for span in spans:
            ids += self.ids_of(text[position : span.start])
            span.first_token = len(ids)
            ids += self.ids_of(text[span.start : span.end])
            span.last_token = len(ids)
            position = span.end
        ids += self.ids_of(text[position:])
        if self._decode(ids) != self._decode(self.ids_of(text)):
            raise DataError(
                "an answer begins with white space that this tokenizer joins with the prompt's",
                place=place,
                remedy="Remove the white space at the start of the answers.",
            )
        return ids

    def _verify(self, text: str, ids: list[int], spans: Sequence[AnswerSpan], place: str) -> None:
        """Raises unless the learned tokens decode to exactly the text of their spans."""
        for span in spans:
            expected, tokens = text[span.start : span.end], ids[span.first_token : span.last_token]
            if span.is_learned and not self._decodes_to(tokens, expected):
                raise DataError(
                    f"the learned tokens decode to {shorten(self._decode(tokens))} instead of the answer "
                    f"{shorten(expected)}",
                    place=place,
                    kind="the learned tokens decode to another text than the answer",
                    remedy="The tokenizer does not keep this text; remove the record, or correct its files.",
                )

    def _decodes_to(self, ids: list[int], expected: str) -> bool:
        decoded = self._decode(ids)
        # Many tokenizers normalise the text first: to NFC (Qwen3) or NFKC.
        return decoded == expected or normalize("NFKC", decoded) == normalize("NFKC", expected)

    def _decode(self, ids: list[int]) -> str:
        """Decodes as in the middle of a text: some tokenizers drop a space at the very start."""
        before = [] if self.eos is None else [self.eos]
        text: str = self._tokenizer.decode(  # type: ignore[assignment]
            before + ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text.removeprefix(str(self._tokenizer.eos_token or ""))
