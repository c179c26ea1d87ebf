"""Write everything the quick start reads, except the pretrained weights.

The quick start teaches a tiny model to turn an order written in English into JSON. Three actions, all seeded:

    python generate.py data          # orders_train.jsonl, orders_eval.jsonl: the fine-tune
    python generate.py tokenizer     # base/: tokenizer, chat template, model and generation config
    python generate.py pretraining   # base_tasks.jsonl, base_tasks_eval.jsonl: what the base model learns first

The base model learns to find and copy the parts of an order, and never sees JSON. The fine-tune then has
to learn the format alone, which takes seconds. Every file is the same, byte for byte, on every run.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


def entries(text: str, separator: str = " ") -> tuple[str, ...]:
    """Split a written-out list, which reads better than forty quoted words."""
    return tuple(text.split(separator))


FIRST_NAMES = entries(
    "Ada Alma Anton Bela Bruno Cara Clara Dario Dora Edda Elio Emil Fina Flora Gero Greta Hanno Hilda Ida Ivo "
    "Jana Jonas Kaya Klara Lars Lena Lino Mara Milo Mona Nils Nora Olga Otto Petra Rolf Selma Tilda Udo Vera"
)
LAST_NAMES = entries(
    "Abel Arden Bergo Birk Calder Corvin Dalen Drost Elger Falk Ferro Garn Holt Imhof Jarn "
    "Karlo Lund Marek Noll Orso Palm Quist Rook Stern Tarn Ulmer Varga Wendt Yarrow Zell"
)
ITEMS = entries(
    "desk lamp, wall clock, tea pot, garden chair, paper box, wool scarf, hand drill, rain coat, "
    "bread knife, water jug, picture frame, door mat, candle set, tool bag, soup bowl, floor rug",
    ", ",
)
CITIES = entries(
    "Almora Brenholm Castell Dunmere Eastley Farwick Gelden Harrow Ilmen Jorvik "
    "Kelby Lorne Marlow Norden Oakham Pelham Rivona Selby Torvik Welden"
)
MONTHS = entries("January February March April May June July August September October November December")

SENTENCES = (
    "On {day}, {name} ordered {quantity} x {item}; ship to {city}.",
    "{name} from {city} wants {quantity} x {item} by {day}.",
    "Please send {quantity} x {item} to {name} in {city} on {day}.",
    "New order for {city}: {quantity} x {item}, due {day}, buyer {name}.",
    "By {day} we owe {name} {quantity} x {item}, delivered to {city}.",
    "Ship {quantity} x {item} to {city} before {day}; the customer is {name}.",
)

NUM_TRAIN = 3_000
NUM_EVAL = 200
NUM_TASKS = 140_000
NUM_TOKENIZER_ROWS = 4_000
VOCABULARY_SIZE = 808
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Order:
    """Hold the five parts of one order, in the order in which every answer gives them."""

    name: str
    item: str
    quantity: int
    city: str
    day: str


FIELDS = tuple(Order.__dataclass_fields__)

Row = dict[str, list[dict[str, str]]]
"""One line of a data file: OpenAI `messages`."""


def main() -> None:
    """Run the action named on the command line."""
    actions: dict[str, Callable[[Path], None]] = {
        "data": write_data,
        "tokenizer": write_tokenizer_and_config,
        "pretraining": write_pretraining,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=sorted(actions))
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into (default: beside this file)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    actions[arguments.action](arguments.out)


# Orders


def draw_order(rng: random.Random, *, held_out: bool) -> Order:
    """Draw an order whose person is on one side of the split.

    Every seventh pair of first and last name is held out, so no person of the evaluation is ever trained on,
    while each first and each last name alone is.
    """
    while True:
        first, last = rng.randrange(len(FIRST_NAMES)), rng.randrange(len(LAST_NAMES))
        if is_held_out(first, last) == held_out:
            break
    return Order(
        name=f"{FIRST_NAMES[first]} {LAST_NAMES[last]}",
        item=rng.choice(ITEMS),
        quantity=rng.randint(1, 99),
        city=rng.choice(CITIES),
        day=f"{rng.randint(1, 28)} {rng.choice(MONTHS)}",
    )


def is_held_out(first: int, last: int) -> bool:
    """Say whether the person made of these two indices belongs to the evaluation."""
    return (first + 2 * last) % 7 == 0


def write_sentence(order: Order, rng: random.Random) -> str:
    """Word an order by one of the six patterns."""
    return rng.choice(SENTENCES).format(**asdict(order))


def conversation(question: str, answer: str) -> Row:
    """Build a row of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# Action: data


def write_data(out: Path) -> None:
    """Write the fine-tune's training rows and its held-out rows: a sentence, and its JSON."""
    write_jsonl(out / "orders_train.jsonl", order_rows(NUM_TRAIN, seed=1, held_out=False))
    write_jsonl(out / "orders_eval.jsonl", order_rows(NUM_EVAL, seed=2, held_out=True))


def order_rows(count: int, *, seed: int, held_out: bool) -> Iterator[Row]:
    """Yield rows of distinct sentences, each answered by a JSON object with the fields in fixed order."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        order = draw_order(rng, held_out=held_out)
        sentence = write_sentence(order, rng)
        if sentence not in seen:
            seen.add(sentence)
            yield conversation(sentence, json.dumps(asdict(order)))


# Action: pretraining


def write_pretraining(out: Path) -> None:
    """Write the base model's training tasks (a large file, not committed) and its held-out tasks."""
    write_jsonl(out / "base_tasks.jsonl", task_rows(NUM_TASKS, seed=3, held_out=False))
    write_jsonl(out / "base_tasks_eval.jsonl", task_rows(NUM_EVAL, seed=4, held_out=True))


def task_rows(count: int, *, seed: int, held_out: bool) -> Iterator[Row]:
    """Yield rows that give a sentence and, on the next line, set a task about it."""
    rng = random.Random(seed)
    for _ in range(count):
        order = draw_order(rng, held_out=held_out)
        sentence = write_sentence(order, rng)
        task, answer = draw_task(order, sentence, rng)
        yield conversation(f"{sentence}\n{task}", answer)


def draw_task(order: Order, sentence: str, rng: random.Random) -> tuple[str, str]:
    """Draw one task about an order: what to ask, and the exact answer.

        question   What is the city?   ->  Marlow
        list       List the fields.    ->  Ada Holt|desk lamp|38|Marlow|4 May
        pick       Give city, item.    ->  Marlow|desk lamp
        pair       Pair day, name.     ->  day "4 May", name "Ada Holt"
        repeat     Repeat.             ->  the sentence

    Answers put no space before a value, so that the words come as they do after a quotation mark in JSON.
    """
    values = {field: str(value) for field, value in asdict(order).items()}
    kind = rng.choices(("question", "list", "pick", "pair", "repeat"), weights=(2, 3, 2, 2, 1))[0]
    if kind == "question":
        field = rng.choice(FIELDS)
        return f"What is the {field}?", values[field]
    if kind == "list":
        return "List the fields.", "|".join(values.values())
    if kind == "repeat":
        return "Repeat.", sentence
    chosen = rng.sample(FIELDS, 2)
    if kind == "pick":
        return f"Give {', '.join(chosen)}.", "|".join(values[field] for field in chosen)
    return f"Pair {', '.join(chosen)}.", ", ".join(f'{field} "{values[field]}"' for field in chosen)


# Action: tokenizer


def write_tokenizer_and_config(out: Path) -> None:
    """Write the base model's folder but for its weights: tokenizer, chat template, and the two configs."""
    base = out / "base"
    base.mkdir(exist_ok=True)
    write_tokenizer(base)
    write_json(base / "config.json", model_config())
    write_json(base / "generation_config.json", generation_config())


def write_tokenizer(base: Path) -> None:
    """Train a byte-level BPE tokenizer on orders, tasks and answers, and save it with its chat template.

    Each digit and each line break is a token of its own. The line break matters to training: the prompt
    ends in one, and no content can merge with it, so a prompt's tokens always begin the whole row's tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(base)


def tokenizer_texts() -> Iterator[str]:
    """Yield the texts the tokenizer is trained on: every role name, fine-tune rows, and pretraining tasks."""
    num_each = NUM_TOKENIZER_ROWS // 2
    rows = [*order_rows(num_each, seed=5, held_out=False), *task_rows(num_each, seed=6, held_out=False)]
    for row in rows:
        for message in row["messages"]:
            yield message["role"]
            yield message["content"]
        yield "system"


def model_config() -> dict[str, object]:
    """Give the model's shape: Qwen3-MoE at about 1.1 M parameters."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def generation_config() -> dict[str, object]:
    """Give the decoding defaults: greedy, ending at the end of the assistant's turn."""
    return {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 128}


# Files


def write_json(path: Path, value: object) -> None:
    """Write one JSON document, indented, with a last line break."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")


def write_jsonl(path: Path, rows: Iterator[Row]) -> None:
    """Write one row a line and say how many there were."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{path.name}: {len(lines):,} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
