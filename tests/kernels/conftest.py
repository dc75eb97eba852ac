"""Kernels run on the GPU if there is one, else on the CPU through Triton's interpreter."""

import pytest
import torch

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run here."""
    return torch.device(request.param)
