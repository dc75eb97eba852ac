"""Launches of a verify step: rows through the target, to its token behind every row.

Symbols: R = 16 rows, D hidden, V vocabulary.
"""

from dataclasses import replace

from torch import Tensor

from dspark.kernels.accept import Field, pick_parts
from dspark.kernels.experts import experts_down, experts_up
from dspark.kernels.gemm16 import gemm16
from dspark.kernels.gqa_verify import gqa_attend, gqa_combine, gqa_prepare
from dspark.kernels.kda_verify import kda_verify
from dspark.kernels.launch import ROWS
from dspark.kernels.mla_verify import mla_attend, mla_combine, mla_prepare
from dspark.kernels.products import gate_up16, gated_gemm16, swiglu16
from dspark.kernels.reduce_norm import embed_norm, parts_norm
from dspark.kernels.router import route
from dspark.kernels.tiles import gate_up_tile, tile_for
from dspark.serving.graph.arena import Arena, Caches
from dspark.serving.graph.sums import add_experts, add_norm
from dspark.serving.graph.weights import (
    DenseFFN,
    ExpertFFN,
    GQAMixer,
    KDAMixer,
    LayerWeights,
    MLAMixer,
    TargetWeights,
)

__all__ = ["TargetBody", "head_logits", "product"]

_LATENT_EPS = 1e-6
"""Of the norms inside MLA, which the config does not set."""


def product(arena: Arena, component: str, name: str, x: Tensor, weight: Tensor) -> Tensor:
    """Partial sums [S, R, N] of ``x`` @ ``weight``.T, in scratch ``name``."""
    tile = tile_for(*weight.shape)
    out = arena.parts(name, tile.splits, len(weight))
    if arena.on(component):
        gemm16(x, weight, out, **tile.options())
    return out


def head_logits(arena: Arena, component: str, weight: Tensor) -> Tensor:
    """Logits [R, V] float32 of the normed rows."""
    tile = replace(tile_for(*weight.shape), splits=1)
    out = arena.parts("logits", 1, len(weight))
    if arena.on(component):
        gemm16(arena.normed, weight, out, **tile.options())
    return out[0]


class TargetBody:
    """Launches every kernel of the target once; capturing them is the caller's work.

    Another block of the same layers brings its own ``cursor`` and ``live_rows``, and one
    ``component`` that all its launches count as.
    """

    def __init__(
        self,
        weights: TargetWeights,
        arena: Arena,
        caches: Caches,
        layer_ids: tuple[int, ...],
        most_rows: int = ROWS,
        *,
        cursor: Field = Field.CURSOR,
        live_rows: Field = Field.LIVE_ROWS,
        component: str | None = None,
    ) -> None:
        self.weights, self.arena, self.caches = weights, arena, caches
        self.cursor, self.live_rows = arena.of(cursor), arena.of(live_rows)
        self.component = component
        self.layer_ids, self.most_rows = layer_ids, most_rows
        self.eps = weights.config.rms_norm_eps

    def verify(self) -> Tensor:
        """Logits [R, V] float32 behind every row."""
        arena, layers = self.arena, self.weights.layers
        if arena.on("embedding"):
            embed_norm(
                arena.of(Field.ANCHOR), self.weights.embedding, layers[0].norm,
                arena.residual, arena.normed, eps=self.eps,
                proposals=(
                    arena.proposals, arena.of(Field.COUNT), arena.of(Field.LIVE_ROWS),
                    arena.of(Field.DONE),
                ),
            )  # fmt: skip
        for index, layer in enumerate(layers):
            last = index + 1 == len(layers)
            after = self.weights.norm if last else layers[index + 1].norm
            self.layer(index, layer, after)
        return head_logits(arena, "head", self.weights.head)

    def layer(self, index: int, layer: LayerWeights, after: Tensor) -> None:
        """Mixer and FFN, and the norm ``after`` them."""
        arena = self.arena
        mixed = self.mix(index, layer.mixer)
        if self.on("norms"):
            add_norm(arena, mixed, layer.ffn_norm, eps=self.eps)
        if isinstance(layer.ffn, DenseFFN):
            self._dense(layer.ffn, after, self.tap(index))
        else:
            self.experts(layer.ffn, after, self.tap(index))

    def on(self, component: str) -> bool:
        """Whether ``component``, or what all of it counts as, is launched."""
        return self.arena.on(self.component or component)

    def _product(self, component: str, name: str, x: Tensor, weight: Tensor) -> Tensor:
        return product(self.arena, self.component or component, name, x, weight)

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Best scores of parts of the vocabulary, and their ids, for every row: [R, P] each."""
        arena, exchange = self.arena, self.arena.exchange
        best, ids = arena.picked, arena.picked_ids
        if arena.on("head"):
            pick_parts(
                logits, arena.floors, arena.ints, arena.reals, best, ids,
                first=exchange.first if exchange else 0,
            )  # fmt: skip
        if exchange is None:
            return best, ids
        all_best = arena.scratch("picked", (ROWS, exchange.peers.ranks))
        all_ids = arena.scratch("picked ids", (ROWS, exchange.peers.ranks), ids.dtype)
        if arena.on("head"):
            exchange.choose(best, ids, arena.mailbox, all_best, all_ids)
        return all_best, all_ids

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [R, V] of all ranks."""
        exchange = self.arena.exchange
        if exchange is None:
            return logits
        ranks, share = exchange.peers.ranks, exchange.share
        out = self.arena.scratch("whole logits", (ROWS, ranks * share))
        exchange.logits(logits, out)
        return out

    def tap(self, index: int) -> Tensor | None:
        """Where layer ``index`` leaves its output for the draft."""
        if index not in self.layer_ids:
            return None
        hidden, place = self.arena.residual.shape[1], self.layer_ids.index(index)
        return self.arena.taps[:, place * hidden : (place + 1) * hidden]

    def mix(self, index: int, mixer: KDAMixer | MLAMixer | GQAMixer) -> Tensor:
        """Partial sums of the mixer's output."""
        if isinstance(mixer, KDAMixer):
            return self._kda(index, mixer)
        if isinstance(mixer, GQAMixer):
            return self._gqa(index, mixer)
        return self._mla(index, mixer)

    def _kda(self, index: int, mixer: KDAMixer) -> Tensor:
        arena, width = self.arena, mixer.heads * mixer.size
        into = self._product("KDA in", "mixer", arena.normed, mixer.into)
        tuning = arena.tuning
        block_v = min(tuning.kda_block_v, mixer.size)
        core = arena.parts("core", 1, width)[0]
        squares = arena.scratch("squares", (ROWS, mixer.heads, mixer.size // block_v))
        rows = arena.scratch("kda rows", (ROWS, mixer.heads, 6, mixer.size))
        if self.on("KDA"):
            kda_verify(
                into, mixer.conv, mixer.a_log, mixer.dt_bias, mixer.norm, self.caches.kda[index],
                core, squares, rows, start_slot=arena.of(Field.START_SLOT),
                live_rows=self.live_rows, turn=arena.of(Field.TURN),
                lower_bound=self.weights.ling.kda_lower_bound, block_v=block_v,
                warps=tuning.kda_warps,
            )  # fmt: skip
        parts = tuning.out_parts if mixer.heads % tuning.out_parts == 0 else 1
        out = arena.parts("mixed", parts, len(mixer.out))
        if self.on("KDA out"):
            gated_gemm16(
                core, squares, mixer.out, out, eps=self.eps, block_n=tuning.out_block_n,
                warps=tuning.out_warps,
            )  # fmt: skip
        return out

    def _mla(self, index: int, mixer: MLAMixer) -> Tensor:
        arena, config = self.arena, self.weights.ling
        into = self._product("MLA in", "mixer", arena.normed, mixer.into)
        heads, size = mixer.heads, config.latent_dim
        first = heads * config.qk_head_dim
        queries = into[:, :, :first]
        if mixer.query is not None and mixer.query_norm is not None:
            first = mixer.query.shape[1]
            low = arena.scratch("low-rank query", (ROWS, first), arena.dtype)
            if self.on("MLA in"):
                parts_norm(into[:, :, :first], mixer.query_norm, low, eps=_LATENT_EPS)
            queries = self._product("MLA in", "queries", low, mixer.query)
        query = arena.scratch("query", (ROWS, heads, size), arena.dtype)
        total = arena.scratch(
            "mla total", (arena.tuning.mla_lanes, ROWS, heads, config.kv_lora_rank)
        )
        peaks = arena.scratch("mla peaks", (arena.tuning.mla_lanes, ROWS, heads))
        masses = arena.scratch("mla masses", (arena.tuning.mla_lanes, ROWS, heads))
        mixed = arena.scratch("mla mixed", (ROWS, heads * mixer.value), arena.dtype)
        if self.on("MLA"):
            cursor, live = self.cursor, self.live_rows
            latents = self.caches.latents[index]
            mla_prepare(
                queries, into[:, :, first : first + size], mixer.latent_norm, mixer.kv_b,
                mixer.inverse, latents, query, cursor=cursor, live_rows=live, eps=_LATENT_EPS,
                amplitude=mixer.amplitude,
            )  # fmt: skip
            mla_attend(
                query, latents, total, peaks, masses, cursor=cursor, live_rows=live,
                scale=mixer.scale, block=arena.tuning.mla_block, stages=arena.tuning.mla_stages,
                heads_per_tile=arena.tuning.mla_heads, warps=arena.tuning.mla_warps,
            )  # fmt: skip
            gates = into[:, :, first + size :]
            mla_combine(
                total, peaks, masses, mixer.kv_b, gates, mixed, live_rows=live,
                lane_block=arena.tuning.mla_lane_block, block=arena.tuning.mla_value_block,
                warps=arena.tuning.mla_combine_warps,
            )  # fmt: skip
        return self._product("MLA out", "mixed", mixed, mixer.out)

    def _gqa(self, index: int, mixer: GQAMixer) -> Tensor:
        arena, heads, size = self.arena, mixer.heads, mixer.size
        projected = self._product("attention in", "mixer", arena.normed, mixer.into)
        keys, values = self.caches.pairs[index]
        lanes, chunk, stages = arena.tuning.lanes_for(*keys.shape[1:])
        query = arena.scratch("gqa query", (heads, ROWS, size), arena.dtype)
        total = arena.scratch("gqa total", (lanes, ROWS, heads, size))
        peaks = arena.scratch("gqa peaks", (lanes, ROWS, heads))
        masses = arena.scratch("gqa masses", (lanes, ROWS, heads))
        mixed = arena.scratch("gqa mixed", (ROWS, heads * size), arena.dtype)
        if self.on("attention"):
            cursor, live = self.cursor, self.live_rows
            gqa_prepare(
                projected, mixer.q_norm, mixer.k_norm, mixer.inverse, query, keys, values,
                cursor=cursor, live_rows=live, eps=self.eps, amplitude=mixer.amplitude,
            )  # fmt: skip
            gqa_attend(
                query, keys, values, total, peaks, masses, cursor=cursor, live_rows=live,
                scale=mixer.scale, chunk=chunk, warps=arena.tuning.gqa_warps, stages=stages,
            )  # fmt: skip
            gqa_combine(total, peaks, masses, mixed, live_rows=live)
        return self._product("attention out", "mixed", mixed, mixer.out)

    def _dense(self, ffn: DenseFFN, after: Tensor, tap: Tensor | None) -> None:
        """Dense FFN, residual, and the norm ``after`` it."""
        arena = self.arena
        width = ffn.down.shape[1]
        inner = arena.scratch("dense", (ROWS, width), arena.dtype)
        if not ffn.fused:
            parts = self._product("dense FFN", "gate up", arena.normed, ffn.gate_up)
            if self.on("dense FFN"):
                swiglu16(parts, inner)
        elif self.on("dense FFN"):
            tile = gate_up_tile(width, ffn.gate_up.shape[1])
            gate_up16(
                arena.normed, ffn.gate_up, inner, block_n=tile.block_n, block_k=tile.block_k,
                warps=tile.warps, stages=tile.stages,
            )  # fmt: skip
        out = self._product("dense FFN", "fed", inner, ffn.down)
        if self.on("norms"):
            add_norm(arena, out, after, eps=self.eps, tap=tap)

    def experts(self, ffn: ExpertFFN, after: Tensor, tap: Tensor | None) -> None:
        """Routed and shared experts, residual, and the norm ``after`` them."""
        arena, config, tuning = self.arena, self.weights.ling, self.arena.tuning
        logits = self._product("router", "router", arena.normed, ffn.router)
        if self.on("router"):
            route(
                logits, ffn.bias, self.live_rows, arena.ids, arena.factors,
                groups=config.n_group, kept_groups=config.topk_group,
                factor=config.routed_scaling_factor, warps=tuning.route_warps,
            )  # fmt: skip
        if self.on("experts"):
            experts_up(
                arena.normed, ffn.gate_up, arena.ids, arena.inner, limit=ffn.limit,
                shared_limit=ffn.shared_limit, most_rows=self.most_rows,
                block_n=tuning.up_block_n, block_k=_step(ffn.gate_up.shape[2], tuning.up_block_k),
                warps=tuning.up_warps, stages=tuning.up_stages,
            )  # fmt: skip
            experts_down(
                arena.inner, ffn.down, arena.ids, arena.each, most_rows=self.most_rows,
                block_n=tuning.down_block_n, block_k=_step(ffn.down.shape[2], tuning.down_block_k),
                warps=tuning.down_warps, stages=tuning.down_stages,
            )  # fmt: skip
            add_experts(arena, after, eps=self.eps, tap=tap)


def _step(size: int, most: int) -> int:
    """Largest power of two up to ``most`` that divides ``size``."""
    return min(most, size & -size)
