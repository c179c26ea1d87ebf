"""Weights of learned tokens: they land on the tokens of their message or part, and stay there up to the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from label_cases import answer, chat, learned_texts, refusal, user
from label_templates import SHAPES, call

from finetune.data.build import Dataset, build_dataset, plan_rows
from finetune.data.chat import LossOn, Renderer
from finetune.data.collate import RowCollator
from finetune.data.loss_weights import WeightRuns, weights_beside
from finetune.data.rows import RowDataset
from finetune.data.store import SampleStore, StoreBuilder
from finetune.data.types import IGNORE_INDEX, ContentPart, Conversation, Message, Origin, Sample
from finetune.errors import DataError
from finetune.recipe.schema import DataSection

WEIGHTS = st.sampled_from([None, 0.0, 0.25, 1.0, 2.0, 100.0])
TEXTS = st.sampled_from(["a", " an", "foo", "f x", "\u6c49\u5b57", "\U0001f600", "e\u0301", "x\n", '"q"', "\n\ny"])


@functools.cache
def renderer_of(shape: str) -> tuple[Any, Renderer]:
    tokenizer = SHAPES[shape].tokenizer()
    return tokenizer, Renderer(tokenizer)


def message_of(content: str, weight: float | None) -> Message:
    return Message("assistant", content, is_learned=None if weight is None else weight > 0, weight=weight or 1.0)


def part_of(content: str, weight: float | None) -> ContentPart:
    return ContentPart(content, None if weight is None else weight > 0, weight or 1.0)


def weights_of(sample: Sample) -> np.ndarray:
    """A sample's weights, also where each is 1."""
    if sample.loss_weights is None:
        return (sample.labels != IGNORE_INDEX).astype(np.float32)
    return sample.loss_weights


def stretches_of(sample: Sample, tokenizer: Any) -> list[tuple[str, float]]:
    """The learned text of a sample, cut where its weight changes."""
    weights = weights_of(sample)
    borders = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(sample)]
    return [
        (tokenizer.decode(sample.input_ids[start:end], skip_special_tokens=False), float(weights[start]))
        for start, end in pairwise(borders)
        if weights[start]
    ]


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=40)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS, WEIGHTS), min_size=1, max_size=4))
def test_weights_land_on_the_tokens_of_their_message(shape: str, turns: list[tuple[str, str, float | None]]) -> None:
    """For each template of the label tests: tokens and labels are those without weights, and each answer's learned
    stretch, its end token with it, has its weight and no other token has one."""
    tokenizer, renderer = renderer_of(shape)
    made = [each for asked, said, weight in turns for each in (user(asked), message_of(said, weight))]
    expected = [1.0 if weight is None else weight for _, _, weight in turns]
    if not any(expected):
        return
    sample = renderer.render(chat(*made), loss_on="assistant")
    flags = [Message(each.role, each.content, is_learned=each.is_learned) for each in made]
    plain = renderer.render(chat(*flags), loss_on="assistant")
    assert plain.loss_weights is None
    assert sample.input_ids.tolist() == plain.input_ids.tolist()
    assert sample.labels.tolist() == plain.labels.tolist()
    assert (sample.loss_weights is None) == (set(expected) <= {0.0, 1.0})
    is_learned = sample.labels != IGNORE_INDEX
    weights = weights_of(sample)
    assert ((weights != 0) == is_learned).all()
    first = np.flatnonzero(is_learned & ~np.append(False, is_learned[:-1]))
    last = np.flatnonzero(is_learned & ~np.append(is_learned[1:], False))
    found = [set(weights[start : end + 1].tolist()) for start, end in zip(first, last, strict=True)]
    assert found == [{weight} for weight in expected if weight]
    said = [answer for (_, answer, _), weight in zip(turns, expected, strict=True) if weight]
    assert all(text.strip() in shown for text, shown in zip(said, learned_texts(sample, tokenizer), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=40)
@given(parts=st.lists(st.tuples(TEXTS, WEIGHTS), min_size=1, max_size=4), weight=WEIGHTS)
def test_weights_land_on_the_tokens_of_their_part(
    shape: str, parts: list[tuple[str, float | None]], weight: float | None
) -> None:
    """The learned text, cut where the weight changes, is that of the parts; the last has the end token too.

    White space at the ends of the turn is the template's to keep or strip.
    """
    tokenizer, renderer = renderer_of(shape)
    content = "".join(text for text, _ in parts)
    made = message_of(content, weight)
    message = Message("assistant", content, {}, made.is_learned, tuple(part_of(*each) for each in parts), made.weight)
    whole = 1.0 if weight is None else weight
    expected: list[tuple[str, float]] = []
    for text, own in [(text, whole if own is None else own) for text, own in parts]:
        if expected and expected[-1][1] == own:
            text = expected.pop()[0] + text
        expected.append((text, own))
    end = SHAPES[shape].end
    expected[-1] = (expected[-1][0] + end, expected[-1][1])
    expected = [(text, own) for text, own in expected if own]
    if not expected:
        return
    sample = renderer.render(chat(user("q"), message), loss_on="assistant")

    def without_ends(stretches: list[tuple[str, float]]) -> list[tuple[str, float]]:
        texts = [text.removesuffix(end).rstrip() + end if text.endswith(end) else text for text, _ in stretches]
        texts[0] = texts[0].lstrip()
        return list(zip(texts, (own for _, own in stretches), strict=True))

    assert without_ends(stretches_of(sample, tokenizer)) == without_ends(expected)


def test_all_weighs_what_the_template_writes_with_1() -> None:
    tokenizer, renderer = renderer_of("smollm")
    made = chat(user("q"), message_of("A", 0.5), user("r"), answer("B"))
    shown = stretches_of(renderer.render(made, loss_on="all"), tokenizer)
    assert [weight for _, weight in shown] == [1.0, 0.5, 1.0]
    assert shown[1][0] == "A<|im_end|>"


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant"])
def test_separate_turns_have_their_own_weights(loss_on: LossOn) -> None:
    tokenizer, renderer = renderer_of("smollm")
    made = chat(user("q"), message_of("A", 0.5), user("r"), answer("B"))
    samples = renderer.render_all(made, loss_on=loss_on, turns="separate")
    shown = [stretches_of(sample, tokenizer) for sample in samples]
    assert shown == [[("A<|im_end|>", 0.5)], [("B<|im_end|>", 1.0)]]
    assert samples[1].loss_weights is None


def test_a_turn_that_calls_tools_has_a_weight_as_a_whole() -> None:
    tokenizer, renderer = renderer_of("items")
    tool_calls = {"tool_calls": [call("f", {"x": "y"})]}
    whole = Message("assistant", "A", tool_calls, is_learned=True, weight=2.0)
    shown = stretches_of(renderer.render(chat(user("q"), whole), loss_on="assistant"), tokenizer)
    assert [(text.endswith("</function><|im_end|>"), weight) for text, weight in shown] == [(True, 2.0)]
    parts = Message("assistant", "A", tool_calls, parts=(ContentPart("A", True, 2.0),))
    assert "whether or how much" in refusal(chat(user("q"), parts), tokenizer).message


def test_only_answers_have_a_weight() -> None:
    tokenizer, _ = renderer_of("smollm")
    made = chat(Message("user", "q", is_learned=True, weight=0.5), answer("A"))
    assert "message 1 (user) is marked to be learned" in refusal(made, tokenizer).message


# Runs and stores


def sample_of(weights: list[float], number: int = 1) -> Sample:
    """A sample of which the first token, and those of weight 0, are not learned."""
    ids = np.arange(len(weights), dtype=np.int32)
    values = np.array([0.0, *weights[1:]], dtype=np.float32)
    labels = np.where(values != 0, ids, IGNORE_INDEX).astype(np.int32)
    return Sample(ids, labels, Origin("a.jsonl", number), weights_beside(labels, values))


MANY = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]), min_size=1, max_size=12), min_size=1, max_size=20)


@settings(deadline=None, max_examples=60)
@given(many=MANY, data=st.data())
def test_a_store_gives_each_sample_its_weights(tmp_path_factory: Any, many: list[list[float]], data: Any) -> None:
    """In memory, spilled to disk, saved and mapped, and in a selection with repeats."""
    samples = [sample_of(weights, number) for number, weights in enumerate(many)]
    folder = tmp_path_factory.mktemp("store")
    builders = StoreBuilder(), StoreBuilder(folder=folder, spill_tokens=5)
    for sample in samples:
        for builder in builders:
            builder.add(sample)
    stores = [builder.finish() for builder in builders]
    stores[1].save(folder)
    stores.append(SampleStore.load(folder))
    assert (folder / "weight_starts.npy").exists() == any(sample.loss_weights is not None for sample in samples)
    order = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=30))
    pairs = [(store, samples) for store in stores]
    pairs += [(store.select(order), [samples[index] for index in order]) for store in stores]
    for store, expected in pairs:
        for index, sample in enumerate(expected):
            found = store[index].loss_weights
            assert (found is None) == (sample.loss_weights is None)
            assert found is None or found.tolist() == weights_of(sample).tolist()
            assert store.weighted[index] == sum(weight not in (0, 1) for weight in weights_of(sample))


def test_damaged_runs_are_refused(tmp_path: Path) -> None:
    builder = StoreBuilder()
    builder.add(sample_of([0, 0.5, 0.5, 1, 2]))
    builder.finish().save(tmp_path)
    np.save(tmp_path / "weight_ends.npy", np.array([3, 9], dtype=np.int64))
    with pytest.raises(ValueError, match="within the tokens"):
        SampleStore.load(tmp_path)
    np.save(tmp_path / "weight_values.npy", np.array([0.5], dtype=np.float32))
    with pytest.raises(ValueError, match="weight_values"):
        SampleStore.load(tmp_path)


@given(weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=20))
def test_runs_are_what_is_neither_0_nor_1(weights: list[float]) -> None:
    runs = WeightRuns.of(np.array(weights, dtype=np.float32))
    rebuilt = [0.0 if weight in (0, 1) else None for weight in weights]
    for start, end, value in zip(runs.starts, runs.ends, runs.values, strict=True):
        rebuilt[start:end] = [float(value)] * int(end - start)
    assert rebuilt == [0.0 if weight in (0, 1) else weight for weight in weights]
    runs.require_within(len(weights))


# Data sets


def record(*answers: tuple[str, float | None]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, (text, weight) in enumerate(answers):
        own = {} if weight is None else {"weight": weight}
        messages += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": text, **own}]
    return {"messages": messages}


def build(tokenizer: Any, path: Path, said: list[str] | None = None, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=(said if said is not None else []).append)


def test_batches_carry_weights_where_there_are_some(chatml: Any, write_jsonl: Callable) -> None:
    """Packed with a sample that has none; the figures count tokens and sum weights."""
    dataset = build(chatml, write_jsonl([record(("AB", 0.5), ("C", None)), record(("D", None))]), max_length=128)
    plan = plan_rows(dataset.train, DataSection.model_validate({"train": [{"path": "x"}], "max_length": 128}), seed=0)
    batch = RowCollator(row_length=128, pad_token_id=0)([RowDataset(dataset.train, plan)[0]])
    assert "loss_weights" in batch
    weights, labels = batch["loss_weights"].numpy(), batch["labels"].numpy()
    assert (weights.dtype, weights.shape) == (np.float32, (1, 128))
    assert ((weights != 0) == (labels != IGNORE_INDEX)).all()
    assert (batch["num_supervised_tokens"], batch["sum_of_weights"]) == (3 + 2 + 2, 3 * 0.5 + 2 + 2)
    assert chatml.decode(labels[weights == 0.5]) == "AB<|im_end|>"


def test_weights_of_0_and_1_make_no_other_batch(chatml: Any, write_jsonl: Callable) -> None:
    plain = write_jsonl([record(("A", None), ("B", None)), record(("C", None))], "plain.jsonl")
    written = write_jsonl([record(("A", 1), ("B", 1.0)), record(("C", 1))])
    stores = [build(chatml, path).train for path in (plain, written)]
    assert all(len(store.weight_runs) == 0 for store in stores)
    for index in range(2):
        assert stores[0][index].labels.tolist() == stores[1][index].labels.tolist()
        assert stores[1][index].loss_weights is None


@pytest.mark.parametrize("length", [22, 30, 36])
def test_a_cut_sample_keeps_the_weights_of_what_is_left(chatml: Any, write_jsonl: Callable, length: int) -> None:
    path = write_jsonl([record(("foo", None), ("bar", 0.5), ("baz", 4))])
    whole = build(chatml, path).train[0]
    cut = build(chatml, path, max_length=length, over_length="truncate")
    expected = weights_of(whole)[:length]
    assert weights_of(cut.train[0]).tolist() == expected.tolist()
    assert (cut.train[0].loss_weights is None) == (0.5 not in expected)
    assert cut.ledger.tokens_weighted == int(np.isin(expected, (0.5, 4)).sum())


@pytest.mark.parametrize("turns", ["together", "separate"])
def test_equal_texts_of_unequal_weights_are_no_duplicates(chatml: Any, write_jsonl: Callable, turns: str) -> None:
    weights = [(0.5, None), (None, 0.5), (0.5, None), (None, None), (None, 1), (0.5, 2)]
    path = write_jsonl([record(("A", first), ("A", second)) for first, second in weights])
    dataset = build(chatml, path, duplicates="drop", turns=turns)
    assert sorted({dataset.train.origin(index).record for index in range(len(dataset.train))}) == [1, 2, 4, 6]
    assert dataset.ledger.records_dropped == 2
    assert dataset.ledger.tokens_weighted == int(dataset.train.weighted.sum()) == 2 + 2 + 4
    check = next(check for check in dataset.gate.checks if check.name == "duplicates")
    assert check.examples == (f"{path}:3 = {path}:1", f"{path}:5 = {path}:4")


def test_a_leak_is_a_leak_whatever_its_weight(chatml: Any, write_jsonl: Callable) -> None:
    train, held_out = write_jsonl([record(("A", 0.5))]), write_jsonl([record(("A", None))], "eval.jsonl")
    with pytest.raises(DataError, match="learned by heart"):
        build(chatml, train, eval=[{"path": str(held_out)}])


def test_the_cache_keeps_weights(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([record(("A", 0.5)), record(("B", None))])
    said: list[str] = []
    first, second = (build(chatml, path, said, cache=True) for _ in range(2))
    assert "hit" in said[-1]
    assert [weights_of(first.train[index]).tolist() for index in range(2)] == [
        weights_of(second.train[index]).tolist() for index in range(2)
    ]
    assert second.ledger == first.ledger
    assert second.ledger.tokens_weighted == 2
    assert "2 of them with a weight other than 1" in second.ledger.summary_lines()[0]


def test_bad_weight_is_placed_at_its_line(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([record(("A", 0.5)), record(("B", -1))])
    with pytest.raises(DataError) as caught:
        build(chatml, path)
    assert caught.value.place == f"{path}:2"
    assert "messages[1].weight must be 0, or a number from" in caught.value.message
    assert "how much its tokens count" in caught.value.remedy


def test_conversation_of_prompt_and_completion(chatml: Any) -> None:
    """`loss_on: completion` takes the weights of the completion's messages."""
    made = Conversation("chat", Origin("a", 1), (user("q"), message_of("A", 3.0)), num_prompt_messages=1)
    sample = Renderer(chatml).render(made, loss_on="completion")
    assert stretches_of(sample, chatml) == [("A<|im_end|>", 3.0)]
