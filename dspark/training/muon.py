"""Muon: momentum made orthogonal by a Newton-Schulz iteration, for matrices inside a model.

Matrices of one shape, turned so that they are wide, go through the iteration as one batch: a small
model has hundreds, and one at a time they would cost more launches than the model itself. Source:
K. Jordan and others, Muon (2024); the factor for tall matrices is theirs too.

Symbols: N matrices, R rows <= C columns of them as turned.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Muon", "orthogonalised"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalised(matrices: Tensor) -> Tensor:  # [N, R, C] -> [N, R, C], singular values near 1
    """U V^T of each, roughly: singular values end between 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    # rounding does no harm here, and tensor cores want 16 bits
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    out: Tensor = x.to(matrices.dtype)
    return out


@dataclass
class _Group:
    parts: list[tuple[Tensor, bool]]
    """Parameters [..., rows, columns] and whether they are turned."""
    momentum: Tensor  # [N, R, C]


class Muon:
    """Steps ``matrices`` [..., rows, columns]; leading dimensions are matrices of their own."""

    def __init__(
        self, matrices: Iterable[Tensor], *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        by_shape: dict[tuple[int, int], list[tuple[Tensor, bool]]] = defaultdict(list)
        for one in matrices:
            rows, columns = one.shape[-2:]
            by_shape[min(rows, columns), max(rows, columns)].append((one, rows > columns))
        self._groups = [
            _Group(parts, torch.zeros_like(torch.cat([_wide(one, turn) for one, turn in parts])))
            for parts in by_shape.values()
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every matrix that has a gradient somewhere in its group; gradients stay."""
        for group in self._groups:
            gradient = torch.cat(
                [
                    _wide(one.grad if one.grad is not None else torch.zeros_like(one), turn)
                    for one, turn in group.parts
                ]
            )
            group.momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(gradient.lerp_(group.momentum, self.momentum))
            sizes = [one.shape[:-2].numel() for one, _ in group.parts]
            for (one, turn), part in zip(group.parts, torch.split(update, sizes), strict=True):
                part = (part.mT if turn else part).reshape(one.shape)
                rows, columns = one.shape[-2:]
                one.mul_(1 - learning_rate * self.weight_decay)
                one.add_(part, alpha=-learning_rate * max(1.0, rows / columns) ** 0.5)


def _wide(one: Tensor, turn: bool) -> Tensor:  # [..., rows, columns] -> [N, R, C]
    flat = one.detach().reshape(-1, *one.shape[-2:])
    return flat.mT if turn else flat
