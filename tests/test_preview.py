"""`finetune preview`: rows with their mask, lengths, packing, ledger and gate, as text, page and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny import make_chat_file, make_config, make_recipe, make_tokenizer

from finetune.cli import main
from finetune.data.types import IGNORE_INDEX, Origin, Sample
from finetune.errors import ExitCode
from finetune.preview.model import Stretch, document_of, histogram
from finetune.preview.text import choose_marks


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe over a folder that holds a tokenizer and no weights, and no config either."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    make_chat_file(tmp_path / "data.jsonl", rows=12)
    path = tmp_path / "recipe.yaml"
    values = make_recipe(tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "out", data={"max_length": 128})
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["preview", *arguments, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == result.get("exit_code", 0)
    return result


def test_json_holds_rows_with_their_mask(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, str(recipe), "--rows", "99")
    assert result["packing"]["rows"] == len(result["rows"])
    documents = [document for row in result["rows"] for document in row["documents"]]
    assert sorted(int(document["source"].rpartition(":")[2]) for document in documents) == list(range(1, 13))
    tokenizer = make_tokenizer()
    for row in result["rows"]:
        assert len(row["tokens"]) == len(row["mask"]) <= 128
        assert row["text"] == tokenizer.decode(row["tokens"])
        assert row["mask"] == [mark for document in row["documents"] for mark in document["mask"]]
    lines = Path(recipe.parent / "data.jsonl").read_text(encoding="utf-8").splitlines()
    for document in documents:
        record = json.loads(lines[int(document["source"].rpartition(":")[2]) - 1])
        assert document["learned"] == [record["messages"][1]["content"] + "<|im_end|>"]
        assert "".join(stretch["text"] for stretch in document["stretches"]) == document["text"]


def test_json_holds_ledger_histogram_and_gate(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, str(recipe), "--rows", "1", "data.eval={fraction: 0.25}")
    ledger = result["ledger"]
    assert (ledger["records"], ledger["samples_held_out"], result["eval_samples"]) == (12, 3, 3)
    assert sum(each["samples"] for each in result["histogram"]) == 9
    assert len(result["rows"]) == 1
    assert result["gate"]["status"] in ("ok", "warning")
    assert {"end of turn", "learned share", "duplicates"} <= {check["name"] for check in result["gate"]["checks"]}
    assert not (recipe.parent / "out").exists()


def test_text_marks_what_is_learned(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", str(recipe), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "[[...]] is learned" in shown
    answers = re.findall(r"assistant\n\[\[([^\]]*)\]\]", shown)
    assert answers and all(answer.endswith("<|im_end|>") for answer in answers)
    assert "row 1 of" in shown
    assert "each seeing only itself" in shown
    assert re.search(r"\d+ - \d+ +#+ +\d", shown)
    assert "12 records -> 12 samples" in shown
    assert "gate    ok: end of turn: learned in 12 of 12 records" in shown


def test_text_is_coloured_on_a_terminal(recipe: Path, tmp_path: Path) -> None:
    """In a real terminal: learned text in bold green, and no marks."""
    import os
    import pty
    import subprocess
    import sys

    leader, follower = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", "preview", str(recipe), "--rows", "1"],
        stdout=follower,
        stderr=follower,
        env=environment,
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not piece:
            break
        shown += piece
    assert process.wait() == 0
    text = shown.decode()
    assert re.search(r"\x1b\[1;32m[^\x1b]*<\|im_end\|>", text)
    assert "[[" not in text


def test_page_is_whole_and_escaped(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = recipe.parent / "data.jsonl"
    bad = {
        "messages": [{"role": "user", "content": "<script>alert(1)</script>"}, {"role": "assistant", "content": "<b>"}]
    }
    data.write_text(json.dumps(bad) + "\n" + data.read_text(encoding="utf-8"), encoding="utf-8")
    page = recipe.parent / "page.html"
    assert main(["preview", str(recipe), "--rows", "20", "--html", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<mark>&lt;b&gt;&lt;|im_end|&gt;</mark>" in html
    assert not re.search(r"(?:src|href)=\"(?!data:)", html)
    assert html.count('<article class="card row">') > 1
    assert "13 samples" in html or "<dd>13</dd>" in html
    assert str(page) in capsys.readouterr().out


def test_gate_fault_ends_with_code_3_and_says_why(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = recipe.parent / "data.jsonl"
    empty = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]})
    data.write_text(data.read_text(encoding="utf-8") + empty + "\n" + "{\n", encoding="utf-8")
    result = run_json(capsys, str(recipe))
    assert result["exit_code"] == ExitCode.DATA == 3
    assert result["error"] == "DataError"
    assert [fault["records"] for fault in result["faults"]] == [1, 1]
    assert result["faults"][0]["examples"][0]["place"] == f"{data}:13"
    assert "data.malformed" in result["remedy"]
    result = run_json(capsys, str(recipe), "data.malformed=drop")
    assert (result["ledger"]["records"], result["ledger"]["records_dropped"]) == (14, 2)


def test_page_in_a_folder_that_is_not_there(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, str(recipe), "--html", str(recipe.parent / "none" / "page.html"))
    assert result["exit_code"] == ExitCode.ENVIRONMENT
    assert "page.html" in result["place"]


def test_rows_without_packing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, str(recipe), "data.packing=false", "--rows", "2")
    assert [len(row["documents"]) for row in result["rows"]] == [1, 1]
    assert result["packing"]["rows"] == 12
    assert run_json(capsys, str(recipe), "--rows", "0")["rows"] == []


@pytest.mark.parametrize("lengths", [[5], [1, 2, 3], [10, 4000], list(range(1, 1000)), [7] * 9, [1, 10**9]])
def test_histogram_holds_each_sample_once(lengths: list[int]) -> None:
    bins = histogram(np.array(lengths, dtype=np.int64))
    assert len(bins) <= 12
    for each in bins:
        assert each.samples == sum(each.start <= length <= each.end for length in lengths)
    assert sum(each.samples for each in bins) == len(lengths)


def test_stretches_of_split_characters_lose_no_text() -> None:
    """A border inside a character of several bytes still shows both sides."""
    tokenizer = make_tokenizer()
    ids = np.array(tokenizer("a\u6f22b")["input_ids"], dtype=np.int32)
    labels = ids.copy()
    labels[:2] = IGNORE_INDEX
    document = document_of(Sample(ids, labels, Origin("a", 1)), tokenizer=tokenizer)
    assert document.text == "a\u6f22b"
    assert [stretch.is_learned for stretch in document.stretches] == [False, True]
    assert sum(document.mask) == len(ids) - 2


def test_a_page_replaces_pages_only(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--html` replaced whatever the path named, the training data too."""
    data = tmp_path / "data.jsonl"
    before = data.read_bytes()
    error = run_json(capsys, str(recipe), "--html", str(data))
    assert error["place"] == str(data)
    assert data.read_bytes() == before
    page = tmp_path / "page.html"
    for _ in range(2):
        run_json(capsys, str(recipe), "--html", str(page))
    assert page.read_bytes().startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("texts", "marks"),
    [
        (["plain", "learned", ""], ("[[", "]]")),
        (["[[1, 2]]", "learned", ""], ("{{{", "}}}")),
        (["ends in [", "learned", ""], ("{{{", "}}}")),
        (["plain", "ends in ]", ""], ("{{{", "}}}")),
        (["[[", "{{{x}}}", "<<<"], ("[[learned 1:", ":1]]")),
        (["[[ {{{ <<< [[learned 1:", "x", ""], ("[[learned 2:", ":2]]")),
    ],
)
def test_marks_cannot_be_taken_for_text(texts: list[str], marks: tuple[str, str]) -> None:
    """Without colour, data that holds `[[` was read as learned."""
    stretches = [Stretch(text, bool(number % 2), 1) for number, text in enumerate(texts)]
    assert choose_marks([stretches]) == marks


def write_records(recipe: Path, *records: tuple[str, str]) -> None:
    lines = [
        json.dumps({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]})
        for user, answer in records
    ]
    (recipe.parent / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_unseen_characters_are_spelled_out_in_text_and_page(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data could turn a line around, and so show another answer than the one learned."""
    write_records(recipe, ("a \u202e b \x1b[31m", "c \u2066 d \x85"), ("x", "y"))
    page = recipe.parent / "page.html"
    assert main(["preview", str(recipe), "data.max_length=512", "--html", str(page)]) == 0
    for shown in (capsys.readouterr().out, page.read_text(encoding="utf-8")):
        assert "a \\u202e b \\x1b[31m" in shown
        assert "c \\u2066 d \\x85" in shown
        assert not re.search("[\u202e\u2066\x1b\x85]", shown)


def test_page_folds_long_context_and_shows_findings_first(recipe: Path) -> None:
    """The learned part of a long sample lay below the edge of a box."""
    write_records(recipe, ("long " * 600, "answer"), ("x", "y"))
    page = recipe.parent / "page.html"
    assert main(["preview", str(recipe), "data.max_length=9000", "--html", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    folded = re.search(r"<details><summary>middle of ([\d,]+) tokens that are not learned", html)
    assert folded is not None and int(folded[1].replace(",", "")) > 2000
    after = html[html.index("</details>") :]
    assert after.index("<mark>answer") < 500
    assert "<details" not in html[: folded.start()] and "max-height: 420px" not in html
    titles = re.findall(r"<h2>([^<]*)</h2>", html)
    assert titles == ["Gate", "Ledger and packing", "Lengths of the samples, in tokens", "Rows as the model sees them"]


def test_a_length_beyond_the_models_positions_is_said(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`finetune train` refuses it, and preview showed the data as if it could be trained on."""
    assert run_json(capsys, str(recipe), "data.max_length=600")["warnings"] == []
    make_config("qwen3").save_pretrained(recipe.parent / "model")
    assert run_json(capsys, str(recipe), "data.max_length=512")["warnings"] == []
    (warning,) = run_json(capsys, str(recipe), "data.max_length=600")["warnings"]
    assert "positions up to 512 only" in warning and "600" in warning


def test_counts_of_one_are_singular(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(recipe, ("x", "y"))
    assert main(["preview", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert not re.findall(r"(?<![\d,.])1 (?:records|samples|rows|tokens)\b", shown)
    assert "1 record -> 1 sample, " in shown and "1 sample in 1 row of" in shown
    assert "learned in 1 of 1 record" in shown


def test_a_hit_of_the_cache_says_the_format_too(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for what in ("miss", "hit"):
        assert main(["preview", str(recipe), "data.cache=true"]) == 0
        shown = capsys.readouterr().out
        assert f"Token cache: {what}" in shown
        assert f"{tmp_path / 'data.jsonl'}: recognised as messages" in shown


def test_weights_are_shown(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A weight other than 1 stands after its text, on the terminal, the page and in the object; the ledger counts."""
    data, page = recipe.parent / "data.jsonl", recipe.parent / "page.html"
    parts = [{"type": "text", "text": "lo", "weight": 0.1}, {"type": "text", "text": "hi"}]
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]}
    plain = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]}
    data.write_text("".join(json.dumps(each) + "\n" for each in (record, plain)), encoding="utf-8")
    assert main(["preview", str(recipe), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "[[lo]](x0.1)[[hi<|im_end|>]]" in shown and "weight in the loss" in shown
    assert "2 of them with a weight other than 1" in shown
    assert "gate    ok: loss weights: 2 of 7 learned tokens have a weight other than 1" in shown
    assert '<mark class="weighted" title="weight 0.1">lo<sub>0.1</sub></mark><mark>hi' in page.read_text("utf-8")
    result = run_json(capsys, str(recipe))
    stretches = [each for row in result["rows"] for document in row["documents"] for each in document["stretches"]]
    assert {(each["text"], each["weight"]) for each in stretches if each["is_learned"]} == {
        ("lo", 0.1),
        ("hi<|im_end|>", 1.0),
        ("a<|im_end|>", 1.0),
    }
    assert result["ledger"]["tokens_weighted"] == 2
    data.write_text(json.dumps(plain) + "\n", encoding="utf-8")
    assert main(["preview", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert "[[a<|im_end|>]]" in shown and "weight in the loss" not in shown and "loss weights" not in shown
