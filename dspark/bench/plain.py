"""The fastest plain decoding at hand, as the baseline that a draft has to beat.

Losslessness is held against our own step without the draft, whose rows do not depend on their
number. This is the other path: one row a step, the library's attention and cache. It is only
timed, and how far it agrees with ours is printed, since its rounding differs.
"""

import inspect
import time
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from dspark.decoding import DecodeParams, decode
from dspark.target import HFTarget, Target

__all__ = ["agreement", "library_decode"]


@torch.no_grad()
def library_decode(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy output through transformers' own cache, and the seconds of every step behind the
    prefill."""
    if not isinstance(target, HFTarget):
        return _own_decode(target, prompt_ids, max_new_tokens)
    model = target.model
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache()
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    tokens: list[int] = []
    steps: list[float] = []
    begun = time.perf_counter()
    while len(tokens) < max_new_tokens:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
        token = int(out.logits[0, -1].argmax())
        now = time.perf_counter()
        steps.append(now - begun)
        begun = now
        tokens.append(token)
        if token in target.eos_ids:
            break
        ids = torch.tensor([[token]], device=target.device)
    return tokens, steps[1:]


def _own_decode(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int
) -> tuple[list[int], list[float]]:
    """For targets that no library runs here: our own step without a draft."""
    done = decode(target, None, prompt_ids, DecodeParams(max_new_tokens))
    return done.token_ids, done.step_s


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of positions up to the first difference, of the longer output's length."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same / max(len(one), len(other), 1)
