from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.config import SamplingSetting
from dspark.corpus.draw import Draw

torch.set_num_threads(1)


def reference(logits: torch.Tensor, one: SamplingSetting) -> torch.Tensor:
    """[1, V] -> probabilities [V] by transformers' own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(one.temperature)])
    if one.top_k > 0:
        warpers.append(TopKLogitsWarper(one.top_k))
    if one.top_p < 1:
        warpers.append(TopPLogitsWarper(one.top_p))
    if one.min_p > 0:
        warpers.append(MinPLogitsWarper(one.min_p))
    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    scores: Any = logits.float()
    expected: torch.Tensor = warpers(ids, scores)[0].double().softmax(-1)
    return expected


def masses(logits: torch.Tensor, one: SamplingSetting, cells: int) -> torch.Tensor:
    """[1, V] -> share [V] of an even grid of uniforms that `Draw` maps to each token."""
    grid = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    tokens = Draw([one] * cells, grid[:, None])(logits.expand(cells, -1), 0)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / cells


@pytest.mark.parametrize("vocabulary", [5, 700])
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 1.5},
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"top_p": 0.999},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 400},
        {"min_p": 0.2},
        {"min_p": 0.001},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.95, "top_k": 300, "min_p": 0.01},
    ],
)
def test_probabilities_are_those_of_the_warpers(
    setting: dict[str, float], spread: float, vocabulary: int
) -> None:
    # spread 0.02 keeps more tokens than the candidate list holds, 4.0 only a handful
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(1, vocabulary, generator=generator) * spread
    one = SamplingSetting(**setting)  # type: ignore[arg-type]
    expected = reference(logits, one)
    cells = 2000
    got = masses(logits, one, cells)
    # a grid of N uniforms misses each token's mass by at most one cell at either end
    assert (got - expected).abs().max() <= 2 / cells
    assert torch.equal(got[expected == 0], torch.zeros_like(got[expected == 0]))


def test_ties_at_the_kth_logit_stay() -> None:
    logits = torch.zeros(1, 600)
    logits[0, :2] = 1.0
    share = masses(logits, SamplingSetting(top_k=3), 3000)
    assert (share > 0).all()
    share = masses(logits, SamplingSetting(top_k=2), 3000)
    assert share.nonzero().flatten().tolist() == [0, 1]


def test_settings_are_per_row_and_survive_compaction() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    settings = [
        SamplingSetting(temperature=0),
        SamplingSetting(),
        SamplingSetting(top_k=1),
        SamplingSetting(temperature=1.7, top_p=0.9),
        SamplingSetting(temperature=0),
        SamplingSetting(min_p=0.3),
    ]
    uniforms = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    together = Draw(settings, uniforms)(logits, 2)
    for row, one in enumerate(settings):
        alone = Draw([one], uniforms[row : row + 1])(logits[row : row + 1], 2)
        assert alone[0] == together[row]
    best = logits.argmax(-1)
    assert [int(together[i]) for i in (0, 2, 4)] == [int(best[i]) for i in (0, 2, 4)]
    draw = Draw(settings, uniforms)
    draw.keep([5, 1, 0])
    assert torch.equal(draw(logits[[5, 1, 0]], 2), together[[5, 1, 0]])


def test_the_last_uniform_never_draws_a_token_of_no_mass() -> None:
    logits = torch.full((1, 1000), -float("inf"))
    logits[0, [3, 500]] = 0.0
    last = torch.tensor([[1.0 - 2**-53]], dtype=torch.float64)
    for one in (SamplingSetting(), SamplingSetting(top_p=0.99), SamplingSetting(min_p=0.01)):
        assert int(Draw([one], last)(logits, 0)) in (3, 500)
        assert int(Draw([one], torch.zeros(1, 1, dtype=torch.float64))(logits, 0)) in (3, 500)
