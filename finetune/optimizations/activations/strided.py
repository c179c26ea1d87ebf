"""How a tensor lies in memory, so that it comes back from the host as it went: same bytes, same strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Strided:
    """Shape, strides and format of a tensor without gaps or overlaps; others are stored as a plain copy."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        """Reads the layout of a tensor; one with gaps gets that of its contiguous copy."""
        kept = tensor if _is_dense(tensor) else tensor.contiguous()
        return cls(tensor.shape, kept.stride(), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's memory, in its own order, as bytes; a view where the tensor has no gaps."""
        detached = tensor.detach()
        kept = detached if detached.stride() == self.stride else detached.contiguous()
        return kept.as_strided((kept.numel(),), (1,)).view(torch.uint8)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that lies at the beginning of `memory` (uint8)."""
        return memory[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1),
        key=lambda pair: pair[1],
    ):
        if stride != expected:
            return False
        expected *= size
    return True
