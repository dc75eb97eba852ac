"""Settings of every stage: frozen models, each range checked, each field documented.

One YAML file holds the sections of all stages, so that `sample`, `capture`, `train` and `eval`
of one run read the same target, template and seed. Reading and overriding: `config_io`.
"""

import math
import re
import urllib.parse
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "CaptureSettings",
    "Config",
    "DataSettings",
    "DraftSettings",
    "EvalSettings",
    "LossSettings",
    "SampleSettings",
    "SamplingSetting",
    "TargetSettings",
    "TrackerSettings",
    "TrainSettings",
]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what torch's generators take
PositiveInt = Annotated[int, Field(ge=1)]
Place = Annotated[str, Field(min_length=1)]

_ROUTE = re.compile(r"/(chat/completions|completions|generate|models)$")


def _drawn_or_greedy(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise ValueError("must be 0 (greedy), or from 0.01 to 2")
    return temperature


Temperature = Annotated[float, Field(ge=0.0, le=2.0), AfterValidator(_drawn_or_greedy)]


class _Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class TargetSettings(_Settings):
    """The post-trained model that is sampled, distilled from and served."""

    path: str = "smollm2-135m"
    """A directory, a hub id, or the name of a target that a package carries (`smollm2-135m`)."""
    revision: str | None = None
    """Hub revision; None is the default branch."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on a GPU and on CPUs with bf16 arithmetic, float32 elsewhere."""
    device: str = "auto"
    """auto: this process's GPU when there is one, else cpu. Several, such as cuda:0+cuda:1, share
    the layers of a Ling-3.0 target; not for training, where `train.target_devices` does that."""
    apply_swiglu_limits: bool = True
    """Ling-3.0 only: the SwiGLU limits that serving engines apply; false for parity with
    modeling code that leaves them out."""
    config_overrides: dict[str, Any] | None = None
    """Ling-3.0 only: keys of config.json to replace, such as `rope_scaling` (YaRN)."""


class DraftSettings(_Settings):
    """Shape of the draft, and where its weights start."""

    init_from: str | None = None
    """Directory of an exported draft to continue from; its shape then replaces the keys below."""
    num_layers: PositiveInt = 5
    """Draft decoder layers (L)."""
    block_size: Annotated[int, Field(ge=1, le=64)] = 7
    """Slots drafted from one anchor (K), the anchor's own slot included: K proposals."""
    num_taps: PositiveInt = 5
    """Tapped target layers when `target_layer_ids` is not given."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based decoder layers whose outputs are the taps; None spreads `num_taps` of them."""
    intermediate_size: PositiveInt | None = None
    """MLP width; None takes the target's."""
    markov_rank: Annotated[int, Field(ge=0)] = 256
    """Rank of the sequential head (r); 0 leaves it out."""
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_init: Literal["random", "embedding"] = "random"
    """First weights of the sequential head: embedding takes the principal components of the
    target's embedding, from which a training of a few steps gets further. Not for `init_from`."""
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    """Feed the previous token's Markov embedding to the confidence head too."""
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """An id that never occurs in the data; None picks an unused special id of the tokenizer."""

    @field_validator("target_layer_ids")
    @classmethod
    def _some_or_none(cls, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if ids == ():
            raise ValueError("must be layer numbers such as [1, 9, 17], or null")
        return ids


class SamplingSetting(_Settings):
    """One way to sample the target; several are mixed by weight, chosen per row."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0
    temperature: Temperature = 1.0
    """0 is greedy; else 0.01 or more, below which engines take another and logits overflow."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    """-1 or 0: no limit."""
    min_p: Fraction = 0.0
    thinking: bool | None = None
    """Passed to the template as `enable_thinking`; None leaves it out."""

    @model_validator(mode="after")
    def _greedy_is_plain(self) -> Self:
        if self.temperature == 0 and self.min_p > 0:
            raise ValueError("min_p has no effect at temperature 0; set one of them")
        return self


class SampleSettings(_Settings):
    """Prompts in, responses of the target out."""

    prompts: tuple[str, ...] = ()
    """Files, globs, folders, hub ids or names of public sets (`open-perfectblend`, …)."""
    out: Place = "outputs/responses.jsonl"
    limit: PositiveInt | None = None
    """First N prompts only."""
    samples_per_prompt: PositiveInt = 1
    settings: tuple[SamplingSetting, ...] = (SamplingSetting(),)
    max_new_tokens: PositiveInt = 512
    max_prompt_tokens: PositiveInt = 2048
    """Longer prompts are rejected and counted, never cut."""
    batch_size: PositiveInt = 16
    """Rows decoded together by the in-process sampler."""
    seed: Seed = 0
    regenerate: Literal["last", "all"] = "last"
    """all: every assistant turn is answered anew, each seeing the new turns before it. Endpoint
    only."""
    endpoint: str | None = None
    """URL, up to /v1, of a server that holds the target, such as http://host:30000/v1; None samples
    in this process."""
    endpoint_api: Literal["auto", "openai", "vllm", "sglang"] = "auto"
    """vllm: /v1/completions (`dspark serve` too); sglang: /generate; openai: /v1/chat/completions.
    auto asks the server's list of models."""
    model: str | None = None
    """Name under which the endpoint serves the target; None takes the first it lists."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Conversations in flight at the endpoint; at most 8 at `dspark serve`."""
    request_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds that one request may take as a whole."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Further attempts after a failure that may pass: 429, 5xx, time-outs, broken answers."""
    api_key_env: str = "DSPARK_API_KEY"
    """Name of the environment variable that holds the endpoint's key, if it wants one."""
    allow_retokenized: bool = False
    """Take answers of an endpoint that returns no token ids, tokenised again and marked
    `retokenized`: the ids may then differ from those that were sampled."""

    @field_validator("out")
    @classmethod
    def _is_not_packed(cls, out: str) -> str:
        if out.endswith((".gz", ".parquet")):
            raise ValueError("must name a file of plain lines, such as responses.jsonl")
        return out

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if "@" in url or "?" in url:
            raise ValueError("must hold no key; name the variable that does in api_key_env")
        url = url.rstrip("/")
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError:
            port = 0
        if port == 0 or (port is None and parts.netloc.endswith(":")):
            raise ValueError("must be a URL with a port of 1 to 65535, or without a port")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://host:30000/v1")
        if (known := _ROUTE.search(parts.path)) is not None:
            given = url.removesuffix(known[0])
            raise ValueError(
                f"must be the URL up to /v1, without {known[0]}, which is added to each request: "
                f"{given if given.endswith('/v1') else given + '/v1'}"
            )
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.isidentifier():
            raise ValueError("must be the name of an environment variable, never the key itself")
        return name

    @field_validator("settings")
    @classmethod
    def _at_least_one(cls, settings: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
        if not settings:
            raise ValueError("must hold at least one setting, such as {temperature: 1}")
        if math.isinf(sum(setting.weight for setting in settings)):
            raise ValueError("must have weights whose sum is finite, such as 1 and 2")
        return settings


class DataSettings(_Settings):
    """Responses or capture shards as training rows."""

    responses: tuple[str, ...] = ()
    """responses.jsonl files or globs (online features)."""
    shards: str | None = None
    """Directory written by `dspark capture` (offline features)."""
    on_missing: Literal["refuse", "generate"] = "refuse"
    """For offline features. refuse: `shards` are the rows of the run; generate: `responses` are,
    and the target computes in the trainer's process what `shards` (which may be an unfinished
    capture) do not hold."""
    window_bytes: Annotated[int, Field(ge=0)] = 0
    """For `on_missing: generate`: room on the disk, beside `shards`, in which rows that were
    computed wait for the next epoch; the oldest go first. Of all processes together."""
    max_length: Annotated[int, Field(ge=4)] = 4096
    """Tokens of a row, prompt included; longer rows are cut and counted."""
    min_supervised_tokens: PositiveInt = 2
    """Rows with fewer are rejected and counted."""
    pack_length: PositiveInt | None = None
    """Put several of these rows, each a document of its own, into one of up to so many tokens
    (at least `max_length`); `train.num_anchors` is then shared among them. None: no packing."""

    @model_validator(mode="after")
    def _window_is_used(self) -> Self:
        if self.window_bytes and self.on_missing == "refuse":
            raise ValueError(
                f"window_bytes is {self.window_bytes} but on_missing is refuse: set "
                "on_missing=generate, or window_bytes=0"
            )
        return self

    @model_validator(mode="after")
    def _pack_holds_a_document(self) -> Self:
        if self.pack_length is not None and self.pack_length < self.max_length:
            raise ValueError(
                f"pack_length is {self.pack_length}, less than max_length {self.max_length}: a row "
                "must hold the longest document"
            )
        return self


class CaptureSettings(_Settings):
    """Responses to feature shards on disk."""

    out: Place = "outputs/features"
    dtype: Literal["bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fn_all"] = "bfloat16"
    """float8_e4m3fn: taps in 8 bits with a scale for every state, the final state in bfloat16;
    float8_e4m3fn_all: that in 8 bits too."""
    shard_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    batch_size: PositiveInt = 8
    """Rows of a forward pass on a GPU; a CPU computes one at a time (`target.documents`)."""


class LossSettings(_Settings):
    """Objective: ce·CE + l1·L1 + confidence·BCE + accept_length·ramp·L_acc."""

    ce_weight: Annotated[float, Field(ge=0.0)] = 0.1
    l1_weight: Annotated[float, Field(ge=0.0)] = 0.9
    """Weight of the full L1 (0..2), twice the total variation."""
    confidence_weight: Annotated[float, Field(ge=0.0)] = 1.0
    accept_length_weight: Annotated[float, Field(ge=0.0)] = 0.5
    accept_length_start: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the steps before which L_acc is off."""
    accept_length_ramp: Fraction = 0.1
    """Share of the steps, from there, over which the weight of L_acc rises from 0."""
    accept_length_form: Literal["expected", "path", "path_exact", "chain"] = "expected"
    """Whose products L_acc has the gradient of. expected: the slots' own chances to be accepted
    (alpha); path: a slot is reached with min(1, q/p) of the data's tokens before it, what follows
    as in expected; path_exact: that on both sides, with the gradient of the ratios too; chain: the
    draft's probabilities q of the data's tokens. For path and path_exact the data has to be
    sampled from the target at `accept_length_temperature`, without top-p or top-k."""
    accept_length_focal: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight, inside L_acc, of the cross entropy of each block's first slot whose most likely token
    is not the data's; divided by the block size as the rest of L_acc."""
    accept_length_temperature: Annotated[float, Field(ge=0.01, le=1.0)] = 1.0
    """Sharpen the target's distribution for L_acc only (for drafts served greedily); lower, its
    logits would overflow."""
    decay: Annotated[float, Field(gt=0.0)] = 4.0
    """Slot weight exp(-k / decay), k from 0."""
    slot_weights: Literal["exponential", "survival"] = "exponential"
    """survival: D-PACE's suffix sums of smoothed reach from exact alpha, in all three terms."""
    survival_smoothing: Fraction = 0.5
    """a in alpha~ = (1 - a)·alpha + a, for `slot_weights: survival`."""
    distance: Literal["l1", "lk_hybrid", "nla"] = "l1"
    """Per-slot distance in the L1 term: full L1; KL blended with TV by alpha; -log alpha."""
    chunk_blocks: PositiveInt = 64
    """Blocks whose vocabulary-wide tensors exist at one time."""
    one_pass: bool = True
    """On a GPU: loss and gradient in one pass over the vocabulary, by kernels. False goes through
    autograd chunk by chunk, as CPUs do, at three times the time and memory."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        names = ("ce_weight", "l1_weight", "confidence_weight", "accept_length_weight")
        if not any(getattr(self, name) for name in names):
            raise ValueError(f"{', '.join(names)} are all 0: give one of them a weight")
        return self

    @model_validator(mode="after")
    def _ramp_ends_in_time(self) -> Self:
        # the sum of two decimals may round up
        if self.accept_length_start + self.accept_length_ramp > 1 + 1e-9:
            raise ValueError(
                f"accept_length_start {self.accept_length_start:g} and accept_length_ramp "
                f"{self.accept_length_ramp:g} add up to more than 1, all steps: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _temperature_is_used(self) -> Self:
        if self.accept_length_form == "chain" and self.accept_length_temperature != 1:
            raise ValueError(
                f"accept_length_temperature is {self.accept_length_temperature:g} but "
                "accept_length_form is chain, which has no target distribution: set "
                "accept_length_temperature=1, or another form"
            )
        return self


class TrackerSettings(_Settings):
    """Where metrics go beside metrics.jsonl. Keys and tokens come from the environment only."""

    kind: Literal["none", "wandb"] = "none"
    project: str = "dspark"
    name: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] = ()


class TrainSettings(_Settings):
    """The optimisation run. A step is an optimizer step."""

    output_dir: Place = "outputs/train"
    features: Literal["online", "split", "offline"] = "online"
    """online: the target runs in this process; split: in others, on `target_devices`; offline:
    `data.shards`."""
    target_devices: tuple[str, ...] = ()
    """For split, on each machine: `[cuda:4, cuda:5]`, dealt out to its training processes. A
    Ling-3.0 target may lie on several: `[cuda:2+cuda:3, cuda:4+cuda:5]`."""
    split_queue: Annotated[int, Field(ge=1, le=64)] = 2
    """For split: forward passes that each target device may be ahead of the training."""
    steps: PositiveInt | None = None
    """Optimizer steps; wins over `epochs`."""
    epochs: PositiveInt = 10
    batch_size: PositiveInt = 1
    """Rows a process takes in one forward pass."""
    grad_accumulation: PositiveInt = 1
    """Forward passes of one optimizer step. Global batch = batch_size x this x processes."""
    num_anchors: PositiveInt = 512
    """Blocks sampled from a row at each visit; the documents of a packed row share them by their
    supervised tokens."""
    lr: Annotated[float, Field(gt=0.0)] = 6e-4
    warmup_ratio: Fraction = 0.04
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """wsd: constant, then linear to 0 over the last 20% of the steps."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Also keep an average of the weights over the steps, such as 0.999 (short at first: see
    `training.ema`); validation decodes with both, and `best` and the export take the better."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """None takes what `accelerate launch` was told."""
    gradient_checkpointing: bool = False
    compile: bool = False
    """On a GPU whose processes hold whole weights (not ZeRO-3, not FSDP): fuse the draft's layers,
    a third of a step's time less. Compiling takes half a minute, once with `data.pack_length`
    and up to five times without, where forward passes differ in shape. With `data.pack_length` the
    pass of a target in this process is compiled and captured too."""
    attention: Literal["auto", "dense"] = "auto"
    """Of the draft while it trains. auto: on a GPU, only over the tiles of the context that are
    seen (flex attention, compiled at the first step); dense: with a mask of the whole."""
    seed: Seed = 0
    num_processes: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """Refuse to start with any other number of processes."""
    resume: str = "auto"
    """auto: the newest complete checkpoint in output_dir; none: refuse one that is not empty;
    or a path."""
    save_every: PositiveInt = 500
    keep: PositiveInt = 2
    """Complete checkpoints kept besides `best`."""
    log_every: PositiveInt = 10
    validate_every: PositiveInt | None = None
    """Steps between real decodes that choose `best`; None: at the end only."""
    validation_prompts: tuple[str, ...] = ()
    """Prompts that are decoded with target + draft; empty: no validation and no `best`."""
    validation_limit: PositiveInt = 8
    validation_max_new_tokens: PositiveInt = 64
    tracker: TrackerSettings = TrackerSettings()

    @model_validator(mode="after")
    def _split_names_devices(self) -> Self:
        if self.features == "split" and not self.target_devices:
            raise ValueError(
                "features is split but target_devices is empty: name the devices that run the "
                "target, such as [cuda:4, cuda:5]"
            )
        if self.target_devices and self.features != "split":
            raise ValueError(
                f"target_devices is {list(self.target_devices)} but features is {self.features}: "
                "set features=split, or leave target_devices out"
            )
        return self


class EvalSettings(_Settings):
    """Real decoding of prompt sets with target and draft."""

    prompts: tuple[str, ...] = ()
    limit: PositiveInt | None = None
    max_new_tokens: PositiveInt = 256
    plain_tokens: PositiveInt = 32
    """Tokens of each prompt over which decoding without the draft is timed; its whole output is
    compared in any case."""
    temperature: Temperature = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Seed = 0


class Config(_Settings):
    """A whole run."""

    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    sample: SampleSettings = SampleSettings()
    data: DataSettings = DataSettings()
    capture: CaptureSettings = CaptureSettings()
    loss: LossSettings = LossSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
