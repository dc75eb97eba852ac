"""Tiny random targets, drafts and a byte tokenizer, so that every test runs on a CPU in seconds."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dspark.config import DraftSettings
from dspark.draft import DSparkDraftModel
from dspark.draft.config import config_for_target
from dspark.target import Target
from dspark.target.rows import ATTENTION_NAME

__all__ = ["save_tiny_target", "tiny_draft", "tiny_target", "tiny_tokenizer"]

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


def _tiny_model(seed: int, **overrides: Any) -> LlamaForCausalLM:
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
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
        return LlamaForCausalLM(config)


def tiny_target(seed: int = 0, **overrides: Any) -> Target:
    """A random float32 Llama of six narrow layers over `tiny_tokenizer`'s vocabulary."""
    return Target(_tiny_model(seed, **overrides), "tiny")


def save_tiny_target(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write `tiny_target` and its tokenizer where `dspark.target.load` reads them."""
    _tiny_model(seed, **overrides).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


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
