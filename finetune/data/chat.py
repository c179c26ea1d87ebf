r"""Turn a conversation into tokens and labels, the same way for training and for generation.

Chat goes through the tokenizer's own chat template. Its text is tokenized once, without further special tokens, so a
BOS that the template writes is there exactly once. Where the answers are is found without knowing any marker: the
conversation is rendered again with one answer replaced by a probe, and the text that differs is that answer.

    rendered    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    with probe  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n000<|im_end|>\n
    supervised                                                         ^^^^^^^^^^^^^^^^

The supervised span is the answer and the special token that ends the turn. What the template writes before the answer,
such as a header, a channel or an empty think block, is not learned; a think block that is part of the content is,
unless the template leaves it out of earlier turns.

Borders are exact. Where the tokenizer would merge the last prompt character and the first answer character into one
token (a content that starts with a line break, say), the text is tokenized in pieces cut at the borders, which is what
generation does too: it tokenizes the prompt alone. White space that the template writes between its generation prompt
and the answer, or between the answer and the end token, is learned with the answer, as the model must produce it
(`[INST] Hi [/INST] Hello </s>`, where generation starts after `[/INST]`).

Templates that print today's date give other tokens on another day. A template with a `date_string` variable gets a
fixed date; one that only calls `strftime_now` (gpt-oss) cannot be told, and keeps the day of the run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, cast
from unicodedata import normalize

import numpy as np
from jinja2.exceptions import TemplateError

from finetune.data.load import shorten
from finetune.data.spans import AnswerSpan, difference, probe_for, think_start
from finetune.data.types import IGNORE_INDEX, Conversation, Message, PromptReference, Sample
from finetune.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["assistant", "last_assistant", "completion", "all"]

FIXED_DATE = "26 Jul 2024"
"""The date that templates with a `date_string` variable print; Llama 3.1's own default."""


def prints_today(chat_template: str | dict[str, str] | None) -> bool:
    """Tells whether a template writes today's date and cannot be given another."""
    return "strftime_now" in str(chat_template) and "date_string" not in str(chat_template)


def render(conversation: Conversation, *, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> Sample:
    """Tokenizes and labels one conversation.

    Kind `chat` uses the chat template. Kind `completion` is the prompt, the completion and EOS, prompt and completion
    tokenized apart, BOS first where the tokenizer adds one. Kind `text` is BOS, document, EOS and learned whole.
    Control tokens written out in a completion record or a document are read as such; in a chat they are an error.

    Raises:
        DataError: the conversation cannot be rendered, or its labels would not be exactly its answers.
    """
    return Renderer(tokenizer).render(conversation, loss_on=loss_on)


def prompt_reference(conversation: Conversation, *, tokenizer: PreTrainedTokenizerBase) -> PromptReference | None:
    """Returns the prompt of the last answer, as training sees it, and that answer; None for plain text.

    The prompt of a last turn that calls tools is None too: such a turn has no text to compare with.
    """
    return Renderer(tokenizer).prompt_reference(conversation)


class Renderer:
    """Renders conversations with one tokenizer; holds what is the same for all of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise EnvironmentProblem(
                f"the tokenizer {type(tokenizer).__name__} has no fast (Rust) version",
                remedy="Use a model folder that holds a tokenizer.json.",
            )
        self._tokenizer = tokenizer
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokens |= {str(token) for token in (tokenizer.bos_token, tokenizer.eos_token) if token}
        # Longest first: of two tokens where one starts with the other, the tokenizer takes the longer.
        names = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)"
        self._special = re.compile(names)
        self._turn_end = re.compile(rf"\s*(?:{names})")
        with_specials = self._ids_of("a", add_special_tokens=True)
        self._adds_bos = tokenizer.bos_token_id is not None and with_specials[:1] == [tokenizer.bos_token_id]

    def render(self, conversation: Conversation, *, loss_on: LossOn) -> Sample:
        """Does what the function `render` does."""
        if loss_on == "completion" and not _has_completion(conversation):
            raise DataError(
                "`loss_on: completion` needs prompt/completion records",
                place=str(conversation.origin),
                remedy="Set `data.loss_on` to assistant, or store the record as prompt and completion.",
            )
        if conversation.kind == "chat":
            sample = self._render_chat(conversation, loss_on)
        elif conversation.kind == "completion":
            prompt, answer = self._completion_ids(conversation)
            learn_prompt = loss_on == "all"
            sample = _sample_of([(prompt, learn_prompt), (answer, True)], conversation)
        else:
            sample = _sample_of([(self._document_ids(conversation), True)], conversation)
        if sample.num_supervised_tokens == 0:
            raise DataError(
                "no token of this record would be learned",
                place=str(conversation.origin),
                remedy="Remove the record, or choose other tokens with `data.loss_on`.",
            )
        return sample

    def prompt_reference(self, conversation: Conversation) -> PromptReference | None:
        """Does what the function `prompt_reference` does."""
        if conversation.kind == "text":
            return None
        if conversation.kind == "completion":
            prompt_ids, _ = self._completion_ids(conversation)
            prompt, reference = conversation.text, conversation.completion
        else:
            last = _answers(conversation)[-1]
            if conversation.messages[last].extra.get("tool_calls"):
                return None
            text, ids, spans = self._tokenize_chat(conversation, supervised=[last])
            prompt_ids = ids[: spans[last].first_token]
            prompt, reference = text[: spans[last].start], conversation.messages[last].content
        return PromptReference(np.asarray(prompt_ids, dtype=np.int32), prompt, reference, conversation.origin)

    # Completion and text

    def _completion_ids(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        prompt = self._with_bos(self._ids_of(conversation.text))
        return prompt, self._with_eos(self._ids_of(conversation.completion), conversation)

    def _document_ids(self, conversation: Conversation) -> list[int]:
        return self._with_bos(self._with_eos(self._ids_of(conversation.text), conversation))

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = cast("int", self._tokenizer.bos_token_id)
        return [bos, *ids] if self._adds_bos and ids[:1] != [bos] else ids

    def _with_eos(self, ids: list[int], conversation: Conversation) -> list[int]:
        eos = cast("int | None", self._tokenizer.eos_token_id)
        if eos is None:
            raise DataError(
                "the tokenizer has no EOS token, so the model would never learn to stop",
                place=str(conversation.origin),
                remedy="Set `eos_token` in the model's tokenizer_config.json.",
            )
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def _ids_of(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]  # type: ignore[return-value]

    # Chat

    def _render_chat(self, conversation: Conversation, loss_on: LossOn) -> Sample:
        supervised = _supervised_answers(conversation, loss_on)
        _, ids, spans = self._tokenize_chat(conversation, supervised=supervised)
        input_ids = np.asarray(ids, dtype=np.int32)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        if loss_on == "all":
            labels[:] = input_ids
        for index in supervised:
            tokens = slice(spans[index].first_token, spans[index].last_token)
            labels[tokens] = input_ids[tokens]
        labels[:1] = IGNORE_INDEX
        return Sample(input_ids, labels, conversation.origin)

    def _tokenize_chat(
        self, conversation: Conversation, *, supervised: list[int]
    ) -> tuple[str, list[int], dict[int, AnswerSpan]]:
        """Returns the rendered text, its tokens and the span of each answer by its message index.

        All answers are located, supervised or not, so that the tokens do not depend on `loss_on`; an answer that is
        not supervised and cannot be located has no span.
        """
        self._require_renderable(conversation)
        text = self._apply_template(conversation.messages, conversation)
        spans: dict[int, AnswerSpan] = {}
        for index in _answers(conversation):
            try:
                spans[index] = self._locate(conversation, text, index)
            except DataError:
                if index in supervised:
                    raise
        ids = self._tokenize_whole(text, spans)
        if ids is None:
            ids = self._tokenize_pieces(conversation, text, spans)
        for index in supervised:
            self._verify(conversation, text, ids, spans[index])
        return text, ids, spans

    def _require_renderable(self, conversation: Conversation) -> None:
        place = str(conversation.origin)
        if self._tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, and the record is a conversation",
                place=place,
                remedy="Set `model.chat_template` to a Jinja file, or store the data as prompt and completion strings.",
            )
        for index, message in enumerate(conversation.messages):
            for text in (message.content, *(value for value in message.extra.values() if isinstance(value, str))):
                found = self._special.search(text)
                if found is None:
                    continue
                raise DataError(
                    f"message {index + 1} contains the control token {found.group()}, which the model would read as "
                    f"a border between turns, near {shorten(text[max(0, found.start() - 20) :][:60])}",
                    place=place,
                    remedy="Remove it from the text, or write it otherwise; the chat template adds control tokens.",
                )

    def _apply_template(
        self, messages: tuple[Message, ...], conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        template = self._tokenizer.chat_template
        variables: dict[str, Any] = {"date_string": FIXED_DATE} if "date_string" in str(template) else {}
        turns = [{"role": message.role, "content": message.content, **message.extra} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                turns,
                tools=list(conversation.tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )  # type: ignore[return-value]
        except (TemplateError, TypeError, ValueError) as error:
            # A template is a program of the model's maker; these are the types it fails with on data it does not take.
            raise DataError(
                f"the chat template refuses this conversation: {error}",
                place=str(conversation.origin),
                remedy="Change the roles or contents to what the model's template takes, or set `model.chat_template`.",
            ) from error

    def _locate(self, conversation: Conversation, text: str, index: int) -> AnswerSpan:
        """Returns the characters of one answer and of the token that ends its turn."""
        message = conversation.messages[index]
        place = str(conversation.origin)
        if message.extra.get("tool_calls"):
            raise DataError(
                f"message {index + 1} calls tools, and learning tool calls is not supported",
                place=place,
                remedy="Remove the record, or learn other turns with `data.loss_on: last_assistant`.",
            )
        probe = probe_for(message.content)
        probed = self._apply_template(_replaced(conversation, index, content=probe), conversation)
        start, end = difference(text, probed)
        probe_end = len(probed) - (len(text) - end)
        is_plain = probed[start:probe_end] == probe
        if not is_plain or text[start:end].strip() != message.content.strip():
            start = think_start(text, start=start, end=end, content=message.content, is_plain=is_plain)
            if start is None:
                start = self._rewritten_think_start(conversation, text, index, end)
        if start is None:
            raise DataError(
                f"the chat template changes or leaves out message {index + 1}: {shorten(message.content)}",
                place=place,
                remedy="Change the content to what the template keeps, or set `model.chat_template`.",
            )
        generation_start = self._generation_start(conversation, text, index)
        if generation_start is not None and text[generation_start:start].isspace():
            start = generation_start
        if self._shows_reasoning(conversation, text, index):
            start = generation_start
            if start is None:
                raise DataError(
                    f"message {index + 1} has reasoning that the chat template shows apart from its generation prompt",
                    place=place,
                    remedy="Put the reasoning into the content, or remove it from the record.",
                )
        turn_end = self._turn_end.match(text, end)
        if turn_end is None:
            raise DataError(
                f"the chat template puts no special token after message {index + 1}, so the model would never learn "
                f"to stop; the text there is {shorten(text[end : end + 40])}",
                place=place,
                remedy="Set `model.chat_template` to a template that ends each answer with an end-of-turn token.",
            )
        return AnswerSpan(start, turn_end.end())

    def _rewritten_think_start(self, conversation: Conversation, text: str, index: int, end: int) -> int | None:
        """Returns where an answer starts whose think block the template wrote again with other white space."""
        content = conversation.messages[index].content
        start = self._generation_start(conversation, text, index) if "</think>" in content else None
        if start is None or "".join(text[start:end].split()) != "".join(content.split()):
            return None
        return start

    def _shows_reasoning(self, conversation: Conversation, text: str, index: int) -> bool:
        """Tells whether the message has reasoning beside its content, and the template writes it out."""
        extra = conversation.messages[index].extra
        names = [name for name in ("reasoning_content", "reasoning", "thinking") if extra.get(name)]
        if not names:
            return False
        probed = {name: probe_for(str(extra[name])) for name in names}
        return self._apply_template(_replaced(conversation, index, **probed), conversation) != text

    def _generation_start(self, conversation: Conversation, text: str, index: int) -> int | None:
        """Returns where generation of the message would begin.

        None where generation's prompt is not what training shows, or where the template takes no such prompt: nothing
        before the message, or less than it wants to see.
        """
        if index == 0:
            return None
        try:
            prompt = self._apply_template(conversation.messages[:index], conversation, add_generation_prompt=True)
        except DataError:
            return None
        return len(prompt) if text.startswith(prompt) else None

    # Tokens of rendered text

    def _tokenize_whole(self, text: str, spans: dict[int, AnswerSpan]) -> list[int] | None:
        """Tokenizes in one go and sets the spans' tokens; None when a token lies across a span's border."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoded["input_ids"]  # type: ignore[assignment]
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        for span in spans.values():
            first = int(np.searchsorted(offsets[:, 1], span.start, side="right"))
            last = int(np.searchsorted(offsets[:, 0], span.end, side="left"))
            span.first_token, span.last_token = first, last
            # Decoding is the proof; offsets alone are not, as some tokenizers trim spaces from them.
            if not self._decodes_to(ids[first:last], text[span.start : span.end]):
                return None
        return ids

    def _tokenize_pieces(self, conversation: Conversation, text: str, spans: dict[int, AnswerSpan]) -> list[int]:
        """Tokenizes the stretches between the spans' borders one by one, so that no token lies across a border.

        Raises:
            DataError: the pieces do not add up to the text, as with tokenizers that put a space before every piece.
        """
        ids: list[int] = []
        position = 0
        for span in spans.values():
            ids += self._ids_of(text[position : span.start])
            span.first_token = len(ids)
            ids += self._ids_of(text[span.start : span.end])
            span.last_token = len(ids)
            position = span.end
        ids += self._ids_of(text[position:])
        if self._decode(ids) != self._decode(self._ids_of(text)):
            raise DataError(
                "an answer begins with white space that this tokenizer joins with the prompt's",
                place=str(conversation.origin),
                remedy="Remove the white space at the start of the answers.",
            )
        return ids

    def _verify(self, conversation: Conversation, text: str, ids: list[int], span: AnswerSpan) -> None:
        """Raises unless the supervised tokens decode to exactly the answer and its end token."""
        expected = text[span.start : span.end]
        if self._decodes_to(ids[span.first_token : span.last_token], expected):
            return
        found = self._decode(ids[span.first_token : span.last_token])
        raise DataError(
            f"the learned tokens decode to {shorten(found)} instead of the answer {shorten(expected)}",
            place=str(conversation.origin),
            remedy="The tokenizer does not keep this text; remove the record, or correct the tokenizer's files.",
        )

    def _decodes_to(self, ids: list[int], expected: str) -> bool:
        decoded = self._decode(ids)
        # Many tokenizers normalise the text first: to NFC (Qwen3) or NFKC.
        return decoded == expected or normalize("NFKC", decoded) == normalize("NFKC", expected)

    def _decode(self, ids: list[int]) -> str:
        """Decodes as in the middle of a text: some tokenizers drop a space at the very start."""
        eos = cast("int | None", self._tokenizer.eos_token_id)
        before = [] if eos is None else [eos]
        text: str = self._tokenizer.decode(  # type: ignore[assignment]
            before + ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text.removeprefix(str(self._tokenizer.eos_token or ""))


def _sample_of(pieces: list[tuple[list[int], bool]], conversation: Conversation) -> Sample:
    """Joins pieces of tokens, each learned or not; the first token is never learned, as nothing precedes it."""
    input_ids = np.asarray([token for ids, _ in pieces for token in ids], dtype=np.int32)
    is_learned = np.repeat([learned for _, learned in pieces], [len(ids) for ids, _ in pieces])
    labels = np.where(is_learned, input_ids, IGNORE_INDEX).astype(np.int32)
    labels[:1] = IGNORE_INDEX
    return Sample(input_ids, labels, conversation.origin)


def _has_completion(conversation: Conversation) -> bool:
    return conversation.kind == "completion" or conversation.num_prompt_messages is not None


def _answers(conversation: Conversation) -> list[int]:
    return [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]


def _supervised_answers(conversation: Conversation, loss_on: LossOn) -> list[int]:
    """Returns the indices of the messages that are learned by span; none for `all`, which needs no spans."""
    answers = _answers(conversation)
    if loss_on == "all":
        return []
    if loss_on == "last_assistant":
        return answers[-1:]
    if loss_on == "completion":
        return [index for index in answers if index >= (conversation.num_prompt_messages or 0)]
    return answers


def _replaced(
    conversation: Conversation, index: int, *, content: str | None = None, **extra: str
) -> tuple[Message, ...]:
    """Returns the messages with the content or some extra fields of one of them replaced."""
    old = conversation.messages[index]
    new = Message(old.role, old.content if content is None else content, {**old.extra, **extra})
    return (*conversation.messages[:index], new, *conversation.messages[index + 1 :])
