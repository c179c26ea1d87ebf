"""Rules that span several keys, or that a type cannot say: all of them, in the order in which they are told.

Each rule takes a valid recipe and returns what it found wrong, or None. It never changes a value. They stand in
`model_rules.py`, `data_rules.py` and `run_rules.py`.
"""

from __future__ import annotations

from finetune.recipe import data_rules, model_rules, run_rules
from finetune.recipe.paths import can_be_path
from finetune.recipe.schema import Recipe
from finetune.recipe.violation import Rule, Violation


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


RULES: tuple[Rule, ...] = (
    model_rules.quantized_weights_need_an_adapter,
    model_rules.full_fine_tuning_in_fp16_is_refused,
    model_rules.modules_in_fp16_are_not_trained,
    model_rules.adapter_names_are_names,
    model_rules.earlier_adapter_agrees,
    model_rules.new_tokens_are_texts,
    model_rules.revision_needs_a_hub_id,
    data_rules.hub_fields_need_a_hub_dataset,
    data_rules.streaming_is_of_whole_hub_splits,
    data_rules.eval_sources_have_no_weight,
    model_rules.chat_template_exists,
    model_rules.lora_targets_are_names,
    model_rules.lora_leaves_the_lm_head_alone,
    run_rules.micro_batch_divides_the_step,
    run_rules.budgets_need_a_plan,
    data_rules.separate_turns_have_turns_to_learn,
    data_rules.date_is_a_day,
    run_rules.evaluation_needs_held_out_data,
    run_rules.early_stopping_needs_evaluations,
    run_rules.delivering_the_best_needs_evaluations,
    run_rules.trackers_are_named_once,
    run_rules.metrics_are_known,
    run_rules.metric_names_differ,
    data_rules.columns_have_one_role,
)
