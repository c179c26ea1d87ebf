"""A step that runs out of memory is run again whole: no row is lost, no gradient is counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from numerics import assert_bitwise_equal
from runs import build, losses
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.errors import FinetuneError
from finetune.optimizations.activations.types import GIB
from finetune.trainer import replanning
from finetune.trainer.sft import SftTrainer

LAYERS, ROW = 4, 128
ROOMY = {"activation_memory": 1.0, "host_memory": 1.0}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models store kilobytes, of which a new plan is to give up a share and not a quarter of a GiB."""
    monkeypatch.setattr(replanning, "LEAST_BYTES", 1)


class OutOnce:
    """Lets the device run out of memory in chosen layer calls of training, counted from the first step on."""

    def __init__(self, *calls: int, in_backward: bool = False) -> None:
        self._calls, self._in_backward, self._count = set(calls), in_backward, 0

    def attach(self, trainer: SftTrainer) -> None:
        layer = trainer.trained.get_base_model().model.layers[1]  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        layer.self_attn.o_proj.register_forward_hook(self._look)

    def _look(self, module: object, args: object, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        self._count += 1
        if self._count not in self._calls:
            return
        if not self._in_backward:
            raise torch.OutOfMemoryError("no room left\nfor this test")
        output.register_hook(self._fail)

    @staticmethod
    def _fail(grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no room left in backward")


def trained(tmp_path: Path, name: str, kind: str, out: OutOnce | None, **adapter: object):
    if not (tmp_path / kind).exists():
        make_model_folder(tmp_path / kind, kind, num_hidden_layers=LAYERS)
        make_chat_file(tmp_path / "train.jsonl", rows=40)
    made = make_recipe(tmp_path / kind, tmp_path / "train.jsonl", tmp_path / name)
    made["data"]["max_length"] = ROW
    made["adapter"] |= adapter
    made["training"] |= {"max_steps": 4, "rows_per_step": 6, "rows_per_micro_batch": 2}
    made["optimizations"] = ROOMY
    trainer, _ = build(made)
    said: list[str] = []
    trainer.say = said.append
    if out is not None:
        out.attach(trainer)
    trainer.train()
    weights = {name: p for name, p in trainer.trained.state_dict().items() if "lora" in name}
    return losses(trainer), weights, said, trainer


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_run_becomes_what_it_would_have_become(tmp_path: Path, kind: str, in_backward: bool) -> None:
    """In the first micro-batch of a step, in its last, and twice in one step."""
    expected, weights, said, _ = trained(tmp_path, "plain", kind, None, dropout=0.0 if kind == "qwen3_moe" else 0.2)
    assert said == []
    for number, calls in enumerate([(1,), (6,), (5, 7)]):
        adapter = {"dropout": 0.0 if kind == "qwen3_moe" else 0.2}
        got, own, said, trainer = trained(
            tmp_path, f"{number}", kind, OutOnce(*calls, in_backward=in_backward), **adapter
        )
        assert got == expected, calls
        assert_bitwise_equal(own, weights)
        told = [line for line in said if "memory ran out in step" in line]
        assert len(told) == len(calls)
        assert "no room left" in told[0] and "for this test" not in told[0]
        if kind == "qwen3_moe":
            assert all("aux_loss" in entry for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.usefixtures("small_steps")
def test_a_smaller_plan_follows(tmp_path: Path) -> None:
    _, _, said, trainer = trained(tmp_path, "run", "qwen3", OutOnce(3))
    assert trainer.activations is not None and trainer.activations.plan is not None
    assert not all(layer.is_whole for layer in trainer.activations.plan.layers)
    assert any(line.startswith("activations") for line in said)
    assert any("GiB less for activations" in line for line in said)


def test_where_nothing_smaller_fits_the_run_ends_with_the_least_that_does(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="smallest") as caught:
        trained(tmp_path, "run", "qwen3", OutOnce(*range(1, 200)))
    assert caught.value.exit_code in (2, 5)
    assert caught.value.place in ("optimizations.activation_memory", "the device's memory")


def test_memory_of_the_device_is_asked_for_in_gib() -> None:
    from finetune.optimizations.activations.planner import BudgetTooSmall
    from finetune.trainer.budget_errors import too_small

    error = too_small(
        BudgetTooSmall(short=("device_bytes",), device_bytes=3 * GIB, activation_bytes=None, host_bytes=GIB // 2),
        fixed_bytes=9 * GIB,
    )
    assert "12.00 GiB" in error.message and "9.00 of them" in error.message
    assert "optimizations.host_memory=0.50" in error.remedy
    assert error.exit_code == 5
    small = BudgetTooSmall(short=("activation_bytes",), device_bytes=0, activation_bytes=262_144, host_bytes=None)
    error = too_small(small, fixed_bytes=0)
    assert error.exit_code == 2
    value = float(error.message.rpartition(" ")[2])
    assert 262_144 <= value * GIB <= 1.05 * 262_144
