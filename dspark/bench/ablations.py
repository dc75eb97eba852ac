"""Techniques of the decode step that `dspark bench step --ablate` turns off, one at a time.

Each gives way to what an engine without it does: torch's launches in place of a fused kernel, wide
weights in place of narrow ones. Those of kernels stay inside the captured graph, so that a
difference is that of the technique and not of an eager segment.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.kernels.accept import Field
from dspark.kernels.launch import ROWS, without_pdl
from dspark.kernels.router import route_reference
from dspark.serving.graph import draft_body, target_body
from dspark.serving.graph.arena import Arena
from dspark.serving.graph.step import GraphStep

__all__ = ["ABLATIONS", "OF_LING", "without"]

ABLATIONS = {
    "run-ahead": "a step is enqueued when the one before it has been read",
    "graph": "kernels are launched one by one",
    "pdl": "a kernel starts when the one before it has ended",
    "fused-routing": "torch's operations choose the experts",
    "bf16-head": "router and head in float32, by cuBLAS",
    "staged-commit": "the accepted KDA state is copied to its place behind every step",
}
"""Name of each technique, and what happens without it."""
OF_LING = ("fused-routing", "staged-commit")
"""Those that a dense target has no use for."""


@contextlib.contextmanager
def without(name: str, step: GraphStep) -> Iterator[None]:
    """``step`` is captured without a technique inside, and with it again behind.

    Raises:
        ConfigError: a name that is not among `ABLATIONS`.
    """
    if name not in ABLATIONS:
        raise ConfigError(f"ablation must be one of {', '.join(ABLATIONS)}, got '{name}'")
    techniques: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "pdl": without_pdl,
        "fused-routing": _routing_by_torch,
        "bf16-head": _wide_products,
        "staged-commit": lambda: _copied_states(step),
    }
    changed = techniques.get(name)
    if changed is None:  # of the loop around the step
        yield
        return
    try:
        with changed():
            step.capture()
        yield
    finally:
        step.capture()


@contextlib.contextmanager
def _replaced(*places: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, new in places:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(places, before, strict=True):
            setattr(owner, name, old)


def _routing_by_torch() -> contextlib.AbstractContextManager[None]:
    def route(
        logits: Tensor, bias: Tensor, live_rows: Tensor, ids: Tensor, factors: Tensor, **how: Any
    ) -> None:
        how = {"chosen": ids.shape[1]} | {key: how[key] for key in how if key != "warps"}
        found, weights = route_reference(logits.sum(0), bias, ROWS, **how)
        dead = torch.arange(ROWS, device=ids.device)[:, None] >= live_rows
        ids.copy_(found.masked_fill(dead, -1))
        factors.copy_(weights)

    return _replaced((target_body, "route", route))


def _wide_products() -> contextlib.AbstractContextManager[None]:
    wide: dict[int, Tensor] = {}
    plain = target_body.product

    def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
        if weight.data_ptr() not in wide:
            wide[weight.data_ptr()] = weight.float()
        torch.mm(x.float(), wide[weight.data_ptr()].t(), out=out)

    def product(arena: Arena, component: str, name: str, x: Tensor, weight: Tensor) -> Tensor:
        if component != "router":
            return plain(arena, component, name, x, weight)
        out = arena.parts("wide router", 1, len(weight))
        multiply(x, weight, out[0])
        return out

    def head_logits(arena: Arena, component: str, weight: Tensor) -> Tensor:
        out = arena.parts("logits", 1, len(weight))[0]
        multiply(arena.normed, weight, out)
        return out

    return _replaced(
        (target_body, "product", product),
        (target_body, "head_logits", head_logits),
        (draft_body, "head_logits", head_logits),
    )


def _copied_states(step: GraphStep) -> contextlib.AbstractContextManager[None]:
    plain = step.run_body
    slot = step.arena.of(Field.START_SLOT)
    places = {index: torch.empty_like(one.states[:1]) for index, one in step.caches.kda.items()}

    def run_body() -> None:
        plain()
        for index, place in places.items():
            torch.index_select(step.caches.kda[index].states, 0, slot, out=place)

    return _replaced((step, "run_body", run_body))
