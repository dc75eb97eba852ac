"""What of a memory plan a dense decoder decides: its scratch, its caches, and reading a prompt.

Symbols: D hidden, H query heads, J key/value heads, X head size, I inner width, V vocabulary.
"""

from dspark.kernels.tiles import tile_for
from dspark.serving.graph.dense import fused
from dspark.target.base import PREFILL_ROWS
from dspark.target.families import DenseShape
from dspark.target.rows import MOST_ROWS as ROWS

__all__ = ["LANES", "dense_caches", "dense_prompt", "dense_scratch"]

LANES = 16
"""Of the attention, which share the context."""
_WIDE, _NARROW = 4, 2
_PIECE = PREFILL_ROWS["cuda"]


def dense_scratch(shape: DenseShape) -> tuple[list[int], int, int]:
    """Outputs of the products, numbers of the model's dtype a row, and bytes beside them."""
    heads, size, hidden = shape.num_attention_heads, shape.head_dim, shape.hidden_size
    outputs = [(heads + 2 * shape.num_key_value_heads) * size, hidden, hidden]
    # residual, norm and the one row of an arena without experts; queries and what they mix
    rows = 3 * hidden + shape.intermediate_size + 2 * heads * size
    total = LANES * ROWS * heads * (size + 2) * _WIDE
    both = 2 * shape.intermediate_size
    if not fused(hidden * shape.intermediate_size):
        total += tile_for(both, hidden).splits * ROWS * both * _WIDE
    return outputs, rows, total


def dense_caches(shape: DenseShape, positions: int) -> int:
    """Keys and values of all layers."""
    pair = 2 * shape.num_key_value_heads * shape.head_dim
    return shape.num_hidden_layers * pair * positions * _NARROW


def dense_prompt(shape: DenseShape, context: int, taps: int) -> int:
    """While a prompt of ``context`` tokens is read, ``taps`` layers of it kept; or laid out."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    piece = min(context, _PIECE)
    # the taps of a piece, apart and joined, and those of the one before
    kept = 3 * piece * taps * hidden * _NARROW
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    # before and behind the rotation; transformers' mask, which the attention here does not read
    attention = 4 * piece * heads * shape.head_dim * _NARROW + piece * piece
    # the norm works in float32
    busy = max(attention, 4 * piece * inner * _NARROW) + 12 * piece * hidden * _NARROW
    # before: the largest matrices that are laid out anew
    stack = 2 * 2 * inner * hidden * _NARROW
    return max(kept + busy, stack)
