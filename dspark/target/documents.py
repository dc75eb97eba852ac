"""Features of documents of different lengths: alone on a CPU, with others of like length elsewhere.

How a CPU adds depends on the shape of what it adds. So a document is computed there without
padding and without others, and its features are the same bits in a training, in the workers of
`split` and in `dspark capture`, whatever it is batched with.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspark.target.base import Features, Target

__all__ = ["document_features"]

_FILL = 0.8
"""Least length of a document beside the longest one it is computed with."""


def document_features(
    target: Target,
    layer_ids: Sequence[int],
    documents: Sequence[Tensor],  # [S] int64 each
    *,
    most: int | None = None,
) -> Iterator[tuple[int, Features]]:
    """Number and features [S, ...] of every document; ``most`` of them at a time, None: any.

    What is yielded are views of all that were computed together.
    """
    alone = target.device.type == "cpu"
    for group in _alike([len(ids) for ids in documents], 1 if alone else most):
        ids = pad_sequence([documents[number] for number in group], batch_first=True)
        found = target.features(ids, layer_ids)
        for place, number in enumerate(group):
            tokens = len(documents[number])
            yield number, Features(found.taps[place, :tokens], found.last_hidden[place, :tokens])


def _alike(lengths: Sequence[int], most: int | None) -> list[list[int]]:
    """Numbers of documents that are computed together: little of a group is padding."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = not groups or len(groups[-1]) == most
        if not full and lengths[number] >= _FILL * lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
