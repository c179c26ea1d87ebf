"""`finetune recipes`, `init` and `schema` as commands: output, JSON, 80 columns, no colour."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import tiny

from finetune.cli import main
from finetune.recipe.load import load_recipe
from finetune.recipe.reference import recipe_json_schema
from finetune.start.shipped import shipped_root


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def test_recipes_alone_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    alone = capsys.readouterr().out
    assert main(["recipes", "list"]) == 0
    assert capsys.readouterr().out == alone
    assert alone.startswith("quickstart\n    see a model learn")


def test_recipes_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["recipes"]
    assert {"quickstart", "configs/quantization/nf4"} <= {item["name"] for item in listed}
    assert main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"] == listed
    assert main(["recipes", "--json", "list"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"] == listed
    assert main(["recipes", "show", "quickstart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == (shipped_root() / "recipes/quickstart.yaml").read_text()


def test_show_prints_the_file_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "quickstart"]) == 0
    assert capsys.readouterr().out == (shipped_root() / "recipes/quickstart.yaml").read_text()


def test_copy_tells_what_was_written_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "qwen3-14b_qlora_sft", "own"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("written  own/qwen3-14b_qlora_sft.yaml\nwritten  own/configs/quantization/nf4.yaml\n")
    assert "missing  own/data/support.jsonl: put your own data there" in out
    assert main(["recipes", "copy", "qwen3-14b_qlora_sft", "own/mine.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "own/mine.yaml"
    load_recipe("own/mine.yaml")


@pytest.mark.parametrize(
    "arguments", [["show", "nothing"], ["copy", "nothing"], ["remove", "quickstart"], ["show"]], ids=" ".join
)
def test_wrong_arguments_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *arguments]) == 2
    assert "remedy: " in capsys.readouterr().err


def test_schema_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["schema"], ["schema", "--json"]):
        assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out) == recipe_json_schema()
    assert main(["schema", "-o", "s.json"]) == 0
    assert json.loads(Path("s.json").read_text()) == recipe_json_schema()
    Path("mine.json").write_text("[]")
    assert main(["schema", "-o", "mine.json"]) == 2
    assert Path("mine.json").read_text() == "[]"


def test_a_schema_that_cannot_be_written_is_an_environment_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "-o", "nowhere/s.json"]) == 4
    assert "cannot be written" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Input that is typed."""

    def isatty(self) -> bool:
        return True


def test_init_asks_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("qa.csv").write_text("Frage,Antwort\n" + "a,b\n" * 20)
    answers = ["qa.csv", "Frage", "Antwort", "Qwen/Qwen3-14B", "24GiB"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join([*answers, *[""] * 5])))
    assert main(["init", "--method", "sft"]) == 0
    assert "Which column holds the question? (Frage, Antwort): " in capsys.readouterr().out
    recipe = load_recipe("recipe.yaml")
    assert recipe.model.quantization == "nf4"
    assert recipe.data.train[0].columns is not None


def test_init_asks_nothing_under_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A question on stdout would stand before the object."""
    tiny.make_chat_file(Path("a.jsonl"))
    monkeypatch.setattr(sys, "stdin", Terminal("no\n" * 9))
    assert main(["init", "a.jsonl", "--model", "org/tiny", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("{") and json.loads(out)["recipe"] == "recipe.yaml"


def test_init_stopped_while_it_asks_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert main(["init"]) == 130
    assert not Path("recipe.yaml").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--column", "instruction"), ("--eval-fraction", "1.5"), ("--max-length", "2")]
)
def test_init_refuses_wrong_options(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a.csv", option, value]) == 2
    assert option in capsys.readouterr().err


def test_init_holds_nothing_out_where_the_share_is_zero() -> None:
    """It was refused; 0 is what one types for nothing."""
    tiny.make_chat_file(Path("a.jsonl"))
    assert main(["init", "a.jsonl", "--model", "Qwen/Qwen3-14B", "--card", "cpu", "--eval-fraction", "0"]) == 0
    assert "eval: null" in Path("recipe.yaml").read_text()


def test_lines_fit_80_columns_and_have_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.make_chat_file(Path("a.jsonl"))
    assert main(["recipes"]) == 0
    assert main(["recipes", "copy", "quickstart", "own"]) == 0
    assert main(["init", "a.jsonl", "--model", "Qwen/Qwen3-14B", "--card", "rtx3090"]) == 0
    for command in (["init"], ["recipes"], ["recipes", "copy"], ["schema"], ["diff"], ["runs"]):
        assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if len(line) > 80] == []
