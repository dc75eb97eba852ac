"""Documents as one stream of tokens, shuffled anew for every pass and cut into rows of one length.

A row goes on where the one before ended: nothing is padded, left out or repeated within a pass.
What follows a document is taught to nothing that stands before it: the label of its first token is
-100.

Symbols: N tokens, B rows of a batch, T row length.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.errors import DataError

__all__ = ["TokenStream"]

Ids = npt.NDArray[np.int32]


class TokenStream:
    """``documents`` are token ids, each with whatever marks its beginning."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents: list[Ids] = [np.asarray(one, dtype=np.int32) for one in documents if one]
        self.num_tokens = sum(len(one) for one in self._documents)

    def batches(
        self, batch: int, length: int, seed: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and labels, each [B, T + 2] int64, without end; rows overlap by the last two tokens.

        Raises:
            DataError: there is not one batch of text.
        """
        rows = (self.num_tokens - 2) // length
        if rows < batch:
            raise DataError(
                f"{self.num_tokens} tokens are no batch of {batch} rows of {length}; "
                "give more text, or a smaller --batch or --length"
            )
        offsets = torch.arange(length + 2, device=device)
        generator = np.random.default_rng(seed)
        while True:
            order = [self._documents[i] for i in generator.permutation(len(self._documents))]
            ids = torch.from_numpy(np.concatenate(order)).to(device)
            firsts = np.cumsum([0, *(len(one) for one in order[:-1])])
            labels = ids.clone()
            labels[torch.from_numpy(firsts).to(device)] = -100
            for first in range(0, rows - batch + 1, batch):
                starts = torch.arange(first, first + batch, device=device) * length
                places = starts[:, None] + offsets
                yield ids[places].long(), labels[places].long()
