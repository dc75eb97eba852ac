"""The NEXTN block of Ling-3.0: one more layer that guesses the token after the next.

At position t it reads the target's last hidden state (behind the final norm) and the embedding of
token t + 1, and predicts token t + 2 through the target's own head. For a deeper guess its own
output takes the place of the hidden state. It is the public engines' baseline draft.

Symbols: B batch, T rows, D hidden, V vocabulary, L latent rank, P rotated size of a query.
"""

import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.target.mla import MLA
from dspark.target.model import LingModel, NextN
from dspark.target.state import Call

__all__ = ["nextn_block", "nextn_hidden", "nextn_latents"]


def nextn_block(model: LingModel, depth: int = 0) -> NextN:
    """The block, which `load_model(..., nextn=True)` reads.

    Raises:
        TargetError: the checkpoint has none, or it was not read.
    """
    index = model.config.num_hidden_layers + depth
    if index >= len(model.model.layers):
        raise TargetError(
            f"NEXTN block {depth} is not there: the config has num_nextn_predict_layers "
            f"{model.config.num_nextn_predict_layers}, "
            f"{'loaded' if model.has_nextn else 'not loaded'}"
        )
    block: NextN = model.model.layers[index]  # type: ignore[assignment]
    return block


def nextn_hidden(
    model: LingModel,
    hidden: Tensor,  # [B, T, D] behind the final norm, or this function's result one token before
    next_ids: Tensor,  # [B, T] int64, the token after each
    call: Call,
) -> Tensor:  # [B, T, D]; `model.logits` of it is over token t + 2
    """Run the block over whole sequences or, with ``call.by_row`` and its own cache, over a step.

    Raises:
        TargetError: as `nextn_block`.
    """
    block = nextn_block(model)
    joined = _joined(model, block, hidden, next_ids)
    out: Tensor = block.final_layernorm(block(joined, call, model.reduce))
    return out


def nextn_latents(
    model: LingModel,
    hidden: Tensor,  # [B, T, D], as for `nextn_hidden`
    next_ids: Tensor,  # [B, T] int64
    positions: Tensor,  # [B, T] int64
) -> Tensor:  # [B, T, L + P]
    """What `nextn_hidden` leaves in the block's cache, without the rest of its work.

    Raises:
        TargetError: as `nextn_block`.
    """
    block = nextn_block(model)
    assert isinstance(block.attention, MLA)
    x = block.input_layernorm(_joined(model, block, hidden, next_ids))
    return block.attention.latents(x, positions)


def _joined(model: LingModel, block: NextN, hidden: Tensor, next_ids: Tensor) -> Tensor:
    embedded = block.enorm(model.embed(next_ids))
    out: Tensor = block.eh_proj(torch.cat([embedded, block.hnorm(hidden)], -1))
    return out
