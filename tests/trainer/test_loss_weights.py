"""The weighted loss: equal to a plain loop, the same for every split and packing, and nothing new without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_bitwise_equal, assert_same_trajectory
from reference_loop import train_plainly
from runs import build, build_model, grad_norms, losses, windows
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.errors import GateStopped

FULL = {"type": "none"}
WEIGHTS = (0.25, None, 2, 1, 0.1, 7.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for kind in ("qwen3", "qwen3_moe"):
        make_model_folder(root / kind, kind)
    for name, rows, seed in (("train", 43, 0), ("eval", 9, 5)):
        plain = make_chat_file(root / f"{name}.jsonl", rows=rows, seed=seed)
        weigh(plain, root / f"{name}-mixed.jsonl", WEIGHTS)
        weigh(plain, root / f"{name}-ones.jsonl", (1, 1.0))
    return root


def weigh(plain: Path, target: Path, weights: tuple[float | None, ...]) -> Path:
    """Gives the answers of a file weights in turn."""
    records = [json.loads(line) for line in plain.read_text(encoding="utf-8").splitlines()]
    for number, record in enumerate(records):
        weight = weights[number % len(weights)]
        record["messages"][1] |= {} if weight is None else {"weight": weight}
    target.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return target


def recipe(folder: Path, out: Path, name: str = "train-mixed", kind: str = "qwen3", **sections: Any) -> dict[str, Any]:
    made = make_recipe(folder / kind, folder / f"{name}.jsonl", out, **sections)
    made["data"]["max_length"] = 128
    return made


def mean_loss(model: torch.nn.Module, batches: list[dict[str, Any]]) -> float:
    """sum(w * nll) / sum(w) over batches, in fp64 from full logits."""
    total = weights = 0.0
    with torch.no_grad():
        for batch in batches:
            metadata = batch["packed_metadata"]
            logits = (
                model(
                    input_ids=batch["input_ids"],
                    position_ids=metadata.position_ids,
                    packed_metadata=metadata,
                    use_cache=False,
                )
                .logits[:, :-1]
                .double()
            )
            labels = batch["labels"][:, 1:]
            is_learned = labels != -100
            nll = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            weight = batch["loss_weights"][:, 1:].double() if "loss_weights" in batch else is_learned.double()
            total += float((weight * nll)[is_learned].sum())
            weights += float(weight[is_learned].sum())
    return total / weights


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("adapter", [{"type": "lora", "rank": 4, "alpha": 8}, FULL], ids=["lora", "full"])
def test_equals_a_plain_loop(folder: Path, tmp_path: Path, kind: str, adapter: dict[str, Any]) -> None:
    training = {"router_aux_loss": 0.0, "learning_rate": 5e-3}
    made = recipe(folder, tmp_path / "run", kind=kind, adapter=adapter, training=training)
    _, _, reference = build_model(made)
    trainer, _ = build(made)
    steps = windows(trainer)
    assert any("loss_weights" in batch for batch in steps[0])
    trainer.train()
    trace = train_plainly(reference, steps, learning_rate=5e-3, total_steps=4)
    assert_same_trajectory(losses(trainer), trace.losses, relative=2e-5)
    assert_same_trajectory(grad_norms(trainer), trace.grad_norms, relative=2e-4)


def test_the_first_step_and_the_held_out_loss_are_the_formula(folder: Path, tmp_path: Path) -> None:
    """In fp64; `eval_tokens` stays the number of tokens."""
    made = recipe(folder, tmp_path / "run", training={"rows_per_step": 8, "rows_per_micro_batch": 2, "max_steps": 1})
    made["data"]["eval"] = [{"path": str(folder / "eval-mixed.jsonl")}]
    _, _, reference = build_model(made)
    trainer, prepared = build(made)
    expected = mean_loss(reference.eval(), windows(trainer)[0])
    held_out = list(trainer.get_eval_dataloader())
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(mean_loss(reference, held_out), rel=1e-6)
    assert prepared.dataset.eval is not None
    assert metrics["eval_tokens"] == prepared.dataset.eval.num_supervised_tokens
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(expected, rel=1e-6)


def test_micro_batches_do_not_change_the_step(folder: Path, tmp_path: Path) -> None:
    """The divisor is the sum of the weights of the whole step, also where some micro-batches have no weights."""
    runs = {}
    for micro in (8, 2, 1):
        training = {"rows_per_step": 8, "rows_per_micro_batch": micro, "max_steps": 7, "max_grad_norm": 0.0}
        made = recipe(folder, tmp_path / str(micro), data={"packing": False}, adapter=FULL, training=training)
        made["training"]["learning_rate"] = 1e-3
        trainer, _ = build(made)
        if micro == 1:
            assert {"loss_weights" in batch for batch in windows(trainer)[0]} == {True, False}
        trainer.train()
        runs[micro] = (losses(trainer), grad_norms(trainer))
    for micro in (2, 1):
        assert_same_trajectory(runs[micro][0], runs[8][0], relative=1e-5)
        assert_same_trajectory(runs[micro][1], runs[8][1], relative=1e-4)


def one_step(folder: Path, out: Path, name: str = "train-mixed", *, packing: bool = True) -> tuple[float, float]:
    """Loss and gradient norm of one step over all samples."""
    made = recipe(folder, out, name, data={"packing": packing}, adapter=FULL)
    made["training"] |= {"rows_per_step": 64, "rows_per_micro_batch": 1, "max_steps": 1, "max_grad_norm": 0.0}
    trainer, _ = build(made)
    trainer.train()
    return losses(trainer)[0], grad_norms(trainer)[0]


def test_packed_equals_unpacked(folder: Path, tmp_path: Path) -> None:
    packed, unpacked = (one_step(folder, tmp_path / str(packing), packing=packing) for packing in (True, False))
    assert packed[0] == pytest.approx(unpacked[0], rel=1e-5)
    assert packed[1] == pytest.approx(unpacked[1], rel=1e-4)
    assert packed[0] != pytest.approx(one_step(folder, tmp_path / "plain", "train")[0], rel=1e-3)


@pytest.mark.parametrize("weight", [2, 0.001])
def test_one_weight_for_all_changes_nothing_but_rounding(folder: Path, tmp_path: Path, weight: float) -> None:
    """Also where the sum of the weights of a step is below 1."""
    weigh(folder / "train.jsonl", folder / f"all-{weight}.jsonl", (weight,))
    found, plain = one_step(folder, tmp_path / "run", f"all-{weight}"), one_step(folder, tmp_path / "plain", "train")
    assert found == pytest.approx(plain, rel=1e-5)


def gradient_sum(folder: Path, out: Path, weights: tuple[float | None, float | None]) -> torch.Tensor:
    """The gradient of the summed loss of a conversation of two answers with these weights, not yet divided."""
    out.mkdir()
    turns = []
    for line, weight in zip((folder / "train.jsonl").read_text(encoding="utf-8").splitlines(), weights, strict=False):
        asked, said = json.loads(line)["messages"]
        turns += [asked, said if weight is None else {**said, "weight": weight}]
    (out / "data.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    made = recipe(folder, out / "run", adapter=FULL, data={"train": [{"path": str(out / "data.jsonl")}]})
    made["data"]["max_length"] = 256
    trainer, _ = build(made)
    (batch,) = trainer.get_train_dataloader()
    loss_sum, _ = trainer._loss_sum(trainer.trained, batch)
    loss_sum.backward()
    return torch.cat([each.grad.flatten() for each in trainer.trained.parameters() if each.grad is not None])


def test_weight_2_is_twice_the_gradient(folder: Path, tmp_path: Path) -> None:
    """Before normalising; weight 0 is not learned at all."""
    both, twice, second, first = (
        gradient_sum(folder, tmp_path / name, weights)
        for name, weights in {"both": (None, None), "twice": (1, 2), "second": (0, 1), "first": (1, 0)}.items()
    )
    assert float(second.norm()) > 1.0
    torch.testing.assert_close(first + second, both, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(twice, first + 2 * second, rtol=1e-4, atol=1e-4)


def test_weights_of_1_change_no_bit(folder: Path, tmp_path: Path) -> None:
    trainers = []
    for name in ("train", "train-ones"):
        made = recipe(folder, tmp_path / name, name)
        made["data"]["eval"] = [{"path": str(folder / f"{name.replace('train', 'eval')}.jsonl")}]
        trainer, _ = build(made)
        assert not any("loss_weights" in batch for batch in trainer.get_train_dataloader())
        trainer.train()
        trainer.evaluate()
        trainers.append(trainer)
    plain, ones = trainers
    assert losses(plain) == losses(ones)
    assert grad_norms(plain) == grad_norms(ones)
    assert plain.held_out_loss()["loss"] == ones.held_out_loss()["loss"]
    assert_bitwise_equal(dict(plain.trained.state_dict()), dict(ones.trained.state_dict()))


def test_a_continued_run_knows_other_weights(folder: Path, tmp_path: Path) -> None:
    """`--resume` compares this digest; tokens and labels of the three are the same."""
    weigh(folder / "train.jsonl", folder / "other.jsonl", (0.25, None, 2, 1, 0.1, 7))
    digests = [
        build(recipe(folder, tmp_path / name, name))[1].data_digest() for name in ("train", "train-mixed", "other")
    ]
    assert len(set(digests)) == 3
    assert digests[0] == build(recipe(folder, tmp_path / "ones", "train-ones"))[1].data_digest()


def test_a_record_that_is_left_out_makes_no_other_data(folder: Path, tmp_path: Path) -> None:
    """The digest took in the weights of records that `duplicates: drop` leaves out, and their places in the store."""
    lines = (folder / "train-mixed.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "more.jsonl").write_text("".join([*lines[:3], *lines[:3], *lines[3:]]), encoding="utf-8")
    made = [recipe(folder, tmp_path / name, name) for name in ("train-mixed", "more")]
    for each in made:
        each["data"]["duplicates"] = "drop"
    digests = [build(each)[1].data_digest() for each in made]
    assert digests[0] == digests[1]


def test_a_failed_batch_is_saved_with_its_weights(folder: Path, tmp_path: Path) -> None:
    made = recipe(folder, tmp_path / "run", training={"learning_rate": 1e30, "max_grad_norm": 0.0})
    trainer, _ = build(made)
    with pytest.raises(GateStopped) as caught:
        trainer.train()
    saved = np.load(caught.value.place)
    assert {"input_ids", "labels", "position_ids", "loss_weights", "rows"} == set(saved.files)
    assert ((saved["loss_weights"] != 0) == (saved["labels"] != -100)).all()
