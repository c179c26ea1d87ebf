"""The recipe's one schema: every section, field, default and limit.

The text under a field is its help, its description in the JSON Schema and its line in `docs/recipe_reference.md`.
Rules that span fields are in `rules.py`; reading files, `extends` and overrides are in `load.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=False, allow_inf_nan=False
    )


class ModelSection(Section):
    """The base model: where its files are and how they are held in memory."""

    path: str = Field(min_length=1)
    """Folder with the model's files (relative to the recipe) or a hub id such as `Qwen/Qwen3-14B`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; none means its main branch."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` loads the weights; `random` needs only `config.json` and the tokenizer and draws the weights
    on the device from `training.seed`, for pretraining, tests and benches."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of the weights. `auto` keeps the one that the model's `config.json` names."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """`nf4` holds the frozen linear layers in 4 bits (QLoRA), `int8` in 8 bits (LLM.int8); both need an adapter."""
    attention: Literal["auto", "flash4", "flash3", "flash2", "varlen", "flex", "sdpa", "segments", "eager"] = "auto"
    """What computes attention. `auto` takes the fastest that is exact on the device and says which: `flash4` where that
    is installed, else torch's own `varlen`, on a CPU `segments` (one call a document). `sdpa` takes a dense mask;
    `eager` is transformers' own attention."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. `auto` takes a CUDA device when there is one; `cuda` is an error when there is none."""
    chat_template: str | None = None
    """Jinja file (relative to the recipe) used in place of the tokenizer's own chat template."""
    new_tokens: list[str] = []
    """Texts that become one token each, such as `<cite>`. Their rows of the embedding and the LM head begin as the mean
    of all rows and are trained; with an adapter no other row changes. The tokenizer is saved with them."""
    new_special_tokens: list[str] = []
    """The same for control tokens that a chat template writes, such as `<|im_end|>`: they can end a turn, and decoding
    can leave them out."""


class LoraAdapter(Section):
    """Low-rank adapters (LoRA) beside frozen weights; `docs/adapters.md` has an example of each kind."""

    type: Literal["lora"] = "lora"
    """Kind of adapter."""
    rank: int = Field(default=16, ge=1, le=4096)
    """Rank of each adapter."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's output is scaled by `alpha / rank`."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (rank-stabilized LoRA), so that a high rank learns as fast as a low one."""
    dora: bool = False
    """Train the length of each weight's rows apart from their direction (DoRA). Not for expert parameters."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input while training. Not for expert parameters."""
    targets: Literal["all-linear", "attention"] | list[str] = "all-linear"
    """`all-linear`: every linear layer of attention and MLP, experts included, never the router or the LM head.
    `attention`: the attention projections. A list names modules by their path or its end, such as `q_proj` or
    `model.layers.3.self_attn.q_proj`, or expert parameters such as `mlp.experts.gate_up_proj`."""
    layers: Annotated[list[int], Field(min_length=1)] | None = None
    """Numbers of the layers that get an adapter, from 0; none means all."""
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter, named by their path or its end, such as `norm` or
    `lm_head`. An embedding that is tied to the LM head stays tied: naming either trains the one weight of both."""
    continue_from: str | None = None
    """Folder of an earlier PEFT adapter (relative to the recipe) to train on from. The keys of this section are then
    its own, and need not be given; one that contradicts it is an error."""
    loraplus_ratio: float | None = Field(default=None, ge=1.0, le=1000.0)
    """LoRA+: the B matrices learn at so many times `training.learning_rate`, the A matrices at the rate itself; none
    gives both the same."""


class NoAdapter(Section):
    """Full fine-tuning: every weight is trained."""

    type: Literal["none"]
    """Kind of adapter."""


def _adapter_type(value: object) -> object:
    """Returns an adapter's `type`; one that names none is LoRA, so that `adapter: {rank: 8}` says enough."""
    return value.get("type", "lora") if isinstance(value, dict) else getattr(value, "type", None)


Adapter = Annotated[
    Annotated[LoraAdapter, Tag("lora")] | Annotated[NoAdapter, Tag("none")], Discriminator(_adapter_type)
]


class Columns(Section):
    """Which column of the data plays which role, where the names differ."""

    instruction: str | None = None
    """Column that holds the question of an Alpaca record."""
    input: str | None = None
    """Column that holds what follows the instruction of an Alpaca record."""
    output: str | None = None
    """Column that holds the answer of an Alpaca record."""
    history: str | None = None
    """Column that holds the earlier questions and answers of an Alpaca record."""
    system: str | None = None
    """Column that holds the system message."""
    messages: str | None = None
    """Column that holds the list of messages."""
    conversations: str | None = None
    """Column that holds the list of ShareGPT turns."""
    tools: str | None = None
    """Column that holds the definitions of the tools."""
    prompt: str | None = None
    """Column that holds the prompt."""
    completion: str | None = None
    """Column that holds the completion."""
    text: str | None = None
    """Column that holds the document."""
    chosen: str | None = None
    """Column that holds the preferred answer of a pair; to learn it with `sft`, give it the role `completion`,
    `messages` or `output` instead."""
    rejected: str | None = None
    """Column that holds the other answer of a pair."""
    label: str | None = None
    """Column that holds the verdict on an answer (KTO)."""
    answer: str | None = None
    """Column that holds the answer that a reward compares with (GRPO)."""


class Source(Section):
    """Data files of one format, or a dataset of the hub."""

    path: str = Field(min_length=1)
    """File (`.json`, `.jsonl`, `.csv`, `.tsv`, `.parquet`, `.arrow` or `.txt`; text also as `.gz` or `.zst`), folder
    with such files, pattern such as `data/*.jsonl` (all relative to the recipe), or a hub id such as `org/name`."""
    format: Literal[
        "auto",
        "alpaca",
        "sharegpt",
        "messages",
        "prompt_completion",
        "text",
        "preference",
        "kto",
        "prompt_answer",
    ] = "auto"
    """Shape of a record. `auto` recognises it from the first record's keys, says which it took, and refuses a later
    record of another shape. `training.method: sft` refuses `preference`, `kto` and `prompt_answer`, and says how their
    answers can be learned."""
    columns: Columns | None = None
    """Column names of the data by the role they play, such as `{instruction: question, output: answer}`."""
    weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """How many times each record is taken in an epoch: 2 takes each twice, 0.5 a half drawn by `training.seed`."""
    max_rows: int | None = Field(default=None, ge=1)
    """Use only the first so many records."""
    name: str | None = None
    """Configuration of a hub dataset; none takes its default."""
    split: str | None = None
    """Split of a hub dataset; none takes `train`."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; none takes its main branch."""
    streaming: bool = False
    """Read a hub dataset's rows as they arrive instead of downloading all of it first; only tokens go to the disk. A
    local copy is used where there is one. With `max_rows`, and no local copy, rows are streamed anyway."""


class EvalFraction(Section):
    """A part of the training data held out for evaluation."""

    fraction: float = Field(gt=0.0, lt=1.0)
    """Share of the distinct samples to hold out; equal samples never end up on both sides."""


class DataSection(Section):
    """What is trained on and how it becomes rows."""

    train: list[Source] = Field(min_length=1)
    """Files to train on, read in order."""
    eval: Annotated[list[Source], Field(min_length=1)] | EvalFraction | None = None
    """Files to evaluate on, or a fraction of the training data, or nothing."""
    max_length: int = Field(default=2048, ge=8, le=4_194_304)
    """Length of a row in tokens."""
    over_length: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a sample longer than `max_length`: refuse the run, leave the sample out, cut its end, or
    (plain text only) split it over several rows. What was lost is counted and reported."""
    loss_on: Literal["assistant", "last_assistant", "completion", "all"] = "assistant"
    """Tokens that are learned: all assistant turns, the last one only, the completion of prompt/completion
    records, or every token. Plain text always trains on every token."""
    turns: Literal["together", "separate"] = "together"
    """`together` makes one sample of a conversation. `separate` makes one for each learned turn, as the last of what
    precedes it, which is how it is generated; it costs the prompt's tokens once for each turn, and is needed where
    the chat template leaves the reasoning out of earlier turns."""
    date: str | None = Field(default=None, json_schema_extra={"format": "date"})
    """Date (YYYY-MM-DD) that a chat template which prints today's date writes; none takes the day of the run's start.
    The run records it."""
    malformed: Literal["error", "drop"] = "error"
    """What to do with records that cannot be used: refuse the run, telling all of them by kind, or leave them out,
    counted in the ledger with their places."""
    role_order: Literal["strict", "any"] = "strict"
    """Order of the roles in a conversation. `strict` refuses as malformed: a system or developer message after the
    first message, an answer before any question, two questions in a row, two answers in a row unless one of them calls
    tools, and a tool result that follows neither a call nor another result. It takes all else, such as a question at
    the end or a call without a result. `any` takes what the chat template takes and does not leave out."""
    duplicates: Literal["keep", "drop", "error"] = "keep"
    """What to do with records of the training data that equal an earlier one once rendered. `keep` warns."""
    leakage: Literal["error", "drop", "keep"] = "error"
    """What to do with training records that equal one of `data.eval`: refuse the run, leave them out of the training
    data, or keep them with a warning."""
    unknown_control_tokens: Literal["error", "keep"] = "error"
    """What to do with text written like a control token (`<|im_start|>`, `[INST]`) that this tokenizer does not have:
    refuse the run, or learn it as plain text."""
    packing: bool = True
    """Put several samples into one row, each seeing only itself."""
    cache: bool = True
    """Keep the tokenized samples in the user's cache folder, keyed by content, for the next run."""


class Watch(Section):
    """What is watched in the logged losses and gradient norms. Only logged values are read: nothing is fetched for it,
    and a step counts as one logged step."""

    loss_spike: float | None = Field(default=6.0, gt=0.0)
    """Warn when a loss lies so many deviations above the median of the last 50. A deviation is 1.48 times the median
    distance from that median (the standard deviation, for a normal spread), at least 5 % of the median. None: never."""
    grad_norm_spike: float | None = Field(default=10.0, gt=0.0)
    """The same for the norm of the gradient."""
    divergence: float | None = Field(default=1.0, gt=0.0)
    """Stop the run (exit code 6) when the loss stays so far above the level that it had reached: the lowest value that
    four of five losses did not exceed, in the first 20 losses and in any 50 in a row. In nats per token. None:
    never."""
    divergence_steps: int = Field(default=20, ge=2)
    """Logged steps in a row that the loss has to stay there."""


class TrainingSection(Section):
    """The optimisation: how long, how large a step, how fast."""

    method: Literal["sft"] = "sft"
    """Training method."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data; `max_steps` ends the run earlier."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps at most."""
    rows_per_step: int = Field(default=8, ge=1)
    """Rows that make one optimizer step, whatever the micro-batch."""
    rows_per_micro_batch: int = Field(default=1, ge=1)
    """Rows in one forward and backward pass; must divide `rows_per_step`."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_fraction: float = Field(default=0.03, ge=0.0, lt=1.0)
    """Share of all steps, rounded up to whole ones, over which the learning rate rises: of `n` such steps the first has
    1/(n + 1) of `training.learning_rate`, and the step after them all of it."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """`adamw` keeps its state in the format of the trained weights (fp32 for adapters), `adamw_8bit` in 8 bits,
    `paged_adamw_8bit` in memory that the host backs."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """`auto` plans for each layer what is kept on the device, what goes to the host, and what is computed again in the
    backward pass, within `optimizations.activation_memory` and `optimizations.host_memory`. `true` keeps the inputs of
    layers and computes all else again, `false` keeps everything."""
    router_aux_loss: float | None = Field(default=None, ge=0.0)
    """Coefficient of an MoE's load-balancing loss; none takes the model's own, 0 leaves the loss out."""
    seed: int = Field(default=7, ge=0, le=2**32 - 1)
    """Seed of the data order, the adapters' first values and dropout."""
    watch: Watch = Watch()
    """When to warn of a spike, and when to stop a run that diverged."""


class EarlyStopping(Section):
    """When to end a run whose held-out loss no longer falls."""

    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without an improvement after which the run ends."""
    min_improvement: float = Field(default=0.0, ge=0.0)
    """How far the held-out loss has to fall below that of the last improvement to count as one; the first evaluation
    after the first step counts as one."""


class EvaluationSection(Section):
    """When and how the held-out data is looked at."""

    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate after every so many steps; none evaluates at the end only. Needs `data.eval`."""
    at_start: bool = True
    """Evaluate before the first step too, so that the report shows before and after."""
    metrics: list[str] = []
    """Scores of generated answers against the reference: `exact_match`, or a Python file (relative to the recipe)
    that defines `score(prediction: str, reference: str) -> float`. Computed at the start and at the end."""
    metric_rows: int = Field(default=200, ge=1)
    """Held-out samples that are scored, from the first on."""
    samples: int = Field(default=3, ge=0)
    """Held-out prompts whose answers are kept in `samples.jsonl` and shown, beside their reference: before the first
    step, at each evaluation, and at the end."""
    prompts: list[Annotated[str, Field(min_length=1)]] = []
    """Prompts of your own, each the text of a user's message, answered whenever held-out prompts are. They go through
    the chat template as training data do; without one they are completed as they stand."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer that is generated, in tokens."""
    early_stopping: EarlyStopping | None = None
    """End the run when the held-out loss no longer falls, such as `{patience: 3}`; none trains all steps. Needs
    `evaluation.every_steps`."""


class OptimizationsSection(Section):
    """What makes a run faster or smaller without changing its result. `auto` follows a look at the device."""

    packed_metadata_cache: bool | Literal["auto"] = True
    """Build the boundaries of packed documents, and the masks made from them, once a batch for all layers and their
    recompute; `false` rebuilds them in every layer."""
    double_buffered_reload: bool | Literal["auto"] = True
    """Where the plan has activations on the host, fetch those of the next layer while backward computes on another
    buffer; `false` has one buffer, and copies and computing take turns. `auto` takes the second buffer where it saves
    time."""
    activation_memory: Annotated[float, Field(ge=0.0, le=1e6)] | Literal["auto"] = "auto"
    """GiB of the device for what backward needs, reload buffers included; `auto` takes what is free."""
    host_memory: Annotated[float, Field(ge=0.0, le=1e6)] | Literal["auto"] = "auto"
    """GiB of pinned host memory for the rest; `auto` takes at most four fifths of what is free."""


class OutputSection(Section):
    """The run folder and what goes into it."""

    dir: str = Field(min_length=1)
    """Run folder, relative to the folder that the command is given in."""
    save_every_steps: int | None = Field(default=None, ge=1)
    """Write a checkpoint after every so many steps; none writes one at the end only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are removed."""
    log_every_steps: int = Field(default=1, ge=1)
    """Steps between two lines of `metrics.jsonl`; metrics are fetched from the device only then."""
    deliver: Literal["auto", "best", "last"] = "auto"
    """Which weights are the result in `adapter/` or `model/`: the `last`, or the `best`, those of the lowest held-out
    loss. `auto` takes the best with `evaluation.early_stopping`, else the last. With `evaluation.every_steps` the best
    are kept in `best/` in any case; `result.json` names both."""
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = []
    """Experiment trackers that get the metrics too; none starts unless it is named here."""


class Recipe(Section):
    """A complete run: what is trained, on what, how, and where the result goes."""

    model: ModelSection
    adapter: Adapter = LoraAdapter()
    data: DataSection
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    optimizations: OptimizationsSection = OptimizationsSection()
    output: OutputSection
