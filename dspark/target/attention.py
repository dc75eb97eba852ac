"""The attention of `rows` under a name by which transformers finds it.

A module of its own: importing transformers' models takes 160 MB and some seconds, which whoever
only reads data or a tokenizer is spared.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dspark.errors import TargetError
from dspark.target.rows import RowAttention

__all__ = ["ATTENTION_NAME"]

ATTENTION_NAME = "dspark_rows"
_UNKNOWN = {"s_aux": "attention sinks", "softcap": "capped attention scores"}
"""What layers hand over beside keys and values, and SDPA would leave out or does not do."""


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, H, R, N]
    key: Tensor,  # [B, G, R, N]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_cache: RowAttention | None = None,
    apart: Tensor | None = None,  # [B, R, R] bool, what each position sees of packed documents
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What a transformers layer calls: the row path inside a decode, SDPA everywhere else."""
    for key_word, what in _UNKNOWN.items():
        if kwargs.get(key_word) is not None:
            raise TargetError(
                f"the target ({type(module).__name__}) has {what}, which no attention here computes"
            )
    if row_cache is None:
        spoilt = None
        if apart is not None:
            key, value, spoilt = _kept_apart(key, value, apart)
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out if spoilt is None else (out[0].masked_fill(spoilt, torch.nan), None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return row_cache.attend(layer, query[0], key[0], value[0], scale)[None], None


def _kept_apart(
    key: Tensor,  # [B, G, R, N]
    value: Tensor,
    apart: Tensor,  # [B, R, R] bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Finite keys and values, and which positions [B, R, 1, 1] saw one that was not.

    A mask multiplies by 0, and 0 times NaN is NaN in every document of the row. Nothing is read
    back: a training's host stays ahead of its GPU.
    """
    broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1)).all(1)  # [B, R]
    hidden = broken[:, None, :, None]
    spoilt = (apart & broken[:, None]).any(-1)
    return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), spoilt[..., None, None]


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
