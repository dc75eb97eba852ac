"""Prompts that begin like an earlier one: what prefill left is used again, equal to the bit.

A prompt is read in pieces of a fixed length at absolute positions, so that what a whole piece
leaves depends on the tokens up to its end and on nothing else. Only that is kept. A last piece that
was cut short, and tokens that were decoded, went through products of other widths, which may round
otherwise: they are read again as part of the next prompt.

Symbols: S positions, F tapped layers, D hidden, V vocabulary.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.target import GoOn, Target

__all__ = ["PrefixCache", "PromptContext", "read_prompt"]

_Written = dict[int, tuple[Tensor, ...]]
"""By layer: what tokens have left there."""


class PromptContext(Protocol):
    """Where the draft's side of a prompt goes."""

    def extend(self, taps: Tensor) -> None:
        """Append taps [n, F*D]."""

    def written(self, start: int) -> _Written:
        """Views of what was appended from position ``start`` on."""

    def restore(self, written: _Written, rows: int) -> None:
        """Append what `written` gave of ``rows`` positions."""


@dataclass(frozen=True, eq=False)
class _Prefix:
    """A prompt up to the end of a piece; ``parts``: what that piece left in target and draft."""

    key: "_Key"
    parts: tuple[_Written, ...]
    num_bytes: int


_Key = tuple[_Prefix | bool, tuple[int, ...]]
"""What stands before a piece (nothing: whether there is a draft), and its tokens."""


class PrefixCache:
    """Pieces of prompts that one target and one draft have read, least recently used first.

    A piece is used whenever one behind it is, and counts as used later: none is ever dropped
    before those that need it. Prompts that were read without the draft are held apart, since
    they leave nothing for it, and so that either way of decoding is timed by itself.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._held: OrderedDict[_Key, _Prefix] = OrderedDict()

    def find(self, token_ids: list[int], size: int, *, drafted: bool) -> list[_Prefix]:
        """Whole pieces that ``token_ids`` begin with; at least one token remains to be read."""
        path: list[_Prefix] = []
        for start in range(0, len(token_ids) - size, size):
            key = _key(path, token_ids[start : start + size], drafted)
            if key not in self._held:
                break
            path.append(self._held[key])
        self._use(path)
        return path

    def keep(
        self, path: list[_Prefix], token_ids: list[int], parts: tuple[_Written, ...]
    ) -> list[_Prefix]:
        """Copy what the piece behind ``path`` left; the longer path, or the same without room.

        Others make room for it, but never the path itself: of a prompt that is larger than the
        cache the beginning stays.
        """
        key = _key(path, token_ids, len(parts) > 1)
        if key not in self._held:
            size = sum(one.nbytes for part in parts for some in part.values() for one in some)
            while self._held and self.held_bytes + size > self.most_bytes:
                oldest = next(iter(self._held.values()))
                if oldest in path:
                    break
                del self._held[oldest.key]
                self.held_bytes -= oldest.num_bytes
            if self.held_bytes + size > self.most_bytes:
                return path
            self._held[key] = _Prefix(key, tuple(_copied(part) for part in parts), size)
            self.held_bytes += size
        path = [*path, self._held[key]]
        self._use(path)
        return path

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self.held_bytes = 0

    def _use(self, path: list[_Prefix]) -> None:
        for one in reversed(path):
            self._held.move_to_end(one.key)


@torch.no_grad()
def read_prompt(
    target: Target,
    cache: Any,
    prompt_ids: Tensor,  # [S] int64
    context: PromptContext | None,
    prefixes: PrefixCache | None,
    go_on: GoOn | None = None,
) -> tuple[Tensor, int]:  # [1, V] logits behind the prompt; tokens that were not read again
    """Fill an empty cache, and the draft's context, with a prompt.

    Raises:
        ReadingStopped: as `Target.read` does.
    """
    size, token_ids, path = target.prefill_rows, prompt_ids.tolist(), list[_Prefix]()
    if prefixes is not None:
        path = prefixes.find(token_ids, size, drafted=context is not None)
    for prefix in path:
        cache.restore(prefix.parts[0], size)
        if context is not None:
            context.restore(prefix.parts[1], size)
    reused = cache.length
    for piece, taps in target.read(cache, prompt_ids[reused:], go_on):
        hidden = piece
        if context is not None:
            context.extend(taps)
        start = cache.length - size
        # no piece that was cut short, and none behind one that found no room
        if prefixes is not None and start == len(path) * size:
            parts: tuple[_Written, ...] = (cache.written(start),)
            if context is not None:
                parts += (context.written(start),)
            path = prefixes.keep(path, token_ids[start : cache.length], parts)
    return target.last_logits(hidden), reused


def _key(path: list[_Prefix], token_ids: list[int], drafted: bool) -> _Key:
    return (path[-1] if path else drafted, tuple(token_ids))


def _copied(part: _Written) -> _Written:
    # views of a buffer that grows and is written behind them
    return {layer: tuple(one.clone() for one in some) for layer, some in part.items()}
