"""How many positions a model has, from its config alone."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

from finetune.recipe.schema import ModelSection


def position_limit(config: PretrainedConfig) -> int | None:
    """Returns the longest sequence in tokens that the config allows; None where it names none."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def known_position_limit(section: ModelSection) -> int | None:
    """Returns the limit of a model whose config is on this machine; None without one, as a preview needs no model.

    Nothing is downloaded. A config that cannot be read is left to `finetune train`, which says what is wrong with it.
    """
    try:
        return position_limit(
            AutoConfig.from_pretrained(section.path, revision=section.revision, local_files_only=True)
        )
    except (OSError, ValueError, KeyError):
        return None
