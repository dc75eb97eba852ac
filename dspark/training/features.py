"""Target features of a batch: computed here (online) or read from capture shards (offline).

Both give the same numbers for the same rows, up to the dtype that the shards were written in.
"""

from collections.abc import Sequence

from torch import Tensor

from dspark.target import Features, Target

__all__ = ["batch_features", "gather_rows"]


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
