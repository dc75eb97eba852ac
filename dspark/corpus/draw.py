"""Draw the next token of every row, each row with its own sampling setting and its own uniforms.

Filters are those of transformers' logits warpers, in their order: temperature, top-k (ties with
the k-th stay), top-p (the smallest set whose mass reaches p, the token that reaches it included),
min-p. A token is then found by inverting the cumulative distribution at the row's uniform number,
so what a row becomes depends on its own seed and logits, not on its neighbours.

Symbols: T rows, V vocabulary, C candidates.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config import SamplingSetting

__all__ = ["Draw"]

# Sorting a whole vocabulary for thousands of rows costs more than the forward pass; nearly always
# the kept tokens are among this many, and the few rows where they are not are sorted in full.
_CANDIDATES = 256
_GROUP = 256


class Draw:
    """Settings and uniform numbers of T rows on one device.

    Args:
        settings: one a row.
        uniforms: [T, N] float64 in [0, 1); column n is used for the row's n-th token.
    """

    def __init__(self, settings: Sequence[SamplingSetting], uniforms: Tensor) -> None:
        self._settings = list(settings)
        self._uniforms = uniforms
        self._group()

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self._settings = [self._settings[row] for row in rows]
        self._uniforms = self._uniforms[torch.tensor(rows, device=self._uniforms.device)]
        self._group()

    def __call__(self, logits: Tensor, step: int) -> Tensor:  # [T, V] -> [T] int64
        """One token a row. Waits for the device only if a setting filters."""
        uniform = self._uniforms[:, step]
        if len(self._greedy) == len(logits):
            return logits.argmax(-1)
        tokens = logits.new_empty(len(logits), dtype=torch.int64)
        if len(self._greedy):
            tokens[self._greedy] = logits[self._greedy].argmax(-1)
        if len(self._plain):
            rows = self._plain
            scaled = logits[rows].float() / self._temperature[rows, None]
            tokens[rows] = _invert(scaled.softmax(-1), uniform[rows])
        if len(self._filtered):
            rows = self._filtered
            scaled = logits[rows].float() / self._temperature[rows, None]
            tokens[rows] = self._draw_filtered(scaled, rows, uniform[rows])
        return tokens

    def _group(self) -> None:
        device = self._uniforms.device
        kinds: dict[str, list[int]] = {"greedy": [], "plain": [], "filtered": []}
        for row, one in enumerate(self._settings):
            filters = one.top_p < 1 or one.top_k > 0 or one.min_p > 0
            kind = "greedy" if one.temperature == 0 else "filtered" if filters else "plain"
            kinds[kind].append(row)
        self._greedy, self._plain, self._filtered = (
            torch.tensor(rows, dtype=torch.int64, device=device) for rows in kinds.values()
        )

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._temperature = column([one.temperature for one in self._settings])
        self._top_p = column([one.top_p for one in self._settings])
        self._top_k = column([max(one.top_k, 0) for one in self._settings], torch.int64)
        self._min_p = column([one.min_p for one in self._settings])

    def _draw_filtered(self, scaled: Tensor, rows: Tensor, uniform: Tensor) -> Tensor:
        vocabulary = scaled.shape[-1]
        count = min(_CANDIDATES, vocabulary)
        tokens, covered = self._among(scaled, rows, uniform, count)
        if count < vocabulary:
            open_rows = (~covered).nonzero().flatten()  # waits for the device
            if len(open_rows):
                tokens[open_rows], _ = self._among(
                    scaled[open_rows], rows[open_rows], uniform[open_rows], vocabulary
                )
        return tokens

    def _among(
        self, scaled: Tensor, rows: Tensor, uniform: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:  # tokens [T], covered [T] bool: the kept tokens are among `count`
        values, ids = scaled.topk(count, dim=-1)
        p = (values - scaled.logsumexp(-1, keepdim=True)).exp()  # [T, C], descending
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        limited = top_k > 0
        last = (top_k.clamp(1, count) - 1)[:, None]
        in_top_k = ~limited[:, None] | (values >= values.gather(-1, last))
        p = p * in_top_k
        reached = p.double().cumsum(-1)
        mass = torch.where(limited, reached[:, -1], 1.0)
        in_top_p = reached - p < (top_p * mass)[:, None]
        in_min_p = p >= min_p[:, None] * p[:, :1]
        kept = p.double() * (in_top_p & in_min_p)
        cumulative = kept.cumsum(-1)
        position = _first_above(cumulative, uniform * cumulative[:, -1])
        tokens = ids.gather(-1, position[:, None])[:, 0]
        # a limited row's ties may go on behind the candidates unless the k-th value is above them
        covered = torch.where(
            limited,
            (top_k <= count) & (values.gather(-1, last)[:, 0] > values[:, -1]),
            (reached[:, -1] >= top_p) | (p[:, -1] < min_p * p[:, 0]),
        )
        # with top_p = 1 the mass never counts as reached by rounding alone
        return tokens, covered & (limited | (top_p < 1) | (p[:, -1] < min_p * p[:, 0]))


def _invert(p: Tensor, uniform: Tensor) -> Tensor:  # [T, V] float32, [T] float64 -> [T] int64
    """The token at which the cumulative distribution passes ``uniform``.

    Two levels: sums of groups of tokens first, so that no [T, V] cumulative sum is written, and
    both in float64, whose rounding no draw can notice.
    """
    padded = F.pad(p, (0, -p.shape[-1] % _GROUP)).view(len(p), -1, _GROUP)
    sums = padded.sum(-1, dtype=torch.float64).cumsum(-1)  # [T, G]
    aim = uniform * sums[:, -1]
    group = _first_above(sums, aim)
    before = F.pad(sums, (1, 0)).gather(-1, group[:, None])[:, 0]
    row = torch.arange(len(p), device=p.device)
    inner = padded[row, group].double().cumsum(-1)
    return group * _GROUP + _first_above(inner, aim - before)


def _first_above(cumulative: Tensor, aim: Tensor) -> Tensor:  # [T, C], [T] -> [T]
    """First index whose cumulative mass exceeds ``aim``; never one of zero mass at the end."""
    total = cumulative[:, -1:]
    last = (cumulative < total).sum(-1)
    return torch.minimum((cumulative <= aim[:, None]).sum(-1), last)
