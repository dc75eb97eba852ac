"""Any transformers causal LM with a key/value cache as a target; taps are taken by hooks.

Symbols: B batch, S positions, T rows, M sequences, D hidden, F tapped layers, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dspark.errors import TargetError
from dspark.target.base import Features, Target, check_layer_ids, join_taps
from dspark.target.lockstep import LockstepCache
from dspark.target.rows import RowCache, Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HFTarget", "attention_windows", "logit_transform"]


class HFTarget(Target):
    """A `PreTrainedModel` whose attention goes through `dspark.target.rows`.

    Raises:
        TargetError: the model keeps recurrent state, or its layers or head cannot be found.
    """

    def __init__(self, model: "PreTrainedModel", name: str, revision: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.revision = revision
        self.config: Any = model.config.get_text_config(decoder=True)
        if getattr(model, "_is_stateful", False) or _recurrent(self.config):
            raise TargetError(
                f"target '{name}' ({type(model).__name__}) keeps recurrent state, which a rejected "
                "draft token cannot be taken back from here; use a target with a key/value cache"
            )
        self._decoder: Any = model.get_decoder()
        self._layers = _decoder_layers(self._decoder, self.config.num_hidden_layers, name)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise TargetError(f"target '{name}' has no linear output head")
        self._head = head
        self._finish = logit_transform(self.config)
        self._windows = attention_windows(self.config)
        generation = getattr(model, "generation_config", None)
        self.eos_ids = frozenset(
            _ids(getattr(generation, "eos_token_id", None)) | _ids(self.config.eos_token_id)
        )
        if self.device.type != "meta":  # an outline has no values to compare
            self._check_head()

    @property
    def decoder(self) -> Any:
        """The model without its head."""
        return self._decoder

    @property
    def layers(self) -> nn.ModuleList:
        """Of the decoder."""
        return self._layers

    @property
    def embed_weight(self) -> Tensor:  # [V, D]
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:  # [V, D]
        return self._head.weight

    @property
    def head_bias(self) -> Tensor | None:  # [V]
        """Of the output head; most have none."""
        bias: Tensor | None = self._head.bias
        return bias

    @property
    def architecture(self) -> str:
        names = getattr(self.model.config, "architectures", None) or [""]
        return str(names[0])

    @torch.no_grad()
    def packed_features(
        self, input_ids: Tensor, layer_ids: Sequence[int], documents: Tensor
    ) -> Features | None:
        if self._windows:  # a mask for each kind of layer would be needed
            return None
        return self._features(input_ids, layer_ids, **_apart(documents.to(self.device)))

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,  # [B, S] int64
        layer_ids: Sequence[int],
        attention_mask: Tensor | None = None,  # [B, S], only needed for padding on the left
    ) -> Features:
        """Taps and last hidden states of whole sequences, in the target's dtype."""
        return self._features(input_ids, layer_ids, attention_mask=attention_mask)

    def _features(
        self, input_ids: Tensor, layer_ids: Sequence[int], **seen: Tensor | None
    ) -> Features:
        with self._tapped(layer_ids) as taken:
            out = self._decoder(input_ids=input_ids.to(self.device), use_cache=False, **seen)
        return Features(join_taps(taken, layer_ids, out.last_hidden_state), out.last_hidden_state)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] behind the final norm -> [..., V]."""
        weight = self._head.weight
        return self._finish(self._head(hidden.to(weight.device, weight.dtype)))

    @torch.no_grad()
    def own_logits(self, input_ids: Tensor) -> Tensor:  # [S] int64 -> [S, V]
        """Of every position, by the model's own forward pass."""
        out = self.model(input_ids=input_ids[None].to(self.device), use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    def new_cache(self, layer_ids: Sequence[int] = ()) -> RowCache:
        """An empty cache for one sequence whose calls return the taps of ``layer_ids``."""
        check_layer_ids(layer_ids, self.num_layers)
        self.pack()
        return RowCache(tuple(layer_ids))

    @torch.no_grad()
    def step_together(self, cache: LockstepCache, input_ids: Tensor) -> Tensor:
        """One token of each sequence [M]; their logits [M, V], equal to those of `verify`.

        Nothing is kept until ``cache.commit``.
        """
        count = len(input_ids)
        padded = input_ids.new_full((cache.rows,), int(input_ids[0]))
        padded[:count] = input_ids
        out = self._decoder(
            input_ids=padded[None].to(self.device),
            position_ids=cache.begin(self._windows)[None],
            use_cache=False,
            row_cache=cache,
        )
        return self.logits(out.last_hidden_state[0])[:count]

    def _extend(
        self, cache: RowCache, input_ids: Tensor, count: int | None
    ) -> tuple[Tensor, Tensor]:
        rows = len(input_ids)
        cache.begin(rows, self._windows, self.device)
        positions = cache.length + torch.arange(rows, device=self.device)
        with self._tapped(cache.layer_ids) as taken:
            out = self._decoder(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                row_cache=cache,
            )
        hidden = out.last_hidden_state
        return hidden[0], join_taps(taken, cache.layer_ids, hidden)[0]

    @contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        check_layer_ids(layer_ids, self.num_layers)
        taken: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                taken[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self._layers[i].register_forward_hook(keep(i)) for i in layer_ids]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _check_head(self) -> None:
        """The last hidden state must reproduce the model's own logits."""
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        theirs = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self.features(ids, ()).last_hidden).float()
        if not theirs.isfinite().all():
            raise TargetError(
                f"target '{self.name}' computes logits that are NaN or Inf: its weights are "
                f"damaged, or too large for {self.dtype}"
            )
        if not torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2):
            raise TargetError(
                f"target '{self.name}': the output head applied to the last hidden state differs "
                f"from the model's own logits by up to {(ours - theirs).abs().max():.3g}; this "
                "architecture transforms its logits in a way that is not known here"
            )


def _apart(documents: Tensor) -> dict[str, Tensor]:
    """Mask [B, 1, S, S] and positions [B, S]: documents of a row do not see each other.

    Our attention also gets the mask by a name of its own, for what is NaN under it.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, :, None] == documents[:, None, :]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins, places, 0).cummax(1).values
    seen = same & (places[:, None] >= places)
    return {
        "attention_mask": seen[:, None],
        "apart": seen,
        "position_ids": places - first,
    }


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list | tuple) else {int(value)}


def _recurrent(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return any("attention" not in kind or "linear" in kind for kind in kinds)


def _decoder_layers(decoder: nn.Module, count: int, name: str) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TargetError(f"target '{name}': found no list of {count} decoder layers to tap")


def attention_windows(config: Any) -> Windows:
    """Of each layer of a model of ``config``; empty if none has one."""
    window: int | None = getattr(config, "sliding_window", None)
    # a config keeps keys that its model does not know, and does not heed
    known = "sliding_window" in inspect.signature(type(config)).parameters
    if window is None or not known:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding"] * config.num_hidden_layers
    windows = tuple(window if "sliding" in kind else None for kind in kinds)
    return windows if any(windows) else ()


def logit_transform(config: Any) -> Callable[[Tensor], Tensor]:
    """What a model of ``config`` does to the output of its head."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    if divisor and divisor != 1:
        return lambda logits: logits / divisor
    if factor and factor != 1:
        return lambda logits: logits * factor
    return lambda logits: logits
