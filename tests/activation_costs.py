"""Costs for tests of the activation plan: small round ones, and ones like a 14B model on a large card."""

from __future__ import annotations

from dataclasses import replace

from finetune.optimizations.activations.types import GIB, Group, GroupCost, LayerCosts, Link, ModelCosts


def small_costs(*, num_layers: int = 4, num_buffers: int = 2, **changes: object) -> ModelCosts:
    """Round numbers: 100 bytes of input, 1 s of forward, 3 s of backward, of which 1 s remakes two groups."""
    groups = {
        Group.INPUT: GroupCost(100, 0.0),
        Group.QKV: GroupCost(200, 0.2),
        Group.GATE_UP: GroupCost(400, 0.6),
    }
    kind = LayerCosts(
        groups=groups,
        forward_seconds=1.0,
        backward_seconds=3.0,
        whole_seconds=3.0,
        whole_bytes=1000,
        forward_peak_bytes=500,
        backward_peak_bytes=700,
    )
    costs = ModelCosts(
        kinds=(kind,),
        layers=(0,) * num_layers,
        fixed_bytes=10_000,
        head_seconds=0.5,
        head_peak_bytes=600,
        optimizer_seconds=0.25,
        num_micro_batches=2,
        link=Link(to_host_bytes_per_second=200.0, to_device_bytes_per_second=100.0),
        num_buffers=num_buffers,
    )
    return replace(costs, **changes)


def qwen3_14b_costs(*, num_layers: int = 40, num_kinds: int = 1, num_buffers: int = 2) -> ModelCosts:
    """Predicted costs of Qwen3-14B with QLoRA, 16,384 packed tokens, on an H200; further kinds attend for longer."""
    tokens = 16_384
    bytes_and_saving = {  # bytes a token; milliseconds saved a GiB
        Group.INPUT: (10_240, 0.0),
        Group.QKV: (14_336, 8.0),
        Group.ATTENTION: (10_400, 3.3),
        Group.ATTENTION_OUTPUT: (10_240, 8.0),
        Group.GATE_UP: (69_632, 7.4),
    }
    kinds = []
    for kind in range(num_kinds):
        longer = 0.004 * kind
        groups = {
            group: GroupCost(size * tokens, saving * 1e-3 * size * tokens / GIB)
            for group, (size, saving) in bytes_and_saving.items()
        }
        attention = groups[Group.ATTENTION]
        groups[Group.ATTENTION] = replace(attention, seconds=attention.seconds + longer)
        remade = sum(cost.seconds for cost in groups.values())
        forward, whole = 0.0166 + longer, 0.036 + 3 * longer
        kinds.append(
            LayerCosts(
                groups=groups,
                forward_seconds=forward,
                backward_seconds=whole - forward + remade + 0.0005,  # norms, rotary and SwiGLU are remade in any case
                whole_seconds=whole,
                whole_bytes=250_200 * tokens,
                forward_peak_bytes=60_000 * tokens,
                backward_peak_bytes=101_000 * tokens,
            )
        )
    return ModelCosts(
        kinds=tuple(kinds),
        layers=tuple(index % num_kinds for index in range(num_layers)),
        fixed_bytes=int(8.2 * GIB),
        head_seconds=0.08,
        head_peak_bytes=int(0.9 * GIB),
        optimizer_seconds=0.03,
        num_micro_batches=1,
        link=Link(55e9, 55e9),
        num_buffers=num_buffers,
    )
