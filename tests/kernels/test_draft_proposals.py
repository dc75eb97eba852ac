"""Shortlist, pair biases and chain beside the proposer that they replace."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.decoding.proposer import BlockProposer
from dspark.decoding.sampling import SamplingParams, filter_logits, pick_candidate
from dspark.draft import DSparkDraftModel
from dspark.draft.config import DSparkConfig
from dspark.kernels import proposals
from dspark.serving.graph.weights import DraftWeights

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=2.5, top_p=0.6),
    SamplingParams(temperature=2.0, min_p=0.3),
    SamplingParams(temperature=3.0, top_k=12, top_p=0.8, min_p=0.2),
]


def number(value: float, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([value], dtype=dtype, device=device)


def listed(logits: Tensor, slots: int, per_part: int, parts: int) -> tuple[Tensor, Tensor]:
    shape = (slots, parts * per_part)
    values = torch.full(shape, torch.nan, device=logits.device)
    ids = torch.full(shape, -7, dtype=torch.int32, device=logits.device)
    proposals.shortlist(logits, values, ids, slots=slots, per_part=per_part, parts=parts)
    return values, ids


def chained(
    values: Tensor, ids: Tensor, bias: Tensor | None, confidence: Tensor | None,
    params: SamplingParams, *, position: int, limit: int, threshold: float = 0.0,
) -> list[int]:  # fmt: skip
    """Proposals; rows behind them must not be written."""
    device, real = values.device, torch.float32
    out, count = torch.full((16,), -7, dtype=torch.int32, device=device), number(-7, device)
    low = (params.seed & 0xFFFFFFFF) - (1 << 32) * ((params.seed >> 31) & 1)
    proposals.chain(
        values, ids, bias, confidence, out, count,
        position=number(position, device), limit=number(limit, device),
        threshold=number(threshold, device, real),
        temperature=number(params.temperature, device, real),
        top_p=number(params.top_p, device, real), top_k=number(params.top_k, device),
        min_p=number(params.min_p, device, real), seed_low=number(low, device),
        seed_high=number(params.seed >> 32, device), slots=len(values),
    )  # fmt: skip
    found = out.tolist()
    assert found[int(count) :] == [-7] * (16 - int(count))
    return found[: int(count)]


@dataclass
class Pairs:
    """Random heads over a random shortlist, and the arithmetic of the proposer with them."""

    ids: Tensor
    values: Tensor
    w1: Tensor
    w2: Tensor
    hidden: Tensor
    weight: Tensor
    shift: Tensor
    temperatures: Tensor
    anchor: int = 3

    @classmethod
    def drawn(
        cls, seed: int, device: torch.device, *, slots: int = 5, rank: int = 8, wide: int = 32,
        dtype: torch.dtype = torch.float32, joint: bool = True, size: int = 24,
    ) -> "Pairs":  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        ids = torch.stack([torch.randperm(70, generator=generator)[:wide] for _ in range(slots)])
        hidden = normal(16, size)
        hidden[slots:] = torch.nan
        return cls(
            ids.int().to(device), normal(slots, wide).to(device),
            normal(70, rank).to(device, dtype), normal(70, rank).to(device, dtype),
            hidden.to(device, dtype), normal(size + rank * joint).to(device, dtype) / 4,
            normal(1).to(device, dtype), normal(slots).exp().to(device),
        )  # fmt: skip

    def computed(self, markov: bool = True, confident: bool = True) -> tuple[Tensor, Tensor]:
        slots, wide = self.ids.shape
        device = self.ids.device
        bias = torch.full((slots, wide, wide), torch.nan, device=device)
        confidence = torch.full((slots, wide), torch.nan, device=device)
        proposals.pair_bias(
            self.ids, number(self.anchor, device), self.w1 if markov else None,
            self.w2 if markov else None, self.hidden, self.weight if confident else None,
            self.shift if confident else None, self.temperatures if confident else None, bias,
            confidence, slots=slots,
            block_previous=16, block_candidates=16, block_rank=16,
        )  # fmt: skip
        return bias, confidence

    def bias_of(self, slot: int, previous: int) -> Tensor:
        return (self.w2[self.ids[slot].long()] @ self.w1[previous]).float()

    def confidence_of(self, slot: int, previous: int) -> Tensor:
        x = self.hidden[slot].float()
        if len(self.weight) > len(x):
            x = torch.cat([x, self.w1[previous].float()])
        return (x @ self.weight.float() + self.shift.float()[0]) / self.temperatures[slot]

    def proposed(
        self, params: SamplingParams, *, position: int, limit: int, threshold: float = 0.0,
        markov: bool = True, confident: bool = True,
    ) -> list[int]:  # fmt: skip
        """`BlockProposer.propose` over this shortlist."""
        found: list[int] = []
        previous = self.anchor
        for slot in range(min(limit, len(self.ids))):
            logits = self.values[slot]
            if markov:
                logits = logits + self.bias_of(slot, previous)
            if confident and float(self.confidence_of(slot, previous).sigmoid()) < threshold:
                break
            ids = self.ids[slot].long()
            # so that of equal logits the first one has the lowest id
            order = ids.argsort()[self.values[slot, ids.argsort()] > -torch.inf]
            choice = pick_candidate(logits[order], ids[order], params, position + slot + 1)
            previous = int(choice)
            found.append(previous)
        return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("vocabulary", "parts", "per_part"), [(1001, 4, 4), (512, 4, 8), (37, 4, 16), (5, 8, 2)]
)
def test_each_part_lists_its_best(
    vocabulary: int, parts: int, per_part: int, seed: int, device: torch.device
) -> None:
    """With many ties, some logits at -inf, and parts that hold less than is asked for."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, vocabulary, generator=generator).mul(4).round().div(4)
    logits[1, ::3] = -torch.inf
    logits[3:] = torch.nan
    values, ids = listed(logits.to(device), 3, per_part, parts)
    size = -(-vocabulary // parts)
    for slot in range(3):
        for part in range(parts):
            run = logits[slot, part * size : (part + 1) * size]
            best, places = run.sort(descending=True, stable=True)
            filled = int((best[:per_part] > -torch.inf).sum())
            found = slice(part * per_part, part * per_part + filled)
            assert torch.equal(values[slot, found].cpu(), best[:filled])
            assert torch.equal(ids[slot, found].cpu(), places[:filled].int() + part * size)
            rest = slice(found.stop, (part + 1) * per_part)
            assert (values[slot, rest] == -torch.inf).all()
            assert (ids[slot, rest] == 0).all()


def test_a_shortlist_does_not_depend_on_the_other_rows(device: torch.device) -> None:
    logits = torch.randn(16, 100, generator=torch.Generator().manual_seed(0)).to(device)
    whole = listed(logits, 16, 4, 4)
    for slots in (1, 2, 7, 15):
        other = logits.clone()
        other[slots:] = torch.nan
        for mine, theirs in zip(listed(other, slots, 4, 4), whole, strict=True):
            assert torch.equal(mine, theirs[:slots])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("rank", "wide", "joint"), [(8, 32, True), (40, 32, False), (16, 8, True), (24, 64, True)]
)
def test_pairs_are_those_of_the_heads(
    rank: int, wide: int, joint: bool, seed: int, device: torch.device
) -> None:
    pairs = Pairs.drawn(seed, device, slots=3, rank=rank, wide=wide, joint=joint)
    bias, confidence = pairs.computed()
    # the GPU multiplies float32 in tf32
    tolerance = 1e-5 if device.type == "cpu" else 2e-2
    for slot in range(3):
        for p in range(wide):
            previous = int(pairs.ids[slot - 1, p]) if slot else pairs.anchor
            torch.testing.assert_close(
                bias[slot, p], pairs.bias_of(slot, previous), rtol=tolerance, atol=tolerance
            )
            torch.testing.assert_close(
                confidence[slot, p], pairs.confidence_of(slot, previous), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_biases_are_rounded_like_the_weights(seed: int, device: torch.device) -> None:
    # the interpreter cuts off what bfloat16 should round
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    pairs = Pairs.drawn(seed, device, slots=2, dtype=dtype, wide=16)
    bias, confidence = pairs.computed()
    assert torch.equal(bias, bias.to(dtype).float())
    previous = pairs.ids[0].long()
    expected = (pairs.w1[previous] @ pairs.w2[pairs.ids[1].long()].T).float()
    assert (bias[1] == expected).float().mean() > 0.95
    torch.testing.assert_close(bias[1], expected, rtol=1e-2, atol=1e-2)
    theirs = [pairs.confidence_of(1, int(each)) for each in previous]
    torch.testing.assert_close(confidence[1], torch.stack(theirs), rtol=1e-5, atol=1e-5)


def test_a_head_that_is_not_there_is_not_written(device: torch.device) -> None:
    pairs = Pairs.drawn(0, device, joint=False)
    bias, confidence = pairs.computed(markov=False)
    assert bias.isnan().all()
    expected = torch.stack([pairs.confidence_of(slot, 0) for slot in range(5)])
    torch.testing.assert_close(confidence, expected[:, None].expand_as(confidence))
    whole, _ = pairs.computed()
    bias, confidence = pairs.computed(confident=False)
    assert torch.equal(bias, whole)
    assert confidence.isnan().all()
    assert all(one.isnan().all() for one in pairs.computed(markov=False, confident=False))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("params", FILTERS)
def test_chains_are_those_of_the_proposer(
    params: SamplingParams, seed: int, device: torch.device
) -> None:
    """With every filter, with and without heads, some places empty, up to any limit."""
    params = replace(params, seed=(seed << 33) + 7 - seed)
    pairs = Pairs.drawn(seed, device)
    pairs.values[:, 20:27] = -torch.inf
    pairs.ids[:, 20:27] = 0
    bias, confidence = pairs.computed()
    for limit in (0, 3, 9):
        mine = chained(pairs.values, pairs.ids, bias, confidence, params, position=41, limit=limit)
        assert mine == pairs.proposed(params, position=41, limit=limit)
        assert len(mine) == min(limit, 5)
    # slots that are not asked for, with candidates in them
    few = (pairs.values[:3], pairs.ids[:3], bias[:3], confidence[:3])
    assert chained(*few, params, position=41, limit=9) == mine[:3]
    plain = chained(pairs.values, pairs.ids, None, None, params, position=6, limit=5)
    assert plain == pairs.proposed(params, position=6, limit=5, markov=False, confident=False)
    assert plain != mine


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_chain_ends_where_confidence_is_too_low(seed: int, device: torch.device) -> None:
    lengths = set()
    for draw in range(3):
        pairs = Pairs.drawn(10 * seed + draw, device, wide=16)
        bias, confidence = pairs.computed()
        for threshold in (0.0, 0.4, 0.6, 1.0):
            mine = chained(
                pairs.values, pairs.ids, bias, confidence, FILTERS[1], position=9, limit=5,
                threshold=threshold,
            )  # fmt: skip
            expected = pairs.proposed(FILTERS[1], position=9, limit=5, threshold=threshold)
            assert mine == expected
            lengths.add(len(mine))
            if threshold == 0.6:
                whole = chained(
                    pairs.values, pairs.ids, bias, None, FILTERS[1], position=9, limit=5,
                    threshold=threshold,
                )  # fmt: skip
                assert len(whole) == 5
    assert {0, 5} < lengths


def test_of_equal_logits_the_lowest_id_wins(device: torch.device) -> None:
    ids = torch.tensor([[9, 4, 6, 0, 2, 8, 1, 3]] * 2, dtype=torch.int32, device=device)
    values = torch.tensor([[1, 1, 1, 0, 0, 1, -torch.inf, 0]] * 2, device=device)
    bias = torch.zeros(2, 8, 8, device=device)
    # behind 4, at place 1, the ids 2 and 8 are as good as each other
    bias[1, 1, 4], bias[1, 1, 5] = 2, 1
    assert chained(values, ids, bias, None, SamplingParams(), position=0, limit=2) == [4, 2]


def test_without_candidates_there_is_no_proposal(device: torch.device) -> None:
    pairs = Pairs.drawn(0, device)
    pairs.values[2] = -torch.inf
    for params in FILTERS:
        mine = chained(pairs.values, pairs.ids, None, None, params, position=1, limit=5)
        assert len(mine) == 2


@triton.jit
def _filter(scores, out, top_k, top_p, min_p, C: tl.constexpr):
    c = tl.arange(0, C)
    row = tl.program_id(0)
    left = proposals.filtered(tl.load(scores + row * C + c), top_k, top_p, min_p)
    tl.store(out + row * C + c, left)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "params",
    [
        *FILTERS[1:],
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=64),
        SamplingParams(temperature=1.0, top_k=900),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=8.0, top_k=20, top_p=0.97),
    ],
)
def test_filters_are_those_of_the_reference(
    params: SamplingParams, seed: int, device: torch.device
) -> None:
    """Ties at the edge stay together; places without a candidate stay out."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 64, generator=generator).mul(3)
    logits[:2] = logits[:2].round()
    logits[1::2, 50:] = -torch.inf
    scores = (logits / params.temperature).to(device)
    out = torch.full_like(scores, torch.nan)
    _filter[(4,)](scores, out, params.top_k, params.top_p, params.min_p, C=64)
    assert torch.equal(out.cpu(), filter_logits(logits, params))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("params", [FILTERS[0], FILTERS[1], FILTERS[5]])
def test_proposals_are_the_drafts_own(
    params: SamplingParams, seed: int, device: torch.device
) -> None:
    """From hidden states on, with a vocabulary that a shortlist holds whole."""
    draft = DSparkDraftModel(
        DSparkConfig(
            vocab_size=45, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, block_size=4,
            target_layer_ids=[0, 1], num_target_layers=4, mask_token_id=44, markov_rank=8,
            sts_temperatures=[16.0, 0.1, 16.0, 1.0],
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    tables = torch.randn(2, 45, 32, generator=generator).to(device)
    draft.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    draft.attach(tables[0], tables[1])
    heads = draft.markov_head
    assert heads is not None
    params = replace(params, seed=seed)
    taps = torch.randn(6, 64, generator=generator).to(device)
    anchor = torch.tensor(11, device=device)
    confidence_head = DraftWeights.of(draft).confidence
    assert confidence_head is not None
    for threshold in (0.0, 0.4, 0.7):
        proposer = BlockProposer(draft, params, threshold=threshold)
        proposer.extend(taps)
        hidden = torch.full((16, 32), torch.nan, device=device)
        hidden[:4] = draft.block_hidden(proposer._context, anchor)
        logits = torch.full((16, 45), torch.nan, device=device)
        logits[:4] = draft.block_logits(hidden[:4])
        values, ids = listed(logits, 4, 4, 16)
        bias = torch.full((4, 64, 64), torch.nan, device=device)
        confidence = torch.full((4, 64), torch.nan, device=device)
        proposals.pair_bias(
            ids, anchor[None], heads.markov_w1.weight, heads.markov_w2.weight, hidden,
            *confidence_head, bias, confidence, slots=4,
        )  # fmt: skip
        mine = chained(
            values, ids, bias, confidence, params, position=6, limit=4, threshold=threshold
        )
        assert mine == proposer.propose(anchor, 4).tolist()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    pairs = Pairs.drawn(0, device)
    logits = torch.zeros(16, 50, device=device)
    for rows, slots, per_part in ((15, 2, 4), (16, 17, 4), (16, 2, 3)):
        with pytest.raises(ValueError, match="shortlist wants contiguous logits"):
            listed(logits[:rows], slots, per_part, 4)
    with pytest.raises(ValueError, match="shortlist wants contiguous ids"):
        proposals.shortlist(logits, pairs.values, pairs.ids[:2], slots=5, per_part=8, parts=4)
    pairs.w2 = pairs.w2[:, :7]
    with pytest.raises(ValueError, match="pair_bias wants contiguous w2"):
        pairs.computed()
    pairs.w2, pairs.weight = pairs.w1, pairs.weight[:-1]
    with pytest.raises(ValueError, match="pair_bias wants contiguous conf_weight"):
        pairs.computed()
    with pytest.raises(ValueError, match="a power of two of candidates"):
        chained(
            pairs.values[:, :24], pairs.ids[:, :24], None, None, FILTERS[0], position=0, limit=1
        )
    bias = torch.zeros(5, 32, 31, device=device)
    with pytest.raises(ValueError, match="chain wants contiguous bias"):
        chained(pairs.values, pairs.ids, bias, None, FILTERS[0], position=0, limit=1)
