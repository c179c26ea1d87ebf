"""The summed loss is the cross entropy of all logits, as accurate as TRL's fused head, in two products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlps import LiveBytes
from numerics import assert_as_accurate_as
from torch import Tensor, nn
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from finetune.optimizations import loss as loss_module
from finetune.optimizations.loss import can_fuse, summed_loss

R, L, H, V = 3, 17, 32, 101
OPTIONS = [{}, {"softcap": 3.0}, {"logit_scale": 0.3}, {"softcap": 2.0, "logit_scale": 1.7}]


@pytest.fixture(autouse=True)
def parts_of_four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOGITS", 4 * V)


def make(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias).requires_grad_(False).to(dtype)
    head.weight.mul_(8)
    labels = torch.randint(0, V, (R, L)).masked_fill(torch.rand(R, L) < 0.4, -100)
    labels[:, 0] = 5  # has no token before it
    return torch.randn(R, L, H).to(dtype).requires_grad_(), labels, head


def whole(hidden: Tensor, labels: Tensor, head: nn.Linear, *, loss_weights=None, logit_scale=1.0, softcap=None):
    """The same from all logits."""
    logits = head(hidden[:, :-1]).double() * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return (losses if loss_weights is None else losses * loss_weights[:, 1:].flatten()).sum()


def with_gradient(compute: Any, hidden: Tensor, *args: Any, factor: float = 1 / 7, **options: Any) -> tuple:
    loss = compute(hidden, *args, **options)
    return loss.detach(), torch.autograd.grad(loss * factor, hidden)[0]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_are_those_of_all_logits(options: dict, is_weighted: bool, bias: bool) -> None:
    hidden, labels, head = make(bias=bias)
    more = options | ({"loss_weights": torch.rand(R, L) * 3} if is_weighted else {})
    expected = with_gradient(whole, hidden, labels, head, **more)
    found = with_gradient(summed_loss, hidden, labels, head, **more)
    assert found[0].dtype == torch.float32
    assert torch.allclose(found[0].double(), expected[0], rtol=1e-5)
    assert torch.allclose(found[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("is_autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_accurate_as_trl(options: dict, is_autocast: bool) -> None:
    def trl(hidden: Tensor, labels: Tensor, head: nn.Linear, *, logit_scale=1.0, softcap=None) -> Tensor:
        mask = labels[:, 1:] != -100
        states, targets = hidden[:, :-1][mask], labels[:, 1:][mask]
        args = (head.weight, head.bias, targets, 1.0, 64, softcap, logit_scale, ("log_probs",))
        return -ChunkedLogProbFunction.apply(states, *args)[0].sum()

    hidden, labels, head = make(dtype=torch.bfloat16)
    true = with_gradient(whole, hidden.detach().float().requires_grad_(), labels, head.float(), **options)
    head.to(torch.float32 if is_autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        plain = with_gradient(trl, hidden, labels, head, **options)
        found = with_gradient(summed_loss, hidden, labels, head, factor=1.0, divisor=torch.tensor(7), **options)
    assert found[1].dtype == plain[1].dtype == torch.bfloat16
    assert_as_accurate_as(found[0] * 7, plain[0], true[0], margin=1.0, rounding=1e-4)
    assert_as_accurate_as(found[1], plain[1], true[1], margin=1.25)


def test_the_factor_is_not_rounded_to_the_format_of_the_states() -> None:
    """A step's divisor would else be off by up to 0.4 % for all tokens alike."""
    hidden, labels, head = make(dtype=torch.bfloat16)
    factor = 1 / 773  # in bf16 0.26 % off
    one, scaled = (with_gradient(summed_loss, hidden, labels, head, factor=f)[1].double() for f in (1.0, factor))
    assert abs((scaled.norm() / (one.norm() * factor)).item() - 1) < 1e-3


def test_no_supervised_token_is_a_differentiable_zero() -> None:
    hidden, labels, head = make()
    loss, gradient = with_gradient(summed_loss, hidden, labels.fill_(-100), head)
    assert loss == 0 and gradient.shape == hidden.shape and not gradient.any()


def test_without_gradients_there_is_none() -> None:
    hidden, labels, head = make()
    expected, peaks = whole(hidden, labels, head), []
    for has_gradient in (False, True):
        with torch.set_grad_enabled(has_gradient), LiveBytes() as memory:
            loss = summed_loss(hidden, labels, head)
        assert torch.allclose(loss.double(), expected.detach(), rtol=1e-5) and loss.requires_grad == has_gradient
        peaks.append(memory.peak)
        del loss
    assert peaks[0] + 4 * hidden.numel() <= peaks[1]


def test_fp16_is_divided_where_the_loss_is_scaled_up() -> None:
    """Divided before, most gradients of a long step would be 0."""
    hidden, labels, head = make(dtype=torch.float16)
    true = with_gradient(whole, hidden.detach().float().requires_grad_(), labels, head.float(), factor=1 / 1e6)
    loss, scaled = with_gradient(summed_loss, hidden, labels, head.half(), factor=2.0**16, divisor=1e6)
    assert abs(loss.item() * 1e6 / true[0].item() - 1) < 1e-2
    assert (scaled.double() / 2**16 - true[1].double()).norm() < 1e-2 * true[1].double().norm()


def test_all_logits_are_never_there_and_backward_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOGITS", 8 * V)
    head = nn.Linear(H, V, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    tokens = 4096
    hidden = torch.randn(1, tokens, H).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, V, (1, tokens))
    with LiveBytes() as memory:
        loss = summed_loss(hidden, labels, head)
        forward = memory.peak
        loss.backward()
    of_labels = 6 * 8 * tokens  # int64 and fp32, and the looks at which of them count
    of_part = 8 * V * 16 + 8 * H * 8
    assert forward <= 2 * tokens * H + of_labels + of_part
    assert memory.peak <= forward + 8 * V * 8


def test_a_second_backward_is_refused() -> None:
    hidden, labels, head = make()
    loss = summed_loss(hidden, labels, head)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


def test_which_heads_it_takes() -> None:
    _, _, head = make()
    assert can_fuse(head).ok
    assert "is trained" in can_fuse(nn.Linear(H, V)).reason
    assert "is a Sequential" in can_fuse(nn.Sequential(head)).reason
    hidden, labels, _ = make()
    with pytest.raises(ValueError, match="is trained"):
        summed_loss(hidden, labels, nn.Linear(H, V))
