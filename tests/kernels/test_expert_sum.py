"""The experts of a prompt's rows, added in one pass."""

import pytest
import torch

from dspark.kernels.expert_sum import expert_sum, expert_sum_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_are_gathered_weighed_and_added(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(12 * 3, 1100, generator=generator).to(device, dtype)
    places = torch.randperm(12 * 3, generator=generator).view(12, 3).to(device)
    weights = torch.rand(12, 3, generator=generator).to(device)
    out = expert_sum(parts, places, weights)
    expected = expert_sum_reference(parts, places, weights)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # with the shared expert the sum is rounded, and the interpreter cuts off instead
    shared = torch.randn(12, 1100, generator=generator).to(device, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        expert_sum(parts, places, weights, shared),
        expert_sum_reference(parts, places, weights, shared),
        rtol=tolerance, atol=tolerance,
    )  # fmt: skip
    with pytest.raises(ValueError, match="wants contiguous shared"):
        expert_sum(parts, places, weights, shared[:3])
