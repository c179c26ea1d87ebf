"""The model's config as it is saved: without what TRL and transformers changed in it for training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CHANGED_FOR_TRAINING = ("use_cache", "output_router_logits", "router_aux_loss_coef")


def training_settings(model: nn.Module) -> dict[str, Any]:
    """Returns the config's values that are changed for training, where the architecture has them."""
    config = _text_config(model)
    return {name: getattr(config, name) for name in CHANGED_FOR_TRAINING if hasattr(config, name)}


@contextmanager
def settings_as(model: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Sets the config to `values` for a block: with training's router logits and without a cache, a saved model would
    fail in a plain batched `generate`, or be slow in it."""
    config, in_training = _text_config(model), training_settings(model)
    _set_all(config, values)
    try:
        yield
    finally:
        _set_all(config, in_training)


def _text_config(model: nn.Module) -> Any:
    return model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def _set_all(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)
