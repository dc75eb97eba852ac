"""Muon: orthogonal steps, whatever stands together in a batch."""

import pytest
import torch

from dspark.training.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(3, 16, 48), (1, 32, 32)])
def test_singular_values_come_close_to_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    got = orthogonalised(matrices)
    values = torch.linalg.svdvals(got)
    assert values.max() < 1.3
    assert values.median() > 0.65
    assert values.flatten().quantile(0.1) > 0.5
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert ((u @ vh) * got).sum() / got.square().sum() > 0.9


def test_a_batch_steps_each_matrix_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 48), (48, 16), (4, 48, 16), (2, 16, 48), (20, 20)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    together = [one.clone() for one in weights]
    muon = Muon(together, weight_decay=0.1)
    for _ in range(3):
        for one, gradient in zip(together, gradients, strict=True):
            one.grad = gradient.clone()
        muon.step(0.05)
    for weight, gradient, got in zip(weights, gradients, together, strict=True):
        alone = weight.clone()
        single = Muon([alone], weight_decay=0.1)
        for _ in range(3):
            alone.grad = gradient.clone()
            single.step(0.05)
        torch.testing.assert_close(got, alone)
        assert not torch.equal(got, weight)


def test_tall_matrices_take_larger_steps_and_decay_needs_no_gradient() -> None:
    tall, wide = torch.zeros(64, 16), torch.zeros(16, 64)
    gradient = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    muon = Muon([tall, wide])
    tall.grad, wide.grad = gradient, gradient.T.contiguous()
    muon.step(0.1)
    torch.testing.assert_close(tall, 2 * wide.T)

    still = torch.ones(16, 16)
    Muon([still], weight_decay=0.5).step(0.1)
    torch.testing.assert_close(still, torch.full((16, 16), 0.95))
