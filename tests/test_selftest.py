"""`finetune selftest`: fine on this machine, and it finds a backend that lets documents see each other."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from finetune.cli import main
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.dense import attend_segments
from finetune.optimizations.attention.types import AttentionOptions, Boundaries
from finetune.selftest import MODELS


def test_every_backend_of_a_cpu_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    tried = {(result["backend"], result["model"]): result["status"] for result in results}
    for backend in ("sdpa", "segments"):
        assert all(tried[backend, model] == "ok" for model in MODELS)
    if not torch.cuda.is_available():
        assert tried["varlen", "every model"] == "not here"


def leaky(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """Attention that sees a little of the whole row."""
    return attend_segments(query, key, value, boundaries=boundaries, options=options) + 0.1 * value.mean(
        dim=1, keepdim=True
    ).repeat_interleave(query.shape[2] // value.shape[2], dim=2)


def test_a_backend_that_mixes_documents_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BACKENDS, "segments", dataclasses.replace(BACKENDS["segments"], attend=leaky))
    assert main(["selftest", "--json"]) == 6
    captured = capsys.readouterr()
    assert "segments" in json.loads(captured.out)["message"]
    assert "when its neighbour does" in captured.err
