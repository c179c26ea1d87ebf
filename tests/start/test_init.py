"""A recipe from a few answers: it loads, it passes preview, and nothing is written over."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import tiny
import yaml

from finetune.cli import main
from finetune.console import Console
from finetune.errors import DataError, EnvironmentProblem, ExitCode, RecipeError
from finetune.recipe.load import load_recipe
from finetune.start.init import InitRequest, Written, init
from finetune.start.recipe_text import scalar

ROWS = [f'"What, exactly, is {number}?",The number {number}.' for number in range(30)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("qa.csv").write_text("\n".join(["Frage,Antwort", *ROWS]) + "\n")
    Path("named.csv").write_text("\n".join(["question,answer", *ROWS]) + "\n")
    return tmp_path


def write(ask=None, **values) -> Written:
    request = InitRequest(**{"output": Path("recipe.yaml"), "data": "named.csv", "model": "org/tiny-1B", **values})
    return init(request, console=Console(), ask=ask)


def test_a_written_recipe_loads_and_passes_preview(capsys: pytest.CaptureFixture[str]) -> None:
    """A CSV whose columns have no standard names, a model folder, no terminal."""
    tiny.make_model_folder(Path("models/tiny"), "qwen3", weights=False)
    columns = ["--column", "instruction=Frage", "--column", "output=Antwort"]
    Path("sub").mkdir()
    arguments = ["qa.csv", "--model", "models/tiny", "--card", "cpu", "-o", "sub/own.yaml", *columns]
    assert main(["init", *arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["next"][0] == "finetune preview sub/own.yaml"
    assert values["data"]["num_rows"] == 30
    recipe = load_recipe("sub/own.yaml")
    assert recipe.model.path == str(Path("models/tiny").absolute())
    assert recipe.data.max_length == 512  # the model has no more positions
    assert main(["preview", "sub/own.yaml", "data.cache=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_the_first_line_names_the_schema_beside_it_which_the_recipe_satisfies() -> None:
    written = write()
    first, _, text = written.recipe.read_text().partition("\n")
    assert first == "# yaml-language-server: $schema=recipe.schema.json"
    jsonschema.validate(yaml.safe_load(text), json.loads(written.schema.read_text()))


def test_columns_with_telling_names_are_taken_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    write()
    columns = load_recipe("recipe.yaml").data.train[0].columns
    assert columns is not None
    assert (columns.instruction, columns.output) == ("question", "answer")
    assert "columns  instruction is question, output is answer\n" in capsys.readouterr().out


def test_columns_that_say_nothing_need_an_option_without_a_terminal() -> None:
    with pytest.raises(RecipeError, match="fit no known format: Frage, Antwort") as caught:
        write(data="qa.csv")
    assert "--column instruction=NAME" in caught.value.remedy
    assert not Path("recipe.yaml").exists()


@pytest.mark.parametrize(("missing", "option"), [("data", "DATA"), ("model", "--model")])
def test_a_missing_answer_names_its_option(missing: str, option: str) -> None:
    with pytest.raises(RecipeError, match=f"{option} is missing"):
        write(**{missing: None})


def test_on_a_terminal_all_is_asked() -> None:
    asked: list[str] = []
    answers = {
        "Data file": "qa.csv",
        "Which column holds the question": "Frage",
        "Which column holds the answer": "Antwort",
        "Model": "Qwen/Qwen3-14B",
        "Card": "rtx3090",
        "Adapter": "lora",
    }

    def ask(question: str, default: str | None) -> str:
        asked.append(question)
        answer = next((text for begin, text in answers.items() if question.startswith(begin)), default)
        assert answer is not None, question
        return answer

    write(ask, data=None, model=None)
    recipe = load_recipe("recipe.yaml")
    assert asked[0] == "Data file, folder or hub dataset"
    assert asked[-1] == "Folder of the run"
    assert all(any(question.startswith(begin) for question in asked) for begin in answers)
    assert (recipe.model.quantization, recipe.model.device) == ("nf4", "auto")
    assert recipe.output.dir == "runs/recipe"


def test_given_options_are_not_asked() -> None:
    def ask(question: str, default: str | None) -> str:
        raise AssertionError(question)

    columns = {"instruction": "question", "output": "answer"}
    write(ask, card="cpu", method="sft", adapter="none", run_dir="out", columns=columns)
    recipe = load_recipe("recipe.yaml")
    assert (recipe.adapter.type, recipe.output.dir) == ("none", "out")


def test_a_wrong_column_is_an_error_of_the_arguments_and_no_question() -> None:
    """The data's file was asked for again and again, which mends no `--column`."""
    left = ["nowhere.csv", "qa.csv"]
    with pytest.raises(RecipeError, match=r"no column `Fragen` in qa\.csv") as caught:
        write(lambda question, default: left.pop(0), data=None, columns={"instruction": "Fragen", "output": "Antwort"})
    assert caught.value.place == "--column instruction=Fragen"
    assert caught.value.remedy == "Use one of: Frage, Antwort."
    assert not left and not Path("recipe.yaml").exists()
    for arguments in (["--column", "instruction=Fragen", "--column", "output=Antwort"], ["--column", "text=Fragen"]):
        assert main(["init", "qa.csv", "--model", "org/tiny-1B", "--card", "cpu", *arguments]) == ExitCode.RECIPE


def test_a_column_that_the_first_record_leaves_out_is_known() -> None:
    rows = [{"q": "What is 1?", "a": "One."}, {"q": "What is 2?", "a": "Two.", "rules": "Be short."}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(data="rows.jsonl", columns={"instruction": "q", "output": "a", "system": "rules"})
    columns = load_recipe("recipe.yaml").data.train[0].columns
    assert columns is not None and columns.system == "rules"


def test_columns_that_are_there_and_fit_nothing_end_the_questions() -> None:
    with pytest.raises((RecipeError, DataError)):
        write(lambda question, default: "qa.csv", data=None, columns={"instruction": "Frage"})


def test_a_wrong_answer_is_asked_for_again_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The earlier answers stay, and the first record is shown before the questions that follow it."""
    answers = ["nowhere.csv", "qa.csv", "Fragen", "Frage", "Antwort", "./nowhere", "org/tiny-1B", "big", "cpu", "lara"]
    left = [*answers, "lora", "runs/mine"]
    write(lambda question, default: left.pop(0), data=None, model=None)
    recipe = load_recipe("recipe.yaml")
    assert not left and (recipe.model.path, recipe.output.dir) == ("org/tiny-1B", "runs/mine")
    told = capsys.readouterr()
    for reason in ("nowhere.csv", "no column `Fragen`", "Use one of: Frage, Antwort", "no such folder", "`lara`"):
        assert reason in told.err, reason
    assert "record   user: What, exactly, is 0?\n         assistant: The number 0.\n" in told.out
    assert told.out.index("record ") < told.out.index("written ")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adapter": "lara"}, "`lara` is not allowed"),
        ({"method": "sfd"}, "`sfd` is not allowed"),
        ({"card": "big"}, "`big` is no card"),
        ({"model": "./nowhere"}, "no such folder"),
        ({"data": "org/data", "columns": {"question": "q"}}, "`question` is no role"),
        ({"output": Path("recipe.json")}, "a recipe is a YAML file"),
    ],
)
def test_wrong_answers_are_refused_and_nothing_is_written(values: dict[str, object], message: str) -> None:
    before = sorted(Path().iterdir())
    with pytest.raises(RecipeError, match=message):
        write(**values)
    assert sorted(Path().iterdir()) == before


def test_an_existing_file_is_replaced_with_force_only() -> None:
    Path("recipe.yaml").write_text("mine: 1\n")
    with pytest.raises(RecipeError, match="will not be replaced") as caught:
        write()
    assert "--force" in caught.value.remedy
    assert Path("recipe.yaml").read_text() == "mine: 1\n"
    write(force=True)
    load_recipe("recipe.yaml")


def test_a_folder_that_is_not_there_is_made() -> None:
    """As `recipes copy` does."""
    write(output=Path("new/deep/recipe.yaml"))
    load_recipe("new/deep/recipe.yaml")
    Path("file").touch()
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        write(output=Path("file/recipe.yaml"))


def test_a_share_of_zero_holds_nothing_out() -> None:
    write(eval_fraction=0.0)
    assert load_recipe("recipe.yaml").data.eval is None


def test_odd_names_of_files_and_columns_survive() -> None:
    Path("my: data #1.csv").write_text("\n".join(['"ask: it","an, swer"', *ROWS]) + "\n")
    write(data="my: data #1.csv", columns={"instruction": "ask: it", "output": "an, swer"}, run_dir="1e5")
    recipe = load_recipe("recipe.yaml")
    assert recipe.data.train[0].path == str(Path("my: data #1.csv").absolute())
    assert recipe.data.train[0].columns is not None and recipe.data.train[0].columns.output == "an, swer"
    assert recipe.output.dir == "1e5"


def test_a_hub_dataset_is_named_and_not_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    write(data="org/data")
    assert load_recipe("recipe.yaml").data.train[0].path == "org/data"
    assert "is not looked at" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["a", "../a.csv", "no", "null", "1", "1e5", "0x1", "~", "~/a", "a b", 'q"', "a: b", "\u00e9", "2024-01-01", ".5"],
)
def test_scalars_read_back(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"model: {{path: a/b}}\ndata: {{train: [{{path: x.csv}}]}}\noutput:\n  dir: {scalar(text)}\n", encoding="utf-8"
    )
    assert load_recipe(path).output.dir == text
