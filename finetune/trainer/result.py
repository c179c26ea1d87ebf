"""What a run makes: the best weights while it goes on, and at its end the last ones and the result."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from finetune.run.atomic import write_json
from finetune.run.best import Best, copy_weights, fault_of_best, forget_best, read_best, replace_best, settle_best
from finetune.run.checkpoints import checkpoint_step, damage_of
from finetune.run.folder import RunFolder
from finetune.run.metrics import read_metrics
from finetune.trainer.prepare import Prepared
from finetune.trainer.sft import SftTrainer


class Results:
    """Saves the weights of one run.

    Every folder is complete: a plain PEFT adapter or a whole model, with the tokenizer.

    Args:
        stop_ids: tokens that end an answer. A whole model's generation config gets them: a base model that was trained
            on chat would otherwise go on after its turn.
    """

    def __init__(self, prepared: Prepared, trainer: SftTrainer, run: RunFolder, *, stop_ids: Sequence[int]) -> None:
        self._run = run
        self._trainer = trainer
        self._tokenizer = prepared.tokenizer
        self._stop_ids = list(stop_ids)
        self._delivers = prepared.delivers
        self._keeps_best = prepared.keeps_best
        self._best: Best | None = None
        if prepared.keeps_best:
            settle_best(run.best_dir)
            self._best = self._whole_best()

    def offer(self, step: int, eval_loss: float) -> None:
        """Keeps the present weights as the best where their held-out loss is the lowest so far."""
        if self._keeps_best and (self._best is None or eval_loss < self._best.eval_loss):
            self._best = replace_best(self._run.best_dir, step=step, eval_loss=eval_loss, write=self._save)

    def finish(self, eval_loss: float | None) -> dict[str, Any]:
        """Saves the result and, where it is another, the last weights; returns what `result.json` holds.

        Where the best weights are the result they are in the model afterwards, so that what is measured is what is
        delivered.

        Args:
            eval_loss: held-out loss of the present, last weights; None without held-out data.
        """
        step = self._trainer.state.global_step
        if eval_loss is not None:
            self.offer(step, eval_loss)
        delivered = last_dir = self._result_dir
        if self._delivers == "best" and self._best is not None and self._best.step != step:
            last_dir = self._run.last_dir
        self._save(last_dir)  # first, since what mends damaged best weights puts others into the model
        if last_dir != delivered:
            self._best = self._whole_best()
            if self._best is None:
                assert eval_loss is not None
                self._save(delivered)
                shutil.rmtree(last_dir)
                last_dir = delivered
                self.offer(step, eval_loss)
            else:
                copy_weights(self._best.path, delivered)
                self._trainer.load_weights(self._best.path)
        best = self._best
        result = {
            "delivered": self._delivers,
            "path": str(delivered),
            "best": best and {"step": best.step, "eval_loss": best.eval_loss, "path": str(best.path)},
            "last": {"step": step, "eval_loss": eval_loss, "path": str(last_dir)},
        }
        write_json(self._run.result_path, result)
        return result

    def _whole_best(self) -> Best | None:
        """Returns the best weights so far, having read all of them.

        Damaged ones are made again from the checkpoint of their step, which puts its weights into the model, or else
        forgotten: the best is then counted from the next evaluation.
        """
        folder = self._run.best_dir
        fault = fault_of_best(folder) if folder.exists() else None
        if fault is None:
            return read_best(folder)
        past = [(record["eval_loss"], record["step"]) for record in self._evaluations()]
        eval_loss, step = min(past, default=(None, -1))
        checkpoint = self._sound_checkpoint(step)
        if eval_loss is None or checkpoint is None:
            forget_best(folder)
            self._trainer.say(
                f"{folder} is damaged and was removed: {fault}. No checkpoint holds the best weights so far, so the "
                "best is that of the evaluations from here on."
            )
            return None
        self._trainer.say(f"{folder} is damaged: {fault}. It is made again from {checkpoint.name}.")
        self._trainer.load_weights(checkpoint)
        return replace_best(folder, step=step, eval_loss=eval_loss, write=self._save)

    def _evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations of trained weights that are recorded, up to the step that the run is at."""
        records = read_metrics(self._run.metrics_path)
        return [record for record in records if record["step"] > 0 and record.get("eval_loss") is not None]

    def _sound_checkpoint(self, step: int) -> Path | None:
        complete = self._run.scan_checkpoints().complete
        return next((path for path in complete if checkpoint_step(path) == step and damage_of(path) is None), None)

    @property
    def _result_dir(self) -> Path:
        return self._run.adapter_dir if isinstance(self._trainer.trained, PeftModel) else self._run.model_dir

    def _save(self, folder: Path) -> None:
        with self._trainer.config_as_loaded():
            save_weights(self._trainer.trained, folder, tokenizer=self._tokenizer, stop_ids=self._stop_ids)


def save_weights(model: Any, folder: Path, *, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
    """Writes a plain PEFT adapter, or a whole model whose generation config gets `stop_ids`, with the tokenizer."""
    if isinstance(model, PeftModel):
        # "auto" would look at the hub for the base's vocabulary. Trained embeddings are saved in any case.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card with nothing filled in
    else:
        in_training = model.generation_config.eos_token_id
        model.generation_config.eos_token_id = list(stop_ids)
        model.save_pretrained(folder)
        model.generation_config.eos_token_id = in_training
    tokenizer.save_pretrained(folder)


def artifacts_of(result: dict[str, Any]) -> list[dict[str, object]]:
    """Returns the folders of a result for the report: the result first, then the best and the last where apart."""
    folders = [(Path(result["path"]).name, result["path"], result["delivered"])]
    for name in ("best", "last"):
        part = result[name]
        if part and part["path"] != result["path"]:
            folders.append((name, part["path"], name))
    return [
        {"name": name, "weights": which, "step": result[which]["step"], "path": path, "bytes": _size(Path(path))}
        for name, path, which in folders
    ]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
