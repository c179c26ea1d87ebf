"""Wrong keys and values: each is placed, and the message says what is allowed."""

from __future__ import annotations

import pytest
from recipe_files import MINIMAL, Write, failure


@pytest.mark.parametrize(
    ("text", "place", "parts"),
    [
        (
            "training:\n  lerning_rate: 1\n",
            "r.yaml:5:3",
            ["`training.lerning_rate`", "found 1", "did you mean `learning_rate`", "allowed here: method, epochs"],
        ),
        ("training: {rank: 8}", "r.yaml:4:12", ["`rank` is a key of `adapter`"]),
        (
            "adapter: {type: none, rank: 8}",
            "r.yaml:4:23",
            ["`rank` is a key of `adapter` of another type", "allowed here: type"],
        ),
        ("adapter: {lora: 1}", "r.yaml:4:11", ["unknown key `adapter.lora`"]),
        ("rank: 8", "r.yaml:4:1", ["unknown key `rank`", "`rank` is a key of `adapter`"]),
        ("training: {adapter: {}}", "r.yaml:4:12", ["`adapter` is a key of the top level"]),
        ("learning_rte: 1", "r.yaml:4:1", ["did you mean `learning_rate`, a key of `training`"]),
        ("trainin: {}", "r.yaml:4:1", ["did you mean `training`"]),
        ("zzz: {}", "r.yaml:4:1", ["unknown key `zzz`, found an empty mapping; allowed here: model"]),
        ("training: {extends: x}", "r.yaml:4:12", ["unknown key `training.extends`"]),
        (
            "adapter: {type: lorra}",
            "r.yaml:4:17",
            ["`adapter.type` must be `lora` or `none`", '"lorra"', "did you mean `lora`"],
        ),
        (
            "adapter: 5",
            "r.yaml:4:10",
            ["`adapter` must be a mapping of type `lora` or a mapping of type `none`", "found 5"],
        ),
        ("adapter: {rank: 0}", "r.yaml:4:17", ["a whole number, 1 or more and at most 4096, found 0"]),
        ("adapter: {rank: true}", "r.yaml:4:17", ["a whole number", "found true"]),
        ("adapter: {rank: 16.0}", "r.yaml:4:17", ["a whole number", "found 16.0"]),
        ("adapter: {alpha: .inf}", "r.yaml:4:18", ["a number, more than 0", "found .inf"]),
        ("adapter: {alpha: .nan}", "r.yaml:4:18", ["a number, more than 0", "found .nan"]),
        ("adapter: {targets: [q_proj, 3]}", "r.yaml:4:29", ["`adapter.targets.1` must be text, found 3"]),
        ("adapter: {targets: all}", "r.yaml:4:20", ["`all-linear`, `attention` or a list of text", 'found "all"']),
        ("training: {schedule: cosin}", "r.yaml:4:22", ["`constant`, `linear` or `cosine`", "did you mean `cosine`"]),
        ("training: {seed: '7'}", "r.yaml:4:18", ["`training.seed` must be a whole number", 'found "7"']),
        ("training:\nevaluation: {}", "r.yaml:4:10", ["`training` must be a mapping", "found nothing (null)"]),
        ("evaluation: {metrics: exact_match}", "r.yaml:4:23", ["a list of text"]),
    ],
)
def test_wrong_key_or_value(write: Write, text: str, place: str, parts: list[str]) -> None:
    error = failure(write(MINIMAL + text))
    assert error.place == place
    assert all(part in error.message for part in parts), error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("model: {path: a, revision: 1e5}", 'Put quotes around the value of `model.revision`: "1e5".'),
        ("data: {packing: no}", "Set `data.packing` to `true` or `false`"),
        ("data: {max_length: 8_192}", "without quotes, units or separators"),
        ("data: {train: x.jsonl}", "Write `data.train: [{path: x.jsonl}]`."),
        ("training: {epochs: }", "remove the key to keep its default"),
        ("modle: {}", "docs/recipe_reference.md"),
    ],
)
def test_remedies_say_what_to_write(write: Write, text: str, remedy: str) -> None:
    assert remedy in failure(write(text)).remedy


@pytest.mark.parametrize(
    ("eval_text", "first_line"),
    [
        ("{fractoin: 0.1}", "r.yaml:3:3: `data.eval.fraction` is missing; it must be a number"),
        ("{fraction: 1}", "r.yaml:3:20: `data.eval.fraction` must be a number, more than 0 and less than 1, found 1"),
        ("[{pth: x}]", "r.yaml:3:10: `data.eval.0.path` is missing; it must be text"),
        ("[]", "r.yaml:3:9: `data.eval` must be a list of mappings"),
        ("5", "r.yaml:3:9: `data.eval` must be a list of mappings"),
    ],
)
def test_unions_report_the_member_that_was_meant(write: Write, eval_text: str, first_line: str) -> None:
    text = f"data:\n  train: [{{path: a}}]\n  eval: {eval_text}\nmodel: {{path: a/b}}\noutput: {{dir: o}}\n"
    assert str(failure(write(text))).startswith(first_line)


def test_missing_sections_and_keys(write: Write) -> None:
    error = failure(write("model: {}\noutput: {dir: ''}\n"))
    lines = str(error).splitlines()
    assert lines[0].startswith("r.yaml:1:1: `model.path` is missing; it must be text, not empty")
    assert lines[1].startswith("r.yaml:1:1: `data` is missing; it must be a mapping")
    assert lines[2] == 'r.yaml:2:15: `output.dir` must be text, not empty, found ""'
    assert "Add `model.path`." in error.remedy


def test_all_faults_are_reported_in_the_order_they_are_written(write: Write) -> None:
    error = failure(write("rank: 8\n" + MINIMAL + "adapter: {rank: 0, alpha: x}\n"), "training.seed=-1", "nonsense")
    places = [line.split(": ")[0] for line in str(error).splitlines()[:3]]
    assert places == ["r.yaml:1:1", "r.yaml:5:17", "r.yaml:5:27"]
    assert "\ncommand line: training.seed=-1: `training.seed` must be" in error.message
    assert "\ncommand line: nonsense: an override is written" in error.message


def test_a_key_named_like_a_union_member_hides_nothing(write: Write) -> None:
    """The validator names the members of a union in its locations; a key of that name was taken for one."""
    lines = str(failure(write(MINIMAL + "adapter: {lora: 1, rank: 0}"))).splitlines()
    assert lines[0].startswith("r.yaml:4:11: unknown key `adapter.lora`")
    assert lines[1].startswith("r.yaml:4:26: `adapter.rank` must be a whole number")


def test_long_values_are_shortened_in_messages(write: Write) -> None:
    assert len(failure(write(MINIMAL + f"training: {{seed: {'x' * 10_000}}}")).message) < 300


@pytest.mark.parametrize("digits", ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "0o" + "7" * 9000])
@pytest.mark.parametrize("key", ["training.max_steps", "training.learning_rate", "data.max_length", "training.seed"])
def test_numbers_of_thousands_of_digits(write: Write, key: str, digits: str) -> None:
    """Python refuses to read or print them, in a file as on the command line."""
    error = failure(write(MINIMAL), f"{key}={digits}")
    assert f"`{key}` must be a" in error.message
    assert len(error.message) < 500 and len(error.place) < 250


def test_an_item_of_thousands_of_digits(write: Write) -> None:
    error = failure(write(MINIMAL), f"data.train.{'9' * 5000}.path=x")
    assert "is no item of the list `data.train`" in error.message


@pytest.mark.parametrize(("key", "value"), [("data.eval", "{path: x}"), ("data.train", "{path: x, weight: 2}")])
def test_a_mapping_where_a_list_is_meant(write: Write, key: str, value: str) -> None:
    """It was told that `fraction` is missing, and that `path` is unknown."""
    error = failure(write(MINIMAL), f"{key}={value}")
    assert f"`{key}` must be a list of mappings" in error.message
    assert "fraction` is missing" not in error.message and "unknown key" not in error.message
    assert f"`{key}: [{{path: ...}}]`" in error.remedy
