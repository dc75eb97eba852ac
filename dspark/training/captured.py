"""The target's pass over packed rows as one launch: its layers compiled, all of it captured.

A target of a few hundred million parameters takes less time on a GPU than its launches take on the
host, and most of what the GPU then does stands between the products. The rows of a packed run have
one shape, so both can be had once for all.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dspark.target import Features, Target

__all__ = ["CapturedFeatures", "compiled"]

log = logging.getLogger(__name__)

_WARM_UP = 3
"""Passes before the capture: what is compiled or chosen at a first call is so by then."""


class CapturedFeatures:
    """`Target.packed_features` on a GPU, replayed for rows of the first call's shape.

    What it returns is overwritten by its next call. Other shapes, and targets whose pass cannot be
    captured, go through `Target.packed_features` itself.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._layer_ids: tuple[int, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self,
        input_ids: Tensor,  # [B, S] int64, on the target's device
        layer_ids: Sequence[int],
        documents: Tensor,  # [B, S] int64
    ) -> Features | None:
        """See `Target.packed_features`."""
        if self._layer_ids is None:
            self._layer_ids = tuple(layer_ids)
            self._capture(input_ids, documents)
        same = self._graph is not None and self._layer_ids == tuple(layer_ids)
        if not same or input_ids.shape != self._ids.shape:
            return self._target.packed_features(input_ids, layer_ids, documents)
        assert self._graph is not None
        self._ids.copy_(input_ids)
        self._documents.copy_(documents)
        self._graph.replay()
        return Features(self._taps, self._last_hidden)

    def _capture(self, input_ids: Tensor, documents: Tensor) -> None:
        layers = getattr(self._target, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            return
        self._ids, self._documents = input_ids.clone(), documents.to(input_ids.device, copy=True)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with compiled(layers):
                with torch.cuda.stream(aside):
                    for _ in range(_WARM_UP):
                        if self._features() is None:
                            return
                torch.cuda.current_stream().wait_stream(aside)
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    found = self._features()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler, or of what may not be captured
            log.info("the target's pass is not captured, which costs time alone: %s", error)
            return
        assert found is not None
        self._taps, self._last_hidden, self._graph = found.taps, found.last_hidden, graph

    def _features(self) -> Features | None:
        assert self._layer_ids is not None
        return self._target.packed_features(self._ids, self._layer_ids, self._documents)


@contextmanager
def compiled(layers: nn.ModuleList) -> Iterator[None]:
    """Each layer's `forward` compiled meanwhile; hooks on the layers see what they always see.

    Not for good: the same layers decode, in calls of many shapes.
    """
    try:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
