"""Device memory of one sequence: state, caches, and what the kernels hand to each other.

Everything is allocated once, before the graph is captured, and never moves.

Symbols: R = 16 rows, D hidden, F tapped layers, S partial sums, G lanes of an attention,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.kernels.accept import RECORD, RING, STOP_IDS, Field, Real
from dspark.kernels.kda_verify import KDASlots
from dspark.kernels.launch import ROWS
from dspark.serving.graph.exchange import Exchange
from dspark.serving.graph.gathered import Gathered
from dspark.serving.graph.tuning import Tuning
from dspark.serving.graph.weights import (
    DraftWeights,
    GQAMixer,
    KDAMixer,
    NextNWeights,
    TargetWeights,
)

__all__ = ["Arena", "Caches"]

PICK_PARTS = 64
MOST_SCHEDULE = 4096
_GUARD = 2 * ROWS
"""Positions behind the context that steps may write: of those that were queued when it ended."""


@dataclass(frozen=True)
class Caches:
    """What a sequence leaves behind, by layer."""

    kda: dict[int, KDASlots]
    latents: dict[int, Tensor]  # [capacity, L + P]; behind the target's those of a NEXTN block
    pairs: dict[int, tuple[Tensor, Tensor]]  # keys and values [J, capacity, X] of a dense decoder
    keys: Tensor | None  # [draft layers, J, capacity, X]
    values: Tensor | None

    @classmethod
    def empty(
        cls,
        target: TargetWeights,
        draft: DraftWeights | None,
        context: int,
        nextn: NextNWeights | None = None,
    ) -> "Caches":
        """For ``context`` positions."""
        like = target.head
        capacity = context + _GUARD
        kda, latents, pairs = {}, {}, {}
        behind = [nextn.layer] if nextn is not None else []
        for index, layer in enumerate([*target.layers, *behind]):
            mixer = layer.mixer
            if isinstance(mixer, KDAMixer):
                kda[index] = KDASlots.empty(
                    mixer.heads, mixer.size, mixer.conv.shape[1], like.dtype, like.device
                )
            elif isinstance(mixer, GQAMixer):
                each = (mixer.groups, capacity, mixer.size)
                pairs[index] = (like.new_zeros(each), like.new_zeros(each))
            else:
                latents[index] = like.new_zeros(capacity, target.ling.latent_dim)
        keys = values = None
        if draft is not None:
            shape = (len(draft.layers), draft.groups, capacity, draft.size)
            keys, values = like.new_zeros(shape), like.new_zeros(shape)
        return cls(kda, latents, pairs, keys, values)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        held = [one for slots in self.kda.values() for one in (slots.states, slots.inputs)]
        held += self.latents.values()
        held += [one for pair in self.pairs.values() for one in pair]
        return held + [one for one in (self.keys, self.values) if one is not None]


class Arena:
    """State of the step and its scratch.

    Attributes:
        ints, reals: the state, by `Field` and `Real`.
        exchange: with the other ranks; None: there are none.
    """

    def __init__(
        self,
        target: TargetWeights,
        draft: DraftWeights | None,
        tuning: Tuning,
        exchange: Exchange | Gathered | None = None,
    ) -> None:
        like = target.head
        device, dtype = like.device, like.dtype
        hidden, config = target.config.hidden_size, target.config
        self.device, self.dtype, self.tuning = device, dtype, tuning
        self.exchange = exchange
        self.ints = torch.zeros(int(Field.STOPS) + STOP_IDS, dtype=torch.int32, device=device)
        self.reals = torch.zeros(len(Real), device=device)
        self.mailbox = torch.zeros(1, dtype=torch.int32, device=device)
        self.schedule = torch.zeros(MOST_SCHEDULE, dtype=torch.int32, device=device)
        self.ring = torch.zeros(RING, RECORD, dtype=torch.int32, device=device)
        self.floors = torch.full((ROWS,), float("-inf"), device=device)
        self.proposals = torch.zeros(ROWS, dtype=torch.int32, device=device)
        self.picked = torch.zeros(ROWS, PICK_PARTS, device=device)
        self.picked_ids = torch.zeros(ROWS, PICK_PARTS, dtype=torch.int32, device=device)
        self.residual, self.normed = self.rows(hidden), self.rows(hidden)
        taps = len(draft.layer_ids) if draft is not None else 0
        self.taps = self.rows(taps * hidden)
        chosen = config.num_experts_per_tok
        inner = max(
            [layer.ffn.down.shape[-1] for layer in target.layers if layer.ffn.down.dim() == 3] + [1]
        )
        self.ids = torch.full((ROWS, chosen), -1, dtype=torch.int32, device=device)
        self.factors = torch.zeros(ROWS, chosen + 1, device=device)
        self.inner = torch.zeros(1 + ROWS * chosen, ROWS, inner, dtype=dtype, device=device)
        self.each = torch.zeros(ROWS, chosen + 1, hidden, dtype=dtype, device=device)
        self._parts: dict[str, Tensor] = {}
        self.only: str | None = None
        """Launch this component alone: for a breakdown of the time of a step."""

    def on(self, component: str) -> bool:
        """Whether ``component`` is launched."""
        return self.only in (None, component)

    def rows(self, width: int) -> Tensor:
        """[R, width] in the model's dtype."""
        return torch.zeros(ROWS, width, dtype=self.dtype, device=self.device)

    def parts(self, name: str, splits: int, width: int) -> Tensor:
        """Scratch [S, R, width] float32 that all layers use in turn under ``name``."""
        return self.scratch(name, (splits, ROWS, width))

    def scratch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Zeros that are made at the first call and given again at every other."""
        key = f"{name} {shape}"
        if key not in self._parts:
            self._parts[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._parts[key]

    def of(self, field: Field) -> Tensor:
        """[1] int32, one number of the state."""
        return self.ints[field : field + 1]

    def real(self, field: Real) -> Tensor:
        """[1] float32."""
        return self.reals[field : field + 1]
