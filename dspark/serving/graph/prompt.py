"""From a prompt to the state that the first step starts from.

The prompt is read by the target's own modules; what they remember is put where the kernels look for
it, and the draft's context is filled from the taps of the whole prompt.

Symbols: S positions, F tapped layers, D hidden, H query heads, J key/value heads and X head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from dspark.draft.layers import rotate
from dspark.serving.graph.arena import Caches
from dspark.serving.graph.weights import DraftWeights
from dspark.target.model import LingModel, Reduce
from dspark.target.mtp import nextn_latents
from dspark.target.norm import rms_norm
from dspark.target.rows import Windows
from dspark.target.state import LingCache

__all__ = ["ArenaContext", "PromptCache", "fill_context", "fill_nextn", "hand_over"]

_PIECE = 4096


class _Pairs:
    """Keys and values in the arena, [J, capacity, X] each by layer, written behind a cursor."""

    def __init__(self, pairs: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._pairs, self.length = pairs, 0

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """By layer, views [J, n, X] of what lies from position ``start`` on."""
        rows = slice(start, self.length)
        return {
            layer: (keys[:, rows], values[:, rows]) for layer, (keys, values) in self._pairs.items()
        }

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Append what `written` gave of ``rows`` positions."""
        here = slice(self.length, self.length + rows)
        for layer, held in written.items():
            for store, one in zip(self._pairs[layer], held, strict=True):
                store[:, here] = one
        self.length += rows


class PromptCache(_Pairs):
    """What a dense decoder's layers write a prompt to: the kernels' own keys and values.

    Pieces attend by SDPA. It need not be the step's arithmetic: whatever is proposed later, a
    prompt is read once, in the same pieces.
    """

    def __init__(self, caches: Caches, layer_ids: tuple[int, ...]) -> None:
        super().__init__(caches.pairs)
        self.layer_ids, self._rows = layer_ids, 0

    def begin(self, rows: int, windows: Windows, device: torch.device) -> None:
        """A piece of ``rows`` positions follows."""
        self._rows = rows

    def attend(
        self,
        layer: int,
        query: Tensor,  # [H, S, X]
        key: Tensor,  # [J, S, X]
        value: Tensor,  # [J, S, X]
        scaling: float,
    ) -> Tensor:  # [S, H, X]
        """Append, then attend to all that is held."""
        keys, values = self._pairs[layer]
        start, end = self.length, self.length + self._rows
        keys[:, start:end], values[:, start:end] = key, value
        # no bias says what is_causal does, and a piece behind another begins in the middle
        mask = causal_lower_right(self._rows, end) if start else None
        out = F.scaled_dot_product_attention(
            query[None], keys[None, :, :end], values[None, :, :end], attn_mask=mask,
            is_causal=mask is None, scale=scaling, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)

    def commit(self, rows: int) -> None:
        """Keep the piece."""
        self.length += rows


def hand_over(cache: LingCache, caches: Caches) -> None:
    """Put a prompt's state into ``caches``, as behind a step that kept no row of turn 0."""
    for index, state in cache.kda.items():
        slots = caches.kda[index]
        slots.states[0] = state.state[0].transpose(1, 2)
        slots.inputs[0, : state.tail.shape[1]] = state.tail[0]
    for index, latent in cache.latents.items():
        caches.latents[index][: cache.length] = latent.held[0, : cache.length]


def fill_context(
    draft: DraftWeights,
    caches: Caches,
    taps: Tensor,  # [S, F D] (of this rank's inputs)
    start: int = 0,
    reduce: Reduce | None = None,
) -> None:
    """Keys and values of the draft for positions ``start``...: `DSparkDraftModel.extend`.

    ``reduce``: sums over the ranks whose inputs `taps` are.

    Not by it: a rank's heads, and keys beside values, lie otherwise than in the modules.
    """
    assert caches.keys is not None
    assert caches.values is not None
    for first in range(0, len(taps), _PIECE):
        piece = taps[first : first + _PIECE].to(draft.fc.dtype)
        rows = F.linear(piece, draft.fc)
        rows = rms_norm(reduce(rows) if reduce else rows, draft.context_norm, draft.eps)
        at = start + first + torch.arange(len(piece), device=taps.device)
        angles = at[:, None].float() * draft.inverse
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos() * draft.amplitude, angles.sin() * draft.amplitude
        rotary = cos.to(rows.dtype)[None], sin.to(rows.dtype)[None]
        here = slice(start + first, start + first + len(piece))
        # a layer at a time: those of all layers together are ten times as wide as the rows
        for layer, weight in enumerate(draft.context.chunk(len(draft.layers))):
            both = F.linear(rows, weight).view(len(piece), 2, draft.groups, draft.size)
            key = rms_norm(both[:, 0], draft.context_k_norms[layer], draft.eps)
            caches.keys[layer, :, here] = rotate(key.transpose(0, 1)[None], rotary)[0]
            caches.values[layer, :, here] = both[:, 1].transpose(0, 1)


class ArenaContext(_Pairs):
    """A draft's context in the arena, from the start of a prompt on."""

    def __init__(
        self, draft: DraftWeights, caches: Caches, rank: int, reduce: Reduce | None = None
    ) -> None:
        assert caches.keys is not None
        assert caches.values is not None
        super().__init__(dict(enumerate(zip(caches.keys, caches.values, strict=True))))
        self._draft, self._caches, self._rank, self._reduce = draft, caches, rank, reduce

    def extend(self, taps: Tensor) -> None:  # [n, F D] of the whole layers
        """Append what the taps of the next ``n`` positions come to."""
        width = self._draft.fc.shape[1]
        mine = taps[:, self._rank * width : (self._rank + 1) * width]
        fill_context(self._draft, self._caches, mine, self.length, self._reduce)
        self.length += len(taps)


def fill_nextn(
    model: LingModel,
    caches: Caches,
    hidden: Tensor,  # [S, D], the target's behind its final norm
    prompt_ids: Tensor,  # [S] int64
) -> None:
    """Latents of the NEXTN block for all of a prompt but the last token, which has none behind it.

    The block attends to nothing but these, so no more of it has to run.
    """
    latents = caches.latents[model.config.num_hidden_layers]
    for first in range(0, len(hidden) - 1, _PIECE):
        rows = slice(first, min(first + _PIECE, len(hidden) - 1))
        following = prompt_ids[rows.start + 1 : rows.stop + 1]
        at = torch.arange(rows.start, rows.stop, device=hidden.device)
        latents[rows] = nextn_latents(model, hidden[None, rows], following[None], at[None])[0]
