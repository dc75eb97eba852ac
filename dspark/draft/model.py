"""The draft model: taps and anchors in, hidden states of the slots out; trained and cached form.

Both forms run the same layers: `forward` masks whole sequences, `block_hidden` reads a cache that
holds only committed context. Their equality is the contract between training and serving.
Source: DSpark, arXiv 2607.05147; names and shapes as in DeepSpec's Qwen3 drafts.

Symbols: B batch, S positions, A anchors, K slots, F tapped layers, D hidden, V vocabulary, r rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from dspark.draft.anchors import block_positions
from dspark.draft.config import DSparkConfig
from dspark.draft.heads import ConfidenceHead, MarkovHead
from dspark.draft.layers import DraftLayer, Rotary
from dspark.draft.visibility import TILE, Visibility
from dspark.kernels.packed_linear import pack_linears

__all__ = ["DSparkDraftModel", "DraftContext"]


class DraftContext:
    """Keys and values of the committed context rows, per draft layer.

    Block rows never enter: their keys come from mask tokens, those of a committed token from the
    target's taps (DSpark recomputes them, algorithm 1).
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._keys: list[Tensor | None] = [None] * layers  # [1, G, capacity, N]
        self._values: list[Tensor | None] = [None] * layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write rows [1, G, n, N] at the cursor; the caller moves ``length`` after all layers."""
        end = self.length + keys.shape[2]
        for store, new in ((self._keys, keys), (self._values, values)):
            held = store[layer]
            if held is None or held.shape[2] < end:
                capacity = max(256, 2 * end)
                grown = new.new_empty(*new.shape[:2], capacity, new.shape[3])
                if held is not None:
                    grown[:, :, : self.length] = held[:, :, : self.length]
                store[layer] = held = grown
            held[:, :, self.length : end] = new

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, length, N]."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, : self.length], values[:, :, : self.length]

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """By layer, views of the keys and values [1, G, n, N] of the rows from ``start`` on."""
        both = {layer: self.read(layer) for layer in range(len(self._keys))}
        return {layer: (k[:, :, start:], v[:, :, start:]) for layer, (k, v) in both.items()}

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Append ``rows`` rows that `written` gave."""
        for layer, (keys, values) in written.items():
            self.append(layer, keys, values)
        self.length += rows


class DSparkDraftModel(PreTrainedModel):
    """The trainable draft; embedding and output head are the target's, frozen, via `attach`."""

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        assert config.block_size is not None
        assert config.target_layer_ids is not None
        hidden = config.hidden_size
        self.block_size = config.block_size
        self.layer_ids = tuple(config.target_layer_ids)
        self.fc = nn.Linear(len(self.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        # heads draw behind the backbone, in post_init: a seed gives the same backbone without them
        with torch.random.fork_rng(devices=[]):
            self.markov_head = MarkovHead(config) if config.markov_rank else None
            self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        # plain attributes, not parameters: they belong to the target and are never saved or moved
        self.embed_weight: Tensor | None = None  # [V, D]
        self.head_weight: Tensor | None = None  # [V, D]
        self._step_head: nn.Linear | None = None
        self._compiled_stack: Callable[..., Tensor] | None = None
        self.sparse_attention = True
        """On a GPU: skip the tiles of (slots, context) that no slot of may see."""
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, Qwen3RMSNorm):
            nn.init.ones_(module.weight)

    def attach(self, embed_weight: Tensor, head_weight: Tensor) -> None:
        """Share the target's frozen embedding and output head, both [V, D]."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        assert tuple(embed_weight.shape) == tuple(head_weight.shape) == shape
        object.__setattr__(self, "embed_weight", embed_weight.detach())
        object.__setattr__(self, "head_weight", head_weight.detach())

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is optimised and saved."""
        yield from ((n, p) for n, p in self.named_parameters() if p.requires_grad)

    # --- the pieces -----------------------------------------------------------------------

    def project_context(self, taps: Tensor) -> Tensor:
        """[B, S, F*D] -> [B, S, D]: the context every layer reads."""
        context: Tensor = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))
        return context

    def _embed(self, ids: Tensor) -> Tensor:
        assert self.embed_weight is not None, "attach() the target's embedding first"
        return nn.functional.embedding(ids, self.embed_weight).to(self.fc.weight.dtype)

    def _block_input(self, anchor_ids: Tensor) -> Tensor:
        """[...] anchors -> [..., K, D] embeddings of [anchor, mask, mask, …]."""
        assert self.config.mask_token_id is not None
        mask = anchor_ids.new_full((*anchor_ids.shape, self.block_size), self.config.mask_token_id)
        mask[..., 0] = anchor_ids
        return self._embed(mask)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] without the Markov bias, in the head's dtype."""
        assert self.head_weight is not None, "attach() the target's output head first"
        return nn.functional.linear(hidden.to(self.head_weight.dtype), self.head_weight)

    def slot_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Teacher-forced logits of whole blocks: [..., K, D], [..., K] -> [..., K, V]."""
        logits = self.base_logits(hidden)
        if self.markov_head is not None:
            # in place: vocabulary-wide memory is the most expensive there is
            logits += self.markov_head.bias(self.markov_head.embed(prev_ids), hidden)
        return logits

    def confidence_logits(self, hidden: Tensor, embedding: Tensor | None) -> Tensor | None:
        """[..., D] and the Markov embedding [..., r] -> [...] float32; None without the head."""
        if self.confidence_head is None:
            return None
        out: Tensor = self.confidence_head(hidden, embedding)
        return out

    def confidence(self, hidden: Tensor, embedding: Tensor | None, slot: int) -> Tensor | None:
        """[...] chance that ``slot`` is kept if all before it are; None without the head."""
        logits = self.confidence_logits(hidden, embedding)
        if logits is None:
            return None
        temperatures = self.config.sts_temperatures
        return (logits / temperatures[slot] if temperatures else logits).sigmoid()

    # --- training ------------------------------------------------------------------------

    def forward(
        self,
        taps: Tensor,  # [B, S, F*D]
        anchor_ids: Tensor,  # [B, A] int64
        anchors: Tensor,  # [B, A] int64 positions
        starts: Tensor | None = None,  # [B, S] int64, first position of each one's document
        anchor_starts: Tensor | None = None,  # [B, A] int64, the same at the anchors
        **kwargs: Any,
    ) -> Tensor:  # [B, A, K, D] behind the final norm
        """Hidden states of every slot of every block; documents of a row do not see each other."""
        batch, count = anchors.shape
        length = taps.shape[1]
        hidden = self._block_input(anchor_ids).flatten(1, 2)
        places = torch.arange(length, device=taps.device)[None]
        if starts is None or anchor_starts is None:
            anchor_starts = torch.zeros_like(anchors)
        else:
            places = places - starts
        positions = block_positions(anchors - anchor_starts, self.block_size).flatten(1)
        rotary = self.rotary_emb(hidden, positions)
        context_rotary = self.rotary_emb(hidden, places)
        seen = Visibility(anchors, anchor_starts, length, self.block_size)
        sparse = self.sparse_attention and hidden.is_cuda and length % TILE == 0
        mask = seen.tiles() if sparse else seen.dense()[:, None]
        stack = self._stack if self._compiled_stack is None else self._compiled_stack
        return stack(taps, hidden, rotary, context_rotary, mask).view(
            batch, count, self.block_size, -1
        )

    def _stack(
        self,
        taps: Tensor,  # [B, S, F*D]
        hidden: Tensor,  # [B, A*K, D]
        rotary: Rotary,  # of the slots
        context_rotary: Rotary,
        mask: Tensor | BlockMask,
    ) -> Tensor:  # [B, A*K, D]
        """All layers and the final norm."""
        context = self.project_context(taps)
        for layer in self.layers:
            read = layer.self_attn.keys_values(context, context_rotary)  # type: ignore[union-attr, operator]
            hidden = layer(hidden, read, rotary, mask)
        out: Tensor = self.norm(hidden)
        return out

    def compile_training(self) -> None:
        """Fuse what stands between the products of `forward`, at its first call."""
        object.__setattr__(self, "_compiled_stack", torch.compile(self._stack))

    # --- decoding, batch 1 ---------------------------------------------------------------

    def new_context(self) -> DraftContext:
        """An empty context cache. From the first one on, the weights are laid out for decoding."""
        if self._step_head is None:
            assert self.head_weight is not None, "attach() the target's output head first"
            vocabulary, hidden = self.head_weight.shape
            head = nn.Linear(hidden, vocabulary, bias=False, device="meta")
            head.weight = nn.Parameter(self.head_weight, requires_grad=False)
            # a plain attribute, like the table it holds
            object.__setattr__(self, "_step_head", head)
            pack_linears(head)
            if not self.training:
                pack_linears(self)
        return DraftContext(len(self.layers))

    @torch.no_grad()
    def block_logits(self, hidden: Tensor) -> Tensor:
        """`base_logits` of one block [K, D] -> [K, V], by the weights laid out for decoding."""
        assert self._step_head is not None
        out: Tensor = self._step_head(hidden.to(self._step_head.weight.dtype))
        return out

    @torch.no_grad()
    def extend(self, context: DraftContext, taps: Tensor) -> None:
        """Append the taps [n, F*D] of newly committed tokens."""
        rows = self.project_context(taps[None])
        positions = context.length + torch.arange(len(taps), device=taps.device)
        rotary = self.rotary_emb(rows, positions[None])
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(rows, rotary)  # type: ignore[union-attr, operator]
            context.append(index, keys, values)
        context.length += len(taps)

    @torch.no_grad()
    def block_hidden(self, context: DraftContext, anchor_id: Tensor) -> Tensor:
        """Hidden states [K, D] of the block whose anchor follows the context; ``anchor_id`` []."""
        hidden = self._block_input(anchor_id[None])
        start = torch.tensor([context.length], device=anchor_id.device)
        rotary = self.rotary_emb(hidden, block_positions(start, self.block_size))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, context.read(index), rotary, None)
        out: Tensor = self.norm(hidden)
        return out[0]
