"""Rules that span several keys, or that a type cannot say.

Each rule takes a valid recipe and returns what it found wrong, or None. It never changes a value.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finetune.recipe.earlier_adapter import SAME_VALUE, read_earlier_adapter
from finetune.recipe.locate import Plain
from finetune.recipe.paths import can_be_path, is_hub_dataset, is_hub_id
from finetune.recipe.schema import EvaluationSection, LoraAdapter, NoAdapter, Recipe

METRICS = ("exact_match",)
"""Metrics that need no file."""
TAKEN_METRIC_NAMES = frozenset({"loss", "tokens", "seconds"})
"""Names under which the held-out loss and its counts are recorded."""


@dataclass(frozen=True)
class Violation:
    """A broken rule."""

    keys: tuple[str, ...]
    """The key that is wrong, then others that take part; the first one written in a file gives the place."""
    found: Plain
    allowed: str
    reason: str
    remedy: str


Rule = Callable[[Recipe], Violation | None]


def check(recipe: Recipe) -> list[Violation]:
    """Returns every broken rule, in the order of `RULES`; the others look at files, so impossible names go first."""
    if (impossible := paths_are_possible(recipe)) is not None:
        return [impossible]
    return [violation for rule in RULES if (violation := rule(recipe))]


def paths_are_possible(recipe: Recipe) -> Violation | None:
    """No file system has a name with NUL or half of a character, or of more than 255 bytes."""
    eval_sources = recipe.data.eval if isinstance(recipe.data.eval, list) else []
    named = {
        "model.path": recipe.model.path,
        "model.chat_template": recipe.model.chat_template,
        **{f"data.train.{index}.path": source.path for index, source in enumerate(recipe.data.train)},
        **{f"data.eval.{index}.path": source.path for index, source in enumerate(eval_sources)},
        **{f"evaluation.metrics.{index}": metric for index, metric in enumerate(recipe.evaluation.metrics)},
        "output.dir": recipe.output.dir,
    }
    for key, value in named.items():
        if value is not None and not can_be_path(value):
            return Violation(
                keys=(key,),
                found=value,
                allowed="a name that a file can have",
                reason="it is empty, holds NUL or half of a character, or has a part of more than 255 bytes",
                remedy=f"Correct `{key}`; it may hold other text than a path.",
            )
    return None


def quantized_weights_need_an_adapter(recipe: Recipe) -> Violation | None:
    """Weights in 4 or 8 bits cannot be trained themselves."""
    if recipe.model.quantization == "none" or isinstance(recipe.adapter, LoraAdapter):
        return None
    return Violation(
        keys=("model.quantization", "adapter.type"),
        found=recipe.model.quantization,
        allowed="`none` with `adapter.type: none`",
        reason="quantized weights are frozen and would leave nothing to train",
        remedy="Set `adapter.type: lora`, or `model.quantization: none`.",
    )


def full_fine_tuning_in_fp16_is_refused(recipe: Recipe) -> Violation | None:
    """Weights in fp16 lose small updates and overflow; adapters are kept in fp32."""
    if recipe.model.dtype != "fp16" or not isinstance(recipe.adapter, NoAdapter):
        return None
    return Violation(
        keys=("model.dtype", "adapter.type"),
        found=recipe.model.dtype,
        allowed="`auto`, `bf16` or `fp32` with `adapter.type: none`",
        reason="updates of weights held in fp16 vanish or overflow",
        remedy="Set `model.dtype: bf16` (or fp32), or `adapter.type: lora`.",
    )


def modules_in_fp16_are_not_trained(recipe: Recipe) -> Violation | None:
    """Modules that are trained in full keep the base's number format, and fp16 loses their small updates."""
    adapter = recipe.adapter
    if recipe.model.dtype != "fp16" or not isinstance(adapter, LoraAdapter) or not adapter.modules_to_save:
        return None
    return Violation(
        keys=("adapter.modules_to_save", "model.dtype"),
        found=list(adapter.modules_to_save),
        allowed="empty while `model.dtype` is fp16",
        reason="updates of weights held in fp16 vanish or overflow",
        remedy="Set `model.dtype: bf16` (or fp32), or remove `adapter.modules_to_save`.",
    )


def adapter_names_are_names(recipe: Recipe) -> Violation | None:
    """An empty name would match every module, and a negative number no layer; none may stand twice."""
    if not isinstance(recipe.adapter, LoraAdapter):
        return None
    names, layers = recipe.adapter.modules_to_save, recipe.adapter.layers or []
    if "" in names or len(set(names)) < len(names):
        return Violation(
            keys=("adapter.modules_to_save",),
            found=list(names),
            allowed="a list of different names",
            reason="a name is empty or stands twice",
            remedy="Name modules by their path or its end, such as [norm, lm_head].",
        )
    if any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
        return Violation(
            keys=("adapter.layers",),
            found=list(layers),
            allowed="a list of different numbers, 0 or more",
            reason="a number is negative or stands twice",
            remedy="Name layers from 0, such as [0, 1, 2].",
        )
    return None


def earlier_adapter_agrees(recipe: Recipe) -> Violation | None:
    """An adapter that is trained on keeps its rank, scale and kind."""
    adapter = recipe.adapter
    if not isinstance(adapter, LoraAdapter) or adapter.continue_from is None:
        return None
    earlier = read_earlier_adapter(adapter.continue_from)
    if earlier.fault is not None:
        return Violation(
            keys=("adapter.continue_from",),
            found=adapter.continue_from,
            allowed="the folder of a LoRA adapter that PEFT saved",
            reason=earlier.fault,
            remedy="Name a folder such as runs/NAME/adapter, or remove the key to begin a new adapter.",
        )
    for key, name in SAME_VALUE.items():
        value, theirs = getattr(adapter, key), earlier.values.get(name) or False
        if key in adapter.model_fields_set and value != theirs:
            return Violation(
                keys=(f"adapter.{key}",),
                found=value,
                allowed=f"{str(theirs).lower()}, or left out",
                reason=f"{earlier.path} has {name} {str(theirs).lower()}",
                remedy=f"Remove `adapter.{key}`, or `adapter.continue_from` to begin a new adapter.",
            )
    return None


def new_tokens_are_texts(recipe: Recipe) -> Violation | None:
    """A token is a text of its own, without space around it, which tokenizers treat unlike each other."""
    names = [*recipe.model.new_tokens, *recipe.model.new_special_tokens]
    wrong = [name for name in names if not name or name != name.strip() or names.count(name) > 1]
    if not wrong:
        return None
    return Violation(
        keys=("model.new_tokens" if wrong[0] in recipe.model.new_tokens else "model.new_special_tokens",),
        found=wrong[0],
        allowed="different texts without space around them",
        reason="it is empty, begins or ends with space, or stands twice",
        remedy="Write each new token once, such as `new_tokens: [<cite>, </cite>]`.",
    )


def revision_needs_a_hub_id(recipe: Recipe) -> Violation | None:
    """A folder has no revisions."""
    if recipe.model.revision is None or is_hub_id(recipe.model.path):
        return None
    return Violation(
        keys=("model.revision", "model.path"),
        found=recipe.model.revision,
        allowed="`null` when `model.path` is a folder",
        reason=f"{recipe.model.path} is a folder and has no revisions",
        remedy="Remove `model.revision`, or give a hub id such as Qwen/Qwen3-14B as `model.path`.",
    )


def hub_fields_need_a_hub_dataset(recipe: Recipe) -> Violation | None:
    """Files have no configuration, split or revision."""
    lists = {"train": recipe.data.train, "eval": recipe.data.eval if isinstance(recipe.data.eval, list) else []}
    for name, sources in lists.items():
        for index, source in enumerate(sources):
            for key in ("name", "split", "revision"):
                value = getattr(source, key)
                if value is not None and not is_hub_dataset(source.path):
                    return Violation(
                        keys=(f"data.{name}.{index}.{key}", f"data.{name}.{index}.path"),
                        found=value,
                        allowed="left out when `path` is a file or folder",
                        reason=f"{source.path} is no hub id",
                        remedy=f"Remove `{key}`, or give a hub id such as org/name as `path`.",
                    )
    return None


def streaming_is_of_whole_hub_splits(recipe: Recipe) -> Violation | None:
    """Local files are always read as a stream, and the hub streams a split from its start."""
    lists = {"train": recipe.data.train, "eval": recipe.data.eval if isinstance(recipe.data.eval, list) else []}
    for name, sources in lists.items():
        for index, source in enumerate(sources):
            key = f"data.{name}.{index}"
            if source.streaming and not is_hub_dataset(source.path):
                return Violation(
                    keys=(f"{key}.streaming", f"{key}.path"),
                    found=True,
                    allowed="left out when `path` is a file or folder",
                    reason=f"{source.path} is no hub id, and files on this machine are read as a stream anyway",
                    remedy="Remove `streaming`.",
                )
            if source.streaming and "[" in (source.split or ""):
                return Violation(
                    keys=(f"{key}.split", f"{key}.streaming"),
                    found=source.split,
                    allowed="the name of a whole split, while `streaming` is true",
                    reason="where a slice begins and ends is known only once the whole split was read",
                    remedy="Set `max_rows` to take the first rows, or remove `streaming`.",
                )
    return None


def eval_sources_have_no_weight(recipe: Recipe) -> Violation | None:
    """Every held-out record is looked at once; a weight there would change nothing."""
    sources = recipe.data.eval if isinstance(recipe.data.eval, list) else []
    for index, source in enumerate(sources):
        if source.weight != 1.0:
            return Violation(
                keys=(f"data.eval.{index}.weight",),
                found=source.weight,
                allowed="left out",
                reason="every record of `data.eval` is evaluated once",
                remedy="Remove `weight`; to evaluate on fewer records, set `max_rows`.",
            )
    return None


def chat_template_exists(recipe: Recipe) -> Violation | None:
    """The template file must be there before anything is loaded."""
    template = recipe.model.chat_template
    if template is None or Path(template).is_file():
        return None
    return Violation(
        keys=("model.chat_template",),
        found=template,
        allowed="an existing file",
        reason="it is a folder" if Path(template).is_dir() else "there is no such file",
        remedy="Correct the path (relative to the file that names it), or remove the key to use the tokenizer's own.",
    )


def lora_targets_are_names(recipe: Recipe) -> Violation | None:
    """An empty list would train nothing; an empty name would match every module."""
    targets = recipe.adapter.targets if isinstance(recipe.adapter, LoraAdapter) else "all-linear"
    if isinstance(targets, str) or (targets and all(targets)):
        return None
    return Violation(
        keys=("adapter.targets",),
        found=list(targets),
        allowed="`all-linear`, `attention` or a list of one or more module names",
        reason="without a name there is nothing to adapt",
        remedy="Name modules by the end of their path, such as [q_proj, v_proj], or use `all-linear`.",
    )


def lora_leaves_the_lm_head_alone(recipe: Recipe) -> Violation | None:
    """The loss is computed from the LM head's weight directly, past any adapter on it."""
    targets = recipe.adapter.targets if isinstance(recipe.adapter, LoraAdapter) else "all-linear"
    if isinstance(targets, str) or not any(name.split(".")[-1] == "lm_head" for name in targets):
        return None
    return Violation(
        keys=("adapter.targets",),
        found=list(targets),
        allowed="a list without `lm_head`",
        reason="the fused loss reads the LM head's weight itself, so an adapter on it would be ignored without a word",
        remedy="Remove `lm_head` from `adapter.targets`; `adapter.modules_to_save: [lm_head]` trains it in full.",
    )


def micro_batch_divides_the_step(recipe: Recipe) -> Violation | None:
    """A step is a whole number of micro-batches, so that each weighs the same."""
    rows, micro = recipe.training.rows_per_step, recipe.training.rows_per_micro_batch
    if rows % micro == 0:
        return None
    nearest = max(size for size in range(1, min(rows, micro) + 1) if rows % size == 0)
    return Violation(
        keys=("training.rows_per_micro_batch", "training.rows_per_step"),
        found=micro,
        allowed=f"a divisor of `training.rows_per_step`, which is {rows}",
        reason="a step is a whole number of micro-batches",
        remedy=f"Set `training.rows_per_micro_batch: {nearest}`, or `training.rows_per_step: {micro}`.",
    )


def separate_turns_have_turns_to_learn(recipe: Recipe) -> Violation | None:
    """One sample a turn repeats the prompts, which `loss_on: all` would learn once for each turn."""
    if recipe.data.turns != "separate" or recipe.data.loss_on != "all":
        return None
    return Violation(
        keys=("data.turns", "data.loss_on"),
        found=recipe.data.turns,
        allowed="together, while `data.loss_on` is all",
        reason="each prompt would be learned once for every turn that follows it",
        remedy="Set `data.turns: together`, or `data.loss_on: assistant`.",
    )


def date_is_a_day(recipe: Recipe) -> Violation | None:
    """A date that a chat template prints is a day of the calendar, written so that it reads the same everywhere."""
    found = recipe.data.date
    if found is None or (re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", found) and _is_day(found)):
        return None
    return Violation(
        keys=("data.date",),
        found=found,
        allowed="a day as YYYY-MM-DD",
        reason="there is no such day, or it is written otherwise",
        remedy="Write it like `data.date: 2026-01-31`, or leave it out to take the day of the run's start.",
    )


def _is_day(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def evaluation_needs_held_out_data(recipe: Recipe) -> Violation | None:
    """Asking for an evaluation without data to evaluate on is a mistake; the defaults ask for none."""
    if recipe.data.eval is not None:
        return None
    default = EvaluationSection()
    for key in ("every_steps", "metrics", "samples"):
        value = getattr(recipe.evaluation, key)
        if value and value != getattr(default, key):
            return Violation(
                keys=(f"evaluation.{key}",),
                found=value,
                allowed="left out while `data.eval` is empty",
                reason="there is no held-out data to evaluate on",
                remedy="Add held-out data, such as `data.eval: {fraction: 0.02}`, or remove the key.",
            )
    return None


def early_stopping_needs_evaluations(recipe: Recipe) -> Violation | None:
    """Early stopping counts the evaluations during training."""
    if recipe.evaluation.early_stopping is None or recipe.evaluation.every_steps is not None:
        return None
    return Violation(
        keys=("evaluation.early_stopping",),
        found=recipe.evaluation.early_stopping.model_dump(),
        allowed="left out without `evaluation.every_steps`",
        reason="the run is evaluated at its end only, when there is nothing left to stop",
        remedy="Set `evaluation.every_steps`, or remove `evaluation.early_stopping`.",
    )


def delivering_the_best_needs_evaluations(recipe: Recipe) -> Violation | None:
    """Without evaluations during training the last weights are the only ones that were measured."""
    if recipe.output.deliver != "best" or recipe.evaluation.every_steps is not None:
        return None
    return Violation(
        keys=("output.deliver", "evaluation.every_steps"),
        found=recipe.output.deliver,
        allowed="`auto` or `last` without `evaluation.every_steps`",
        reason="the run is evaluated at its end only, so there are no best weights beside the last",
        remedy="Set `evaluation.every_steps`, or remove `output.deliver`.",
    )


def trackers_are_named_once(recipe: Recipe) -> Violation | None:
    """A tracker named twice would get every figure twice."""
    trackers = recipe.output.trackers
    if len(set(trackers)) == len(trackers):
        return None
    return Violation(
        keys=("output.trackers",),
        found=list(trackers),
        allowed="a list without repetitions",
        reason="a tracker would get every figure twice",
        remedy="Name each tracker once.",
    )


def metrics_are_known(recipe: Recipe) -> Violation | None:
    """A metric is built in, or a Python file that is there."""
    for index, name in enumerate(recipe.evaluation.metrics):
        if name in METRICS or (name.endswith(".py") and Path(name).is_file()):
            continue
        near = difflib.get_close_matches(name, METRICS, n=1)
        return Violation(
            keys=(f"evaluation.metrics.{index}", "evaluation.metrics"),
            found=name,
            allowed="`exact_match` or an existing Python file",
            reason=f"did you mean `{near[0]}`?" if near else "there is no such metric or file",
            remedy="Use `exact_match`, or the path of a .py file (relative to the file that names it).",
        )
    return None


def metric_names_differ(recipe: Recipe) -> Violation | None:
    """Scores are recorded under the metric's name (a file's without `.py`), so two may not share one."""
    names = [Path(metric).stem for metric in recipe.evaluation.metrics]
    twice = sorted({name for name in names if names.count(name) > 1} | (TAKEN_METRIC_NAMES & set(names)))
    if not twice:
        return None
    return Violation(
        keys=("evaluation.metrics",),
        found=list(recipe.evaluation.metrics),
        allowed=f"metrics with names of their own, not {', '.join(sorted(TAKEN_METRIC_NAMES))}",
        reason=f"two values would be recorded as `eval_{twice[0]}`",
        remedy="Remove one, or rename its file.",
    )


def columns_have_one_role(recipe: Recipe) -> Violation | None:
    """A column in two roles would be trained as its own answer."""
    sources = [*recipe.data.train, *(recipe.data.eval if isinstance(recipe.data.eval, list) else [])]
    for index, source in enumerate(sources):
        columns = list(source.columns.model_dump(exclude_none=True).values()) if source.columns else []
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            key = f"data.train.{index}.columns" if index < len(recipe.data.train) else "data.eval"
            return Violation(
                keys=(key, "data.train"),
                found=columns,
                allowed="a different column for each role",
                reason=f"`{twice[0]}` stands in two roles",
                remedy="Give each role a column of its own.",
            )
    return None


RULES: tuple[Rule, ...] = (
    quantized_weights_need_an_adapter,
    full_fine_tuning_in_fp16_is_refused,
    modules_in_fp16_are_not_trained,
    adapter_names_are_names,
    earlier_adapter_agrees,
    new_tokens_are_texts,
    revision_needs_a_hub_id,
    hub_fields_need_a_hub_dataset,
    streaming_is_of_whole_hub_splits,
    eval_sources_have_no_weight,
    chat_template_exists,
    lora_targets_are_names,
    lora_leaves_the_lm_head_alone,
    micro_batch_divides_the_step,
    separate_turns_have_turns_to_learn,
    date_is_a_day,
    evaluation_needs_held_out_data,
    early_stopping_needs_evaluations,
    delivering_the_best_needs_evaluations,
    trackers_are_named_once,
    metrics_are_known,
    metric_names_differ,
    columns_have_one_role,
)
