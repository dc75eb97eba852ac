"""RMSNorm, and modules of which some parameters stay float32 whatever they are cast to."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["Float32Module", "RMSNorm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., size] in the dtype of x
    """x / sqrt(mean(x²) + eps) in float32, cast back, then times the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] in its own dtype
        return rms_norm(x, self.weight, self.eps)


class Float32Module(nn.Module):
    """A module whose parameters and buffers named in ``float32`` ignore casts (`.bfloat16()`)."""

    float32: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "Float32Module":
        before = {name: getattr(self, name).data for name in self.float32}
        super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != torch.float32:
                new.data = old.to(new.device)
        return self
