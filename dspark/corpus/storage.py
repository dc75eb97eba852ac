"""How features are stored: their dtypes, and the 8-bit form with a scale for every state.

A state is one tap or the final hidden state of one token, D numbers. In float8_e4m3fn it is stored
as D bytes and a bfloat16 scale that maps its largest magnitude to 448, the largest of the format.
Decoding gives bfloat16.

Symbols: N tokens, F taps, D hidden.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.corpus.buffers import Buffers
from dspark.target import Features

__all__ = ["STORAGE", "Encoded", "Storage", "decode_into", "decoded", "encode", "row_bytes"]

_BUFFERS = Buffers()
_ID_BYTES = 4 + 1  # input_ids, loss_mask
_SCALE_BYTES = 2
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-100
"""Of a state of zeros, where any would do."""
_CHUNK = 1 << 17
"""Numbers decoded at a time: they stay in the core's cache from one operation to the next."""


@dataclass(frozen=True)
class Storage:
    """Dtypes of one value of `capture.dtype`."""

    taps: torch.dtype
    last_hidden: torch.dtype

    @property
    def decoded(self) -> torch.dtype:
        """What a batch of it holds."""
        return torch.float32 if self.taps == torch.float32 else torch.bfloat16

    def token_bytes(self, hidden_size: int, num_taps: int) -> int:
        """Bytes of one token, with its id and whether it is supervised."""
        taps = hidden_size * self.taps.itemsize + _scale_bytes(self.taps)
        last = hidden_size * self.last_hidden.itemsize + _scale_bytes(self.last_hidden)
        return num_taps * taps + last + _ID_BYTES


STORAGE = {
    "float32": Storage(torch.float32, torch.float32),
    "bfloat16": Storage(torch.bfloat16, torch.bfloat16),
    "float8_e4m3fn": Storage(torch.float8_e4m3fn, torch.bfloat16),
    "float8_e4m3fn_all": Storage(torch.float8_e4m3fn, torch.float8_e4m3fn),
}
"""By `capture.dtype`."""


@dataclass(frozen=True)
class Encoded:
    """Features as they are stored."""

    taps: Tensor  # [..., F*D]
    last_hidden: Tensor  # [..., D]
    tap_scales: Tensor | None = None  # [..., F] bfloat16, of 8-bit taps
    last_scales: Tensor | None = None  # [..., 1] bfloat16, of an 8-bit final state

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def row_bytes(num_tokens: int, hidden_size: int, num_taps: int, dtype: str) -> int:
    """Size on disk of the features of ``num_tokens`` tokens, headers left out."""
    return num_tokens * STORAGE[dtype].token_bytes(hidden_size, num_taps)


def encode(features: Features, dtype: str) -> Encoded:
    """Features in the form of `capture.dtype`, on their device.

    A number that is not finite stays so, but in 8 bits its whole state is then NaN or 0.
    """
    storage = STORAGE[dtype]
    hidden_size = features.last_hidden.shape[-1]
    taps, tap_scales = _stored(features.taps, storage.taps, hidden_size)
    last, last_scales = _stored(features.last_hidden, storage.last_hidden, hidden_size)
    return Encoded(taps, last, tap_scales, last_scales)


def decoded(
    values: Tensor,  # [..., F*D]
    scales: Tensor | None,  # [..., F]
) -> Tensor:  # [..., F*D]
    """The numbers of one tensor of `Encoded`, on its device; itself where it has no scales."""
    if scales is None:
        return values
    if values.device.type == "cpu":
        out = _BUFFERS.empty(*values.shape, dtype=torch.bfloat16)
        decode_into(out.view(-1, out.shape[-1]), values.flatten(0, -2), scales.flatten(0, -2))
        return out
    # every 8-bit number is one of bfloat16, so that only the product is rounded
    return values.bfloat16().view(*scales.shape, -1).mul_(scales[..., None]).flatten(-2)


def decode_into(
    out: Tensor,  # [N, F*D] bfloat16, contiguous, on the CPU
    values: Tensor,  # [N, F*D] float8_e4m3fn
    scales: Tensor,  # [N, F] bfloat16
) -> None:
    """`decoded` on a CPU, which converts this format several times as slowly by itself.

    A byte's seven bits below the sign, moved by four, are a bfloat16 of 2^-120 its value: the
    exponents count from 127 and from 7. The scale takes that along.
    """
    tokens, width = values.shape
    states = scales.shape[-1]
    bits = out.view(torch.int16).numpy()
    bytes_ = values.view(torch.int8).numpy()
    numbers = out.view(tokens, states, width // states) if tokens and width else out
    large = bool((scales > 2.0**7).any())  # 2^120 of it may be too much for the format
    factors = scales[..., None] if large else scales[..., None] * 2.0**120
    step = max(1, _CHUNK // max(1, width))
    for first in range(0, tokens, step):
        part = bits[first : first + step]
        np.copyto(part, bytes_[first : first + step])  # keeps the sign in the upper bits
        np.left_shift(part, 4, out=part)
        np.bitwise_and(part, np.int16(-0x7810), out=part)  # 0x87f0: sign, exponent, mantissa
        if large:
            numbers[first : first + step].mul_(2.0**120)
        numbers[first : first + step].mul_(factors[first : first + step])


def _stored(
    states: Tensor, dtype: torch.dtype, hidden_size: int
) -> tuple[Tensor, Tensor | None]:  # [..., M*D] -> the same, [..., M]
    if dtype != torch.float8_e4m3fn:
        return states.to(dtype), None
    apart = states.float().reshape(*states.shape[:-1], -1, hidden_size)
    peaks = torch.linalg.vector_norm(apart, torch.inf, dim=-1)
    # rounding a scale moves 448 by less than half a step of the 8-bit format
    scales = (peaks / _LARGEST).clamp_min(_SMALLEST_SCALE).bfloat16()
    return (apart / scales.float()[..., None]).to(dtype).flatten(-2), scales


def _scale_bytes(dtype: torch.dtype) -> int:
    return _SCALE_BYTES if dtype == torch.float8_e4m3fn else 0
