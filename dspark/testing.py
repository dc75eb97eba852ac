"""Tiny random targets, drafts, training runs and a byte tokenizer: every test takes seconds."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.config import DraftSettings
from dspark.draft import DSparkDraftModel
from dspark.draft.config import config_for_target
from dspark.target import HFTarget, LingTarget, Target
from dspark.target.attention import ATTENTION_NAME
from dspark.target.config import LingConfig
from dspark.target.model import LingModel
from dspark.target.synthetic import make_checkpoint, synthetic
from dspark.target.weights import fill

__all__ = [
    "TINY_LING",
    "save_tiny_ling",
    "save_tiny_run",
    "save_tiny_target",
    "tiny_draft",
    "tiny_ling",
    "tiny_rows",
    "tiny_run",
    "tiny_target",
    "tiny_tokenizer",
    "write_rows",
]

SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
TINY_VOCAB = 256 + len(SPECIALS)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, plus pad, turn marks and a mask id; a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[2],
        additional_special_tokens=list(SPECIALS),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


_FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def _tiny_model(seed: int, family: str = "llama", **overrides: Any) -> PreTrainedModel:
    tokenizer = tiny_tokenizer()
    config_class, model_class = _FAMILIES[family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # large enough that random logits have a clear maximum
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation=ATTENTION_NAME,
    )
    config.update(overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config)


def tiny_target(seed: int = 0, **overrides: Any) -> HFTarget:
    """A random float32 decoder of six narrow layers over `tiny_tokenizer`'s vocabulary.

    A Llama; ``overrides`` are of its config, but for ``family``, which may be qwen3.
    """
    return HFTarget(_tiny_model(seed, **overrides), "tiny")


def save_tiny_target(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write `tiny_target` and its tokenizer where `dspark.target.load` reads them."""
    _tiny_model(seed, **overrides).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_rows(count: int, *, seed: int = 0, longest: int = 70) -> list[dict[str, Any]]:
    """Tokenised rows of 12 to ``longest`` ids, whose first four are not supervised."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        ids = [rng.randrange(97, 107) for _ in range(rng.randint(12, longest))]
        mask = [0] * 4 + [1] * (len(ids) - 4)
        rows.append({"id": f"r{number}", "input_ids": ids, "loss_mask": mask})
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_tiny_run(directory: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A tiny target, ``rows`` and two validation prompts, where `tiny_run` looks for them."""
    save_tiny_target(directory / "target")
    write_rows(directory / "rows.jsonl", rows)
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in ("ab", "dcba")]
    write_rows(directory / "prompts.jsonl", prompts)
    return directory


def tiny_run(place: Path, out: Path, *overrides: str) -> list[str]:
    """Settings of a training of some milliseconds a step over `save_tiny_run`'s files.

    The last of several ``overrides`` of one key wins. Its prompts are not used unless asked for.
    """
    return [
        f"target.path={place / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        "draft.num_layers=2",
        "draft.block_size=4",
        "draft.num_taps=3",
        "draft.markov_rank=8",
        f"data.responses=[{place / 'rows.jsonl'}]",
        f"train.output_dir={out}",
        "train.num_anchors=6",
        "train.lr=0.002",
        "train.log_every=1",
        "loss.chunk_blocks=8",
        *overrides,
    ]


TINY_LING: dict[str, dict[str, Any]] = {}
"""Two configs that together take every branch of a Ling-3.0 model: `flash` has a ragged tail,
SwiGLU limits low enough to bind and a NEXTN block, `tiny` a low-rank query and none of these."""
TINY_LING["flash"] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "layer_group_size": 3,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000,
    "rope_scaling": None,
    "rope_interleave": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "gated_attention_proj_granularity_type": "head_wise",
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "expert_swiglu_limit_list": [0, 0, 0, 0, 0.05, 0, 0.05],
    "share_expert_swiglu_limit_list": [0, 0, 0.07, 0, 0, 0.05, 0],
    "num_nextn_predict_layers": 1,
    "mtp_use_kda": False,
    "eos_token_id": 3,
    "pad_token_id": 2,
    "hidden_act": "silu",
    # large enough that random logits have a clear maximum
    "initializer_range": 0.2,
}
TINY_LING["tiny"] = {
    **TINY_LING["flash"],
    "num_hidden_layers": 6,
    "q_lora_rank": 24,
    "expert_swiglu_limit_list": None,
    "share_expert_swiglu_limit_list": None,
    "num_nextn_predict_layers": 0,
}


def save_tiny_ling(directory: Path, variant: str = "flash", seed: int = 0, **keys: Any) -> Path:
    """A synthetic checkpoint of `TINY_LING`; ``keys`` replace some of its config's."""
    config = LingConfig.from_dict({**TINY_LING[variant], **keys})
    make_checkpoint(config, directory, seed=seed)
    return directory


def tiny_ling(
    variant: str = "flash", seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> LingTarget:
    """A random Ling-3.0 target; ``options`` are those of `LingModel`."""
    config = LingConfig.from_dict(TINY_LING[variant])
    model = LingModel(config, **options).to(dtype)
    fill(model, lambda spec: synthetic(spec, config, seed))
    return LingTarget(model, f"tiny-{variant}")


def tiny_draft(target: Target, seed: int = 0, **settings: Any) -> DSparkDraftModel:
    """A random float32 draft attached to ``target``; ``settings`` as in `DraftSettings`."""
    shape = {"num_layers": 2, "block_size": 4, "num_taps": 3, "markov_rank": 8, **settings}
    mask = shape.pop("mask_token_id", target.vocab_size - 1)
    config = config_for_target(target.config, DraftSettings(**shape), mask_token_id=mask)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = DSparkDraftModel(config)
    draft.attach(target.embed_weight, target.head_weight)
    draft.eval()
    return draft
