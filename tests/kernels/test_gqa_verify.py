"""A grouped-query attention step beside the layer it replaces: outputs, cache, lanes, rollback."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from dspark.kernels.gqa_verify import gqa_attend, gqa_combine, gqa_prepare
from dspark.target.attention import ATTENTION_NAME
from dspark.target.rows import RowCache

UNWRITTEN = -7.0
HIDDEN = 48
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "rope_theta": 10000.0}  # fmt: skip


class Layer(nn.Module):
    """Attention of a transformers model without its last product, decoding through a `RowCache`."""

    def __init__(
        self, family: str, seed: int, device: torch.device, dtype: torch.dtype, **keys: Any
    ) -> None:
        super().__init__()
        shape = {
            "hidden_size": HIDDEN, "num_attention_heads": 6, "num_key_value_heads": 2,
            "head_dim": 16, "num_hidden_layers": 1, "max_position_embeddings": 1 << 18,
            "attn_implementation": ATTENTION_NAME, **keys,
        }  # fmt: skip
        if family == "llama":
            config: Any = LlamaConfig(**shape)
            self.layer: Any = LlamaAttention(config, 0)
            self.rotary: Any = LlamaRotaryEmbedding(config)
        else:
            config = Qwen3Config(**shape)
            self.layer, self.rotary = Qwen3Attention(config, 0), Qwen3RotaryEmbedding(config)
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size, self.eps, self.scale = config.head_dim, config.rms_norm_eps, self.layer.scaling
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.layer.named_parameters():
            # scores small enough that bfloat16's rounding does not choose another position
            spread = 0.3 if dtype == torch.float32 else 0.1
            parameter.data.normal_(float("norm" in name), spread, generator=generator)
        self.layer.o_proj = nn.Identity()
        self.layer.to(device, dtype).requires_grad_(False)
        self.rotary.to(device)

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        if not hasattr(self.layer, "q_norm"):
            return None, None
        return self.layer.q_norm.weight, self.layer.k_norm.weight

    def forward(self, cache: RowCache, x: Tensor) -> Tensor:
        """[R, H N] of rows behind the cursor; nothing is kept yet."""
        cache.begin(len(x), (), x.device)
        at = cache.length + torch.arange(len(x), device=x.device)
        where = self.rotary(x[None], at[None])
        out: Tensor = self.layer(
            x[None], position_embeddings=where, attention_mask=None, row_cache=cache
        )[0]
        return out[0].flatten(1)

    def products(self, x: Tensor) -> Tensor:
        """Two partial sums [2, R, (H + 2 J) N]."""
        weight = torch.cat(
            [self.layer.q_proj.weight, self.layer.k_proj.weight, self.layer.v_proj.weight]
        )
        halves = zip(x.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
        return torch.stack([left @ right.T for left, right in halves])


def drawn(layer: Layer, context: int, seed: int, device: torch.device) -> RowCache:
    """A cache after ``context`` random positions."""
    cache = RowCache(())
    generator = torch.Generator().manual_seed(seed + 99)
    dtype = layer.layer.q_proj.weight.dtype
    if context:
        x = torch.randn(context, HIDDEN, generator=generator).to(device, dtype)
        layer(cache, x)
        cache.commit(context)
    return cache


class Kernels:
    """The kernels with a cache of which unused memory is NaN."""

    def __init__(
        self, layer: Layer, cache: RowCache, lanes: int, chunk: int = 32, capacity: int = 128
    ) -> None:
        self.layer, self.lanes, self.chunk = layer, lanes, chunk
        weight = layer.layer.q_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.keys = self.nans(layer.groups, capacity, layer.size, dtype=self.dtype)
        self.values = self.keys.clone()
        if cache.length:
            for mine, theirs in zip((self.keys, self.values), cache.committed(0), strict=True):
                mine[:, : cache.length] = theirs.to(self.dtype)
        self.query = self.nans(layer.heads, 16, layer.size, dtype=self.dtype)
        self.parts: tuple[Tensor, Tensor, Tensor]

    def nans(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, device=self.device, dtype=dtype)

    def number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def prepare(self, projected: Tensor, cursor: int, live: int) -> None:
        gqa_prepare(
            projected, *self.layer.norms, self.layer.rotary.inv_freq, self.query, self.keys,
            self.values, cursor=self.number(cursor), live_rows=self.number(live),
            eps=self.layer.eps, amplitude=self.layer.rotary.attention_scaling,
        )  # fmt: skip

    def __call__(self, projected: Tensor, cursor: int, live: int) -> Tensor:
        self.prepare(projected, cursor, live)
        sizes = (self.lanes, 16, self.layer.heads)
        self.parts = (self.nans(*sizes, self.layer.size), self.nans(*sizes), self.nans(*sizes))
        gqa_attend(
            self.query, self.keys, self.values, *self.parts, cursor=self.number(cursor),
            live_rows=self.number(live), scale=self.layer.scale, chunk=self.chunk,
        )  # fmt: skip
        # not NaN, which rows that are not live would give by themselves
        shape = (16, self.layer.heads * self.layer.size)
        out = torch.full(shape, UNWRITTEN, device=self.device, dtype=self.dtype)
        gqa_combine(*self.parts, out, live_rows=self.number(live), block_lanes=2)
        return out


def agree(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Up to the order of sums, or the model's rounding."""
    tolerance = 1e-4
    if dtype != torch.float32 or out.device.type != "cpu":
        tolerance = 2e-2  # also for float32 on a GPU, which multiplies in tf32
    if dtype == torch.bfloat16 and out.device.type == "cpu":
        tolerance = 4e-2  # Triton's interpreter cuts off where a GPU rounds
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(
        out.float(), expected.float(), rtol=tolerance, atol=tolerance * scale
    )


def rows(seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, HIDDEN, generator=generator).to(device, dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_and_rejections_are_those_of_the_layer(
    family: str, seed: int, device: torch.device
) -> None:
    layer = Layer(family, seed, device, torch.float32)
    cursor = [20, 0, 57][seed]
    cache = drawn(layer, cursor, seed, device)
    kernels = Kernels(layer, cache, lanes=[2, 1, 5][seed])
    for turn, (live, kept) in enumerate([(9, 4), (16, 1), (1, 1), (5, 0), (9, 9)]):
        x = rows(10 * seed + turn, device)
        expected = layer(cache, x)
        out = kernels(layer.products(x), cursor, live)
        agree(out[:live], expected[:live], torch.float32)
        assert (out[live:] == UNWRITTEN).all()
        cache.commit(kept)
        cursor += kept
        for mine, theirs in zip((kernels.keys, kernels.values), cache.committed(0), strict=True):
            agree(mine[:, :cursor], theirs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"head_dim": 20, "rope_parameters": LLAMA3}),
        ("qwen3", {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 3}),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 1, "rope_parameters": YARN}),
    ],
    ids=["five of eight lanes' columns, llama3", "no groups", "two tiles a group, yarn"],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sizes_may_be_odd_and_positions_stretched(
    family: str, keys: dict[str, Any], dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    layer = Layer(family, seed, device, dtype, **keys)
    cache = drawn(layer, 40, seed, device)
    kernels = Kernels(layer, cache, lanes=2 + seed)
    x = rows(seed, device, dtype)
    expected = layer(cache, x)
    out = kernels(layer.products(x), 40, 13)
    agree(out[:13], expected[:13], dtype)
    assert (out[13:] == UNWRITTEN).all()
    assert kernels.query[:, :13].isfinite().all()
    assert kernels.query[:, 13:].isnan().all()
    cache.commit(13)
    for mine, theirs in zip((kernels.keys, kernels.values), cache.committed(0), strict=True):
        agree(mine[:, :53], theirs, dtype)
        assert mine[:, 53:].isnan().all()


@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128)], ids=["SmolLM2", "Qwen3-8B"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_real_sizes_with_the_tiles_of_a_gpu(
    shape: tuple[int, int, int], seed: int, device: torch.device
) -> None:
    heads, groups, size = shape
    keys = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size}
    layer = Layer("qwen3", seed, device, torch.bfloat16, **keys)
    context = 240 + 60 * seed
    cache = drawn(layer, context, seed, device)
    kernels = Kernels(layer, cache, lanes=[2, 33, 3][seed], chunk=64, capacity=context + 16)
    x = rows(seed, device, torch.bfloat16)
    expected = layer(cache, x)
    agree(kernels(layer.products(x), context, 9)[:9], expected[:9], torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotations_hold_far_out(family: str, device: torch.device) -> None:
    layer = Layer(family, 0, device, torch.float32)
    cursor = 200_000
    kernels = Kernels(layer, RowCache(()), lanes=1, capacity=cursor + 12)
    x = rows(0, device)
    kernels.prepare(layer.products(x), cursor, 12)
    cache = RowCache(())
    # a cache of its own, which the layer's own positions would have to fill
    cache.begin(16, (), x.device)
    where = layer.rotary(x[None], cursor + torch.arange(16, device=x.device)[None])
    layer.layer(x[None], position_embeddings=where, attention_mask=None, row_cache=cache)
    cache.commit(12)
    close = 2e-5 if device.type == "cpu" else 2e-2
    for mine, theirs in zip((kernels.keys, kernels.values), cache.committed(0), strict=True):
        torch.testing.assert_close(mine[:, cursor:], theirs, rtol=close, atol=close)
        assert mine[:, :cursor].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][: 1 + torch.cuda.is_available()])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_row_depends_on_its_own_position_and_on_nothing_else(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    """Row 7 is the first of another chunk; other rows are NaN, or huge where they are live."""
    layer = Layer("qwen3", seed, device, dtype, num_attention_heads=2, num_key_value_heads=1)
    cache = drawn(layer, 57, seed, device)
    projected = layer.products(rows(seed, device, dtype))

    def step(given: Tensor, live: int) -> Tensor:
        return Kernels(layer, cache, lanes=2)(given, 57, live)

    whole = step(projected, 16)
    assert whole.isfinite().all()
    for live in range(1, 16):
        others = projected.clone()
        others[:, live:] = torch.nan
        assert torch.equal(step(others, live)[:live], whole[:live]), live
    others = projected.clone()
    others[:, 6:] *= -50.0
    assert torch.equal(step(others, 16)[:6], whole[:6])


def test_a_lane_in_which_a_row_sees_nothing_says_so(device: torch.device) -> None:
    layer = Layer("llama", 0, device, torch.float32)
    cache = drawn(layer, 60, 0, device)
    kernels = Kernels(layer, cache, lanes=4)
    kernels(layer.products(rows(0, device)), 60, 9)
    total, peaks, masses = kernels.parts
    # chunks of 32: rows from 4 on see the third, nobody the fourth
    seen = torch.zeros(4, 9, dtype=torch.bool, device=device)
    seen[:2], seen[2, 4:] = True, True
    assert torch.equal((peaks[:, :9] > -torch.inf).all(2), seen)
    assert (peaks[:, :9][~seen] == -torch.inf).all()
    assert torch.equal((masses[:, :9] > 0).all(2), seen)
    assert (masses[:, :9][~seen] == 0).all()
    assert torch.equal(total[:, :9].isfinite().flatten(2).all(2), seen)
    for one in kernels.parts:
        assert one[:, 9:].isnan().all()


def test_a_step_without_live_rows_writes_nothing(device: torch.device) -> None:
    layer = Layer("qwen3", 0, device, torch.float32)
    kernels = Kernels(layer, drawn(layer, 9, 0, device), lanes=1)
    out = kernels(layer.products(rows(0, device)), 9, 0)
    assert (out == UNWRITTEN).all()
    assert kernels.keys[:, 9:].isnan().all()
    assert all(one.isnan().all() for one in (kernels.query, *kernels.parts))


def test_rows_behind_the_caches_end_are_not_written(device: torch.device) -> None:
    layer = Layer("llama", 0, device, torch.float32)
    kernels = Kernels(layer, RowCache(()), lanes=1, capacity=20)
    kernels.prepare(layer.products(rows(0, device)), 12, 16)
    for one in (kernels.keys, kernels.values):
        assert one[:, :12].isnan().all()
        assert one[:, 12:].isfinite().all()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    layer = Layer("qwen3", 0, device, torch.float32)
    kernels = Kernels(layer, RowCache(()), lanes=1)
    projected = layer.products(rows(0, device))
    with pytest.raises(ValueError, match="gqa_prepare wants contiguous projected"):
        kernels.prepare(projected[..., :-1], 0, 1)
    layer.layer.q_norm.weight.data = layer.layer.q_norm.weight.data.bfloat16()
    with pytest.raises(ValueError, match="gqa_prepare wants one dtype"):
        kernels.prepare(projected, 0, 1)
    kernels.parts = (torch.zeros(1, 16, 5, 16, device=device),) * 3
    with pytest.raises(ValueError, match="gqa_attend wants query heads a multiple of the 2"):
        gqa_attend(
            kernels.query[:5], kernels.keys, kernels.values, kernels.parts[0],
            *(torch.zeros(1, 16, 5, device=device) for _ in range(2)),
            cursor=kernels.number(0), live_rows=kernels.number(1), scale=1.0,
        )  # fmt: skip
