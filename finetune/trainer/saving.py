"""How the trainer saves and loads: adapters without a look at the hub, configs as they were loaded, our counts beside
each checkpoint."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from trl.trainer.sft_trainer import SFTTrainer

from finetune.trainer.meter import Meter
from finetune.trainer.saved_config import settings_as

METER_FILE = "meter.json"


class SavingTrainer(SFTTrainer):
    """TRL's trainer with our way of saving. A subclass sets what is declared here."""

    meter: Meter
    _config_as_loaded: Any
    _logged_step: int

    @property
    def trained(self) -> nn.Module:
        """The model; transformers declares its own attribute as one that may be missing."""
        assert self.model is not None
        return self.model

    def load_weights(self, folder: Path) -> None:
        """Takes over the weights that `save_pretrained` wrote into `folder`; the optimizer and the counts stay."""
        if isinstance(self.trained, PeftModel):
            super()._load_from_checkpoint(str(folder))
        else:
            # transformers (5.17 to 5.24) puts the saved tensors into the model by name and passes over those that do
            # not fit; a mixture of experts is saved under other names than it has, so its experts would be left out.
            model: Any = self.trained
            saved = type(model).from_pretrained(folder, dtype=model.dtype)
            model.load_state_dict(saved.state_dict())

    def config_as_loaded(self) -> AbstractContextManager[None]:
        """Puts the config back as it was loaded while the model is saved."""
        return settings_as(self.trained, self._config_as_loaded)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model or its adapter, with the config as it was loaded."""
        with self.config_as_loaded():
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves an adapter without PEFT's look at the base's vocabulary: it would ask the hub, and where new tokens
        made the embedding longer, add all of it to each checkpoint."""
        if not isinstance(self.model, PeftModel):
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        self.model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
        assert self.processing_class is not None
        self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes the checkpoint with our counts beside it; TRL's own adds a model card, which a run folder is not."""
        Trainer._save_checkpoint(self, model, trial)
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        (folder / METER_FILE).write_text(json.dumps(self.meter.state_dict()), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.load_weights(Path(resume_from_checkpoint))
        state = (Path(resume_from_checkpoint) / METER_FILE).read_text(encoding="utf-8")
        self.meter.load_state_dict(json.loads(state))
        self._logged_step = int(Path(resume_from_checkpoint).name.rpartition("-")[2])
