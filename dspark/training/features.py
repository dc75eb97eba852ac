"""Target features of a batch: computed here (online) or read from capture shards (offline).

Both, and the target workers of `split`, give the same numbers for the same rows, up to the dtype
that the shards were written in.
A row may turn out to have none that can be learned from: it is left out here, as capture does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.target import Features, Target

__all__ = ["batch_features", "gather_rows", "silence"]


def batch_features(
    target: Target,
    layer_ids: Sequence[int],
    input_ids: Tensor,  # [B, S] int64, padded on the right
    taps: Tensor | None,  # [B, S, F*D] from shards, else None
    last_hidden: Tensor | None,  # [B, S, D] from shards, else None
) -> Features:
    """Taps and last hidden states on the device of ``input_ids``, without a graph.

    Padding on the right needs no mask: nothing before it can see it, and no anchor stands in it.
    """
    if taps is not None and last_hidden is not None:
        return Features(taps, last_hidden)
    return target.features(input_ids, layer_ids)


def gather_rows(
    last_hidden: Tensor,  # [B, S, D]
    rows: Tensor,  # [N, K] int64, indices into B*S
) -> Tensor:  # [N, K, D]
    """The few rows that pass through the target's head: an [S, V] of logits never exists."""
    return last_hidden.flatten(0, 1)[rows]


@torch.no_grad()
def silence(
    features: Features,
    usable: Tensor,  # [B] bool
    mask: Tensor,  # [N, K] bool, supervised slots
    block_rows: Tensor,  # [N] int64, blocks among the B*A
    num_anchors: int,
) -> Tensor:  # [N, K] bool
    """Set the features of rows that are not usable to 0, in place, and unsupervise their slots.

    A masked slot adds 0 to every sum, and only finite numbers make that 0 a number. The divisors of
    the step were fixed before (see `losses.denominators`) and still count these slots: so little
    is lost (1% of the rows at most) that no second round of communication is worth it.
    """
    for tensor in (features.taps, features.last_hidden):
        tensor.masked_fill_(~usable[:, None, None], 0)
    return mask & usable[block_rows // num_anchors][:, None]
