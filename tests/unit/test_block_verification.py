"""Block verification, by exact enumeration: no sampling, every probability added up."""

import itertools

import pytest
import torch
from torch import Tensor

from dspark.decoding.block_verification import judge_block, of_round, pass_chances
from dspark.decoding.rejection import judge

V, K = 3, 3


def tables(seed: int, far: float) -> tuple[Tensor, Tensor]:
    """Target's and draft's next-token probabilities behind every prefix, by `row`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(V**k for k in range(K + 1)), V, generator=generator)
    other = logits + far * torch.randn(logits.shape, generator=generator)
    return logits.double().softmax(-1), other.double().softmax(-1)


def row(prefix: tuple[int, ...]) -> int:
    place = 0
    for token in prefix:
        place = place * V + token + 1
    return place


def rows(table: Tensor, block: tuple[int, ...], count: int) -> Tensor:  # [count, V]
    return torch.stack([table[row(block[:k])] for k in range(count)])


def kept_chances(chances: Tensor) -> list[float]:
    """How likely it is that exactly 0..n proposals are kept: the longest prefix that passes."""
    fails = (1 - chances).flip(0).cumprod(0).flip(0)  # of i and all longer ones
    longest = [float(fails[0])]
    for i in range(len(chances)):
        rest = float(fails[i + 1]) if i + 1 < len(chances) else 1.0
        longest.append(float(chances[i]) * rest)
    return longest


def output(p: Tensor, q: Tensor, stop: int | None = None) -> tuple[Tensor, float]:
    """Exact distribution of the first K + 1 tokens of one round and what the target adds behind it,
    and how many proposals are kept. ``stop``: a block ends behind this token."""
    found = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    kept = 0.0
    blocks = set()
    for path in itertools.product(range(V), repeat=K):
        end = path.index(stop) + 1 if stop in path else K
        blocks.add(path[:end])
    for block in blocks:
        n = len(block)
        drawn = rows(q, block, n)
        mass = float(drawn[torch.arange(n), torch.tensor(block)].prod())
        chances, rest = pass_chances(rows(p, block, n + 1), drawn, torch.tensor(block))
        for count, chance in enumerate(kept_chances(chances)):
            if chance == 0:
                continue  # what stands behind may have no mass at all
            kept += mass * chance * count
            behind = p[row(block)] if count == n else rest[count] / rest[count].sum()
            for token in range(V):
                known = (*block[:count], token)
                weight = mass * chance * float(behind[token])
                for more in itertools.product(range(V), repeat=K + 1 - len(known)):
                    whole = known + more
                    tail = [float(p[row(whole[:k]), whole[k]]) for k in range(len(known), K + 1)]
                    found[whole] += weight * float(torch.tensor(tail, dtype=torch.float64).prod())
    return found, kept


def exact(p: Tensor) -> Tensor:
    found = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    for whole in itertools.product(range(V), repeat=K + 1):
        found[whole] = rows(p, whole, K + 1)[torch.arange(K + 1), torch.tensor(whole)].prod()
    return found


def token_wise(p: Tensor, q: Tensor) -> float:
    """Proposals that `rejection.judge` keeps: the sum of the prefixes' chances."""
    total = 0.0
    for length in range(1, K + 1):
        for block in itertools.product(range(V), repeat=length):
            place = torch.arange(length), torch.tensor(block)
            both = torch.minimum(rows(p, block, length)[place], rows(q, block, length)[place])
            total += float(both.prod())
    return total


@pytest.mark.parametrize("stop", [None, 1], ids=["full", "cut"])
@pytest.mark.parametrize(("seed", "far"), [(0, 0.0), (1, 0.5), (2, 3.0)])
def test_the_output_has_exactly_the_targets_distribution(
    seed: int, far: float, stop: int | None
) -> None:
    p, q = tables(seed, far)
    found, kept = output(p, q, stop)
    assert torch.allclose(found, exact(p), atol=1e-12)
    if far == 0 and stop is None:
        assert kept == pytest.approx(K)


def test_it_keeps_more_than_one_by_one() -> None:
    p, q = tables(2, 3.0)
    assert output(p, q)[1] > token_wise(p, q) + 0.01


def test_tokens_are_kept_as_the_chances_say() -> None:
    p, q = tables(3, 1.0)
    block = (2, 0, 1)
    target, drawn = rows(p, block, K + 1).float(), rows(q, block, K).float()
    chances, _ = pass_chances(target, drawn, torch.tensor(block))
    draws = 20_000
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(draws, K + 1, generator=generator)
    noise = -torch.log(-torch.log(torch.rand(draws, K + 1, V, generator=generator)))
    one_by_one = [one.expand(draws, *one.shape) for one in (target, drawn, torch.tensor(block))]
    choices = judge_block(one_by_one[0], one_by_one[1], one_by_one[2], uniform, noise)
    kept = (choices[:, :-1] == torch.tensor(block)).cumprod(-1).sum(-1)
    shares = torch.bincount(kept, minlength=K + 1) / draws
    assert shares.tolist() == pytest.approx(kept_chances(chances), abs=0.012)


def test_one_proposal_is_judged_as_by_itself() -> None:
    p, q = tables(4, 1.0)
    generator = torch.Generator().manual_seed(1)
    for token in range(V):
        given = (rows(p, (token,), 2).float(), rows(q, (token,), 1).float(), torch.tensor([token]))
        for _ in range(50):
            uniform, noise = (torch.rand(2, generator=generator), torch.randn(2, V))
            assert torch.equal(judge_block(*given, uniform, noise), judge(*given, uniform, noise))
    nothing = torch.empty(0, dtype=torch.int64)
    alone = judge_block(given[0][:1], given[1][:0], nothing, uniform[:1], noise[:1])
    assert len(alone) == 1


def test_every_round_has_noise_of_its_own() -> None:
    seeds = {int(of_round(seed, position)) for seed in (0, 1, -5, 2**62) for position in range(50)}
    assert len(seeds) == 200
    assert not seeds & {0, 1, -5, 2**62}
