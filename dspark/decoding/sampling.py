"""Choosing tokens so that a draft cannot change the output, at any temperature.

Coupled noise: the token at absolute position p is argmax_v(logit_v / temperature + g(seed, p, v))
over the ids that the filters leave, with Gumbel noise g from a hash of its three keys. That is an
exact sample of the filtered distribution, and it is the same whether position p is computed in a
step of its own or as a row of a verify pass. The draft adds the same noise to its own logits and a
proposal is accepted while it equals the target's choice, so acceptance at one slot is at least
(1 - TV) / (1 + TV). Temperature 0 is the arg max, ties to the lowest id.

Symbols: T rows, V vocabulary, C candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import ConfigError

__all__ = ["SamplingParams", "filter_logits", "gumbel", "pick", "pick_candidate"]

_HEAD = 1024  # candidates that nearly always hold the whole top-p mass


@dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    """0 is greedy; the other fields then have no effect."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: no limit."""
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
        ):
            # written so that NaN fails
            if not low <= value <= high:
                raise ConfigError(f"{name} must lie in {low:g}..{high:g}, got {value}")
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0, got 0")
        if self.top_k < -1:
            raise ConfigError(f"top_k must be -1 (no limit) or more, got {self.top_k}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _mix(x: Tensor) -> Tensor:
    """Avalanche of int32 bit patterns (multiply-xorshift with Wellons' low-bias constants)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as int32
    return x ^ ((x >> 16) & 0xFFFF)


def gumbel(
    seed: int | Tensor,  # one seed, or one a row: [T] int64
    positions: Tensor,  # [T] int64, absolute position of the token to be chosen
    ids: Tensor,  # [C] or [T, C] int64
) -> Tensor:  # [T, C] float32
    """Standard Gumbel noise as a pure function of (seed, position, id).

    The same on every device and for every T, so that a replay or another verify width draws the
    same. 32 random bits a draw: values lie in about -3.1..22.9.
    """
    seeds = torch.as_tensor(seed, dtype=torch.int64, device=positions.device).expand_as(positions)
    low, high = (seeds & 0xFFFFFFFF).to(torch.int32), (seeds >> 32).to(torch.int32)
    key = _mix(_mix(low ^ 0x3C6EF372) ^ high ^ 0x1B873593)
    key = _mix(key + positions.to(torch.int32) * 0x2545F491)[:, None]
    bits = _mix(_mix(ids.to(torch.int32) + key) ^ (key * 0x165667B1))
    # as a fraction in (0, 1); log1p keeps small fractions exact, which are the large noises
    fraction = (bits.to(torch.float32) + 2147483648.5) * 2.0**-32
    return -torch.log(-torch.log1p(-fraction.clamp(2.0**-33, 1 - 2.0**-24)))


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Scaled by the temperature, ids outside top-k, top-p and min-p at -inf: [T, C] float32.

    Filters apply in that order, each to what the one before left, as in transformers. Top-p keeps
    the smallest set of most probable ids that reaches the mass.
    """
    scores = logits.float() / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        floor = scores.topk(params.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < floor, float("-inf"))
    if params.top_p < 1:
        scores = _top_p(scores, params.top_p)
    if params.min_p > 0:
        probability = scores.softmax(-1)
        floor = probability.amax(-1, keepdim=True) * params.min_p
        scores = scores.masked_fill(probability < floor, float("-inf"))
    return scores


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    norm = scores.logsumexp(-1, keepdim=True)
    for count in (min(_HEAD, scores.shape[-1]), scores.shape[-1]):
        ranked = scores.topk(count, dim=-1).values
        before = (ranked - norm).exp().cumsum(-1).roll(1, -1)
        before[..., 0] = 0
        inside = before < top_p
        if count == scores.shape[-1] or not bool(inside[..., -1].any()):
            break
    # the last rank inside sets the floor; ids tied with it stay. The first one always does, even
    # where top_p is too small for float32
    last = (inside.sum(-1, keepdim=True) - 1).clamp_min(0)
    return scores.masked_fill(scores < ranked.gather(-1, last), float("-inf"))


def pick(
    logits: Tensor,  # [T, V]
    params: SamplingParams,
    positions: Tensor,  # [T] int64, absolute position each chosen token will have
) -> Tensor:  # [T] int64
    """The target's token of each row."""
    if params.greedy:
        return logits.argmax(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (filter_logits(logits, params) + gumbel(params.seed, positions, ids)).argmax(-1)


def pick_candidate(
    logits: Tensor,  # [C] float32
    ids: Tensor,  # [C] int64, the ids the logits belong to
    params: SamplingParams,
    position: int,
) -> Tensor:  # [] int64
    """The draft's token among a shortlist, with the noise that the target will use there."""
    if params.greedy:
        return ids[logits.argmax()]
    where = torch.tensor([position], device=ids.device)
    noisy = filter_logits(logits[None], params) + gumbel(params.seed, where, ids)
    return ids[noisy[0].argmax()]
