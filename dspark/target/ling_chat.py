"""Ling-3.0's chat format as a template of our own, on a byte tokenizer for synthetic checkpoints.

A released checkpoint brings its own template, which is used as it comes; this one renders the same
form, so that masks, reasoning and tool calls can be tested and synthetic checkpoints can be served.
Thinking is on unless `enable_thinking` is false; the opening think tag (or, with thinking off, the
whole empty pair) belongs to the prompt.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.errors import TargetError
from dspark.target.config import LingConfig

__all__ = ["TEMPLATE", "synthetic_tokenizer"]

TEMPLATE = """\
{%- set ns = namespace(system='', observing=false) -%}
{%- set turns = messages -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set ns.system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{%- set thinking = enable_thinking is not defined or enable_thinking -%}
{{- '<role>SYSTEM</role>' -}}
{%- set named = 'detailed thinking o' in ns.system -%}
{{- ns.system -}}
{%- if ns.system and (tools or not named) -%}{{- '\n' -}}{%- endif -%}
{%- if tools -%}
{{- '# Tools\n\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools>\n\nA call is written as\n<tool_call>name\n<arg_key>key</arg_key>\n'
    + '<arg_value>value</arg_value>\n</tool_call>\n' -}}
{%- endif -%}
{%- if not named -%}
{{- 'detailed thinking ' + ('on' if thinking else 'off') -}}
{%- endif -%}
{{- '<|role_end|>' -}}
{%- for message in turns -%}
{%- if message.role == 'tool' -%}
{%- if not ns.observing -%}{{- '<role>OBSERVATION</role>' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- set ns.observing = true -%}
{%- if loop.last or turns[loop.index].role != 'tool' -%}
{{- '<|role_end|>' -}}{%- set ns.observing = false -%}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<role>ASSISTANT</role>\n<think>' + (message.reasoning_content or '') + '</think>' -}}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set called = call.function or call -%}
{{- '\n<tool_call>' + called.name -}}
{%- for key, value in called.arguments.items() -%}
{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>'
    + (value if value is string else value | tojson) + '</arg_value>' -}}
{%- endfor -%}
{{- '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|role_end|>' -}}
{%- elif message.role == 'user' -%}
{{- '<role>HUMAN</role>' + message.content + '<|role_end|>' -}}
{%- else -%}
{{- raise_exception('a message of role ' + message.role + ' has no place here') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<role>ASSISTANT</role>\n<think>' + ('' if thinking else '</think>') -}}
{%- endif -%}
"""

_PAD, _END, _BOS = "<|endoftext|>", "<|role_end|>", "<|startoftext|>"
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_OFFICIAL = dict(
    zip(
        (_BOS, _PAD, _END, *_TAGS),
        (156891, 156892, 156895, 156896, 156897, 156903, 156904),
        strict=True,
    )
)


def synthetic_tokenizer(config: LingConfig) -> PreTrainedTokenizerFast:
    """One token a byte, and Ling's special tokens at their official ids where the vocabulary has
    them, else from 256 on with pad and end where the config puts them.

    Raises:
        TargetError: the vocabulary is too small, or pad and end stand among the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = _special_ids(config)
    taken = set(specials.values())
    free = (index for index in range(config.vocab_size) if index not in taken)
    try:
        vocabulary = {symbol: next(free) for symbol in alphabet} | specials
    except StopIteration:
        raise TargetError(
            f"vocab_size {config.vocab_size} is too small for {len(alphabet)} bytes and "
            f"{len(specials)} special tokens"
        ) from None
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    # reasoning and tool calls are text that the caller sees, so their tags are not special
    plain = [AddedToken(name, normalized=False, special=False) for name in _TAGS]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=_PAD,
        eos_token=_END,
        # never added by the tokenizer itself, nor by the template
        additional_special_tokens=[_BOS],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(plain)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _special_ids(config: LingConfig) -> dict[str, int]:
    if config.vocab_size > max(_OFFICIAL.values()):
        return dict(_OFFICIAL)
    eos = config.eos_token_id
    fixed = {_PAD: config.pad_token_id, _END: eos[0] if isinstance(eos, tuple) else eos}
    ids = {name: index for name, index in fixed.items() if index is not None}
    free = (i for i in range(config.vocab_size - 1, -1, -1) if i not in ids.values())
    for name in _OFFICIAL:
        if name not in ids:
            ids[name] = next(free)
    return ids
