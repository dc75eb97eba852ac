"""Kernels of decoding, each beside the plain function it computes."""

from importlib.util import find_spec

__all__ = ["installed"]


def installed() -> bool:
    """Whether Triton is there, which everything here but `packed_linear` needs."""
    return find_spec("triton") is not None
