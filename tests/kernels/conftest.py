"""Kernels run on the GPU if there is one, else on the CPU through Triton's interpreter."""

from pathlib import Path

import pytest
import torch

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run here."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One seed through the interpreter, which takes a thousand times as long as a GPU, and slow.

    What a wrapper refuses comes to no kernel and stays fast.
    """
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    kept = []
    for item in items:
        if here in item.path.parents:
            if getattr(getattr(item, "callspec", None), "params", {}).get("seed") in (1, 2):
                continue
            if "refused" not in item.name:
                item.add_marker(pytest.mark.slow)
        kept.append(item)
    items[:] = kept
