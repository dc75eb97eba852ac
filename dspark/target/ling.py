"""A Ling-3.0 model as a target: taps, decode with rollback of recurrent state and latents.

Symbols: B batch, S positions, T rows of a call, H heads, D hidden, F tapped layers, C chunk length.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.target.base import Features, Target, check_layer_ids, join_taps
from dspark.target.config import ARCHITECTURE
from dspark.target.model import LingModel
from dspark.target.rows import chunk_masks
from dspark.target.state import Call, LingCache

__all__ = ["LingTarget"]


class LingTarget(Target):
    """A frozen `LingModel`.

    Args:
        generation: transformers' GenerationConfig of the checkpoint, for its end ids and defaults.
    """

    model: LingModel

    def __init__(
        self,
        model: LingModel,
        name: str,
        revision: str | None = None,
        generation: Any = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name, self.revision = name, revision
        self.config = model.config
        # where callers look for the author's sampling defaults
        self.model.generation_config = generation
        self.eos_ids = _ids(getattr(generation, "eos_token_id", None)) | _ids(
            model.config.eos_token_id
        )

    @property
    def embed_weight(self) -> Tensor:  # [V, D]; of this rank
        return self.model.model.word_embeddings.weight

    @property
    def head_weight(self) -> Tensor:  # [V, D]; of this rank
        return self.model.lm_head.weight

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def architecture(self) -> str:
        return ARCHITECTURE

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,  # [B, S] int64
        layer_ids: Sequence[int],
        attention_mask: Tensor | None = None,  # [B, S], only needed for padding on the left
    ) -> Features:
        """Taps and last hidden states of whole sequences, in the target's dtype."""
        check_layer_ids(layer_ids, self.num_layers)
        input_ids = input_ids.to(self.device)
        hidden, taps = self.model(
            input_ids, sequence_call(input_ids.shape, self.device, attention_mask), layer_ids
        )
        return Features(join_taps(taps, layer_ids, hidden), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden.to(self.model.lm_head.weight.device, self.dtype))

    @torch.no_grad()
    def own_logits(self, input_ids: Tensor) -> Tensor:  # [S] int64 -> [S, V]
        """Of every position, by a prefill; the weights stay as they are laid out."""
        cache = self.model.new_cache((), 1, self.device, self.dtype)
        return self.logits(self._extend(cache, input_ids.to(self.device), None)[0])

    def new_cache(self, layer_ids: Sequence[int] = ()) -> LingCache:
        check_layer_ids(layer_ids, self.num_layers)
        self.pack()
        return self.model.new_cache(tuple(layer_ids), 1, self.device, self.dtype)

    def _extend(
        self, cache: LingCache, input_ids: Tensor, count: int | None
    ) -> tuple[Tensor, Tensor]:
        rows = len(input_ids)
        cache.begin(rows if count is None else count)
        positions = cache.length + torch.arange(rows, device=self.device)
        if count is None:
            call = prefill_call(cache, positions)
        else:
            heads = self.config.num_attention_heads // self.model.ranks
            masks = chunk_masks(positions, cache.length + rows, None)
            call = Call(
                positions=positions[None],
                by_row=True,
                count=count,
                start=cache.length,
                kda=cache.kda,
                latents=cache.latents,
                masks=tuple(mask.repeat(heads, 1)[None] for mask in masks),
            )
        hidden, taps = self.model(input_ids[None], call, cache.layer_ids)
        return hidden[0], join_taps(taps, cache.layer_ids, hidden)[0]


def sequence_call(
    shape: torch.Size, device: torch.device, attention_mask: Tensor | None = None
) -> Call:
    """Whole sequences [B, S] without a cache; the mask matters for padding on the left only."""
    batch, length = shape
    if attention_mask is None or bool(attention_mask[:, 0].all()):
        positions = torch.arange(length, device=device).expand(batch, length)
        return Call(positions=positions)
    seen = attention_mask.to(device).bool().cumsum(-1)
    valid = seen > 0
    order = torch.arange(length, device=device)
    hidden = (order[None, :] > order[:, None]) | ~valid[:, None, :]
    # a padding row must see something, or its softmax is 0 / 0
    hidden = hidden & (order[None, :] != order[:, None])
    return Call(positions=(seen - 1).clamp_min(0), valid=valid, hidden=hidden[:, None])


def prefill_call(cache: LingCache, positions: Tensor) -> Call:
    """Tokens at ``positions`` [T] behind the cursor, read as a sequence."""
    end = cache.length + len(positions)
    hidden = None
    if cache.length:
        hidden = torch.arange(end, device=positions.device)[None, :] > positions[:, None]
        hidden = hidden[None, None]
    return Call(
        positions=positions[None],
        start=cache.length,
        kda=cache.kda,
        latents=cache.latents,
        hidden=hidden,
    )


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list | tuple) else (int(value),))
