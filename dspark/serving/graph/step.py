"""One round of speculative decoding as one launch: draft, verify, accept, commit.

All that changes from step to step lies on the device, so that the host launches the next step
before it has read the last one's result, and never waits for the device. On a GPU the launches are
captured once into a graph; on a CPU the same kernels run one by one through Triton's interpreter,
which is for tests.

Symbols: V vocabulary, F tapped layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.decoding import DecodeParams, PrefixCache, SamplingParams, draft_limit, read_prompt
from dspark.decoding.loop import stop_ids
from dspark.decoding.proposer import MAX_PROPOSALS
from dspark.decoding.sampling import pick
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.kernels.accept import RING, STOP_IDS, Done, Field, Real, Record, accept
from dspark.kernels.filter_floor import FilterScratch, filter_floor
from dspark.kernels.peers import Peers
from dspark.serving.graph.arena import MOST_SCHEDULE, Arena, Caches
from dspark.serving.graph.dense import dense_weights
from dspark.serving.graph.draft_body import DraftBody
from dspark.serving.graph.exchange import Exchange
from dspark.serving.graph.gathered import Gathered, Library
from dspark.serving.graph.nextn_body import NextNBody
from dspark.serving.graph.prompt import ArenaContext, PromptCache, fill_nextn, hand_over
from dspark.serving.graph.target_body import TargetBody
from dspark.serving.graph.tuning import Tuning
from dspark.serving.graph.weights import (
    DraftWeights,
    NextNWeights,
    TargetWeights,
    unsupported,
)
from dspark.target import GoOn, HFTarget, LingTarget
from dspark.target.state import LingCache

__all__ = ["GraphStep", "StepRecord"]


_SERIALS = RING << 24
"""Serial numbers begin anew behind so many launches, between requests: the device's are int32."""
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class StepRecord:
    """What one launch did."""

    serial: int
    token_ids: list[int]
    num_accepted: int
    num_proposed: int
    done: Done
    clock_ns: int
    """Device time at which it was committed."""
    cursor: int
    """Tokens that were committed before it."""
    missing_rank: int | None = None
    """A rank that did not come to an exchange."""


class GraphStep:
    """Decoding state of one sequence at a time, on the device.

    Args:
        context: positions of a prompt and its output together.
        num_draft_tokens: proposals a round; None: `draft_limit`'s default.
        embedding: the whole embedding table, where ``target`` is one rank of several.
        nextn: proposals a round of the model's own NEXTN block, instead of a draft; 0: none.
        peers: memory of the other ranks, or what reaches them without, where ``target`` is one that
            steps with them.
        prefixes: prompts that were read, for those that begin alike; not used with a NEXTN block,
            which needs the last hidden states of all of a prompt.

    Raises:
        ConfigError: the kernels cannot run these models, or a setting is out of range.
    """

    def __init__(
        self,
        target: LingTarget | HFTarget,
        draft: DSparkDraftModel | None,
        *,
        context: int,
        num_draft_tokens: int | None = None,
        embedding: Tensor | None = None,
        tuning: Tuning | None = None,
        nextn: int = 0,
        prefixes: PrefixCache | None = None,
        peers: Peers | Library | None = None,
    ) -> None:
        if reason := unsupported(target, draft):
            raise ConfigError(f"the graph engine cannot run this: {reason}")
        if not 1 <= context <= target.max_position_embeddings:
            raise ConfigError(
                f"context must lie in 1..{target.max_position_embeddings}, got {context}"
            )
        _check_nextn(target, draft, nextn)
        self.target, self.context = target, context
        self.limit = nextn
        if draft is not None:
            self.limit = draft_limit(draft.block_size, num_draft_tokens)
        elif nextn and num_draft_tokens is not None:
            self.limit = draft_limit(nextn, num_draft_tokens)
        ling = target.model if isinstance(target, LingTarget) else None
        ranks, self.rank = (ling.ranks, ling.rank) if ling else (1, 0)
        self._reduce = ling.reduce if ling else None
        with torch.no_grad():
            if isinstance(target, LingTarget):
                self.weights = TargetWeights.of(target.model, embedding)
            else:
                self.weights = dense_weights(target)
            self.draft = None
            if draft is not None:
                self.draft = DraftWeights.of(draft, ranks, self.rank)
            self.nextn = NextNWeights.of(ling) if ling and nextn else None
            self.caches = Caches.empty(self.weights, self.draft, context, self.nextn)
            self.exchange: Exchange | Gathered | None = None
            slots, share = self.draft.block_size if self.draft else 0, len(self.weights.head)
            if isinstance(peers, Library):
                self.exchange = Gathered(peers, self.weights.config.hidden_size, share, slots)
            elif peers is not None:
                self.exchange = Exchange(peers, self.weights.config.hidden_size, share, slots)
            self.arena = Arena(self.weights, self.draft, tuning or Tuning(), self.exchange)
        layer_ids = self.draft.layer_ids if self.draft else ()
        self.target_body = TargetBody(
            self.weights, self.arena, self.caches, layer_ids, self.limit + 1
        )
        self._draft_body: DraftBody | NextNBody | None = None
        if self.nextn is not None:
            self._draft_body = NextNBody(
                self.nextn, self.weights, self.arena, self.caches, self.limit
            )
        if self.draft is not None:
            self._draft_body = DraftBody(
                self.draft, self.weights, self.arena, self.caches, ranks, self.rank
            )
        self._filters = FilterScratch(target.device)
        on_gpu = target.device.type == "cuda"
        self._mailbox = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self._ring = torch.zeros(self.arena.ring.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._records = self._ring.numpy()
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._filtered = False
        """Whether the running request filters what it samples, for which there is a graph more."""
        self.request = 0
        self.launched = 0
        self._prefixes = prefixes
        self.num_reused = 0
        """Tokens of the last prompt that were not read again."""

    @property
    def device(self) -> torch.device:
        return self.target.device

    @torch.no_grad()
    def begin(
        self,
        prompt_ids: Sequence[int],
        params: DecodeParams,
        go_on: GoOn | None = None,
        schedule: Sequence[int] = (),
    ) -> int:
        """Read the prompt; the first token, which is the first anchor. ``schedule``: `set_state`'s.

        Raises:
            ReadingStopped: as `Target.read` does.
            ConfigError: more than 8 stop ids, or sampling that the kernels do not know.
        """
        stops = sorted(stop_ids(self.target, params))
        if len(stops) > STOP_IDS:
            raise ConfigError(f"at most {STOP_IDS} stop ids are possible, got {len(stops)}")
        if self.exchange is not None:
            self.exchange.in_prompts()
        layer_ids = self.draft.layer_ids if self.draft else ()
        cache: LingCache | PromptCache
        if isinstance(self.target, LingTarget):
            cache = self.target.new_cache(layer_ids)
        else:
            cache = PromptCache(self.caches, layer_ids)
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=self.device)
        if self.nextn is not None:
            assert isinstance(self.target, LingTarget)
            rows = self.target.prefill(cache, prompt, keep_hidden=True, go_on=go_on)
            assert rows.hidden is not None
            fill_nextn(self.target.model, self.caches, rows.hidden, prompt)
            # the last token waits for the one behind it: it is the row that the first step reads
            self.arena.normed[0] = rows.hidden[-1]
            logits = rows.logits
        else:
            context = None
            if self.draft is not None:
                context = ArenaContext(self.draft, self.caches, self.rank, self._reduce)
            logits, self.num_reused = read_prompt(
                self.target, cache, prompt, context, self._prefixes, go_on
            )
        where = torch.tensor([cache.length], device=self.device)
        first = int(pick(logits, params.sampling, where)[0])
        if self.exchange is not None:
            self.exchange.check()
            self.exchange.in_steps()
        if isinstance(cache, LingCache):
            hand_over(cache, self.caches)
        left = min(params.max_new_tokens, self.context - len(prompt_ids)) - 1
        self.set_state(
            cursor=cache.length, anchor=first, left=left, params=params, stops=stops,
            schedule=schedule,
        )  # fmt: skip
        return first

    @torch.no_grad()
    def set_state(
        self,
        *,
        cursor: int,
        anchor: int,
        left: int,
        params: DecodeParams,
        stops: Sequence[int] = (),
        schedule: Sequence[int] = (),
    ) -> None:
        """Start a sequence whose caches are filled up to ``cursor``.

        That of a NEXTN block ends one position before, for which row 0 of `arena.normed` stands.
        ``schedule``: accepted proposals step by step, in turn, where acceptance is simulated.

        Raises:
            ConfigError: the schedule is too long.
        """
        if len(schedule) > MOST_SCHEDULE:
            raise ConfigError(f"a schedule has at most {MOST_SCHEDULE} steps, got {len(schedule)}")
        self.request += 1
        self.launched %= _SERIALS
        most = self.limit
        if params.num_draft_tokens is not None:
            most = min(most, params.num_draft_tokens)
        sampling: SamplingParams = params.sampling
        filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._filtered = filters and not sampling.greedy
        if not self._filtered:
            self.arena.floors.fill_(float("-inf"))
        ints = torch.zeros_like(self.arena.ints, device="cpu")
        for field, value in {
            Field.CURSOR: cursor,
            Field.ANCHOR: anchor,
            Field.LIMIT: max(0, min(most, left - 1)),
            Field.NUM_DRAFT: most,
            Field.LEFT: left,
            Field.SERIAL: self.launched,
            Field.REQUEST: self.request,
            # as many as there are ids is no limit, and so is any larger number
            Field.TOP_K: min(sampling.top_k, _INT32_MAX),
            Field.SEED_LOW: _int32(sampling.seed),
            Field.SEED_HIGH: _int32(sampling.seed >> 32),
            Field.SIMULATED: len(schedule),
            Field.NUM_STOPS: len(stops),
        }.items():
            ints[field] = value
        if self.nextn is not None and cursor > 0:
            ints[Field.INJECT_BASE], ints[Field.INJECT_COUNT] = cursor - 1, 1
        ints[Field.STOPS : Field.STOPS + len(stops)] = torch.tensor(list(stops), dtype=torch.int32)
        self.arena.ints.copy_(ints)
        reals = torch.zeros(len(Real))
        reals[Real.TEMPERATURE] = sampling.temperature
        reals[Real.TOP_P] = sampling.top_p
        reals[Real.MIN_P] = sampling.min_p
        reals[Real.THRESHOLD] = params.confidence_threshold
        self.arena.reals.copy_(reals)
        if schedule:
            self.arena.schedule[: len(schedule)] = torch.tensor(list(schedule), dtype=torch.int32)

    def run_body(self) -> None:
        """Launch every kernel of a step once."""
        arena = self.arena
        self.propose()
        logits = self.target_body.verify()
        if self._filtered and arena.on("filters"):
            whole = self.target_body.whole(logits)
            filter_floor(whole, arena.ints, arena.reals, self._filters, arena.floors)
        picked, ids = self.target_body.pick(logits)
        if not arena.on("accept"):
            return
        accept(
            picked, ids, arena.proposals, arena.ints, arena.mailbox, arena.schedule, arena.ring,
            fault=self.exchange.peers.fault if self.exchange else None,
        )  # fmt: skip

    def _enqueue(self) -> None:
        self.arena.mailbox.copy_(self._mailbox, non_blocking=True)
        self.run_body()
        self._ring.copy_(self.arena.ring, non_blocking=True)

    def propose(self) -> None:
        """Launch the draft."""
        if self._draft_body is not None:
            self._draft_body()

    @torch.no_grad()
    def capture(self) -> None:
        """Compile the kernels and capture the step; done by the first launch if not before."""
        arena = self.arena
        # a NEXTN block reads what the last step, or the prompt, has left
        changed = (arena.ints, arena.ring, arena.normed, arena.proposals)
        kept = [one.clone() for one in changed]
        if self.exchange is not None:
            self.exchange.in_compiling()
        self.run_body()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._enqueue()
        self._graphs[self._filtered] = graph
        for one, old in zip(changed, kept, strict=True):
            one.copy_(old)
        if self.exchange is not None:
            self.exchange.meet()
            self.exchange.in_steps()

    def warm_up(self) -> None:
        """Capture both steps, that with filters too, so that no request waits for a compiler.

        Ends a sequence that was under way. Without a GPU there is nothing to capture.
        """
        if self.device.type != "cuda":
            return
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)):
            params = DecodeParams(max_new_tokens=2, sampling=sampling)
            self.set_state(cursor=0, anchor=0, left=2, params=params)
            self.capture()

    @torch.no_grad()
    def launch(self, *, eager: bool = False) -> int:
        """Enqueue one step; its serial number. ``eager``: kernel by kernel, without the graph."""
        serial = self.launched
        self.launched += 1
        if eager or self.device.type != "cuda":
            self._enqueue()
            return serial
        if self._filtered not in self._graphs:
            self.capture()
        self._graphs[self._filtered].replay()
        return serial

    def read(self, serial: int) -> StepRecord | None:
        """The record of a launch, None until it is there. Asks the device nothing."""
        record = self._records[serial % RING].copy()
        check = int(record[: Record.CHECK].sum(dtype=np.int32)) ^ 0x5EED
        if record[Record.SERIAL] != serial or check != record[Record.CHECK]:
            return None
        emitted = int(record[Record.EMITTED])
        clock = (int(record[Record.CLOCK_HIGH]) << 32) | (
            int(record[Record.CLOCK_LOW]) & 0xFFFFFFFF
        )
        return StepRecord(
            serial=serial,
            token_ids=record[Record.IDS : Record.IDS + emitted].tolist(),
            num_accepted=int(record[Record.ACCEPTED]),
            num_proposed=int(record[Record.PROPOSED]),
            done=Done(int(record[Record.DONE])),
            clock_ns=clock,
            cursor=int(record[Record.CURSOR]),
            missing_rank=int(record[Record.FAULT]) - 1 if record[Record.FAULT] else None,
        )

    def abort(self) -> None:
        """End the running request at the next step."""
        self._mailbox.fill_(self.request)


def _check_nextn(target: LingTarget | HFTarget, draft: DSparkDraftModel | None, nextn: int) -> None:
    if not 0 <= nextn <= MAX_PROPOSALS:
        raise ConfigError(f"nextn must lie in 0..{MAX_PROPOSALS}, got {nextn}")
    if nextn and draft is not None:
        raise ConfigError(f"a step has one draft: either a model, or nextn ({nextn} was given)")
    if nextn and not (isinstance(target, LingTarget) and target.model.has_nextn):
        raise ConfigError(
            f"nextn is {nextn}, but the model has no NEXTN block, or it was not loaded"
        )


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
