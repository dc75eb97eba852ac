"""Which ids a tokenizer knows."""

from typing import Any

__all__ = ["id_limit"]


def id_limit(tokenizer: Any) -> int:
    """One more than the highest id; more than the tokenizer's length where ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
