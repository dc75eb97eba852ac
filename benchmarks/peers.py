"""Kernels of other libraries for the work of a verify step; None where a library is missing.

Both get what ours computes on the way as finished inputs, so they do less than the kernels beside
which they stand: the caller says what is left out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["fla_kda", "flashinfer_mla"]

_PAGE = 64


def fla_kda(heads: int, size: int, tokens: int, layers: int) -> list[Callable[[], object]] | None:
    """FLA's recurrent KDA, one call a layer: no convolutions, no gates, one state kept."""
    try:
        from fla.ops.kda import fused_recurrent_kda
    except ImportError:
        return None
    rows = [_draw(1, tokens, heads, size) for _ in range(layers)]
    decays = [-torch.rand(1, tokens, heads, size, device="cuda") for _ in range(layers)]
    beta = torch.rand(1, tokens, heads, device="cuda").bfloat16()
    states = [torch.zeros(1, heads, size, size, device="cuda") for _ in range(layers)]
    return [
        lambda i=i: fused_recurrent_kda(
            rows[i], rows[i], rows[i], decays[i], beta, initial_state=states[i],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )
        for i in range(layers)
    ]  # fmt: skip


def flashinfer_mla(
    latents: list[Tensor],  # a layer's [capacity, L + P]; capacity a multiple of 64
    kv_b: Tensor,  # [H (N + V), L]
    heads: int,
    nope: int,
    tokens: int,
    context: int,
    scale: float,
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]] | None:
    """FlashInfer's paged MLA (fa3), one call a layer: alone, and with what stands around it.

    Around it: cuBLAS moves the key product to the query, latents are copied to the cache, cuBLAS
    rebuilds the values, and the gate multiplies them. Norm and rotation are left out.
    """
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return None
    rank = kv_b.shape[1]
    turned, value = latents[0].shape[1] - rank, len(kv_b) // heads - nope
    pages = -(-(context + tokens) // _PAGE)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    room = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    indices = torch.arange(pages, dtype=torch.int32, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(
        room, use_cuda_graph=True, qo_indptr=ints(0, tokens), kv_indptr=ints(0, pages),
        kv_indices=indices, kv_len_arr=ints(context + tokens), backend="fa3",
    )  # fmt: skip
    wrapper.plan(
        ints(0, tokens), ints(0, pages), indices, ints(context + tokens), heads, rank, turned,
        _PAGE, True, scale, latents[0].dtype, latents[0].dtype,
    )  # fmt: skip
    still, rotated = _draw(tokens, heads, rank), _draw(tokens, heads, turned)
    out = torch.empty_like(still)
    paged = [one.view(-1, _PAGE, rank + turned) for one in latents]
    # as two tensors, which is how its cache lies
    caches = [(one[..., :rank].contiguous(), one[..., rank:].contiguous()) for one in paged]
    query, gate = _draw(heads, tokens, nope), _draw(tokens, heads, 1)
    fresh, fresh_turned = _draw(tokens, rank), _draw(tokens, turned)
    to_key, to_value = kv_b.view(heads, nope + value, rank).split([nope, value], 1)
    rows = slice(context, context + tokens)

    def alone(cache: tuple[Tensor, Tensor]) -> None:
        wrapper.run(still, rotated, *cache, out=out)

    def whole(cache: tuple[Tensor, Tensor]) -> None:
        still.copy_(torch.bmm(query, to_key).transpose(0, 1))
        cache[0].view(-1, rank)[rows] = fresh
        cache[1].view(-1, turned)[rows] = fresh_turned
        alone(cache)
        values = torch.bmm(out.transpose(0, 1), to_value.transpose(1, 2))
        values.transpose(0, 1) * gate.sigmoid()

    return tuple(  # type: ignore[return-value]
        [lambda call=call, cache=cache: call(cache) for cache in caches] for call in (alone, whole)
    )


def _draw(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
