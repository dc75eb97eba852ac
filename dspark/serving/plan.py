"""What the graph engine will need of a GPU's memory, from configs alone: nothing is loaded.

Weights and caches are exact. Scratch is counted as if every product were split as far as one can
be. What reading a prompt takes besides is an estimate of the tensors that live at the same time in
the widest layer, and the reserve (library workspaces, graphs, fragmentation) is a guess.

Symbols: D hidden, H heads (of this rank), K size of a KDA head, W taps of its convolutions, L + P
width of a latent, N, P and V sizes of an MLA head, X experts a token, I their inner width, F tapped
layers, J key/value heads of the draft.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from rich.table import Table

from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.errors import ConfigError
from dspark.serving.plan_dense import dense_caches, dense_prompt, dense_scratch
from dspark.target.base import PREFILL_ROWS
from dspark.target.config import LingConfig
from dspark.target.families import DenseShape
from dspark.target.rows import CHUNK
from dspark.target.rows import MOST_ROWS as ROWS
from dspark.target.sizes import rank_bytes

__all__ = ["DEFAULT_CONTEXT", "MemoryPlan"]

DEFAULT_CONTEXT = 32768

_WIDE, _NARROW = 4, 2
"""Bytes of a float32 and of a bfloat16."""
_GUARD = 2 * ROWS
_LANES = 66
_DRAFT_LANES = 32
_NARROW_PRODUCT, _MOST_SPLITS = 4096, (12, 8)
"""Parts of a product at most, with fewer outputs than that and with more."""
_CANDIDATES = 128
_PIECE = PREFILL_ROWS["cuda"]
"""Positions of a prompt that are read together."""
_SMALL = 1 << 20
"""State, records, parts of the vocabulary, bounds of filters."""
_RESERVE = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one of ``ranks`` GPUs, in bfloat16, for ``context`` positions.

    ``nextn``: the target's own NEXTN block drafts, in the place of ``draft``.
    ``prefix_cache``: bytes for what prefill left of earlier prompts, at most.

    Raises:
        ConfigError: the model has fewer positions or no such block, or there are two drafts.
        TargetError: a width does not divide by ``ranks``.
    """

    config: LingConfig | DenseShape
    draft: DSparkConfig | None
    context: int
    ranks: int = 1
    nextn: bool = False
    prefix_cache: int = 0

    def __post_init__(self) -> None:
        most = self.config.max_position_embeddings
        if not 2 <= self.context <= most:
            raise ConfigError(f"context must lie in 2..{most}, got {self.context}")
        if self.nextn and self.draft is not None:
            raise ConfigError("a plan has one draft: either a model or the NEXTN block")
        if self.nextn and not (
            isinstance(self.config, LingConfig) and self.config.num_nextn_predict_layers
        ):
            raise ConfigError("the target has no NEXTN block: num_nextn_predict_layers is 0")

    @cached_property
    def target_weights(self) -> int:
        """The whole embedding on every rank: the draft's rows come from anywhere in it."""
        config = self.config
        if isinstance(config, DenseShape):
            return config.parameters * _NARROW
        held = rank_bytes(config, self.ranks)
        table = config.vocab_size * config.hidden_size * _NARROW
        return held["main_model"] - held["embedding"] + table

    @cached_property
    def draft_weights(self) -> int:
        """As it is loaded: whole on every rank, without the tables that are the target's.

        Of a NEXTN block a rank has its part, which the step reads where it lies.
        """
        if self.nextn and isinstance(self.config, LingConfig):
            return rank_bytes(self.config, self.ranks)["nextn"]
        if self.draft is None:
            return 0
        with torch.device("meta"):
            model = DSparkDraftModel(self.draft)
        return sum(one.numel() for _, one in model.trainable()) * _NARROW

    @cached_property
    def draft_copy(self) -> int:
        """Matrices that read the same input, one behind the other, beside what was loaded."""
        if self.draft is None:
            return 0
        draft, hidden = self.draft, self.draft.hidden_size
        size, groups = draft.head_dim, draft.num_key_value_heads or draft.num_attention_heads
        queries, pairs = draft.num_attention_heads * size, 2 * groups * size
        a_layer = hidden * (queries + 2 * pairs + 2 * draft.intermediate_size)
        total = 0
        if self.ranks > 1:  # a rank's columns must be moved together
            a_layer += hidden * (queries + draft.intermediate_size)
            total = len(draft.target_layer_ids or ()) * hidden * hidden
        small = draft.num_hidden_layers * size * _NARROW
        small += (hidden + draft.markov_rank + 1 + (draft.block_size or 0)) * _WIDE
        total += draft.num_hidden_layers * a_layer
        return int(total // self.ranks * _NARROW + small)

    @property
    def caches(self) -> int:
        """Latents (of a NEXTN block too), KDA states of every row, the draft's keys and values."""
        return self._caches(self.context)

    @cached_property
    def scratch(self) -> int:
        """Partial sums, lanes of the attentions, logits, expert rows and candidates."""
        config, ranks, hidden = self.config, self.ranks, self.config.hidden_size
        if isinstance(config, DenseShape):
            outputs, rows, total = dense_scratch(config)
        else:
            outputs, rows, total = self._ling_scratch(config)
        if self.nextn:
            outputs.append(hidden)
            rows += 2 * hidden
        if self.draft is not None:
            draft, slots = self.draft, self.draft.block_size or 0
            size, groups = draft.head_dim, draft.num_key_value_heads or draft.num_attention_heads
            mine = draft.num_attention_heads // ranks * size
            pairs, wide = 2 * (groups // ranks) * size, draft.intermediate_size // ranks
            outputs += [hidden, draft.num_hidden_layers * pairs, mine + pairs, 2 * wide]
            outputs += [hidden, hidden]
            total += _DRAFT_LANES * ROWS * draft.num_attention_heads // ranks * (size + 2) * _WIDE
            total += slots * _CANDIDATES * (_CANDIDATES + 3) * _WIDE
            rows += len(draft.target_layer_ids or ()) * hidden + mine + wide
        parts = sum(one * _MOST_SPLITS[one >= _NARROW_PRODUCT] for one in outputs)
        total += ROWS * parts * _WIDE
        total += ROWS * config.vocab_size // ranks * _WIDE
        return total + ROWS * rows * _NARROW + _SMALL

    def _ling_scratch(self, config: LingConfig) -> tuple[list[int], int, int]:
        ranks = self.ranks
        hidden, heads = config.hidden_size, config.num_attention_heads // ranks
        width = heads * config.head_dim
        inner, dense = config.moe_intermediate_size // ranks, config.intermediate_size // ranks
        query = heads * config.qk_head_dim
        outputs = [5 * width + heads, width, hidden, 2 * dense, hidden, config.num_experts]
        outputs += [(config.q_lora_rank or 0) + query + config.latent_dim + heads, query, hidden]
        total = _LANES * ROWS * heads * (config.kv_lora_rank + 2) * _WIDE
        rows = 2 * hidden + (config.q_lora_rank or 0) + dense
        rows += heads * (config.latent_dim + config.v_head_dim)
        chosen = config.num_experts_per_tok
        rows += (1 + ROWS * chosen) * inner + (chosen + 1) * hidden
        return outputs, rows, total

    @property
    def prompt(self) -> int:
        """While the longest prompt is read: its own cache, taps, and one layer's tensors."""
        return self._prompt(self.context)

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {
            "target weights": self.target_weights,
            "draft weights": self.draft_weights,
            "packed draft weights": self.draft_copy,
            "caches": self.caches,
            "scratch": self.scratch,
            "reading a prompt": self.prompt,
            "earlier prompts": self.prefix_cache,
            "reserve": _RESERVE,
        }

    def to_dict(self) -> dict[str, int]:
        """For a report."""
        named = {name.replace(" ", "_"): size for name, size in self.parts().items()}
        return {"context": self.context, "ranks": self.ranks, **named, "total": self.total}

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def most(self, free: int) -> int:
        """The longest context for which ``free`` bytes suffice; 0 for none."""
        low, high = 1, self.config.max_position_embeddings
        fixed = self.total - self.caches - self.prompt
        while low < high:
            middle = (low + high + 1) // 2
            if fixed + self._caches(middle) + self._prompt(middle) <= free:
                low = middle
            else:
                high = middle - 1
        return low if low >= 2 else 0

    def check(self, free: int) -> None:
        """Is it enough?

        Raises:
            ConfigError: says what is short and what would fit.
        """
        if self.total <= free:
            return
        needs = f"context {self.context} needs {_gb(self.total)}, and {_gb(free)} are free"
        most = self.most(free)
        if most:
            raise ConfigError(f"{needs}: up to {most} positions fit (--context {most})")
        short = _gb(self.total - self.caches - self.prompt)
        raise ConfigError(f"{needs}: weights, scratch and reserve alone are {short}, none fits")

    def table(self, free: int | None = None) -> Table:
        """For people; ``free``: bytes of the device."""
        table = Table(title="memory plan")
        # a title would be wrapped to the table's width
        table.add_column(f"context {self.context}, 1 of {self.ranks} ranks")
        table.add_column("GB", justify="right")
        for name, size in self.parts().items():
            table.add_row(name, f"{size / 1e9:.3f}")
        table.add_section()
        table.add_row("total", f"{self.total / 1e9:.3f}")
        if free is not None:
            table.add_row("free on the device", f"{free / 1e9:.3f}")
        return table

    def _caches(self, context: int) -> int:
        config, draft, positions = self.config, self.draft, context + _GUARD
        if isinstance(config, DenseShape):
            total = dense_caches(config, positions)
        else:
            total = self._ling_caches(config, positions)
        if draft is not None:
            groups = (draft.num_key_value_heads or draft.num_attention_heads) // self.ranks
            a_layer = 2 * groups * draft.head_dim * positions * _NARROW
            total += draft.num_hidden_layers * a_layer
        return total

    def _ling_caches(self, config: LingConfig, positions: int) -> int:
        layers = config.num_hidden_layers
        mla = sum(config.is_mla(layer) for layer in range(layers))
        total = (mla + self.nextn) * positions * config.latent_dim * _NARROW
        width = config.num_attention_heads // self.ranks * config.head_dim
        states = (ROWS + 1) * width * config.head_dim * _WIDE
        inputs = 2 * (config.short_conv_kernel_size - 1 + ROWS) * 3 * width * _NARROW
        return total + (layers - mla) * (states + inputs)

    def _prompt(self, context: int) -> int:
        config = self.config
        tapped = len(self.draft.target_layer_ids or ()) if self.draft is not None else 0
        if isinstance(config, DenseShape):
            return dense_prompt(config, context, tapped)
        heads, hidden = config.num_attention_heads // self.ranks, config.hidden_size
        layers = range(config.num_hidden_layers)
        mla = sum(config.is_mla(layer) for layer in layers)
        piece = min(context, _PIECE)
        # the prompt's own latents, float32, whose room doubles as they grow
        room = -(-piece // CHUNK) * CHUNK
        while room < context:
            room *= 2
        kept = mla * room * config.latent_dim * _WIDE
        # the taps of a piece, apart and joined, and those of the one before; or what a NEXTN
        # block reads of all pieces, and then joined
        taps = tapped or int(self.nextn)
        kept += (2 * context if self.nextn else 3 * piece) * taps * hidden * _NARROW
        # keys and values rebuilt, joined, padded and laid out; masks as bool and as numbers
        keys = 4 * config.qk_head_dim + config.qk_nope_head_dim + config.v_head_dim
        attention = context * heads * keys * _NARROW + 4 * piece * context
        # chunks of decays, each a row's width in float32 and float64, about 48 of them
        recurrence = piece * heads * config.head_dim * 48 * _WIDE
        inner = config.moe_intermediate_size // self.ranks
        pairs = piece * config.num_experts_per_tok
        experts = pairs * (14 * hidden + 12 * inner) + 24 * piece * config.num_experts
        # before: the largest matrix of experts, which is laid out anew
        stack = 2 * (config.num_experts + 1) * inner * hidden * _NARROW
        busy = max(attention, recurrence, experts) + 8 * piece * hidden * _NARROW
        return max(kept + busy, stack)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
