"""The order of copies: what waits for what, told by a recorder in place of a device's streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from activation_models import KEPT, ON_HOST, tiny_model

from finetune.optimizations.activations.copies import CpuCopies
from finetune.optimizations.activations.reload import padded
from finetune.optimizations.activations.strided import Strided


class Recorder(CpuCopies):
    """Copies at once, and writes down what a device would be told; moments are numbers of the computing stream."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self._now = 0

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Any) -> Any:
        super().to_host(source, target, after=after)
        self._now += 1
        self.told.append(("out", after, self._now))
        return f"out {self._now}"

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Any]) -> Any:
        super().to_device(source, target, after=after)
        self._now += 1
        self.told.append(("in", *after))
        return f"in {self._now}"

    def moment(self) -> Any:
        self._now += 1
        return f"compute {self._now}"

    def wait(self, moment: Any) -> None:
        self.told.append(("wait", moment))


@pytest.fixture
def told() -> list[tuple[Any, ...]]:
    tiny = tiny_model("qwen3")
    recorder = Recorder()
    tiny.install([ON_HOST, ON_HOST, ON_HOST, KEPT], copies=recorder)
    loss = tiny.loss()
    recorder.told.append(("backward",))
    loss.backward()
    return recorder.told


def test_forward_waits_for_copies_of_two_layers_ago(told: list[tuple[Any, ...]]) -> None:
    forward = [line for line in told[: told.index(("backward",))] if line[0] in ("out", "wait")]
    # Layers 0, 1 and 2 send; as layer 2 begins, what layer 0 sent must be there, and as layer 3 begins, layer 1's.
    assert [line[0] for line in forward] == ["out", "out", "wait", "out", "wait"]
    assert forward[2][1].startswith("out") and forward[4][1].startswith("out")


def test_each_copy_back_is_told_before_the_layer_that_it_hides_under(told: list[tuple[Any, ...]]) -> None:
    begin = told.index(("backward",))
    first, backward = [line for line in told[:begin] if line[0] == "in"], told[begin + 1 :]
    assert len(first) == 1  # the one that backward wants first goes under the last layer and the head
    waits_for_reload = [index for index, line in enumerate(backward) if line[0] == "wait" and line[1].startswith("in")]
    copies = [index for index, line in enumerate(backward) if line[0] == "in"]
    assert (len(copies), len(waits_for_reload)) == (2, 3)
    # The copy of a layer is told where the layer before it in backward begins, and waited for one layer later.
    assert waits_for_reload[0] < copies[0] < waits_for_reload[1] < copies[1] < waits_for_reload[2]
    for _, computed, written in [*first, *(backward[copy] for copy in copies)]:
        assert computed.startswith("compute") and written.startswith("out")


def test_the_next_forward_writes_only_after_the_last_read() -> None:
    tiny = tiny_model("qwen3")
    recorder = Recorder()
    tiny.install([ON_HOST, ON_HOST, ON_HOST, KEPT], copies=recorder)
    tiny.step()
    recorder.told.clear()
    tiny.step()
    sent = [line for line in recorder.told if line[0] == "out"]
    assert len(sent) == 3 and all(line[1].startswith("in") for line in sent)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(24).view(2, 3, 4)[:, :1].to(torch.int16),
        torch.arange(48.0).view(2, 3, 8)[..., ::2],
        torch.tensor(3.5),
        torch.zeros(0, 5),
    ],
    ids=["plain", "transposed", "cut", "gaps", "scalar", "empty"],
)
def test_a_tensor_comes_back_as_it_lay(tensor: torch.Tensor) -> None:
    layout = Strided.of(tensor)
    memory = torch.zeros(padded(layout.num_bytes), dtype=torch.uint8)
    memory[: layout.num_bytes] = layout.flat(tensor)
    back = layout.view(memory)
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    if tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size():
        assert back.stride() == tensor.stride()
