"""Every rule: what breaks it, where that is reported, and what is allowed beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import RecipeError
from finetune.recipe import data_rules, model_rules, rules, run_rules
from finetune.recipe.load import load_recipe

MINIMAL = "model: {path: org/name}\ndata: {train: [{path: a.jsonl}]}\noutput: {dir: out}\n"

BROKEN = [
    pytest.param(
        ["evaluation.early_stopping={patience: 2}"],
        run_rules.early_stopping_needs_evaluations,
        "`evaluation.early_stopping` must be left out without `evaluation.every_steps`",
        "Set `evaluation.every_steps`",
        id="early-stopping-without-evaluations",
    ),
    pytest.param(
        ["output.deliver=best"],
        run_rules.delivering_the_best_needs_evaluations,
        '`output.deliver` must be `auto` or `last` without `evaluation.every_steps`, found "best"',
        "Set `evaluation.every_steps`",
        id="best-without-evaluations",
    ),
    pytest.param(
        ["output.trackers=[wandb, wandb]"],
        run_rules.trackers_are_named_once,
        "`output.trackers` must be a list without repetitions",
        "once",
        id="tracker-twice",
    ),
    pytest.param(
        ["model.quantization=nf4", "adapter.type=none"],
        model_rules.quantized_weights_need_an_adapter,
        '`model.quantization` must be `none` with `adapter.type: none`, found "nf4"',
        "adapter.type: lora",
        id="nf4-without-adapter",
    ),
    pytest.param(
        ["model.dtype=fp16", "adapter.type=none"],
        model_rules.full_fine_tuning_in_fp16_is_refused,
        '`model.dtype` must be `auto`, `bf16` or `fp32` with `adapter.type: none`, found "fp16"',
        "model.dtype: bf16",
        id="fp16-full",
    ),
    pytest.param(
        ["model.dtype=fp16", "adapter.modules_to_save=[lm_head]"],
        model_rules.modules_in_fp16_are_not_trained,
        '`adapter.modules_to_save` must be empty while `model.dtype` is fp16, found ["lm_head"]',
        "model.dtype: bf16",
        id="fp16-modules-to-save",
    ),
    pytest.param(
        ["adapter.modules_to_save=[norm, norm]"],
        model_rules.adapter_names_are_names,
        "`adapter.modules_to_save` must be a list of different names",
        "Name modules",
        id="modules-to-save-twice",
    ),
    pytest.param(
        ["adapter.layers=[3, -1]"],
        model_rules.adapter_names_are_names,
        "`adapter.layers` must be a list of different numbers, 0 or more, found [3, -1]",
        "from 0",
        id="negative-layer",
    ),
    pytest.param(
        ["adapter.continue_from=/nowhere"],
        model_rules.earlier_adapter_agrees,
        "/nowhere/adapter_config.json cannot be read",
        "begin a new adapter",
        id="no-earlier-adapter",
    ),
    pytest.param(
        ['model.new_special_tokens=["<a> "]'],
        model_rules.new_tokens_are_texts,
        '`model.new_special_tokens` must be different texts without space around them, found "<a> "',
        "new_tokens: [<cite>, </cite>]",
        id="token-with-space",
    ),
    pytest.param(
        ["model.revision=v1", "model.path=./folder"],
        model_rules.revision_needs_a_hub_id,
        '`model.revision` must be `null` when `model.path` is a folder, found "v1"',
        "hub id",
        id="revision-of-folder",
    ),
    *[
        pytest.param(
            [f"data.train.0.{key}=x"],
            data_rules.hub_fields_need_a_hub_dataset,
            f'`data.train.0.{key}` must be left out when `path` is a file or folder, found "x"',
            f"Remove `{key}`, or give a hub id",
            id=f"{key}-of-file",
        )
        for key in ("name", "split", "revision")
    ],
    pytest.param(
        ["data.eval=[{path: /a.jsonl, split: test}]"],
        data_rules.hub_fields_need_a_hub_dataset,
        "`data.eval.0.split` must be left out",
        "hub id",
        id="split-of-eval-file",
    ),
    pytest.param(
        ["data.train.0.streaming=true"],
        data_rules.streaming_is_of_whole_hub_splits,
        "`data.train.0.streaming` must be left out when `path` is a file or folder, found true",
        "Remove `streaming`",
        id="streaming-of-file",
    ),
    pytest.param(
        ["data.eval=[{path: org/name, split: 'test[:5]', streaming: true}]"],
        data_rules.streaming_is_of_whole_hub_splits,
        "`data.eval.0.split` must be the name of a whole split, while `streaming` is true",
        "max_rows",
        id="streaming-of-slice",
    ),
    pytest.param(
        ["data.turns=separate", "data.loss_on=all"],
        data_rules.separate_turns_have_turns_to_learn,
        '`data.turns` must be together, while `data.loss_on` is all, found "separate"',
        "data.loss_on: assistant",
        id="separate-turns-learn-all",
    ),
    *[
        pytest.param(
            [f"data.date='{found}'"],
            data_rules.date_is_a_day,
            f'`data.date` must be a day as YYYY-MM-DD, found "{found}"',
            "data.date: 2026-01-31",
            id=f"date-{found}",
        )
        for found in ("2026-13-05", "2026-02-30", "today", "20260105")
    ],
    pytest.param(
        ["data.eval=[{path: /a.jsonl}, {path: /b.jsonl, weight: 0.5}]"],
        data_rules.eval_sources_have_no_weight,
        "`data.eval.1.weight` must be left out, found 0.5: every record of `data.eval` is evaluated once",
        "max_rows",
        id="weight-of-eval",
    ),
    pytest.param(
        ["model.chat_template=/nowhere/t.jinja"],
        model_rules.chat_template_exists,
        'must be an existing file, found "/nowhere/t.jinja": there is no such file',
        "Correct the path",
        id="template-missing",
    ),
    pytest.param(
        ["model.chat_template=/"],
        model_rules.chat_template_exists,
        "it is a folder",
        "Correct the path",
        id="template-folder",
    ),
    pytest.param(
        ["adapter.targets=[]"], model_rules.lora_targets_are_names, "found an empty list", "all-linear", id="no-targets"
    ),
    pytest.param(
        ["adapter.targets=[q_proj, '']"],
        model_rules.lora_targets_are_names,
        "nothing to adapt",
        "q_proj",
        id="empty-target",
    ),
    pytest.param(
        ["adapter.targets=[q_proj, lm_head]"],
        model_rules.lora_leaves_the_lm_head_alone,
        'a list without `lm_head`, found ["q_proj", "lm_head"]: the fused loss reads the LM head',
        "Remove `lm_head`",
        id="lm-head",
    ),
    pytest.param(
        ["adapter.targets=[model.lm_head]"],
        model_rules.lora_leaves_the_lm_head_alone,
        "fused loss",
        "Remove `lm_head`",
        id="lm-head-by-path",
    ),
    pytest.param(
        ["training.rows_per_micro_batch=3"],
        run_rules.micro_batch_divides_the_step,
        "must be a divisor of `training.rows_per_step`, which is 8, found 3",
        "rows_per_micro_batch: 2`, or `training.rows_per_step: 3`",
        id="micro-batch",
    ),
    pytest.param(
        ["training.rows_per_step=4", "training.rows_per_micro_batch=8"],
        run_rules.micro_batch_divides_the_step,
        "which is 4, found 8",
        "rows_per_micro_batch: 4`",
        id="micro-batch-larger-than-step",
    ),
    pytest.param(
        ["training.gradient_checkpointing=true", "optimizations.host_memory=4"],
        run_rules.budgets_need_a_plan,
        "with `training.gradient_checkpointing: true` nothing is planned",
        "Remove `optimizations.host_memory`, or set `training.gradient_checkpointing: auto`",
        id="budget-without-a-plan",
    ),
    *[
        pytest.param(
            [f"evaluation.{key}={value}"],
            run_rules.evaluation_needs_held_out_data,
            f"`evaluation.{key}` must be left out while `data.eval` is empty, found {value}",
            "data.eval: {fraction: 0.02}",
            id=f"{key}-without-eval",
        )
        for key, value in {"every_steps": "5", "metrics": '["exact_match"]', "samples": "4"}.items()
    ],
    pytest.param(
        ["evaluation.metrics=[exact_mach]", "data.eval={fraction: 0.1}"],
        run_rules.metrics_are_known,
        'must be `exact_match` or an existing Python file, found "exact_mach": did you mean `exact_match`?',
        ".py file",
        id="metric-misspelt",
    ),
    pytest.param(
        ["evaluation.metrics=[/nowhere/score.py]", "data.eval={fraction: 0.1}"],
        run_rules.metrics_are_known,
        "there is no such metric or file",
        ".py file",
        id="metric-file-missing",
    ),
    pytest.param(
        ["evaluation.metrics=[exact_match, exact_match]", "data.eval={fraction: 0.1}"],
        run_rules.metric_names_differ,
        "two values would be recorded as `eval_exact_match`",
        "Remove one",
        id="metric-twice",
    ),
    pytest.param(
        ["data.train=[{path: a.jsonl, columns: {instruction: q, output: q}}]"],
        data_rules.columns_have_one_role,
        "`q` stands in two roles",
        "column of its own",
        id="column-in-two-roles",
    ),
    pytest.param(
        ["evaluation.metrics=[./loss.py]", "data.eval={fraction: 0.1}"],
        run_rules.metric_names_differ,
        "two values would be recorded as `eval_loss`",
        "rename",
        id="metric-named-as-the-loss",
    ),
]


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text("def score(prediction, reference): return 0.0", encoding="utf-8")
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(("overrides", "rule", "message", "remedy"), BROKEN)
def test_broken_rule(recipe_file: Path, overrides: list[str], rule: rules.Rule, message: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, overrides=overrides)
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.place.startswith("command line: ")
    assert rule in rules.RULES


def test_every_rule_is_broken_by_a_case() -> None:
    assert {case.values[1] for case in BROKEN} == set(rules.RULES)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("training:\n  rows_per_micro_batch: 3\n", "r.yaml:5:25"),
        ("training:\n  rows_per_step: 7\n  rows_per_micro_batch: 2\n", "r.yaml:6:25"),
        ("adapter: {targets: [a, lm_head]}\n", "r.yaml:4:20"),
    ],
)
def test_a_broken_rule_has_the_place_of_its_key(recipe_file: Path, text: str, place: str) -> None:
    recipe_file.write_text(MINIMAL + text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file)
    assert caught.value.place == place


def test_all_broken_rules_are_reported(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL + "training: {rows_per_micro_batch: 3}\nadapter: {targets: []}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()[:2]] == ["r.yaml:4:34", "r.yaml:5:20"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.quantization=nf4", "model.init=random"],
        ["model.dtype=fp16"],
        ["model.revision=v1"],
        ["training.schedule=constant", "training.warmup_fraction=0.1"],
        ["training.optimizer=paged_adamw_8bit", "model.device=cpu"],
        ["evaluation.samples=0"],
        ["evaluation.samples=3"],
        ["evaluation.metrics=[exact_match]", "data.eval={fraction: 0.1}"],
        ["adapter.targets=[mlp.experts.gate_up_proj]"],
        ["training.rows_per_step=6", "training.rows_per_micro_batch=3"],
    ],
    ids=" ".join,
)
def test_allowed(recipe_file: Path, overrides: list[str]) -> None:
    assert rules.check(load_recipe(recipe_file, overrides=overrides)) == []


def test_metric_files_and_templates_that_exist_are_allowed(recipe_file: Path) -> None:
    for name in ("score.py", "t.jinja"):
        (recipe_file.parent / name).write_text("")
    text = MINIMAL.replace("]}", "], eval: {fraction: 0.1}}").replace("name}", "name, chat_template: t.jinja}")
    recipe_file.write_text(text + "evaluation: {metrics: [score.py]}\n")
    assert rules.check(load_recipe(recipe_file)) == []
