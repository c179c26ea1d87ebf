"""Reading recipe files, broken ones too, and writing them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_files import MINIMAL, Write, failure, with_dir

from finetune.errors import RecipeError
from finetune.recipe.load import dump_recipe, load_recipe, recipe_hash
from finetune.recipe.schema import LoraAdapter, Recipe

# ---- values ----


def test_minimal_recipe_has_the_defaults(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL))
    assert recipe.adapter == LoraAdapter()
    assert recipe.training.rows_per_step == 8
    assert recipe.output.dir == "out"


@pytest.mark.parametrize("text", ["2.0e-4", "2e-4", "2E-4", "0.0002", "+2e-04", "200e-6"])
def test_numbers_with_exponents_are_numbers(write: Write, text: str) -> None:
    """YAML 1.1 reads `2e-4` as text."""
    assert load_recipe(write(MINIMAL + f"training: {{learning_rate: {text}}}")).training.learning_rate == 2e-4


@pytest.mark.parametrize("word", ["no", "off", "yes", "on", "y", "2024-01-01", "1:30", "1_000"])
def test_words_that_yaml_1_1_would_convert_stay_text(write: Write, word: str) -> None:
    assert load_recipe(write(with_dir(word))).output.dir == word


def test_leading_zeros_are_decimal(write: Write) -> None:
    assert load_recipe(write(MINIMAL + "training: {seed: 010}")).training.seed == 10


def test_byte_order_mark_and_non_ascii_text(write: Write) -> None:
    recipe = load_recipe(write(b"\xef\xbb\xbf" + with_dir("\u00fcber/\u6a21\u578b").encode()))
    assert recipe.output.dir == "\u00fcber/\u6a21\u578b"


def test_environment_variables_stay_literal(write: Write) -> None:
    assert load_recipe(write(with_dir('"${HOME}/x"'))).output.dir == "${HOME}/x"


def test_adapter_without_type_is_lora(write: Write) -> None:
    assert load_recipe(write(MINIMAL + "adapter: {rank: 4}")).adapter == LoraAdapter(rank=4)


def test_anchors_and_aliases_work(write: Write) -> None:
    text = MINIMAL.replace("[{path: a.jsonl}]", "&files [{path: a.jsonl}], eval: *files")
    recipe = load_recipe(write(text))
    assert recipe.data.eval == recipe.data.train


# ---- wrong files ----


def test_missing_file_names_the_nearest(write: Write) -> None:
    write(MINIMAL, "recipe.yaml")
    error = failure(Path("recipes.yaml"))
    assert error.message == "there is no file recipes.yaml"
    assert error.place == "recipes.yaml:1:1"
    assert error.remedy == "Did you mean recipe.yaml?"


def test_missing_folder(write: Write) -> None:
    write(MINIMAL)
    assert "no folder nowhere" in failure(Path("nowhere/r.yaml")).remedy


def test_folder_instead_of_file(write: Write) -> None:
    error = failure(write(MINIMAL, "sub/r.yaml").parent)
    assert error.message == "sub is a folder, not a file"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null"])
def test_empty_file(write: Write, text: str) -> None:
    error = failure(write(text))
    assert (error.message, error.place) == ("the file is empty", "r.yaml:1:1")
    assert "`model`, `data` and `output`" in error.remedy


@pytest.mark.parametrize(("text", "shown"), [("- a\n- b\n", '["a", "b"]'), ("\nhello\n", '"hello"'), ("7", "7")])
def test_file_that_is_no_mapping(write: Write, text: str, shown: str) -> None:
    error = failure(write(text))
    assert error.message == f"the file must hold a mapping of sections, found {shown}"


@pytest.mark.parametrize(
    ("text", "place", "part", "remedy"),
    [
        ("model: {path: x\ndata: 1\n", "r.yaml:2:5", "broken YAML", "brackets"),
        ("model:\n\tpath: x\n", "r.yaml:2:1", "'\\t'", "spaces"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1", "single document", "Keep one document"),
        ("a: *nothing\n", "r.yaml:1:4", "undefined alias", "Check"),
        ("model:\n  path: a\x01b\n", "r.yaml:2:10", "U+0001", "Remove the character"),
        ("model:\n  path: a\n  path: b\n", "r.yaml:3:3", "`path` stands twice; the first is on line 2", "Remove one"),
        ("model: !!python/object:os.system {}\n", "r.yaml:1:8", "tag", "plain values"),
        ("model: !!int x\n", "r.yaml:1:8", "`x` is no int", "Remove the tag"),
        ("? [a]\n: 1\n", "r.yaml:1:3", "a key must be text", "plain key"),
        ("model: &m {path: *m}\n", "r.yaml:1:8", "contains itself", "Write the values out"),
    ],
    ids=["flow", "tab", "two-documents", "alias", "control", "duplicate", "tag", "int-tag", "list-key", "recursive"],
)
def test_broken_yaml_has_a_place(write: Write, text: str, place: str, part: str, remedy: str) -> None:
    error = failure(write(text))
    assert error.place == place
    assert part in error.message
    assert remedy in error.remedy


def test_deep_nesting_is_an_error_not_a_crash(write: Write) -> None:
    assert "nested too deeply" in failure(write("a: " + "[" * 5000 + "]" * 5000)).message


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_refused(write: Write, encoding: str) -> None:
    error = failure(write(("model: {path: a}\n# \u00fc\n" + MINIMAL).encode(encoding)))
    assert "not UTF-8" in error.message
    assert error.place == ("r.yaml:2:3" if encoding == "latin-1" else "r.yaml:1:1")
    assert "iconv" in error.remedy


# ---- anything at all ----

NAMES = (
    "extends type path model adapter data training evaluation output train eval fraction targets metrics dir rank seed "
    "chat_template revision lora none x 0"
)
KEYS = st.sampled_from(NAMES.split())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["lora", "none", "\0", "~x"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)
WHOLE = {"model": {"path": "a"}, "data": {"train": [{"path": "x"}]}, "output": {"dir": "o"}}
"""A recipe that holds, so that values laid over it are looked at one by one."""


def test_aliases_of_aliases_are_refused(tmp_path: Path) -> None:
    """Nine levels of nine aliases stand for 387 million values, which took minutes to write out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    path = tmp_path / "r.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(RecipeError, match="aliases"):
        load_recipe(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=VALUES | st.dictionaries(KEYS, VALUES).map(lambda values: WHOLE | values),
    override=st.tuples(st.lists(KEYS, min_size=1, max_size=4), VALUES),
)
def test_any_values_give_a_recipe_or_a_placed_error(
    tmp_path: Path, values: object, override: tuple[list[str], object]
) -> None:
    path = tmp_path / "any.yaml"
    # JSON is YAML; its escapes also reach characters that no file may hold bare.
    path.write_text(json.dumps(values), encoding="utf-8")
    keys, value = override
    for overrides in ([], [f"{'.'.join(keys)}={json.dumps(value)}"]):
        try:
            load_recipe(path, overrides=overrides)
        except RecipeError as error:
            assert error.place and error.message and error.remedy


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode), override=st.text(max_size=20))
def test_any_bytes_give_a_placed_error(tmp_path: Path, content: bytes, override: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides=[override])
    assert caught.value.place and caught.value.message and caught.value.remedy


# ---- dump and hash ----

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
TRICKY = st.sampled_from(
    [
        "1e4",
        "1e-4",
        "010",
        "0o17",
        "no",
        "null",
        "~",
        " x ",
        "1_0",
        "2024-01-01",
        "a: b",
        "#",
        "<<",
        "=",
        ".inf",
        "\x85",
    ]
)
"""Text that some reader of YAML takes for something else."""
FILES = st.fixed_dictionaries({"path": TEXT.map(lambda name: "/data/d" + name.replace("/", ""))})
LORA = st.fixed_dictionaries(
    {
        "rank": st.integers(1, 4096),
        "alpha": st.floats(1e-30, 1e30),
        "targets": st.lists(TEXT, min_size=1, max_size=3) | st.sampled_from(["attention", "all-linear"]),
    }
)
RECIPES = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": st.just("org/name"), "revision": st.none() | TEXT | TRICKY}),
        "adapter": st.just({"type": "none"}) | LORA,
        "data": st.fixed_dictionaries(
            {
                "train": st.lists(FILES, min_size=1, max_size=3),
                "eval": st.none() | st.fixed_dictionaries({"fraction": st.floats(1e-9, 0.999)}),
            }
        ),
        "training": st.fixed_dictionaries(
            {"learning_rate": st.floats(1e-300, 1e300), "seed": st.integers(0, 2**32 - 1)}
        ),
        "output": st.fixed_dictionaries({"dir": TEXT | TRICKY}),
    }
).map(Recipe.model_validate)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recipe=RECIPES)
def test_dump_and_load_round_trip(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    loaded = load_recipe(path)
    assert loaded == recipe
    assert recipe_hash(loaded) == recipe_hash(recipe)


def test_dump_names_every_key(write: Write) -> None:
    dumped = dump_recipe(load_recipe(write(MINIMAL)))
    for section in ("model", "adapter", "data", "training", "evaluation", "output"):
        assert f"{section}:\n" in dumped
    assert "gradient_checkpointing: auto" in dumped


def test_hash_follows_values_not_their_spelling(write: Write) -> None:
    plain = load_recipe(write(MINIMAL))
    spelled = load_recipe(write("training: {seed: 0x7, epochs: 1}\n" + MINIMAL, "b.yaml"))
    assert recipe_hash(plain) == recipe_hash(spelled)
    assert len(recipe_hash(plain)) == 64
    assert recipe_hash(plain) != recipe_hash(load_recipe("r.yaml", overrides=["training.seed=8"]))
