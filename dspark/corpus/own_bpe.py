"""A byte-level BPE of one's own, with the turn marks and the template of SmolLM2.

The same texts give the same vocabulary. Digits stand alone, as in SmolLM2's and Ling's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark.errors import ConfigError

__all__ = ["END", "MARKS", "START", "TEMPLATE", "chat_text", "train_tokenizer"]

TEXT, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
MARKS = (TEXT, START, END, MASK)
"""Ids 0 to 3; the first three as in SmolLM2. The last one stands nowhere in a text: for drafts."""

_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + _SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LONGEST = 24
"""Bytes of a token: longer ones are rows of dashes and the like."""


def chat_text(messages: Sequence[Mapping[str, Any]], *, cut: bool = False) -> str:
    """What `TEMPLATE` renders; ``cut``: up to the end of the last answer."""
    turns = [(str(one["role"]), str(one.get("content") or "")) for one in messages]
    if turns[0][0] != "system":
        turns.insert(0, ("system", _SYSTEM))
    text = "".join(f"{START}{role}\n{content}{END}\n" for role, content in turns)
    return text.removesuffix(f"{END}\n") if cut else text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Merges of ``texts`` (without marks) up to ``vocab_size`` entries, marks and bytes included.

    Raises:
        ConfigError: there is no room for 256 bytes and the marks, or too little text.
    """
    least = 256 + len(MARKS)
    if vocab_size <= least:
        raise ConfigError(f"vocab_size must be above {least}, bytes and marks; got {vocab_size}")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(MARKS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            max_token_length=_LONGEST,
            show_progress=False,
        ),
    )
    if inner.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"vocab_size {vocab_size} needs more text: it holds {inner.get_vocab_size()} tokens"
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=TEXT,
        eos_token=END,
        additional_special_tokens=[START, MASK],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
