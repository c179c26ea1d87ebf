"""Checks that the program makes on the model it is about to train, before they could cost a GPU hour."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from finetune.data.packed_metadata import PackedMetadata, build_packed_metadata
from finetune.errors import GateStopped

PROBE_TOKENS = 16
RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest change of a hidden state, over their standard deviation. A masked token contributes exactly nothing; what is
left is the rounding of products whose tiles shift with the routing. Contamination changes states by their own size."""
INT8_TOLERANCE = 5e-2
"""LLM.int8 multiplies columns with large inputs in fp16, and which these are is decided over the whole batch, so a
neighbour may change how a document's products are rounded to 8 bits."""

LOSS_TOLERANCE = 1e-3
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Check:
    """One thing that was checked, for the report."""

    name: str
    ok: bool | None
    """None stands for: does not apply to this run."""
    detail: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@torch.no_grad()
def check_documents_are_separate(
    model: nn.Module, *, num_rows: int, takes_metadata: bool = False, is_int8: bool = False
) -> Check:
    """Changes every token of a row's first document and compares the second one's hidden states.

    Args:
        num_rows: of the embedding; ids are drawn below it.
        takes_metadata: the model's attention is one of ours and wants the batch's boundaries.
        is_int8: the model computes in LLM.int8.

    Raises:
        GateStopped: the second document saw the first, so training packed rows would mix documents.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, num_rows, (3, PROBE_TOKENS), generator=generator)
    metadata = build_packed_metadata([(PROBE_TOKENS, PROBE_TOKENS)], row_length=2 * PROBE_TOKENS).to(device)
    was_training = model.training
    model.eval()
    states = [
        _last_hidden_states(
            model, torch.cat((first, tokens[2]))[None].to(device), metadata, takes_metadata=takes_metadata
        )[:, PROBE_TOKENS:]
        for first in tokens[:2]
    ]
    model.train(was_training)
    scale = states[0].float().std().item()
    change = (states[0].float() - states[1].float()).abs().max().item() / (scale or 1.0)
    limit = INT8_TOLERANCE if is_int8 else RELATIVE_TOLERANCE.get(states[0].dtype, 5e-2)
    detail = f"a packed document changes by {change:.1e} of its states' spread when its neighbour does (limit {limit})"
    if change > limit:
        raise GateStopped(
            f"packed documents see each other on this model and attention: {detail}",
            place="data.packing",
            remedy="Set data.packing=false, or choose another model.attention.",
        )
    return Check("packed documents do not see each other", True, detail)


@torch.no_grad()
def check_weights_are_finite(model: nn.Module) -> Check:
    """Looks at every trained weight, so that a last step that broke them is not saved as a result.

    Raises:
        GateStopped: a weight is NaN or infinite.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    broken = [name for name, parameter in trained if not bool(parameter.isfinite().all())]
    if broken:
        raise GateStopped(
            f"{len(broken)} of {len(trained)} trained tensors hold NaN or infinite values, such as {broken[0]}",
            place="the trained weights",
            remedy="Lower training.learning_rate and train again. No adapter was written.",
        )
    return Check("trained weights are finite", True, f"{len(trained)} tensors")


@torch.no_grad()
def check_weights_are_those_in(folder: Path, model: nn.Module) -> Check:
    """Compares the weights of a result folder with those in the model, bit by bit: loss alone cannot tell weights of
    two steps apart. A whole model is read once more, on the CPU.

    Raises:
        GateStopped: a tensor differs, or is only here or only there.
    """
    if isinstance(model, PeftModel):
        inside = get_peft_model_state_dict(model, save_embedding_layers=False)
        saved = load_file(folder / ADAPTER_FILE)
    else:
        whole: Any = model
        inside = whole.state_dict()
        saved = type(whole).from_pretrained(folder, dtype=whole.dtype).state_dict()
    other = [name for name in sorted(inside.keys() | saved.keys()) if not _is_equal(inside.get(name), saved.get(name))]
    if other:
        raise GateStopped(
            f"the best weights were not read back: {len(other)} of {len(inside)} tensors are other than those saved, "
            f"such as {other[0]}",
            place=str(folder),
            remedy="Use the last weights in last/, set output.deliver=last, and please report this.",
        )
    return Check("the delivered weights are read back", True, f"{len(inside)} tensors, equal bit by bit")


def _is_equal(inside: torch.Tensor | None, saved: torch.Tensor | None) -> bool:
    return inside is not None and saved is not None and torch.equal(inside.cpu(), saved.cpu())


def check_loss_again(loss: float | None, *, expected: float, folder: str) -> Check:
    """Compares the held-out loss of weights read back from `folder` with the one measured when they were saved.

    Raises:
        GateStopped: it differs by more than the batch size, which memory may have halved since, can explain.
    """
    again = "not measured" if loss is None else f"{loss:.4f}"
    detail = f"held-out loss {again} of the best weights read back, {expected:.4f} when they were saved"
    if loss is None or not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE, abs_tol=1e-4):
        raise GateStopped(
            f"the best weights are not what was measured: {detail}",
            place=folder,
            remedy="Use the last weights in last/, set output.deliver=last, and please report this.",
        )
    return Check("the delivered weights are the ones measured", True, detail)


def _last_hidden_states(
    model: nn.Module, input_ids: torch.Tensor, metadata: PackedMetadata, *, takes_metadata: bool
) -> torch.Tensor:
    more = {"packed_metadata": metadata} if takes_metadata else {}
    outputs = model(
        input_ids=input_ids, position_ids=metadata.position_ids, use_cache=False, output_hidden_states=True, **more
    )
    return outputs.hidden_states[-1]
