"""Supervised fine-tuning: a thin subclass of TRL's trainer.

What it changes: rows come packed from our own data layer; the loss is normalised over all supervised tokens of a step,
each with its weight; evaluation uses the same sum and divisor and leaves the random state alone; real tokens are
counted; a loss that is not finite stops the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl.trainer.sft_config import SFTConfig

from finetune.data.collate import Batch, RowCollator
from finetune.data.loss_weights import SMALLEST_WEIGHT
from finetune.data.rows import RowDataset
from finetune.optimizations.activations.runtime import Activations
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.run.checkpoints import checkpoint_step
from finetune.trainer.memory import halved_when_out_of_memory, random_state_kept
from finetune.trainer.meter import Meter, MicroBatchRecord, resident_bytes
from finetune.trainer.not_finite import held_out_not_finite, not_finite, save_failed_batch
from finetune.trainer.optimizer import apply_loraplus
from finetune.trainer.replanning import ReplanningStep
from finetune.trainer.saved_config import training_settings
from finetune.trainer.saving import SavingTrainer
from finetune.trainer.skipped_steps import SkippedSteps

HOST_KEYS = ("num_real_tokens", "num_supervised_tokens", "sum_of_weights", "rows")


class SftTrainer(SavingTrainer):
    """Trains on rows of `RowDataset`.

    Args:
        model: base model or PEFT model, on its device.
        args: TRL's config, made by `trainer/build.py`.
        rows: what to train and what to evaluate on.
        collator: makes the batches of both.

    The batch of a loss that is not finite is saved beside the folder of the checkpoints (`args.output_dir`).
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel | nn.Module,
        args: SFTConfig,
        tokenizer: PreTrainedTokenizerBase,
        rows: tuple[RowDataset, RowDataset | None],
        collator: RowCollator,
        callbacks: list[TrainerCallback],
    ) -> None:
        adapters = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        self._config_as_loaded = training_settings(model)
        super().__init__(
            model=model,  # pyright: ignore[reportArgumentType] - a PeftModel is not a PreTrainedModel to the checker
            args=args,
            data_collator=collator,  # pyright: ignore[reportArgumentType] - our rows are typed dicts
            train_dataset=_stand_in(rows[0]),
            eval_dataset=None if rows[1] is None else _stand_in(rows[1]),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.train_dataset: Dataset = rows[0]
        self.eval_dataset: Dataset | None = rows[1]
        # TRL turns adapters over a quantized base to bf16, where small updates round away; keep their fp32 values.
        for name, parameter in self.trained.named_parameters():
            if name in adapters and parameter.dtype != adapters[name].dtype:
                parameter.data = adapters[name]
        self.meter = Meter()
        self.failure_dir = Path(str(args.output_dir)).parent
        self.rows_collator = collator
        self._has_weights = len(rows[0].store.weight_runs) > 0
        self._aux_losses: list[torch.Tensor] = []
        self._aux_losses_before_step = 0
        self.held_out_seconds = 0.0
        """Time spent on held-out losses."""
        self._evaluated: dict[str, float] = {}
        self._evaluated_step = -1
        self._logged_step = 0
        self.metadata_feed: MetadataFeed | None = None
        """Set where attention is one of ours; transformers' own attention takes positions only."""
        self._logged_builds = 0
        self.learning_rate_factor: Callable[[int], float] = lambda step: 1.0
        self.loraplus_ratio: float | None = None
        self.say: Callable[[str], None] = lambda text: None
        self._skipped_steps = SkippedSteps()
        self.activations: Activations | None = None
        """Set where checkpoints follow a plan."""
        self._replanning: ReplanningStep | None = None
        self.planned_at_step = 0
        """Steps that were done when the plan in effect was made, of this start of the run."""

    def train_from(self, checkpoint: Path | None, *, is_over: bool = False) -> None:
        """Trains from the beginning, or on from a checkpoint; one that holds the last step is only loaded, since
        transformers would take a step more before it looks at how many were asked for.

        Args:
            is_over: the checkpoint is of the step that training was stopped early at.
        """
        if self.args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the peak that is logged is of training
        step = checkpoint_step(checkpoint) if checkpoint else None
        self.planned_at_step, self._replanning = step or 0, None
        if checkpoint is None or step is None:
            self.train()
        elif step < self.args.max_steps and not is_over:
            self.train(resume_from_checkpoint=str(checkpoint))
        else:
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the optimizer; with a `loraplus_ratio` the B matrices of the adapters get a rate of their own."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.loraplus_ratio is not None:
            apply_loraplus(optimizer, self.trained, ratio=self.loraplus_ratio)
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns what weight decay applies to: no bias and no vector, such as a norm or a magnitude of DoRA."""
        vectors = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
        return [name for name in super().get_decay_parameter_names(model) if name not in vectors]

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Makes the schedule from `learning_rate_factor`; transformers' own give the first step no rate at all."""
        if self.lr_scheduler is None:
            scheduled: Any = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, self.learning_rate_factor)
        assert isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        return self.lr_scheduler

    def load_weights(self, folder: Path) -> None:
        """Takes over saved weights; what was evaluated is no longer of them."""
        super().load_weights(folder)
        self._evaluated_step = -1

    # --- one step

    def training_step(  # pyright: ignore[reportIncompatibleMethodOverride] - TRL declares it as (*args, **kwargs)
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's loss."""
        self.meter.start_micro_batch()
        host = {key: inputs.pop(key) for key in HOST_KEYS}
        num_slots = inputs["input_ids"].numel()
        if self.activations is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._replanned(model)(self.state.global_step, inputs, num_items_in_batch)
        record = MicroBatchRecord(host["rows"], loss)
        self.meter.count(record, num_real_tokens=host["num_real_tokens"], num_slots=num_slots)
        return loss

    def _replanned(self, model: nn.Module) -> ReplanningStep:
        """Runs micro-batches so that one which runs out of memory is planned and run again."""
        if self._replanning is None:
            assert self.activations is not None
            run = partial(super().training_step, model)
            self._replanning = ReplanningStep(
                self.activations, run=run, begin=self._begin_step, forget=self._forget_step, say=self.say
            )
        return self._replanning

    def _begin_step(self) -> None:
        self._aux_losses_before_step = len(self._aux_losses)

    def _forget_step(self) -> None:
        """Takes back the gradients, and the auxiliary losses, of the step under way, which has another plan from now
        on."""
        self.planned_at_step = self.state.global_step + 1
        self.trained.zero_grad(set_to_none=True)
        del self._aux_losses[self._aux_losses_before_step :]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Cross entropy summed over the micro-batch, each token times its weight, over the sum of the weights of the
        whole step; without weights that is the number of its supervised tokens.

        For an MoE the load-balancing loss times its coefficient is added, averaged over the step's micro-batches.
        """
        if return_outputs:
            raise NotImplementedError("the fused LM head builds no logits; evaluate() needs none")
        if num_items_in_batch is None:
            raise RuntimeError("the trainer did not count the step's supervised tokens")
        loss_sum, aux_loss = self._loss_sum(model, inputs)
        # A step without a supervised token has a sum of 0, and no other step one below the smallest weight.
        divisor = torch.as_tensor(num_items_in_batch, device=loss_sum.device).clamp(min=SMALLEST_WEIGHT)
        loss = loss_sum / divisor
        if aux_loss is not None:
            self._aux_losses.append(aux_loss.detach())
            loss = loss + self.router_aux_loss_coef * aux_loss / self.current_gradient_accumulation_steps
        return loss

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> torch.Tensor | int | None:
        """Returns the divisor of a step's loss: transformers' count of supervised tokens, or the sum of their weights
        (float32) where the data has other weights than 1."""
        # Told by the data and not by the step, so that processes with different batches take the same way.
        if not self._has_weights:
            return super()._get_num_items_in_batch(batch_samples, device)
        of_process = sum(batch["sum_of_weights"] for batch in batch_samples)
        total = self.accelerator.reduce(torch.tensor(of_process, dtype=torch.float32, device=device), reduction="sum")
        assert isinstance(total, torch.Tensor)
        return total

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Summed cross entropy of a batch, each token times its weight, and the load-balancing loss of an MoE."""
        metadata = inputs["packed_metadata"]
        arguments = {key: inputs[key] for key in ("input_ids", "labels")} | {"position_ids": metadata.position_ids}
        if self.metadata_feed is not None:
            arguments["packed_metadata"] = self.metadata_feed.argument(metadata)
        if self.aux_loss_enabled:
            arguments["output_router_logits"] = True
        outputs = model(**arguments, fused_lm_head=True, use_cache=False)
        log_probs = outputs.log_probs  # [R, L - 1], of the labels from the second on; 0 where nothing is learned
        if "loss_weights" in inputs:
            log_probs = log_probs * inputs["loss_weights"][:, 1:]
        return -log_probs.sum(), outputs.aux_loss if self.aux_loss_enabled else None

    # --- evaluation

    def evaluate(  # pyright: ignore[reportIncompatibleMethodOverride] - our rows are the only evaluation set
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
        *,
        scores: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """Mean loss over all supervised tokens of the held-out rows, by their weights, whatever the batch size.

        `scores` are logged beside it.
        """
        figures = self.held_out_loss() | (scores or {})
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in figures.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def held_out_loss(self) -> dict[str, float]:
        """Returns `loss`, `tokens` and `seconds` of the held-out rows at this step; computed once a step.

        Raises:
            GateStopped: the loss is not finite.
        """
        step = self.state.global_step
        if self._evaluated_step != step:
            self._evaluated, self._evaluated_step = self._compute_held_out_loss(), step
        return self._evaluated

    def _compute_held_out_loss(self) -> dict[str, float]:
        started = time.perf_counter()
        was_training = self.trained.training
        self.trained.eval()
        with random_state_kept(self.args.device):
            total, num_tokens, sum_of_weights = halved_when_out_of_memory(
                self._held_out_sum,
                self.args.per_device_eval_batch_size,
                say=lambda size: self.say(
                    f"evaluation ran out of memory with {2 * size} rows a batch; going on with {size}"
                ),
            )
        self.trained.train(was_training)
        loss = total / (sum_of_weights or 1.0)
        if not math.isfinite(loss):
            raise held_out_not_finite(loss, self.state.global_step, checkpoints=Path(str(self.args.output_dir)))
        seconds = time.perf_counter() - started
        self.held_out_seconds += seconds
        return {"loss": loss, "tokens": num_tokens, "seconds": seconds}

    @torch.no_grad()
    def _held_out_sum(self, batch_size: int) -> tuple[float, int, float]:
        """Weighted cross entropy summed over the held-out rows, their supervised tokens, and the weights' sum."""
        self.args.per_device_eval_batch_size = batch_size  # also for the evaluations to come
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        num_tokens, sum_of_weights = 0, 0.0
        builds = self._num_builds
        with self.accelerator.autocast():
            for inputs in self.get_eval_dataloader():
                num_tokens += inputs["num_supervised_tokens"]
                sum_of_weights += inputs["sum_of_weights"]
                loss_sum, _ = self._loss_sum(self.trained, self._prepare_inputs(inputs))
                total += loss_sum
        self._logged_builds += self._num_builds - builds  # a training record counts those of training
        return total.item(), num_tokens, sum_of_weights

    # --- metrics and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds our figures to a training record and stops the run when its loss is not finite."""
        if "loss" in logs:
            self._stop_unless_finite(logs)
            logs = logs | self._training_figures()
            if self.args.fp16:
                logs["skipped_steps"] = self._skipped_steps.count
            if self.loraplus_ratio is not None:
                logs["learning_rate_lora_b"] = logs["learning_rate"] * self.loraplus_ratio
        Trainer.log(self, logs, start_time)

    def _training_figures(self) -> dict[str, float]:
        steps = max(1, self.state.global_step - self._logged_step)
        self._logged_step = self.state.global_step
        seconds, tokens = self.meter.close_window()
        on_cuda = self.args.device.type == "cuda"
        figures: dict[str, float] = {
            "real_tokens": self.meter.real_tokens,
            "slots": self.meter.slots,
            "real_tokens_per_second": tokens / seconds if seconds else 0.0,
            "step_seconds": seconds / steps,
            # PyTorch's own counts, which do not wait for the device.
            "memory_bytes": torch.cuda.memory_allocated() if on_cuda else 0,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_cuda else 0,
            "host_memory_bytes": resident_bytes(),
            "elapsed_seconds": self.meter.elapsed_seconds,
        }
        if self.metadata_feed is not None:
            figures["metadata_builds"] = self._num_builds - self._logged_builds
            self._logged_builds = self._num_builds
        if self._aux_losses:
            figures["aux_loss"] = torch.stack(self._aux_losses).mean().item()
            self._aux_losses = []
        return figures

    def forget_builds(self) -> None:
        """Leaves builds of metadata so far out of the next training record."""
        self._logged_builds = self._num_builds

    @property
    def _num_builds(self) -> int:
        return 0 if self.metadata_feed is None else self.metadata_feed.num_builds

    def _stop_unless_finite(self, logs: dict[str, float]) -> None:
        grad_norm = logs.get("grad_norm", 0.0)
        if self._skipped_steps.explain(self.accelerator.scaler, loss=logs["loss"], grad_norm=grad_norm):
            return
        record = self.meter.first_not_finite()
        what = "the loss" if record is not None else "the gradient"
        rows = (record or self.meter.pending[-1]).rows
        path = save_failed_batch(self.failure_dir, self._batch_of(rows), rows=rows, step=self.state.global_step)
        raise not_finite(
            what,
            step=self.state.global_step,
            figures=f"loss {logs['loss']}, gradient norm {grad_norm}",
            rows=rows,
            saved=path,
            checkpoints=Path(str(self.args.output_dir)),
        )

    def _batch_of(self, rows: list[int]) -> Batch:
        return self.rows_collator([self.train_dataset[row] for row in rows])


def _stand_in(rows: RowDataset) -> datasets.Dataset:
    """Returns the first row as the `datasets.Dataset` that TRL insists on, of which it looks at the first record only;
    the rows themselves take its place once TRL's constructor is done."""
    return datasets.Dataset.from_list([{key: rows[0][key].tolist() for key in ("input_ids", "labels")}])
