"""Check the quick start's committed files: that they can be made again, and that they are what they claim to be."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
BASE = QUICKSTART / "base"
DATA_FILES = ("orders_train.jsonl", "orders_eval.jsonl", "base_tasks_eval.jsonl")
BASE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
NUM_PARAMETERS = 1_091_968
MAX_WEIGHTS_BYTES = 5_000_000

Row = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """Load the generator, which is a script and in no package, from its path."""
    spec = importlib.util.spec_from_file_location("quickstart_generate", QUICKSTART / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():  # the class behind AutoTokenizer differs between versions of transformers
    """Load the committed tokenizer as a user would."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    """Read the committed model configuration."""
    return json.loads((BASE / "config.json").read_text(encoding="utf-8"))


def read_rows(name: str) -> list[Row]:
    """Read one committed data file."""
    return [json.loads(line) for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines()]


def question(row: Row) -> str:
    """Return what the user says."""
    return row["messages"][0]["content"]


def answer(row: Row) -> str:
    """Return what the assistant should say."""
    return row["messages"][1]["content"]


def person(row: Row) -> str:
    """Return the name an order's answer holds."""
    return json.loads(answer(row))["name"]


# The data


def test_data_is_made_again_byte_for_byte(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "NUM_TASKS", 10)  # the large file is not compared
    generate.write_data(tmp_path)
    generate.write_pretraining(tmp_path)
    for name in DATA_FILES:
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes(), name


@pytest.mark.parametrize(("name", "num_rows"), [("orders_train.jsonl", 3_000), ("orders_eval.jsonl", 200)])
def test_orders_are_distinct_user_and_assistant_pairs(name: str, num_rows: int) -> None:
    rows = read_rows(name)
    assert len(rows) == num_rows == len({question(row) for row in rows})
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)


def test_evaluation_shares_no_sentence_and_no_person_with_training() -> None:
    train, held_out = read_rows("orders_train.jsonl"), read_rows("orders_eval.jsonl")
    assert {question(row) for row in train}.isdisjoint(question(row) for row in held_out)
    assert {person(row) for row in train}.isdisjoint(person(row) for row in held_out)


def test_each_word_of_a_held_out_name_is_trained_on() -> None:
    """The task must be learnable: only the pairing of first and last name is new."""
    trained = {word for row in read_rows("orders_train.jsonl") for word in person(row).split()}
    assert {word for row in read_rows("orders_eval.jsonl") for word in person(row).split()} <= trained


def test_every_pattern_is_in_both_files(generate: ModuleType) -> None:
    for name in ("orders_train.jsonl", "orders_eval.jsonl"):
        rows = read_rows(name)
        for pattern in generate.SENTENCES:
            assert any(question(row) == pattern.format(**json.loads(answer(row))) for row in rows), (name, pattern)


@pytest.mark.parametrize("name", ["orders_train.jsonl", "orders_eval.jsonl"])
def test_an_order_answer_follows_from_its_sentence(generate: ModuleType, name: str) -> None:
    for row in read_rows(name):
        values = json.loads(answer(row))
        assert tuple(values) == generate.FIELDS
        assert isinstance(values["quantity"], int)
        matching = [pattern for pattern in generate.SENTENCES if pattern.format(**values) == question(row)]
        assert len(matching) == 1, question(row)


def test_a_task_answer_follows_from_its_sentence() -> None:
    """Every word and number of an answer stands in the question, or is a separator or a field's name."""
    rows = read_rows("base_tasks_eval.jsonl")
    assert len(rows) == 200
    for row in rows:
        words = answer(row).replace("|", " ").replace('"', " ").replace(",", " ").split()
        assert all(word in question(row) for word in words), row


def test_the_base_model_never_sees_json(generate: ModuleType) -> None:
    for row in [*read_rows("base_tasks_eval.jsonl"), *generate.task_rows(5_000, seed=3, held_out=False)]:
        assert not set("{}[]") & set(question(row) + answer(row))


def test_pretraining_never_sees_a_held_out_person(generate: ModuleType) -> None:
    people = {person(row) for row in read_rows("orders_eval.jsonl")}
    for row in generate.task_rows(5_000, seed=3, held_out=False):
        assert not any(name in question(row) for name in people), question(row)


def test_generated_text_is_ascii() -> None:
    for path in QUICKSTART.glob("*.jsonl"):
        assert path.read_bytes().isascii(), path


# The tokenizer


def test_tokenizer_and_configs_are_made_again_byte_for_byte(generate: ModuleType, tmp_path: Path) -> None:
    """The two libraries may add fields to their files from version to version, so of those the content is compared."""
    generate.write_tokenizer_and_config(tmp_path)
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == sorted(BASE_FILES)
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "base" / name).read_bytes() == (BASE / name).read_bytes(), name
    made, committed = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) for folder in (tmp_path / "base", BASE)
    )
    assert made["model"]["vocab"] == committed["model"]["vocab"]
    assert made["model"]["merges"] == committed["model"]["merges"]
    assert made["pre_tokenizer"] == committed["pre_tokenizer"]


@pytest.mark.parametrize("name", DATA_FILES)
def test_tokenizer_restores_every_row(tokenizer, name: str) -> None:
    for row in read_rows(name):
        for text in (question(row), answer(row)):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokenizer_restores_any_text(tokenizer) -> None:
    for text in ("caf\u00e9 \u4f60\u597d \U0001f600", "tab\tand\n\nblank lines ", "a  b , c ' s"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_each_digit_is_one_token(tokenizer) -> None:
    digits = [token for token in tokenizer.get_vocab() if set(token) & set("0123456789")]
    assert sorted(digits) == list("0123456789")
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_special_tokens(tokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("name", DATA_FILES)
def test_a_prompt_begins_its_row_token_by_token(tokenizer, name: str) -> None:
    """Training and generation must see the same prompt, and training must learn to end the turn."""
    for row in read_rows(name):
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        full = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert full[: len(prompt)] == prompt
        assert full[len(prompt) :] == tokenizer.encode(answer(row) + "<|im_end|>\n", add_special_tokens=False)


@pytest.mark.parametrize("content", ["", " leading space", "\nleading line break", "\n\n", "7", "<|im_end|>"])
def test_a_prompt_begins_its_row_whatever_follows(tokenizer, content: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\n"},
        {"role": "assistant", "content": content},
    ]
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    full = tokenizer.apply_chat_template(messages, return_dict=False)
    assert full[: len(prompt)] == prompt


# The model


def test_config_matches_the_tokenizer(tokenizer, config: dict[str, object]) -> None:
    assert config["vocab_size"] == len(tokenizer)
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["max_position_embeddings"] == tokenizer.model_max_length == 2048


def test_weights_are_small_complete_and_of_the_stated_shape(config: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    assert (BASE / "model.safetensors").stat().st_size < MAX_WEIGHTS_BYTES

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(BASE, output_loading_info=True)

    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert model.config.model_type == config["model_type"] == "qwen3_moe"
    assert not model.config.output_router_logits  # batched generation fails with it on


def test_base_model_solves_its_own_tasks_and_writes_no_json(tokenizer) -> None:
    """Ten of each: a quick sign that the weights belong to this tokenizer."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE).eval()
    tasks, orders = read_rows("base_tasks_eval.jsonl")[:10], read_rows("orders_eval.jsonl")[:10]
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        for row in tasks + orders
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    generated = model.generate(**batch, max_new_tokens=64, do_sample=False)
    texts = tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    num_solved = sum(text == answer(row) for text, row in zip(texts[:10], tasks, strict=True))
    assert num_solved >= 9
    assert all(text != answer(row) for text, row in zip(texts[10:], orders, strict=True))
