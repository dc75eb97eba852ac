"""What a training takes of a GPU's memory, by part: an estimate before anything is loaded.

What is held throughout is counted, what a pass needs is modelled: the tensors that the compiled
layers keep for the backward pass, and the objective's chunk. There is one measurement to hold it
against, which was known when this was written: the step of the Ling-3.0-flash draft on one H200,
replicated, 12.3 GiB measured and 12.2 estimated. Shards, checkpointing and eager layers are not
measured; allocator and libraries add a GiB or so that is not in it.

Symbols: D hidden, V vocabulary, r rank, S tokens of a row, Q slots of a row.
"""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from dspark.config import LossSettings
from dspark.draft.config import DSparkConfig

__all__ = ["Holding", "Memory", "TargetSize", "TrainingShape", "estimate", "largest_batch"]

Holding = Literal["replicated", "zero2", "zero3", "fsdp2"]
"""Who holds weights, gradients and moments: see `engine`."""

_BUCKET = 100_000_000  # reduce_bucket_size of configs/deepspeed; two of them overlap
# Kept by eager layers over what compiled ones keep, counted by autograd's hooks on a CPU.
_EAGER = {2: 1.9, 4: 1.5}
# Vocabulary-wide tensors of a chunk's dtype that exist together, by kernels and through autograd.
_WIDE = {True: 2, False: 6}


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """The frozen target, whole in every process."""

    weight_bytes: int
    itemsize: int
    hidden_size: int
    inner_size: int
    """Widest that a token gets inside a layer."""
    num_taps: int
    runs: bool
    """Whether it computes features here (online)."""


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """What of the settings and the launch decides the memory."""

    holding: Holding
    processes: int
    bf16: bool
    batch_size: int
    """Rows of a forward pass."""
    row_tokens: int
    """S of the longest row, padding included."""
    row_anchors: int
    grad_accumulation: int
    gradient_checkpointing: bool
    compiled: bool
    averaged: bool = False
    """Whether an average of the weights is kept."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU. The first group is held throughout, the second in a pass."""

    target_weights: int
    weights: int
    """fp32 masters of the draft."""
    moments: int
    average: int
    """Of the weights (EMA)."""
    gradients: int
    copies: int
    """Weights as products take them: bf16 copies."""
    buckets: int
    """Of sharded gradients, on their way to their process."""

    features: int
    target_pass: int
    activations: int
    objective: int
    gathered: int
    """Whole fp32 weights, while a checkpoint of a sharded training is written."""
    gradients_last: bool
    """One process, one pass: gradients take the room that activations give back."""

    @property
    def held(self) -> int:
        """Throughout a step."""
        most = self.target_weights + self.weights + self.moments + self.average
        most += self.copies + self.buckets
        return most + (0 if self.gradients_last else self.gradients)

    @property
    def peak(self) -> int:
        """The most at one time."""
        draft = self.activations + self.objective
        if self.gradients_last:
            draft = max(draft, self.gradients)
        moment = max(self.target_pass, draft) + self.features
        return self.held + max(moment, self.gathered)

    def to_dict(self) -> dict[str, int]:
        """Parts and peak; without the parts that are empty."""
        parts = {name: value for name, value in asdict(self).items() if value}
        parts.pop("gradients_last", None)
        return {**parts, "peak": self.peak}


def estimate(
    draft: DSparkConfig,
    parameters: int,
    target: TargetSize,
    shape: TrainingShape,
    loss: LossSettings,
) -> Memory:
    """Bytes of the busiest GPU; ``parameters`` are the draft's trainable ones."""
    sharded = shape.holding != "replicated"
    share = -(-parameters // shape.processes) if sharded else parameters
    item = 2 if shape.bf16 else 4
    tokens = shape.batch_size * shape.row_tokens
    # products of a replicated fp32 training read the masters themselves
    copies = item * parameters if sharded or shape.bf16 else 0
    if shape.holding == "fsdp2":
        # one unit: its gradient exists whole, in fp32 while a window adds passes up
        buckets = (4 if shape.grad_accumulation > 1 else item) * parameters
    else:
        buckets = 2 * item * min(parameters, _BUCKET) if sharded else 0
    return Memory(
        target_weights=target.weight_bytes,
        weights=4 * share,
        moments=8 * share,
        average=4 * share if shape.averaged else 0,
        gradients=4 * share,
        copies=copies,
        buckets=buckets,
        features=tokens * (target.num_taps + 1) * target.hidden_size * target.itemsize,
        target_pass=_target_pass(target, tokens) if target.runs else 0,
        activations=_activations(draft, shape, item) * shape.batch_size,
        objective=_objective(draft, shape, loss, item),
        gathered=4 * parameters if sharded else 0,
        gradients_last=not sharded and shape.processes == 1 and shape.grad_accumulation == 1,
    )


def largest_batch(
    draft: DSparkConfig,
    parameters: int,
    target: TargetSize,
    shape: TrainingShape,
    loss: LossSettings,
    *,
    room: int,
) -> int:
    """Most rows of a forward pass whose peak stays within ``room`` bytes; 0: not even one."""

    def fits(rows: int) -> bool:
        changed = replace(shape, batch_size=rows)
        return estimate(draft, parameters, target, changed, loss).peak <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= 1 << 16 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _activations(draft: DSparkConfig, shape: TrainingShape, item: int) -> int:
    """Of one row: what all layers keep for the backward pass."""
    hidden, layers = int(draft.hidden_size), int(draft.num_hidden_layers)
    inner = int(draft.num_attention_heads * draft.head_dim)
    outer = int(draft.num_key_value_heads or 0) * int(draft.head_dim)
    tokens, slots = shape.row_tokens, shape.row_anchors * int(draft.block_size or 0)
    # the residual stream is float32: entering attention and entering the MLP
    stream = slots * 4 * hidden
    # normed twice; queries and keys before their norm; queries; what attention gives; MLP
    values = 2 * hidden + (inner + outer) + 2 * inner + 3 * int(draft.intermediate_size)
    context = tokens * item * outer  # keys before their norm
    attended = (tokens + slots) * item * 2 * outer
    layer = 2 * stream + slots * item * values + context + attended
    if not shape.compiled:
        layer = int(layer * _EAGER[item])
    around = 2 * stream + tokens * hidden * (4 + item)  # embedded slots, final norm; context
    if shape.gradient_checkpointing:
        # of every layer its input and the context's keys and values; one layer is computed again
        kept = stream + tokens * item * 3 * outer
        return around + layers * kept + layer
    return around + layers * layer


def _objective(draft: DSparkConfig, shape: TrainingShape, loss: LossSettings, item: int) -> int:
    slots, vocabulary = int(draft.block_size or 0), int(draft.vocab_size)
    blocks = shape.batch_size * shape.row_anchors
    chunk = min(loss.chunk_blocks, blocks) * slots * vocabulary * item * _WIDE[loss.one_pass]
    # float32 gradient of the Markov factor, added up over chunks
    markov = 4 * vocabulary * int(draft.markov_rank)
    # target's hidden states; the gradient of the draft's
    return chunk + markov + blocks * slots * int(draft.hidden_size) * (item + 4)


def _target_pass(target: TargetSize, tokens: int) -> int:
    """Taps a second time while they are put side by side, and the work of one layer."""
    layer = 4 * target.hidden_size + 3 * target.inner_size
    return tokens * target.itemsize * (target.num_taps * target.hidden_size + layer)
