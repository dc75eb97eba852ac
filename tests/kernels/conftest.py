"""Kernels run on the GPU if there is one, else on the CPU through Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # read when a kernel is defined: before the first import of one
    os.environ["TRITON_INTERPRET"] = "1"

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run here."""
    return torch.device(request.param)
