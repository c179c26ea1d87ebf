"""Layers of a recipe: files that it extends, and overrides of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_files import MINIMAL, Write, failure

from finetune.recipe.load import load_recipe
from finetune.recipe.schema import EvalFraction, LoraAdapter, NoAdapter


def test_extends_merges_in_order_and_the_file_wins(write: Write) -> None:
    write("training: {seed: 1, epochs: 5, rows_per_step: 2}\nadapter: {targets: [a, b]}", "base/one.yaml")
    write("training: {seed: 2, epochs: 6}\nadapter: {targets: [c], rank: 3}", "base/two.yaml")
    recipe = load_recipe(write("extends: [base/one.yaml, base/two.yaml]\ntraining: {seed: 3}\n" + MINIMAL))
    assert (recipe.training.seed, recipe.training.epochs, recipe.training.rows_per_step) == (3, 6.0, 2)
    assert recipe.adapter == LoraAdapter(rank=3, targets=["c"])


def test_extends_takes_one_name_and_chains(write: Write) -> None:
    write("extends: deep/b.yaml\ntraining: {epochs: 2}", "a.yaml")
    write("extends: ../c.yaml\ntraining: {epochs: 3, seed: 3}", "deep/b.yaml")
    write("training: {epochs: 4, seed: 4, rows_per_step: 4}", "c.yaml")
    training = load_recipe(write("extends: a.yaml\n" + MINIMAL)).training
    assert (training.epochs, training.seed, training.rows_per_step) == (2.0, 3, 4)


def test_a_diamond_is_no_cycle(write: Write) -> None:
    write("training: {seed: 1}", "base.yaml")
    write("extends: base.yaml\ntraining: {epochs: 2}", "a.yaml")
    write("extends: base.yaml\ntraining: {rows_per_step: 2}", "b.yaml")
    assert load_recipe(write("extends: [a.yaml, b.yaml]\n" + MINIMAL)).training.epochs == 2.0


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["adapter: {rank: 4}", "adapter: {type: none}"], NoAdapter(type="none")),
        (["adapter: {rank: 4}", "adapter: {type: lora, alpha: 2}"], LoraAdapter(rank=4, alpha=2)),
        (["adapter: {rank: 4}", "adapter: {type: none}", "adapter: {type: lora, alpha: 2}"], LoraAdapter(alpha=2)),
    ],
    ids=["replaced", "same-type-merges", "replaced-twice"],
)
def test_a_mapping_that_changes_type_replaces(
    write: Write, layers: list[str], expected: LoraAdapter | NoAdapter
) -> None:
    names = [write(text, f"l{index}.yaml").name for index, text in enumerate(layers)]
    assert load_recipe(write(f"extends: [{', '.join(names)}]\n" + MINIMAL)).adapter == expected


def test_cycles_are_named(write: Write) -> None:
    write("extends: r.yaml", "a.yaml")
    error = failure(write("extends: a.yaml\n" + MINIMAL))
    assert error.message == "`extends` goes in a circle: r.yaml -> a.yaml -> r.yaml"
    assert error.place == "a.yaml:1:10"


def test_missing_extended_file_is_placed_where_it_is_named(write: Write) -> None:
    write("training: {}", "configs/nf4.yaml")
    error = failure(write("extends:\n  - configs/nf.yaml\n" + MINIMAL))
    assert error.place == "r.yaml:2:5"
    assert error.remedy == "Did you mean configs/nf4.yaml?"


@pytest.mark.parametrize("value", ["5", "{a: b}", "[1]", "null", "['']"])
def test_extends_of_another_type(write: Write, value: str) -> None:
    error = failure(write(f"extends: {value}\n" + MINIMAL))
    assert "`extends` must be a file name or a list of file names" in error.message
    assert error.place.startswith("r.yaml:1:1")


def test_faults_in_an_extended_file_are_placed_there(write: Write) -> None:
    write("training:\n  sed: 1\n", "base.yaml")
    assert failure(write("extends: base.yaml\n" + MINIMAL)).place == "base.yaml:2:3"


# ---- overrides ----


def test_overrides_are_typed_and_win(write: Write) -> None:
    recipe = load_recipe(
        write(MINIMAL + "adapter: {type: lora, rank: 4}\n"),
        overrides=[
            "training.learning_rate=1e-4",
            "data.packing=false",
            "adapter.type=none",
            "data.eval={fraction: 0.5}",
        ],
    )
    assert recipe.training.learning_rate == 1e-4
    assert recipe.data.packing is False
    assert recipe.adapter == NoAdapter(type="none")
    assert recipe.data.eval == EvalFraction(fraction=0.5)


def test_overrides_reach_into_lists_and_null_removes(write: Write) -> None:
    text = MINIMAL.replace("}]}", "}, {path: b.jsonl, max_rows: 3}], eval: {fraction: 0.1}}")
    recipe = load_recipe(write(text), overrides=["data.train.1.path=c.jsonl", "data.eval=null"])
    assert [Path(source.path).name for source in recipe.data.train] == ["a.jsonl", "c.jsonl"]
    assert recipe.data.train[1].max_rows == 3
    assert recipe.data.eval is None


@pytest.mark.parametrize("value", ["1e5", "20240101", "0123", "true", "no"])
def test_overrides_of_text_need_no_quotes(write: Write, value: str) -> None:
    assert load_recipe(write(MINIMAL), overrides=[f"model.revision={value}"]).model.revision == value


def test_later_overrides_win_and_values_may_hold_equals_signs(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL), overrides=["output.dir=a", "output.dir=b=c"])
    assert recipe.output.dir == "b=c"


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("training.lerning_rate=1", "did you mean `learning_rate`", "training.lerning_rate"),
        ("training.seed", "written `section.key=value`", "training.learning_rate=1e-4"),
        ("=5", "written `section.key=value`", "For example"),
        ("training..seed=5", "written `section.key=value`", "For example"),
        ("training.seed=", "has no value", "`training.seed=null`"),
        ("training.seed=[1", "broken YAML", "brackets"),
        ("training.seed=x", 'must be a whole number, 0 or more and at most 4294967295, found "x"', "training.seed"),
        ("data.train.5.path=x", "`5` is no item of the list `data.train`; allowed: 0 to 0", "data.train=[...]"),
        ("data.train.first=x", "`first` is no item", "data.train=[...]"),
        ("data.train.-1.path=x", "`-1` is no item", "data.train=[...]"),
        ("extends=a.yaml", "`extends` cannot be set on the command line", "in the recipe"),
        ("model.path.x=1", "`model.path` must be text", "model.path"),
    ],
)
def test_wrong_overrides_are_placed_on_the_command_line(write: Write, override: str, message: str, remedy: str) -> None:
    error = failure(write(MINIMAL), override)
    assert error.place == f"command line: {override}"
    assert message in error.message
    assert remedy in error.remedy
