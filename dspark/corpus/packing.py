"""Several documents in one row, so that little of a forward pass is padding.

Which documents share a row is a function of their lengths alone, and stays the same throughout a
run. They never see each other: the target computes each alone, and the draft's positions, context,
anchors and labels end with the document (see `draft.anchors`).
"""

import bisect
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark.corpus.dataset import Row
from dspark.errors import DataError

__all__ = ["Documents", "PackedRows", "pack"]


class Documents(Protocol):
    """What is packed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def lengths(self) -> Sequence[int]: ...

    def used_ids(self) -> set[int]: ...


class PackedRows:
    """Rows of up to ``length`` tokens, each of whole documents.

    Raises:
        DataError: a document is longer than a row.
    """

    def __init__(self, documents: Documents, length: int) -> None:
        self.documents = documents
        lengths = documents.lengths()
        longest = max(lengths, default=0)
        if longest > length:
            raise DataError(
                f"a document holds {longest} tokens but data.pack_length is {length}: set it to "
                f"{longest} or more"
            )
        self.groups = pack(lengths, length)
        self.fill = sum(lengths) / (length * len(self.groups)) if self.groups else 0.0
        """Share of the rows' room that tokens take."""

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Row:
        held = [self.documents[number] for number in self.groups[index]]

        def joined(name: str) -> Tensor | None:
            tensors: list[Tensor | None] = [getattr(row, name) for row in held]
            like = next((tensor for tensor in tensors if tensor is not None), None)
            if like is None:
                return None
            # zeros where a document's features are still to be computed
            return torch.cat(
                [
                    like.new_zeros(len(row.input_ids), like.shape[-1]) if tensor is None else tensor
                    for row, tensor in zip(held, tensors, strict=True)
                ]
            )

        return Row(
            id="+".join(row.id for row in held),
            input_ids=torch.cat([row.input_ids for row in held]),
            loss_mask=torch.cat([row.loss_mask for row in held]),
            taps=joined("taps"),
            last_hidden=joined("last_hidden"),
            documents=tuple((row.id, len(row.input_ids)) for row in held),
            tap_scales=joined("tap_scales"),
            last_scales=joined("last_scales"),
            sources=tuple(row.source for row in held),
        )

    def used_ids(self) -> set[int]:
        """Every token id that occurs: none of them can be the mask token."""
        return self.documents.used_ids()


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the documents of every row: longest first, each where least room is left.

    At most 11/9 of the fewest rows possible, and one more. Rows and their documents are in the
    order of the numbers.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), rising
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[number], -1))
        if place == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        bisect.insort(room, (left - lengths[number], row))
    return sorted(sorted(row) for row in rows)
