"""Rotary positions of Ling-3.0's MLA layers: interleaved pairs, YaRN only by an override.

Symbols: B batch, T rows, P rotated size.
"""

import math

import torch
from torch import Tensor

from dspark.target.config import LingConfig

__all__ = ["Rotary"]


class Rotary:
    """Rotates the pairs (2j, 2j + 1) by position x theta^(-2j / P). No weights, never cast.

    YaRN (arXiv 2309.00071, equation 23 for the frequencies, section 3.4 for the amplitude) with
    DeepSeek's `mscale` and `mscale_all_dim`: rotated values are scaled by ``amplitude``, scores by
    ``score_factor``; both are 1 without it.
    """

    def __init__(self, config: LingConfig) -> None:
        size, base = config.qk_rope_head_dim, config.rope_theta
        with torch.device("cpu"):  # modules may be built on the meta device
            inverse = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
            self.amplitude = self.score_factor = 1.0
            scaling = config.rope_scaling
            if scaling is not None:
                factor = float(scaling["factor"])
                inverse = _stretched(inverse, config, factor)
                first, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
                whole = _mscale(factor, every) if every else 1.0
                self.amplitude = scaling.get("attention_factor") or (
                    _mscale(factor, first) / whole if first and every else _mscale(factor, 1.0)
                )
                self.score_factor = whole**2
            self.inverse = inverse.float()

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, T, ..., P] in its own dtype, computed in float32; ``positions`` [B, T] int64."""
        self.inverse = self.inverse.to(x.device)
        angles = positions[..., None].float() * self.inverse
        angles = angles.view(*positions.shape, *[1] * (x.dim() - 3), -1)
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return turned.flatten(-2).to(x.dtype)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _stretched(inverse: Tensor, config: LingConfig, factor: float) -> Tensor:
    """Slow pairs turn ``factor`` times slower, fast ones as before, a ramp in between."""
    scaling, size = config.rope_scaling, config.qk_rope_head_dim
    assert scaling is not None
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings

    def pair_that_turns(times: float) -> float:
        within = math.log(original / (times * 2 * math.pi))
        return size * within / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow") or 1)), size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return inverse / factor * (1 - kept) + inverse * kept
