"""A norm and the modules that read it as one module in tiles, so that the norm's output is never there as a whole.

    q, k, v = q_proj(norm(x)), k_proj(norm(x)), v_proj(norm(x))        y = mlp(norm(x))

x is the residual stream, which lives anyway. Saves the 2 * H bytes a token (16 bits) that the readers would keep of the
norm's output. Nothing is known of the layer between norm and readers, so the norm gives a stand-in: a reader that gets
it runs the joint module, and everything else that touches it gets the norm's real output.

Legend: H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from finetune.optimizations.activations.tiled_mlp import TiledMlp

_LAYOUT: Any = frozenset(
    {
        Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue] - the getters are there at run time
        Tensor.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
        Tensor.device.__get__,  # pyright: ignore[reportAttributeAccessIssue]
        Tensor.size,
        Tensor.dim,
    }
)


class _Ahead(Tensor):
    """Stands for a norm's output; takes no memory."""

    owner: AfterNorm
    x: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LAYOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(_Ahead, lambda one: one.owner.norm_output(one), (args, kwargs or {}))
        return func(*args, **kwargs)


class AfterNorm:
    """One norm and its readers, all of them in tiles already.

    Args:
        readers: the modules that get the norm's output, in the order of their calls.
        is_output_unread, skip_last: see `tile_mlp`.
    """

    def __init__(
        self,
        norm: nn.Module,
        readers: Sequence[nn.Module],
        *,
        tile_tokens: int,
        is_output_unread: Callable[[], bool],
        skip_last: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        modules = [norm, *readers]
        tiled: list[Any] = [module.forward.__self__ for module in modules]  # pyright: ignore[reportFunctionMemberAccess]
        own_norm, own = tiled[0].untiled, [one.untiled for one in tiled[1:]]

        def joint(x: Tensor) -> tuple[Tensor, ...]:
            normed = own_norm(x)
            return tuple(read(normed) for read in own)

        self._norm_output_of: Callable[[Tensor], Tensor] = tiled[0].forward
        self._joint = TiledMlp(nn.ModuleList(modules), joint, tile_tokens, is_output_unread, skip_last)
        self._modules, self._alone = modules, [module.forward for module in modules]
        self._found: dict[int, Tensor] = {}
        """Outputs of the joint module that wait for their reader's call, by its place."""
        norm.forward = self._run_norm
        for index, reader in enumerate(readers):
            reader.forward = self._reader(index, self._alone[index + 1])

    def undo(self) -> None:
        """Takes norm and readers apart again."""
        for module, forward in zip(self._modules, self._alone, strict=True):
            module.forward = forward

    def norm_output(self, ahead: _Ahead) -> Tensor:
        """Returns what the stand-in stands for."""
        return self._norm_output_of(ahead.x)

    def _run_norm(self, x: Tensor) -> Tensor:
        ahead = x.new_empty(()).expand(x.shape).as_subclass(_Ahead)
        ahead.owner, ahead.x = self, x
        self._found.clear()  # of a forward that was given up
        return ahead

    def _reader(self, index: int, alone: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            if not isinstance(hidden, _Ahead):
                return alone(hidden)
            if hidden.owner is not self:
                return alone(hidden.owner.norm_output(hidden))
            if index not in self._found:
                self._found.update(enumerate(self._joint.outputs(hidden.x)))
            return self._found.pop(index)

        return forward


def can_stand_in(norm: nn.Module, readers: Sequence[nn.Module]) -> bool:
    """Whether all are in tiles, each alone."""
    return bool(readers) and all(
        isinstance(getattr(module.forward, "__self__", None), TiledMlp) for module in (norm, *readers)
    )
