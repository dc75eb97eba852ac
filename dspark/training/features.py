"""Target features of a batch: computed here (online) or read from capture shards (offline).

Both, and the target workers of `split`, give the same numbers for the same rows, up to the dtype
that the shards were written in.
A row may turn out to have none that can be learned from: it is left out here, as capture does.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.corpus.storage import decoded
from dspark.target import Features, Target
from dspark.target.documents import document_features

__all__ = ["batch_features", "gather_rows", "silence"]

_PACKED = 8192
"""Longest row for which a mask of all its pairs of positions is made."""


def batch_features(
    target: Target,
    layer_ids: Sequence[int],
    input_ids: Tensor,  # [B, S] int64, padded on the right
    taps: Tensor | None,  # [B, S, F*D] from shards, else None
    last_hidden: Tensor | None,  # [B, S, D] from shards, else None
    spans: Sequence[tuple[int, int, int]] = (),  # row, first position and tokens of each document
    *,
    tap_scales: Tensor | None = None,  # [B, S, F], of 8-bit taps
    last_scales: Tensor | None = None,  # [B, S, 1], of an 8-bit final state
    partial: bool = False,
    packed: Callable[[Tensor, Sequence[int], Tensor], Features | None] | None = None,
) -> Features:
    """Taps and last hidden states on the device of ``input_ids``, without a graph.

    With ``partial`` the documents of ``spans`` alone are computed, and the others' features are 0.
    ``packed`` stands in for `Target.packed_features`.

    Padding on the right needs no mask: nothing before it can see it, and no anchor stands in it.
    Documents that share a row are computed under a mask where the target can (a pass for every
    length of document would cost more than the pass itself), else apart. On a CPU each is computed
    alone, as capture does, so that all features are the same bits.
    """
    if taps is not None and last_hidden is not None:
        return Features(decoded(taps, tap_scales), decoded(last_hidden, last_scales))
    together = input_ids.device.type != "cpu" and not partial
    if not spans or (together and all(first == 0 for _, first, _ in spans)):
        return target.features(input_ids, layer_ids)
    found: Features | None = None
    if together and input_ids.shape[1] <= _PACKED:
        found = (packed or target.packed_features)(
            input_ids, layer_ids, _documents(input_ids, spans)
        )
        if found is not None:
            return found
    documents = [input_ids[row, first : first + tokens] for row, first, tokens in spans]
    for number, part in document_features(target, layer_ids, documents):
        if found is None:
            shape = input_ids.shape
            found = Features(
                part.taps.new_zeros(*shape, part.taps.shape[-1]),
                part.last_hidden.new_zeros(*shape, part.last_hidden.shape[-1]),
            )
        row, first, tokens = spans[number]
        found.taps[row, first : first + tokens] = part.taps
        found.last_hidden[row, first : first + tokens] = part.last_hidden
    assert found is not None
    return found


def _documents(input_ids: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """[B, S] int64 on the CPU: the number of each position's document, their count in padding."""
    documents = torch.full(input_ids.shape, len(spans), dtype=torch.int64)
    for number, (row, first, tokens) in enumerate(spans):
        documents[row, first : first + tokens] = number
    return documents


def gather_rows(
    last_hidden: Tensor,  # [B, S, D]
    rows: Tensor,  # [N, K] int64, indices into B*S
) -> Tensor:  # [N, K, D]
    """The few rows that pass through the target's head: an [S, V] of logits never exists."""
    return last_hidden.flatten(0, 1)[rows]


@torch.no_grad()
def silence(
    features: Features,
    usable: Tensor,  # [M] bool, by document
    documents: Tensor,  # [B, S] int64, the document of each position; M in padding
    mask: Tensor,  # [N, K] bool, supervised slots
    block_documents: Tensor,  # [N] int64
) -> Tensor:  # [N, K] bool
    """Set features of documents that are not usable to 0, in place, and unsupervise their slots.

    A masked slot adds 0 to every sum, and only finite numbers make that 0 a number. The divisors of
    the step were fixed before (see `losses.denominators`) and still count these slots: so little
    is lost (1% of the rows at most) that no second round of communication is worth it.
    """
    # padding too: behind a broken row it is as broken, and a masked NaN is still a NaN
    out = torch.cat([~usable, usable.new_ones(1)])[documents]
    for tensor in (features.taps, features.last_hidden):
        tensor.masked_fill_(out[..., None], 0)
    return mask & usable[block_documents][:, None]
