"""One forward pass of the draft and its objective, as the one module that is prepared.

Everything that reads a trainable parameter happens inside `forward`, so that data parallelism
and autocast see all of it. The frozen target stays outside. The objective goes through `one_pass`
on a GPU (unless `loss.one_pass` is off or logits are neither bfloat16 nor float32), else through
`chunked`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config import LossSettings
from dspark.draft.model import DSparkDraftModel
from dspark.losses import objective_chunked, one_pass

__all__ = ["Objective"]


class Objective(nn.Module):
    """Features and blocks in; this forward pass's share of the step's loss, and its sums, out."""

    def __init__(
        self,
        draft: DSparkDraftModel,
        target_head: Callable[[Tensor], Tensor],  # [..., D] -> [..., V]
        settings: LossSettings,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        """``autocast``: what to cast products to here, where no one outside does."""
        super().__init__()
        self.draft = draft
        self._target_head = target_head
        self._settings = settings
        self._autocast = autocast

    def forward(
        self,
        taps: Tensor,  # [B, S, F*D]
        target_hidden: Tensor,  # [N, K, D], the rows that predict the labels
        *,
        anchor_ids: Tensor,  # [B, A] int64
        anchors: Tensor,  # [B, A] int64
        starts: Tensor | None = None,  # [B, S] int64, first position of each one's document
        anchor_starts: Tensor | None = None,  # [B, A] int64
        block_rows: Tensor,  # [N] int64, the supervised blocks among the B*A
        labels: Tensor,  # [N, K] int64
        prev_ids: Tensor,  # [N, K] int64
        mask: Tensor,  # [N, K] bool
        denominators: Tensor,  # [2] float64, of the whole step over all processes
        ramp: float,
    ) -> tuple[Tensor, Tensor]:  # [] with a graph, [3·K + 10] float64 without
        """Loss share and `Sums.to_vector`. With N = 0 the loss is 0 and so is every gradient."""
        heads: dict[str, Any] = {
            "draft": self.draft,
            "target_head": self._target_head,
            "settings": self._settings,
        }
        casting = nullcontext()
        if self._autocast is not None:
            casting = torch.autocast(taps.device.type, self._autocast)  # type: ignore[assignment]
        with casting:
            hidden = self.draft(taps, anchor_ids, anchors, starts, anchor_starts)
            hidden = hidden.flatten(0, 1)[block_rows]
            blocks = (hidden, target_hidden, labels, mask, prev_ids)
            if self._settings.one_pass and one_pass.usable(self.draft, hidden):
                loss, sums = one_pass.objective_in_one_pass(
                    *blocks, **heads, denominators=denominators, ramp=ramp
                )
                return loss, sums.to_vector()
            sums = objective_chunked(*blocks, **heads)
        return sums.loss(denominators, self._settings, ramp), sums.to_vector()
