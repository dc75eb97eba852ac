"""Sampled output follows the target's own distribution, whatever a draft proposes.

Target and draft are tables of logits, so that every continuation's probability is known exactly and
20,000 of them are decoded side by side. That loop gives the tokens of the real step, seed by seed.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.decoding import (
    DecodeParams,
    ReferenceStep,
    SamplingParams,
    Verification,
    decode,
    nextn_draft,
)
from dspark.decoding.block_verification import judge_block, of_round
from dspark.decoding.rejection import draw, judge
from dspark.decoding.sampling import filter_logits, gumbel, pick
from dspark.target import Rows
from dspark.testing import tiny_draft, tiny_ling

V, K, LENGTH, DRAWS = 5, 2, 3, 20_000
_GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randn(LENGTH + K + 2, V, V, generator=_GENERATOR)  # [position, token before, V]
# a draft that is right often, and far off often
DRAFT = TARGET + torch.randn(TARGET.shape, generator=_GENERATOR)
PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_p=0.8)
PROMPT = torch.tensor([0])

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, SamplingParams], Tensor]
"""Rows [B, n + 1, V], draft's logits [B, n, V], proposals, positions, sampling -> choices."""


def probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    return filter_logits(logits.flatten(0, -2), sampling).softmax(-1).view(logits.shape)


def each(seeds: Tensor, positions: Tensor, sampling: SamplingParams) -> SamplingParams:
    """The same, with one seed a row."""
    rows = seeds.repeat_interleave(positions.shape[-1]) if positions.dim() > 1 else seeds
    return replace(sampling, seed=rows)  # type: ignore[arg-type]


def coupled(
    logits: Tensor, _: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    return pick(logits.flatten(0, 1), sampling, positions.flatten()).view(positions.shape)


def rejection(
    logits: Tensor, drawn: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    return _judged(judge, logits, drawn, proposals, positions, sampling)


def _judged(rule: Callable[..., Tensor], logits: Tensor, drawn: Tensor, *more: Any) -> Tensor:
    proposals, positions, sampling = more
    uniform, noise = draw(sampling.seed, positions.flatten(), V)
    target_p, draft_p = (probabilities(one, sampling) for one in (logits, drawn))
    return rule(
        target_p, draft_p, proposals, uniform.view(positions.shape), noise.view(logits.shape)
    )


def block(
    logits: Tensor, drawn: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    return _judged(judge_block, logits, drawn, proposals, positions, sampling)


def stale_block(
    logits: Tensor, drawn: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    """Broken: the next round draws with the noise that decided this one."""
    return block(logits, drawn, proposals, positions, sampling)


def likeliest(
    logits: Tensor, drawn: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    """Broken: also keeps what the target finds likeliest."""
    choices = coupled(logits, drawn, proposals, positions, sampling)
    choices[:, :-1] = torch.where(
        proposals == logits[:, :-1].argmax(-1), proposals, choices[:, :-1]
    )
    return choices


def replaced(
    logits: Tensor, drawn: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    """Broken: what was rejected is drawn again from p, not from max(p - q, 0)."""
    choices = rejection(logits, drawn, proposals, positions, sampling)
    _, noise = draw(sampling.seed, positions.flatten(), V)
    again = (probabilities(logits, sampling).log() + noise.view(logits.shape)).argmax(-1)
    choices[:, :-1] = torch.where(choices[:, :-1] == proposals, proposals, again[:, :-1])
    return choices


def one_noise(
    logits: Tensor, drawn: Tensor, proposals: Tensor, positions: Tensor, sampling: SamplingParams
) -> Tensor:
    """Broken: what was rejected is drawn with the noise that drew the proposal."""
    choices = rejection(logits, drawn, proposals, positions, sampling)
    p, q = (probabilities(one, sampling) for one in (logits[:, :-1], drawn))
    rest = (p - q).clamp_min(0).log()
    at = replace(sampling, temperature=1.0, top_p=1.0, seed=_first(sampling.seed, K))
    again = pick(rest.flatten(0, 1), at, positions[:, :-1].flatten()).view(proposals.shape)
    choices[:, :-1] = torch.where(choices[:, :-1] == proposals, proposals, again)
    return choices


def _first(seeds: Any, count: int) -> Any:
    return seeds.view(-1, count + 1)[:, :count].flatten()


def continuations(seeds: Tensor, rule: Rule, sampling: SamplingParams) -> Tensor:  # [B, LENGTH]
    """What every seed gives, by rounds of K proposals."""
    count, rows = len(seeds), torch.arange(len(seeds))
    out = torch.full((count, LENGTH + K + 1), -1)
    start = torch.ones(count, dtype=torch.int64)
    own = rule is block
    out[:, 0] = pick(TARGET[1, 0].expand(count, -1), each(seeds, start, sampling), start)
    done = torch.ones(count, dtype=torch.int64)
    while bool((done < LENGTH).any()):
        before, drawn, proposals = [out[rows, done - 1]], [], []
        noise = of_round(seeds, done) if own else seeds
        for k in range(K):
            drawn.append(DRAFT[done + 1 + k, before[-1]])
            where = done + 1 + k
            proposals.append(pick(drawn[-1], each(noise, where, sampling), where))
            before.append(proposals[-1])
        positions = done[:, None] + 1 + torch.arange(K + 1)
        logits = TARGET[positions, torch.stack(before, 1)]
        proposed = torch.stack(proposals, 1)
        choices = rule(
            logits, torch.stack(drawn, 1), proposed, positions, each(noise, positions, sampling)
        )
        kept = (proposed == choices[:, :-1]).cumprod(1).sum(1)
        for k in range(K + 1):
            going = (k <= kept) & (done + k < LENGTH)
            out[rows[going], (done + k)[going]] = choices[going, k]
        done = (done + kept + 1).clamp_max(LENGTH)
    return out[:, :LENGTH]


def chance(out: Tensor, sampling: SamplingParams) -> float:
    """How likely the target itself is to give counts as far from its probabilities: chi-square."""
    p = torch.stack([probabilities(TARGET[at], sampling) for at in range(LENGTH + 1)]).double()
    cells = list(itertools.product(range(V), repeat=LENGTH))
    exact = torch.tensor([float(p[1, 0, a] * p[2, a, b] * p[3, b, c]) for a, b, c in cells])
    places = (out * torch.tensor([V * V, V, 1])).sum(-1)
    counts = torch.bincount(places, minlength=len(cells)).double()
    assert not counts[exact == 0].any()  # what the filters leave out
    expected = exact.double() * len(out)
    rare = expected < 5  # counted together
    expected, counts = (
        torch.cat([one[~rare], one[rare].sum()[None]]) for one in (expected, counts)
    )
    expected, counts = expected[expected > 0], counts[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("rule", [coupled, rejection, block])
def test_a_draft_leaves_the_targets_distribution(rule: Rule, sampling: SamplingParams) -> None:
    assert chance(continuations(torch.arange(DRAWS), rule, sampling), sampling) > 0.001


@pytest.mark.parametrize("rule", [likeliest, replaced, one_noise, stale_block])
def test_a_broken_accept_rule_does_not(rule: Rule) -> None:
    assert chance(continuations(torch.arange(DRAWS), rule, PLAIN), PLAIN) < 1e-6


@dataclass
class Table:
    """Stands for a target and its cache; the token at a position is all that it reads."""

    length: int = 0
    device = torch.device("cpu")
    prefill_rows = 512

    def new_cache(self, _: object) -> "Table":
        return self

    def read(self, _: object, ids: Tensor, __: object) -> Iterator[tuple[Tensor, Tensor]]:
        self.length = len(ids)
        yield ids, ids.new_empty(len(ids), 0)

    def last_logits(self, ids: Tensor) -> Tensor:
        return TARGET[self.length, ids[-1:]]

    def verify(self, _: object, ids: Tensor) -> Rows:
        at = self.length + 1 + torch.arange(len(ids))
        return Rows(TARGET[at, ids], ids.new_empty(len(ids), 0))

    def commit(self, _: object, rows: int) -> None:
        self.length += rows


class TableProposer:
    """Stands for a draft."""

    def __init__(self, target: Table, sampling: SamplingParams) -> None:
        self.target, self.params = target, sampling
        self.proposal_p: list[Tensor] | None = []

    def extend(self, features: Tensor, next_ids: Tensor | None = None) -> None:
        pass

    def propose(self, anchor: Tensor, most: int) -> Tensor:
        tokens, drawn = [anchor], []
        for k in range(most):
            at = self.target.length + 1 + k
            logits = DRAFT[at, tokens[-1]][None]
            drawn.append(probabilities(logits, self.params)[0])
            tokens.append(pick(logits, self.params, torch.tensor([at]))[0])
        self.proposal_p = drawn
        return torch.stack(tokens[1:])


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("rule", [coupled, rejection, block])
def test_the_loop_above_is_the_real_step(rule: Rule, sampling: SamplingParams) -> None:
    expected = continuations(torch.arange(60), rule, sampling)
    widths = set()
    name: Any = rule.__name__
    for seed, tokens in enumerate(expected.tolist()):
        table: Any = Table()
        mine = replace(sampling, seed=seed)
        step = ReferenceStep(table, None, mine, verification=name)
        step._proposer, step.limit = TableProposer(table, mine), K
        out = [step.prefill(PROMPT)]
        while len(out) < LENGTH:
            result = step.step()
            out += result.token_ids
            widths.add(result.num_accepted)
        assert out[:LENGTH] == tokens, seed
    assert widths == {0, 1, 2}


def test_a_draft_tells_what_it_drew_its_proposals_from() -> None:
    """A residual of another q would bend the output, and no other test would see it."""
    target = tiny_ling(nextn=True)
    for draft in (tiny_draft(target), nextn_draft(target, 3)):
        for seed in range(4):
            sampling = SamplingParams(temperature=2.0, top_k=40, seed=seed)
            step = ReferenceStep(target, draft, sampling, verification="rejection")
            step.prefill(torch.arange(5, 12))
            for _ in range(3):
                position, proposals = step.position, step.propose(3)
                assert step._proposer is not None
                drawn = torch.stack(step._proposer.proposal_p or [])
                assert torch.allclose(drawn.sum(-1), torch.ones(3))
                assert ((drawn > 0).sum(-1) == 40).all()
                noise = gumbel(seed, position + 1 + torch.arange(3), torch.arange(512))
                assert torch.equal((drawn.log() + noise).argmax(-1), proposals)
                step.commit(proposals, *step.verify(proposals))


def test_a_request_may_ask_for_any_rule() -> None:
    target = tiny_ling()
    draft, prompt = tiny_draft(target), list(range(5, 12))
    rules: list[Verification] = ["coupled", "rejection", "block"]
    outputs = [
        decode(target, draft, prompt, DecodeParams(12, how, ignore_eos=True, verification=rule))
        for how in (SamplingParams(), SamplingParams(temperature=2.0, seed=1))
        for rule in rules
    ]
    greedy, sampled = outputs[:3], [tuple(one.token_ids) for one in outputs[3:]]
    assert all(one.token_ids == greedy[0].token_ids for one in greedy)
    # the prefill's token is no proposal
    assert len({one[0] for one in sampled}) == 1
    assert len(set(sampled)) == 3
