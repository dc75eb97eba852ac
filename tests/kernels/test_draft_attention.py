"""The draft's cache and attention beside its own layers: every context length, and nothing else."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dspark.draft import DSparkDraftModel
from dspark.draft.config import DSparkConfig
from dspark.draft.layers import DraftAttention
from dspark.kernels.draft_attention import draft_append, draft_attend, draft_combine, draft_rotate

EPS = 1e-6
HEADS = [(4, 2, 16), (2, 2, 16), (3, 1, 24)]  # query heads, key heads, head size
CHUNK = 16


def tiny(heads: tuple[int, int, int], seed: int, device: torch.device) -> DSparkDraftModel:
    query_heads, groups, size = heads
    draft = DSparkDraftModel(
        DSparkConfig(
            vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=query_heads, num_key_value_heads=groups, head_dim=size,
            rms_norm_eps=EPS, block_size=5, target_layer_ids=[0, 1], num_target_layers=4,
            mask_token_id=39, markov_rank=0,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    table = torch.randn(40, 32, generator=generator).to(device)
    draft.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    draft.attach(table, table)
    return draft


def attention(draft: DSparkDraftModel, layer: int) -> DraftAttention:
    found = draft.layers[layer].self_attn
    assert isinstance(found, DraftAttention)
    return found


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """Partial products over two halves of K: [2, rows, outputs]."""
    halves = zip(x.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
    return torch.stack([left @ right.T for left, right in halves])


def number(value: int, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


@dataclass
class Cache:
    """Keys and values of all layers, NaN where nothing has been written."""

    draft: DSparkDraftModel
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, draft: DSparkDraftModel, capacity: int) -> "Cache":
        one = attention(draft, 0)
        shape = (len(draft.layers), one.groups, capacity, one.size)
        like = one.k_norm.weight
        new = [like.new_full(shape, torch.nan) for _ in range(2)]
        return cls(draft, *new)

    def append(self, rows: Tensor, base: int, count: int, block_rows: int = 4) -> None:
        """Rows [16, D] of the projected context."""
        layers = [attention(self.draft, i) for i in range(len(self.draft.layers))]
        weights = [one for a in layers for one in (a.k_proj.weight, a.v_proj.weight)]
        draft_append(
            parts(rows, torch.cat(weights)), torch.stack([a.k_norm.weight for a in layers]),
            inverse(self.draft), self.keys, self.values,
            base=number(base, rows.device), count=number(count, rows.device), eps=EPS,
            block_rows=block_rows,
        )  # fmt: skip


def inverse(draft: DSparkDraftModel) -> Tensor:
    found = draft.rotary_emb.inv_freq
    assert isinstance(found, Tensor)
    # a model that is cast takes them along
    return found.float()


def attended(
    one: DraftAttention, rotary: Tensor, projected: Tensor, keys: Tensor, values: Tensor,
    context: int, slots: int, lanes: int = 3, chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [16, H N] before the output projection, and the lanes' peaks."""
    device = projected.device
    total = torch.full((lanes, 16, one.heads, one.size), torch.nan, device=device)
    peaks, masses = total[..., 0].clone(), total[..., 0].clone()
    heads = one.heads + 2 * one.groups
    block = torch.full((heads, 16, one.size), torch.nan, dtype=keys.dtype, device=device)
    draft_rotate(
        projected, one.q_norm.weight, one.k_norm.weight, rotary, block,
        context=number(context, device), groups=one.groups, eps=EPS,
    )  # fmt: skip
    draft_attend(
        block, keys, values, total, peaks, masses,
        context=number(context, device), slots=slots, scale=one.size**-0.5, chunk=chunk,
    )  # fmt: skip
    out = torch.full((16, one.heads * one.size), torch.nan, dtype=keys.dtype, device=device)
    draft_combine(total, peaks, masses, out, slots=slots, block_lanes=2)
    assert total[:, slots:].isnan().all()
    # lanes behind the context say so, and leave their totals
    idle = [lane for lane in range(1, lanes) if lane * chunk >= context]
    assert (peaks[idle, :slots] == -torch.inf).all()
    assert (masses[idle, :slots] == 0).all()
    assert total[idle].isnan().all()
    return out, peaks


def stacked(one: DraftAttention) -> Tensor:
    return torch.cat([one.q_proj.weight, one.k_proj.weight, one.v_proj.weight])


def same(mine: Tensor, theirs: Tensor) -> None:
    # the GPU multiplies float32 in tf32
    tolerance = 1e-4 if mine.device.type == "cpu" else 1e-2
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_appends_are_those_of_extend(
    heads: tuple[int, int, int], seed: int, device: torch.device
) -> None:
    """As many rows at a time as a step accepts; what the others hold is not written."""
    draft = tiny(heads, seed, device)
    cache, context = Cache.of(draft, 64), draft.new_context()
    generator = torch.Generator().manual_seed(seed)
    for count in (16, 1, 7, 0, 16):
        taps = torch.randn(16, 64, generator=generator).to(device)
        rows = draft.project_context(taps[None])[0]
        rows[count:] = 7.0
        base = context.length
        cache.append(rows, base, count)
        draft.extend(context, taps[:count])
        assert context.length == base + count
        for layer in range(2):
            held = (cache.keys[layer], cache.values[layer])
            for mine, theirs in zip(held, context.read(layer), strict=True):
                torch.testing.assert_close(mine[:, : base + count], theirs[0])
                assert mine[:, base + count :].isnan().all()


def test_rows_behind_the_end_of_the_cache_are_dropped(device: torch.device) -> None:
    draft = tiny(HEADS[0], 0, device)
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device)
    cache, whole = Cache.of(draft, 20), Cache.of(draft, 40)
    cache.append(rows, 12, 16)
    whole.append(rows, 12, 16)
    assert torch.equal(cache.keys[:, :, 12:], whole.keys[:, :, 12:20])
    assert torch.equal(cache.values[:, :, 12:], whole.values[:, :, 12:20])
    assert cache.keys[:, :, :12].isnan().all()
    assert cache.values[:, :, :12].isnan().all()


def test_an_appended_row_does_not_depend_on_the_others(device: torch.device) -> None:
    draft = tiny(HEADS[0], 0, device)
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).to(device)
    whole = Cache.of(draft, 32)
    whole.append(rows, 5, 16)
    for live in range(1, 17):
        other = rows.clone()
        other[live:] = torch.nan
        cache = Cache.of(draft, 32)
        cache.append(other, 5, live, block_rows=8)
        assert torch.equal(cache.keys[:, :, 5 : 5 + live], whole.keys[:, :, 5 : 5 + live])
        assert torch.equal(cache.values[:, :, 5 : 5 + live], whole.values[:, :, 5 : 5 + live])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("heads", "context"),
    [*((HEADS[0], context) for context in (0, 15, 16, 17, 70)), (HEADS[1], 1), (HEADS[2], 49)],
)
def test_blocks_are_those_of_the_draft(
    heads: tuple[int, int, int], context: int, seed: int, device: torch.device
) -> None:
    """Whole layers, but for their attention; behind the context and in dead rows stands NaN."""
    draft = tiny(heads, seed, device)
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(context, 64, generator=generator).to(device)
    anchor = torch.tensor(seed, device=device)
    held = draft.new_context()
    draft.extend(held, taps)
    cache = Cache.of(draft, 80)
    for base in range(0, context, 16):
        count = min(16, context - base)
        rows = torch.full((16, 32), torch.nan, device=device)
        rows[:count] = draft.project_context(taps[None, base : base + count])[0]
        cache.append(rows, base, count)
    hidden = torch.full((16, 32), torch.nan, device=device)
    hidden[:5] = draft._block_input(anchor[None])[0]
    for index, layer in enumerate(draft.layers):
        one = attention(draft, index)
        normed = layer.input_layernorm(hidden)  # type: ignore[operator]
        out, _ = attended(
            one, inverse(draft), parts(normed, stacked(one)), cache.keys[index],
            cache.values[index], context, 5,
        )  # fmt: skip
        assert (out[5:] == 0).all()
        hidden = hidden + out @ one.o_proj.weight.T
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[operator]
    expected = draft.block_hidden(held, anchor)
    same(draft.norm(hidden)[:5], expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_roundings_are_those_of_the_layer(seed: int, device: torch.device) -> None:
    """At real head size: bit by bit, but for sums that end between two numbers."""
    # the interpreter cuts off what bfloat16 should round
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    draft = tiny((2, 1, 128), seed, device).to(dtype)  # type: ignore[arg-type]
    one = attention(draft, 0)
    generator = torch.Generator().manual_seed(seed)
    rows, x = (torch.randn(n, 32, generator=generator) for n in (16, 16))
    rows, x = rows.to(device, dtype), x.to(device, dtype)
    start = 4321
    cache = Cache.of(draft, start + 16)
    cache.append(rows, start, 16)
    positions = torch.arange(start, start + 16, device=device)[None]
    keys, values = one.keys_values(rows[None], draft.rotary_emb(rows[None], positions))
    for mine, theirs in ((cache.keys[0], keys[0]), (cache.values[0], values[0])):
        # a GPU's keys differ by one unit in the last place in a fifth of the places
        share = 0.97 if device.type == "cpu" else 0.7
        assert (mine[:, start:] == theirs).float().mean() > share
        torch.testing.assert_close(mine[:, start:], theirs, rtol=2e-2, atol=2e-2)
    # the same rows as if they were a whole context
    out, _ = attended(
        one, inverse(draft), parts(x, stacked(one)), keys[0].contiguous(), values[0].contiguous(),
        16, 7,
    )  # fmt: skip
    rotary = draft.rotary_emb(x[None], torch.arange(16, 23, device=device)[None])
    own = one.keys_values(x[None, :7], rotary)
    k, v = (torch.cat(pair, 2) for pair in zip((keys, values), own, strict=True))
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    q = one.queries(x[None, :7], rotary)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = expected[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(out[:7], expected, rtol=2e-2, atol=2e-2)


def test_a_slot_does_not_depend_on_the_other_queries(device: torch.device) -> None:
    """Nor on how many lanes there are, but for roundings."""
    draft = tiny(HEADS[1], 0, device)
    one, rotary = attention(draft, 0), inverse(draft)
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 2, 64, 16, generator=generator).to(device)
    projected = torch.randn(2, 16, 6 * 16, generator=generator).to(device)
    whole, _ = attended(one, rotary, projected, keys, values, 50, 16)
    other = projected.clone()
    other[:, :4, : 2 * 16] = torch.nan
    other[:, 9:, : 2 * 16] = 7.0
    changed, _ = attended(one, rotary, other, keys, values, 50, 16)
    assert torch.equal(changed[4:9], whole[4:9])
    for lanes, chunk in ((1, 32), (5, 16)):
        again, _ = attended(one, rotary, projected, keys, values, 50, 16, lanes, chunk)
        same(again, whole)


@pytest.mark.parametrize("slots", [1, 4, 7, 15])
def test_rows_behind_the_slots_are_neither_seen_nor_written(
    slots: int, device: torch.device
) -> None:
    draft = tiny(HEADS[0], 1, device)
    one, rotary = attention(draft, 0), inverse(draft)
    generator = torch.Generator().manual_seed(slots)
    keys, values = torch.randn(2, 2, 64, 16, generator=generator).to(device)
    projected = torch.randn(2, 16, 8 * 16, generator=generator).to(device)
    outs = []
    for rest in (torch.nan, 5.0):
        projected[:, slots:] = rest
        out, _ = attended(one, rotary, projected, keys, values, 21, slots)
        assert out[:slots].isfinite().all()
        assert (out[slots:] == 0).all()
        outs.append(out)
    assert torch.equal(*outs)


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    one = number(1, device)
    with pytest.raises(ValueError, match=r"draft_append wants contiguous projected \(1, 16, 128\)"):
        draft_append(
            zeros(1, 16, 64), zeros(2, 16), zeros(8), zeros(2, 2, 4, 16), zeros(2, 2, 4, 16),
            base=one, count=one, eps=EPS,
        )  # fmt: skip
    with pytest.raises(ValueError, match="even head size"):
        draft_append(
            zeros(1, 16, 60), zeros(2, 15), zeros(7), zeros(2, 1, 4, 15), zeros(2, 1, 4, 15),
            base=one, count=one, eps=EPS,
        )  # fmt: skip

    def attend(slots: int, heads: int, lanes: int = 2) -> None:
        draft_attend(
            zeros(heads + 4, 16, 16), zeros(2, 4, 16), zeros(2, 4, 16), zeros(2, 16, heads, 16),
            zeros(lanes, 16, heads), zeros(2, 16, heads), context=one, slots=slots, scale=1.0,
        )  # fmt: skip

    for slots, heads in ((0, 2), (17, 2), (4, 3)):
        with pytest.raises(ValueError, match="draft_attend wants query heads a multiple"):
            attend(slots, heads)
    with pytest.raises(ValueError, match="draft_rotate wants an even head size"):
        draft_rotate(
            zeros(1, 16, 64), zeros(16), zeros(16), zeros(8), zeros(4, 16, 16), context=one,
            groups=2, eps=EPS,
        )  # fmt: skip
    with pytest.raises(ValueError, match="draft_attend wants contiguous peaks"):
        attend(4, 2, lanes=3)
    with pytest.raises(ValueError, match="draft_combine wants contiguous out"):
        draft_combine(zeros(2, 16, 2, 16), zeros(2, 16, 2), zeros(2, 16, 2), zeros(16, 33), slots=4)
