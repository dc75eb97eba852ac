"""RMSNorm, and modules of which some parameters stay float32 whatever they are cast to."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dspark.target.rows import MOST_ROWS

__all__ = ["Float32Module", "RMSNorm", "reads_prompt", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., size] in the dtype of x
    """x / sqrt(mean(x²) + eps) in float32, cast back, then times the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def reads_prompt(x: Tensor) -> bool:
    """Whether rows [..., D] are so many, on a GPU and without gradients, that kernels take them.

    The rows of a step stay with the library's own functions, whatever they are computed with.
    """
    return x.is_cuda and x.shape[:-1].numel() > MOST_ROWS and not torch.is_grad_enabled()


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] in its own dtype
        if reads_prompt(x) and x.dtype == self.weight.dtype:
            from dspark.kernels.prompt_rows import norm_rows

            return norm_rows(x, self.weight, self.eps)[1]
        return rms_norm(x, self.weight, self.eps)

    def added(self, x: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """x + part, and its norm."""
        if reads_prompt(x) and x.dtype == part.dtype == self.weight.dtype:
            from dspark.kernels.prompt_rows import norm_rows

            return norm_rows(x, self.weight, self.eps, part)
        total = x + part
        return total, self(total)


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
