r"""Turn a conversation into tokens and labels, the same way for training and for generation.

Chat goes through the tokenizer's own chat template (`template.py`). Its text is tokenized once, without further special
tokens, so a BOS that the template writes is there exactly once. Where the answers are is found without knowing any
marker (`marks.py`, `spans.py`):

    rendered    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    learned                                                            ^^^^^^^^^^^^^^^^

Learned is what the model generates, with the special token that ends the turn. What the template writes before an
answer, such as a header, a channel or an empty think block, is not. A turn that calls tools or shows its reasoning is
learned from the end of the generation prompt on, as all that follows is the model's. `docs/labels.md` has each case.

Borders are exact. Where the tokenizer would merge the last prompt character and the first answer character into one
token (a content that starts with a line break, say), the text is tokenized in pieces cut at the borders (`tokens.py`),
which is what generation does too: it tokenizes the prompt alone. White space that the template writes between its
generation prompt and the answer, or between the answer and the end token, is learned with the answer, as the model
must produce it (`[INST] Hi [/INST] Hello </s>`, where generation starts after `[/INST]`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from finetune.data.load import shorten
from finetune.data.loss_weights import weights_beside
from finetune.data.notes import LeftOut
from finetune.data.spans import AnswerSpan, TurnFinder, TurnSpan
from finetune.data.template import ChatTemplate, prints_today, texts_in, turns_of
from finetune.data.tokens import TextTokenizer
from finetune.data.turns import with_reasoning_apart
from finetune.data.types import IGNORE_INDEX, Conversation, Message, PromptReference, Sample
from finetune.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

__all__ = ["LossOn", "Renderer", "Turns", "prints_today"]

LossOn = Literal["assistant", "last_assistant", "completion", "all"]
Turns = Literal["together", "separate"]


class Renderer:
    """Renders conversations with one tokenizer; holds what is the same for all of them.

    Args:
        date: what a template that prints today's date writes; None takes today, and keeps it for this renderer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, date: datetime.date | None = None) -> None:
        if not tokenizer.is_fast:
            raise EnvironmentProblem(
                f"the tokenizer {type(tokenizer).__name__} has no fast (Rust) version",
                remedy="Use a model folder that holds a tokenizer.json.",
            )
        self._has_template = tokenizer.chat_template is not None
        self._special = _special_tokens(tokenizer)
        self._template = ChatTemplate(tokenizer, date=date)
        eos = str(tokenizer.eos_token) if tokenizer.eos_token else None
        self._finder = TurnFinder(self._template, special=self._special, eos_token=eos)
        self._tokens = TextTokenizer(tokenizer)
        self.pinned_date = self._template.pinned_date
        """The date in rendered texts; None where the template prints none."""
        self.left_out = LeftOut()
        """What the template left out of the conversation that was rendered last."""
        self.beside_prompt: list[str | None] = []
        """Of the last learned turn of each sample rendered last, what stands between generation's prompt and what is
        learned; None where the text lacks that prompt."""

    @property
    def has_prompt(self) -> bool:
        """Whether the template has a generation prompt; known once a conversation was rendered."""
        return self._finder.has_prompt

    def render(self, conversation: Conversation, *, loss_on: LossOn) -> Sample:
        """Tokenizes and labels one conversation.

        Kind `chat` uses the chat template. Kind `completion` is the prompt, the completion and EOS, prompt and
        completion tokenized apart, BOS first where the tokenizer adds one. Kind `text` is BOS, document, EOS and
        learned whole. Control tokens written out in a completion record or a document are read as such; in a chat
        they are an error. A message's own choice (`Message.is_learned`) comes before `loss_on`.

        Raises:
            DataError: the conversation cannot be rendered, or its labels would not be exactly its answers.
        """
        self.left_out, self.beside_prompt = LeftOut(), []
        conversation = self._as_template_reads(conversation)
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
            sample = _sample_of([(prompt, loss_on == "all"), (answer, True)], conversation)
        else:
            sample = _sample_of([(self._document_ids(conversation), True)], conversation)
        return _require_labels(sample)

    def render_all(self, conversation: Conversation, *, loss_on: LossOn, turns: Turns) -> list[Sample]:
        """Tokenizes and labels one conversation as one sample, or as one for each learned turn.

        `separate` renders each learned turn as the last one of what precedes it, so that what is trained is what is
        generated, even where the template writes earlier turns otherwise (without their reasoning, say). The prompt
        is repeated in each sample: the tokens of a conversation grow with the square of its turns.

        Raises:
            DataError: as `render`; or `separate` is asked for with `loss_on: all`, which would learn prompts twice.
        """
        self.left_out, self.beside_prompt = LeftOut(), []
        conversation = self._as_template_reads(conversation)
        if turns == "together" or conversation.kind != "chat":
            return [self.render(conversation, loss_on=loss_on)]
        if loss_on == "all":
            raise DataError(
                "`turns: separate` would learn the prompt tokens of `loss_on: all` once for each turn",
                place=str(conversation.origin),
                remedy="Set `data.turns: together`, or `data.loss_on: assistant`.",
            )
        learned = _learned_turns(conversation, loss_on)
        if not learned:
            return [self.render(conversation, loss_on=loss_on)]
        return [self._render_turn(conversation, index, loss_on) for index in learned]

    def prompt_reference(self, conversation: Conversation) -> PromptReference | None:
        """Returns the prompt of the last answer, as training sees it, and that answer; None for plain text.

        The prompt of a last turn that calls tools is None too: such a turn has no text to compare with.
        """
        conversation = self._as_template_reads(conversation)
        if conversation.kind == "text":
            return None
        if conversation.kind == "completion":
            prompt_ids, _ = self._completion_ids(conversation)
            prompt, reference = conversation.text, conversation.completion
        else:
            last = _answers(conversation)[-1]
            if conversation.messages[last].extra.get("tool_calls"):
                return None
            text, turns = self._find_turns(conversation, needed=[last])
            span = AnswerSpan(turns[last].start, turns[last].end)
            earlier = [AnswerSpan(turn.start, turn.end) for index, turn in turns.items() if index < last]
            ids = self._tokens.rendered_ids(text, [*earlier, span], place=str(conversation.origin))
            prompt_ids, prompt = ids[: span.first_token], text[: span.start]
            reference = conversation.messages[last].content
        return PromptReference(np.asarray(prompt_ids, dtype=np.int32), prompt, reference, conversation.origin)

    def _as_template_reads(self, conversation: Conversation) -> Conversation:
        """Returns the conversation with `<think>` text where the template looks for an answer's reasoning."""
        return with_reasoning_apart(conversation) if self._template.reads_reasoning_apart else conversation

    # Completion and text

    def _completion_ids(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        prompt = self._tokens.with_bos(self._tokens.ids_of(conversation.text))
        answer = self._tokens.ids_of(conversation.completion)
        return prompt, self._tokens.with_eos(answer, place=str(conversation.origin))

    def _document_ids(self, conversation: Conversation) -> list[int]:
        ids = self._tokens.ids_of(conversation.text)
        return self._tokens.with_bos(self._tokens.with_eos(ids, place=str(conversation.origin)))

    # Chat

    def _render_chat(self, conversation: Conversation, loss_on: LossOn) -> Sample:
        _require_choices(conversation, loss_on)
        choices = _choices(conversation, loss_on)
        learned = _learned_turns(conversation, loss_on)
        # Of `all` only the turns that the record takes out or weighs have to be known.
        needed = learned if loss_on != "all" else [index for index in choices if _stands_out(conversation, index)]
        text, turns = self._find_turns(conversation, needed=needed)
        spans: list[AnswerSpan] = []
        for index, turn in turns.items():
            spans += _spans_of(conversation, index, turn, is_learned=choices[index])
            if index in learned:
                self.left_out.add(turn)
        if loss_on != "all" and learned:
            last = learned[-1]
            self.beside_prompt = [self._finder.beside_prompt(conversation, last, text, turns[last])]
        return self._label(conversation, text, spans, learn_rest=loss_on == "all")

    def _render_turn(self, conversation: Conversation, index: int, loss_on: LossOn) -> Sample:
        """Renders the messages up to one turn, of which only that one is learned."""
        _require_choices(conversation, loss_on)
        is_learned = _choices(conversation, loss_on)[index]
        part = replace(conversation, messages=conversation.messages[: index + 1])
        text, turns = self._find_turns(part, needed=[index])
        text, turn = self._finder.as_generated(part, text, turns[index])
        self.left_out.add(turn)
        self.beside_prompt.append(self._finder.beside_prompt(part, index, text, turn))
        # No other border than this turn's: generation tokenizes its prompt as one text.
        return _require_labels(self._label(part, text, _spans_of(part, index, turn, is_learned=is_learned)))

    def _label(
        self, conversation: Conversation, text: str, spans: list[AnswerSpan], *, learn_rest: bool = False
    ) -> Sample:
        """Tokenizes rendered text and labels its spans; `learn_rest` learns what lies between them too."""
        ids = self._tokens.rendered_ids(text, spans, place=str(conversation.origin))
        input_ids = np.asarray(ids, dtype=np.int32)
        labels = input_ids.copy() if learn_rest else np.full_like(input_ids, IGNORE_INDEX)
        for span in spans:
            tokens = slice(span.first_token, span.last_token)
            labels[tokens] = input_ids[tokens] if span.is_learned else IGNORE_INDEX
        labels[:1] = IGNORE_INDEX
        return Sample(input_ids, labels, conversation.origin, _loss_weights(labels, spans))

    def _find_turns(self, conversation: Conversation, *, needed: Collection[int]) -> tuple[str, dict[int, TurnSpan]]:
        """Returns the rendered text, which holds all other messages too, and the assistant's turns in it, by message.

        All turns are located, learned or not, so that the tokens do not depend on `loss_on`; a turn that is not needed
        and cannot be located is left out.
        """
        self._require_renderable(conversation)
        place = str(conversation.origin)
        text = self._template.render(turns_of(conversation), tools=conversation.tools, place=place)
        turns: dict[int, TurnSpan] = {}
        located = self._finder.find(conversation, text)
        for index, turn in located.turns.items():
            if isinstance(turn, TurnSpan):
                turns[index] = turn
            elif index in needed:
                raise turn
        if located.context.fault is not None:
            raise located.context.fault
        self.left_out.hides_tools |= located.context.hides_tools
        return text, turns

    def _require_renderable(self, conversation: Conversation) -> None:
        place = str(conversation.origin)
        if not self._has_template:
            raise DataError(
                "the tokenizer has no chat template, and the record is a conversation",
                place=place,
                remedy="Set `model.chat_template` to a Jinja file, or store the data as prompt and completion strings.",
            )
        named = [(f"message {number}", (message.content, message.extra)) for number, message in _numbered(conversation)]
        for name, value in [*named, ("the definition of a tool", conversation.tools)]:
            for text in texts_in(value):
                found = self._special.search(text)
                if found is None:
                    continue
                raise DataError(
                    f"{name} contains the control token {found.group()}, which the model would read as "
                    f"a border between turns, near {shorten(text[max(0, found.start() - 20) :][:60])}",
                    place=place,
                    kind=f"a message or definition contains the control token {found.group()}",
                    remedy="Remove it from the text, or write it otherwise; the chat template adds control tokens.",
                )


def _choices(conversation: Conversation, loss_on: LossOn) -> dict[int, bool]:
    """Returns whether each assistant message is learned: what it says itself, else what `loss_on` says of it."""
    answers = _answers(conversation)
    named = answers
    if loss_on == "last_assistant":
        named = answers[-1:]
    elif loss_on == "completion":
        named = [index for index in answers if index >= (conversation.num_prompt_messages or 0)]
    own = {index: conversation.messages[index].is_learned for index in answers}
    return {index: index in named if choice is None else choice for index, choice in own.items()}


def _learned_turns(conversation: Conversation, loss_on: LossOn) -> list[int]:
    """Returns the assistant messages that are learned, whole or in part, in order."""
    choices = _choices(conversation, loss_on)
    return [
        index
        for index, is_learned in choices.items()
        if is_learned or any(part.is_learned for part in conversation.messages[index].parts)
    ]


def _stands_out(conversation: Conversation, index: int) -> bool:
    """Tells whether a message, or a part of it, is not learned or has a weight other than 1."""
    message = conversation.messages[index]
    return any(each.is_learned is False or each.weight != 1.0 for each in (message, *message.parts))


def _loss_weights(labels: NDArray[np.int32], spans: list[AnswerSpan]) -> NDArray[np.float32] | None:
    """Returns the weights of a sample's tokens [L], 1 outside the spans; None where each is 1."""
    if all(span.weight == 1.0 for span in spans):
        return None
    weights = np.ones(len(labels), dtype=np.float32)
    for span in spans:
        weights[span.first_token : span.last_token] = span.weight
    return weights_beside(labels, weights)


def _spans_of(conversation: Conversation, index: int, turn: TurnSpan, *, is_learned: bool) -> list[AnswerSpan]:
    """Returns a turn's stretches: one, or several where the parts of its content differ in being learned or in weight.

    Parts that do not choose are as `is_learned` and the message's weight say. White space before the content goes with
    the first part, the end token with the last.

    Raises:
        DataError: parts choose in a turn that has more than content.
    """
    message = conversation.messages[index]
    whole = (is_learned, message.weight)
    choices = [whole if part.is_learned is None else (part.is_learned, part.weight) for part in message.parts]
    if set(choices) <= {whole}:
        return [AnswerSpan(turn.start, turn.end, is_learned, weight=message.weight)]
    if not turn.is_content_alone or turn.content_start is None:
        raise DataError(
            f"message {index + 1} chooses for parts of its content whether or how much they are learned, and has "
            "reasoning or tool calls beside them, so that what else is learned is not said",
            place=str(conversation.origin),
            kind="a message chooses for parts of its content, beside reasoning or tool calls",
            remedy="Choose for the whole message, or remove the reasoning and the calls.",
        )
    content = message.content
    first = turn.content_start - (len(content) - len(content.lstrip()))
    last = turn.content_start + len(content.strip())
    spans: list[AnswerSpan] = []
    position, offset = turn.start, 0
    for number, (part, choice) in enumerate(zip(message.parts, choices, strict=True)):
        offset += len(part.text)
        is_last = number == len(message.parts) - 1
        end = turn.end if is_last else min(max(first + offset, turn.content_start), last)
        if spans and (spans[-1].is_learned, spans[-1].weight) == choice:
            spans[-1].end = max(end, position)
        elif end > position:
            spans.append(AnswerSpan(position, end, choice[0], weight=choice[1]))
        position = max(end, position)
    return spans


def _require_choices(conversation: Conversation, loss_on: LossOn) -> None:
    """Raises where a record chooses for a message of another than the assistant what cannot be done."""
    for number, message in _numbered(conversation):
        if message.role == "assistant":
            continue
        choices = {message.is_learned, *(part.is_learned for part in message.parts)}
        if True in choices or (loss_on == "all" and False in choices):
            wish = "to be learned" if True in choices else "not to be learned"
            raise DataError(
                f"message {number} ({message.role}) is marked {wish}, but only an assistant's message can choose",
                place=str(conversation.origin),
                kind=f"a message ({message.role}) is marked {wish}, but only an assistant's message can choose",
                remedy="Remove the mark; `data.loss_on: all` learns every token, `assistant` the answers only.",
            )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Returns a pattern of the tokenizer's special tokens, BOS and EOS among them; one that never matches if none."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens |= {str(token) for token in (tokenizer.bos_token, tokenizer.eos_token) if token}
    # Longest first: of two tokens where one starts with the other, the tokenizer takes the longer.
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")


def _sample_of(pieces: list[tuple[list[int], bool]], conversation: Conversation) -> Sample:
    """Joins pieces of tokens, each learned or not; the first token is never learned, as nothing precedes it."""
    input_ids = np.asarray([token for ids, _ in pieces for token in ids], dtype=np.int32)
    is_learned = np.repeat([learned for _, learned in pieces], [len(ids) for ids, _ in pieces])
    labels = np.where(is_learned, input_ids, IGNORE_INDEX).astype(np.int32)
    labels[:1] = IGNORE_INDEX
    return Sample(input_ids, labels, conversation.origin)


def _require_labels(sample: Sample) -> Sample:
    if sample.num_supervised_tokens == 0:
        raise DataError(
            "no token of this record would be learned",
            place=str(sample.origin),
            remedy="Remove the record, or choose other tokens with `data.loss_on`.",
        )
    return sample


def _has_completion(conversation: Conversation) -> bool:
    return conversation.kind == "completion" or conversation.num_prompt_messages is not None


def _answers(conversation: Conversation) -> list[int]:
    return [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]


def _numbered(conversation: Conversation) -> list[tuple[int, Message]]:
    return list(enumerate(conversation.messages, start=1))
