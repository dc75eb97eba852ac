"""An MLA verify step beside the layer it replaces: outputs, cache, lanes, rollback."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dspark.kernels.mla_verify import mla_attend, mla_combine, mla_prepare
from dspark.target.config import LingConfig
from dspark.target.mla import MLA
from dspark.target.rows import chunk_masks
from dspark.target.state import Call, LatentState
from dspark.testing import TINY_LING

UNWRITTEN = -7.0


def tiny_layer(
    variant: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    keys: dict[str, Any] | None = None,
    spread: float = 0.3,
) -> MLA:
    """Its output is what goes into `dense`."""
    layer = MLA(LingConfig.from_dict({**TINY_LING[variant], **(keys or {})}), 2)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(0, spread, generator=generator)
    layer.to(device, dtype).requires_grad_(False)
    layer.register_module("dense", nn.Identity())
    return layer


def number(value: int, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def nans(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, device=device, dtype=dtype)


class Kernels:
    """The kernels with a cache of which unused memory is NaN."""

    def __init__(
        self,
        layer: MLA,
        held: Tensor,
        lanes: int = 3,
        tile: int = 4,
        block: int = 32,
        capacity: int = 128,
        small: bool = True,
    ) -> None:
        self.layer, self.lanes = layer, lanes
        self.sizes: dict[str, dict[str, Any]] = {"prepare": {}, "attend": {}, "combine": {}}
        if small:  # for layers as small as these
            self.sizes["prepare"] = {"block": block}
            self.sizes["attend"] = {"chunk": 32, "block": 16, "heads_per_tile": tile, "warps": 4}
            self.sizes["combine"] = {"block": block // 2, "lane_block": 2, "warps": 4}
        self.device, self.dtype = held.device, layer.kv_b_proj.weight.dtype
        width = held.shape[1]
        self.latents = nans(capacity, width, device=self.device, dtype=self.dtype)
        self.latents[: len(held)] = held.to(self.dtype)
        self.query = nans(16, layer.heads, width, device=self.device, dtype=self.dtype)
        self.parts: tuple[Tensor, Tensor, Tensor]
        self.out = torch.empty(0)

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, latent and gates as views of one buffer of two partial sums."""
        layer = self.layer
        source = x
        if layer.low_rank_query:
            source = layer.q_a_layernorm(layer.q_a_proj(x))
            query = layer.q_b_proj
        else:
            query = layer.q_proj
        sums = []
        for given, weight in (
            (source, query.weight), (x, layer.kv_a_proj_with_mqa.weight), (x, layer.g_proj.weight)
        ):  # fmt: skip
            halves = zip(given.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
            sums.append(torch.stack([left @ right.T for left, right in halves]))
        sizes = [one.shape[2] for one in sums]
        buffer = nans(2, 17, sum(sizes) + 5, device=self.device)
        buffer[:, :16, : sum(sizes)] = torch.cat(sums, 2)
        views = buffer[:, :16, : sum(sizes)].split(sizes, 2)
        return views[0], views[1], views[2]

    def prepare(self, queries: Tensor, latent: Tensor, cursor: int, live: int) -> None:
        layer = self.layer
        mla_prepare(
            queries, latent, layer.kv_a_layernorm.weight, layer.kv_b_proj.weight,
            layer._rotary.inverse.to(self.device), self.latents, self.query,
            cursor=number(cursor, self.device), live_rows=number(live, self.device), eps=1e-6,
            amplitude=layer._rotary.amplitude, **self.sizes["prepare"],
        )  # fmt: skip

    def attend(self, cursor: int, live: int) -> None:
        sizes = (self.lanes, 16, self.layer.heads)
        total = nans(*sizes, self.layer.rank, device=self.device)
        peaks, masses = nans(*sizes, device=self.device), nans(*sizes, device=self.device)
        mla_attend(
            self.query, self.latents, total, peaks, masses,
            cursor=number(cursor, self.device), live_rows=number(live, self.device),
            scale=self.layer.scale, **self.sizes["attend"],
        )  # fmt: skip
        self.parts = (total, peaks, masses)

    def combine(self, gates: Tensor, live: int) -> Tensor:
        layer = self.layer
        # not NaN, which rows that are not live would give by themselves
        shape = (16, layer.heads * layer.value)
        out = torch.full(shape, UNWRITTEN, device=self.device, dtype=self.dtype)
        mla_combine(
            *self.parts, layer.kv_b_proj.weight, gates, out,
            live_rows=number(live, self.device), **self.sizes["combine"],
        )  # fmt: skip
        return out

    def __call__(self, x: Tensor, cursor: int, live: int) -> Tensor:
        queries, latent, gates = self.products(x)
        self.prepare(queries, latent, cursor, live)
        self.attend(cursor, live)
        return self.combine(gates, live)


def reference(layer: MLA, state: LatentState, x: Tensor, cursor: int) -> Tensor:
    positions = cursor + torch.arange(16, device=x.device)
    masks = chunk_masks(positions, cursor + 16, None)
    call = Call(
        positions=positions[None], by_row=True, count=16, start=cursor, latents={2: state},
        masks=tuple(mask.repeat(layer.heads, 1)[None] for mask in masks),
    )  # fmt: skip
    out: Tensor = layer(x[None], call)[0]
    return out


def drawn(
    layer: MLA, context: int, seed: int, device: torch.device
) -> tuple[LatentState, torch.Generator]:
    """A layer's cache after ``context`` random positions."""
    generator = torch.Generator().manual_seed(seed)
    state = layer.new_state(1, device)
    held = torch.randn(1, context, layer.rank + layer.rope, generator=generator)
    if context:
        state.write(held.to(layer.kv_b_proj.weight.dtype).float().to(device), 0)
    return state, generator


def agree(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Up to the order of sums, or the model's rounding."""
    tolerance = 1e-4
    if dtype != torch.float32 or out.device.type != "cpu":
        tolerance = 2e-2  # also for float32 on a GPU, which multiplies in tf32
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        out.float(), expected.float(), rtol=tolerance, atol=tolerance * scale
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["flash", "tiny"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_and_rejections_are_those_of_the_layer(
    variant: str, seed: int, device: torch.device
) -> None:
    layer = tiny_layer(variant, seed, device)
    cursor = [0, 20, 57][seed]
    state, generator = drawn(layer, cursor, seed, device)
    kernels = Kernels(layer, state.held[0, :cursor], lanes=[1, 2, 5][seed])
    for live, kept in [(9, 4), (16, 1), (1, 1), (5, 0), (9, 9)]:
        x = torch.randn(16, 64, generator=generator).to(device)
        out, expected = kernels(x, cursor, live), reference(layer, state, x, cursor)
        agree(out[:live], expected[:live], torch.float32)
        assert (out[live:] == UNWRITTEN).all()
        cursor += kept
        agree(kernels.latents[:cursor], state.held[0, :cursor], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sizes_may_be_odd_and_positions_stretched(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 40}
    sizes |= {"qk_nope_head_dim": 24, "qk_rope_head_dim": 10, "qk_head_dim": 34, "v_head_dim": 20}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    layer = tiny_layer("flash", seed, device, dtype, {**sizes, "rope_scaling": scaling})
    assert layer._rotary.amplitude > 1.1
    state, generator = drawn(layer, 40, seed, device)
    kernels = Kernels(layer, state.held[0, :40], lanes=2, tile=[1, 2, 4][seed], block=16)
    x = torch.randn(16, 64, generator=generator).to(device, dtype)
    out = kernels(x, 40, 13)
    agree(out[:13], reference(layer, state, x, 40)[:13], dtype)
    agree(kernels.latents[:53], state.held[0, :53], dtype)
    assert (out[13:] == UNWRITTEN).all()
    assert kernels.latents[53:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_real_sizes_with_the_tiles_of_a_gpu(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    """Eight heads of a rank; float32 tiles are too large for a GPU."""
    if dtype == torch.float32 and device.type != "cpu":
        pytest.skip("twice the shared memory that there is")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 512}
    sizes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192}
    # scores small enough that rounding does not choose another position
    layer = tiny_layer("flash", seed, device, dtype, {**sizes, "v_head_dim": 128}, spread=0.08)
    context = 240 + 60 * seed
    state, generator = drawn(layer, context, seed, device)
    held = state.held[0, :context]
    kernels = Kernels(layer, held, lanes=[1, 2, 20][seed], capacity=context + 16, small=False)
    x = torch.randn(16, 64, generator=generator).to(device, dtype)
    out = kernels(x, context, 9)
    agree(out[:9], reference(layer, state, x, context)[:9], dtype)
    agree(kernels.latents[: context + 9], state.held[0, : context + 9], dtype)
    assert (out[9:] == UNWRITTEN).all()


def test_products_may_come_in_the_models_dtype(device: torch.device) -> None:
    layer = tiny_layer("flash", 0, device, torch.bfloat16)
    state, generator = drawn(layer, 5, 0, device)
    x = torch.randn(16, 64, generator=generator).to(device, torch.bfloat16)
    split, whole = (Kernels(layer, state.held[0, :5], lanes=1) for _ in range(2))
    rounded = [one.sum(0, keepdim=True).bfloat16() for one in split.products(x)]
    # a second part that rounding takes away again, whichever way it rounds
    parts = [torch.cat([one.float(), one.float() / 1024]) for one in rounded]
    for kernels, (queries, latent, gates) in ((split, parts), (whole, rounded)):
        kernels.prepare(queries, latent, 5, 6)
        kernels.attend(5, 6)
        kernels.out = kernels.combine(gates, 6)
    assert torch.equal(split.query[:6], whole.query[:6])
    assert torch.equal(split.latents[:11], whole.latents[:11])
    assert torch.equal(split.out[:6], whole.out[:6])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rotations_hold_far_out(seed: int, device: torch.device) -> None:
    layer = tiny_layer("flash", seed, device)
    cursor, generator = 200_000 + 7 * seed, torch.Generator().manual_seed(seed)
    queries = torch.randn(1, 16, layer.heads * 24, generator=generator).to(device)
    latent = torch.randn(1, 16, 40, generator=generator).to(device)
    kernels = Kernels(layer, torch.zeros(0, 40, device=device), capacity=cursor + 12)
    kernels.prepare(queries, latent, cursor, 12)
    positions = cursor + torch.arange(12, device=device)[None]
    turned = layer._rotary(queries[:, :12].unflatten(2, (4, 24))[..., 16:], positions)
    # float32 has angles of 2e5 in steps of 1 / 64: only the same product gives the same turn
    torch.testing.assert_close(kernels.query[:12, :, 32:], turned[0], rtol=1e-5, atol=1e-5)
    assert kernels.query[12:].isnan().all()
    key = layer._rotary(latent[:, :12, 32:], positions)
    torch.testing.assert_close(kernels.latents[cursor:, 32:], key[0], rtol=1e-5, atol=1e-5)
    normed = layer.kv_a_layernorm(latent[:, :12, :32])
    torch.testing.assert_close(kernels.latents[cursor:, :32], normed[0], rtol=1e-5, atol=1e-5)
    assert kernels.latents[:cursor].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][: 1 + torch.cuda.is_available()])
def test_a_row_depends_on_its_own_position_and_on_nothing_else(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Row 7 is the first of another chunk; other rows are NaN, or huge where they are live."""
    layer = tiny_layer("flash", 0, device, dtype)
    state, generator = drawn(layer, 57, 0, device)
    x = torch.randn(16, 64, generator=generator).to(device, dtype)
    held = state.held[0, :57]
    sums = Kernels(layer, held).products(x)

    def step(given: list[Tensor], live: int) -> Tensor:
        kernels = Kernels(layer, held, lanes=2)
        kernels.prepare(given[0], given[1], 57, live)
        kernels.attend(57, live)
        return kernels.combine(given[2], live)

    whole = step(list(sums), 16)
    assert whole.isfinite().all()
    for live in range(1, 16) if device.type == "cuda" else (1, 7, 8, 9, 15):
        others = [one.clone() for one in sums]
        for one in others:
            one[:, live:] = torch.nan
        assert torch.equal(step(others, live)[:live], whole[:live]), live
    others = [one.clone() for one in sums]
    for one in others:
        one[:, 6:] *= -50.0
    assert torch.equal(step(others, 16)[:6], whole[:6])


def test_a_lane_in_which_a_row_sees_nothing_says_so(device: torch.device) -> None:
    layer = tiny_layer("flash", 0, device)
    state, generator = drawn(layer, 60, 0, device)
    kernels = Kernels(layer, state.held[0, :60], lanes=4)
    x = torch.randn(16, 64, generator=generator).to(device)
    agree(kernels(x, 60, 9)[:9], reference(layer, state, x, 60)[:9], torch.float32)
    total, peaks, masses = kernels.parts
    # chunks of 32: rows from 4 on see the third, nobody the fourth
    seen = torch.zeros(4, 9, dtype=torch.bool, device=device)
    seen[:2], seen[2, 4:] = True, True
    assert torch.equal((peaks[:, :9] > -torch.inf).all(2), seen)
    assert torch.equal((masses[:, :9] > 0).all(2), seen)
    assert (peaks[:, :9][~seen] == -torch.inf).all()
    assert (masses[:, :9][~seen] == 0).all()
    assert torch.equal(total[:, :9].isfinite().flatten(2).all(2), seen)
    for one in kernels.parts:
        assert one[:, 9:].isnan().all()


def test_a_step_without_live_rows_writes_nothing(device: torch.device) -> None:
    layer = tiny_layer("flash", 0, device)
    state, generator = drawn(layer, 9, 0, device)
    kernels = Kernels(layer, state.held[0, :9], lanes=1)
    out = kernels(torch.randn(16, 64, generator=generator).to(device), 9, 0)
    assert (out == UNWRITTEN).all()
    assert kernels.latents[9:].isnan().all()
    assert all(one.isnan().all() for one in (kernels.query, *kernels.parts))


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    layer = tiny_layer("flash", 0, device)
    kernels = Kernels(layer, torch.zeros(0, 40, device=device))
    queries, latent, gates = kernels.products(torch.zeros(16, 64, device=device))
    with pytest.raises(ValueError, match="mla_prepare wants queries"):
        kernels.prepare(queries[..., :-1], latent, 0, 1)
    with pytest.raises(ValueError, match="mla_prepare wants queries"):
        kernels.prepare(queries, latent[:, :15], 0, 1)
    with pytest.raises(ValueError, match="last stride of 1"):
        kernels.prepare(queries, latent.transpose(1, 2).contiguous().transpose(1, 2), 0, 1)
    with pytest.raises(ValueError, match="powers of two"):
        Kernels(layer, torch.zeros(0, 40, device=device), tile=3).attend(0, 1)
    kernels.attend(0, 1)
    with pytest.raises(ValueError, match="mla_combine wants total"):
        kernels.combine(gates[..., :-1], 1)
    kernels.latents = kernels.latents.bfloat16()
    with pytest.raises(ValueError, match="mla_attend wants one dtype"):
        kernels.attend(0, 1)
    kernels.latents = kernels.latents[:, :-1]
    with pytest.raises(ValueError, match="mla_attend wants query"):
        kernels.attend(0, 1)
