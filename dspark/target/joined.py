"""Weights that lie one behind the other in memory, and products with all of them at once.

Symbols: R rows, D inputs, N outputs of a matrix.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["in_a_row", "products"]


def in_a_row(parts: Sequence[Tensor]) -> Tensor | None:
    """All values of ``parts``, flat, if each begins where the one before ends."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        # by the storage itself: without memory, as on "meta", all addresses are alike
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def products(
    x: Tensor,  # [R, D]
    linears: Sequence[nn.Module],  # without biases
) -> tuple[Tensor, ...]:  # each [R, N], rows may have a stride
    """``x`` through each of them: one product where their weights lie in a row.

    For inference: no gradient reaches weights that do.
    """
    weights: list[Tensor] = [linear.weight for linear in linears]  # type: ignore[misc]
    whole = in_a_row([weight.detach() for weight in weights])
    if whole is None:
        return tuple(F.linear(x, weight) for weight in weights)
    out = F.linear(x, whole.view(-1, x.shape[-1]))
    return out.split([len(weight) for weight in weights], -1)  # type: ignore[no-untyped-call, no-any-return]
