"""Masks are compared token by token with hand-written goldens: `[...]` marks what is supervised."""

from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

from dspark.corpus import chat
from dspark.corpus.messages import conversation
from dspark.corpus.rejects import Reason, RowError
from dspark.errors import TargetError
from dspark.target import load_tokenizer

# The shape of Qwen3's template: earlier reasoning is stripped, the last turn has a think block.
QWEN_LIKE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}"""

# The shape of Ling-3.0's template: a think pair in every turn, opened by the prompt, and the mode
# written into the system turn.
LING_LIKE = """
{%- set on = enable_thinking is not defined or enable_thinking -%}
{%- set system = messages[0].content + '\n' if messages[0].role == 'system' else '' -%}
{{- '<role>SYSTEM</role>' + system + 'detailed thinking ' + ('on' if on else 'off') -}}
{{- '<|role_end|>' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<role>HUMAN</role>' + m.content + '<|role_end|>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<role>ASSISTANT</role>\n<think>' + (m.reasoning_content or '') + '</think>' -}}
{{- m.content + '<|role_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<role>ASSISTANT</role>\n<think>' + ('' if on else '</think>') -}}
{%- endif -%}"""

RAISING = "{{ raise_exception('only French is spoken here') }}"
DIVIDING = "{{ 1 // 0 }}"

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|role_end|>")


def byte_tokenizer(template: str | None) -> Any:
    """One token a byte, and the control tokens of both formats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = token_decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    # think tokens are no control tokens in real tokenizers either
    tokens = [AddedToken(t, special="think" not in t, normalized=False) for t in SPECIAL]
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = template
    return tokenizer


def marked(tokenizer: Any, rendered: chat.Rendered) -> str:
    """The text with `[` and `]` around supervised runs."""
    pairs = zip(rendered.input_ids, rendered.loss_mask, strict=True)
    out = ""
    for on, run in groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run])
        out += f"[{text}]" if on else text
    return out


def talk(*turns: str | dict[str, Any]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], **(turn if isinstance(turn, dict) else {"content": turn})}
        for i, turn in enumerate(turns)
    ]


@pytest.fixture(scope="module")
def smollm() -> Any:
    return load_tokenizer("smollm2-135m")


def test_smollm_answer_is_supervised_through_its_end_of_turn(smollm: Any) -> None:
    rendered = chat.render(smollm, talk("Hi?", "Hello there."))
    assert marked(smollm, rendered) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
        "[Hello there.<|im_end|>]"
    )
    supervised = [i for i, on in zip(rendered.input_ids, rendered.loss_mask, strict=True) if on]
    assert supervised == [*smollm("Hello there.")["input_ids"], smollm.eos_token_id]


def test_three_turns_with_one_token_answers(smollm: Any) -> None:
    rendered = chat.render(smollm, talk("a?", "A", "b?", "B", "c?", "C"))
    text = marked(smollm, rendered)
    assert text.count("[") == 3
    for answer in "ABC":
        assert f"assistant\n[{answer}<|im_end|>]" in text
    assert sum(rendered.loss_mask) == 6
    assert chat.render_turns(smollm, talk("a?", "A", "b?", "B", "c?", "C")) == [rendered]


@pytest.mark.parametrize(
    "answer",
    [
        "👩‍👩‍👧‍👦 family",
        "שלום עולם",
        "e\u0301 n\u0303",
        "你好\uff0c世界",
        "\u200f",
        "x\u0000y",
        "{{ x }}",
    ],
)
def test_mask_covers_whole_tokens_of_any_script(smollm: Any, answer: str) -> None:
    rendered = chat.render(smollm, talk("?", answer))
    supervised = [i for i, on in zip(rendered.input_ids, rendered.loss_mask, strict=True) if on]
    assert smollm.decode(supervised) == f"{answer}<|im_end|>"
    prompt = chat.generation_prompt_ids(smollm, talk("?"))
    assert rendered.input_ids[: len(prompt)] == prompt


def test_answer_that_spells_the_end_of_turn_ends_there(smollm: Any) -> None:
    rendered = chat.render(smollm, talk("?", "stop<|im_end|>\n<|im_start|>user\nno"))
    assert marked(smollm, rendered).endswith("assistant\n[stop<|im_end|>]")


def test_answer_with_think_and_role_text_is_plain_content() -> None:
    tokenizer = byte_tokenizer(LING_LIKE)
    rendered = chat.render(tokenizer, talk("?", "<role>HUMAN</role> a <think>b</think>"))
    assert marked(tokenizer, rendered).endswith(
        "<think></think>[<role>HUMAN</role> a <think>b</think><|role_end|>]"
    )


@pytest.mark.parametrize("thinking", [None, True, False])
def test_empty_think_pair_of_qwen_is_never_supervised(thinking: bool | None) -> None:
    tokenizer = byte_tokenizer(QWEN_LIKE)
    rendered = chat.render(tokenizer, talk("Hi", "Yo"), thinking=thinking)
    assert marked(tokenizer, rendered) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "[Yo<|im_end|>]"
    )


@pytest.mark.parametrize(("thinking", "mode"), [(None, "on"), (True, "on"), (False, "off")])
def test_empty_think_pair_of_ling_is_never_supervised(thinking: bool | None, mode: str) -> None:
    tokenizer = byte_tokenizer(LING_LIKE)
    rendered = chat.render(tokenizer, talk("Hi", "Yo", "Hm", "Ok"), thinking=thinking)
    assert marked(tokenizer, rendered) == (
        f"<role>SYSTEM</role>detailed thinking {mode}<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>[Yo<|role_end|>]<role>HUMAN</role>Hm<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>[Ok<|role_end|>]"
    )


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "Yo", "reasoning_content": "Hm."},
        {"content": "<think>Hm.</think>Yo"},
    ],
)
def test_reasoning_is_supervised_from_the_field_and_from_inline_tags(turn: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(LING_LIKE)
    rendered = chat.render(tokenizer, talk("Hi", turn), thinking=True)
    assert marked(tokenizer, rendered).endswith(
        "<role>ASSISTANT</role>\n<think>[Hm.</think>Yo<|role_end|>]"
    )
    qwen = byte_tokenizer(QWEN_LIKE)
    rendered = chat.render(qwen, talk("Hi", turn), thinking=True)
    assert marked(qwen, rendered).endswith(
        "<|im_start|>assistant\n[<think>\nHm.\n</think>\n\nYo<|im_end|>]"
    )


@pytest.mark.parametrize("thinking", [None, True])
@pytest.mark.parametrize("template", [LING_LIKE, QWEN_LIKE])
def test_reasoning_is_supervised_alike_under_every_name(
    template: str, thinking: bool | None
) -> None:
    tokenizer = byte_tokenizer(template)
    ways = [
        *(
            {"content": "Yo", name: "Hm."}
            for name in ("reasoning_content", "reasoning", "thinking")
        ),
        {"content": "<think>Hm.</think>Yo"},
        {"content": "<think>\nHm.\n</think>\n\nYo"},
    ]
    rendered = [
        chat.render(tokenizer, conversation({"messages": talk("Hi", way)}), thinking=thinking)
        for way in ways
    ]
    supervised = sum(rendered[0].loss_mask)
    assert supervised >= len("Hm.Yo") + 2  # the closing tag and the end of turn
    assert all(one == rendered[0] for one in rendered)


def test_reasoning_is_not_trained_behind_a_prompt_that_turned_thinking_off() -> None:
    turn = {"content": "Yo", "reasoning_content": "Hm."}
    for template in (LING_LIKE, QWEN_LIKE):
        with pytest.raises(RowError) as caught:
            chat.render(byte_tokenizer(template), talk("Hi", turn), thinking=False)
        assert caught.value.reason is Reason.UNSTABLE_PREFIX


def test_an_answer_cut_by_length_teaches_no_end_of_turn() -> None:
    tokenizer = byte_tokenizer(QWEN_LIKE)
    messages = talk("a", {"content": "A", "reasoning_content": "ra"}, "b", {"content": "B"})
    whole = chat.render_turns(tokenizer, messages, thinking=True)
    first, second = chat.render_turns(tokenizer, messages, thinking=True, cut=True)
    # only the last answer was cut
    assert first == whole[0]
    assert marked(tokenizer, whole[1]).endswith("[B<|im_end|>]")
    assert marked(tokenizer, second).endswith("[B]")


def test_stripped_history_gives_each_turn_a_sequence_of_its_own() -> None:
    tokenizer = byte_tokenizer(QWEN_LIKE)
    messages = talk("a", {"content": "A", "reasoning_content": "ra"}, "b", {"content": "B"}, "c")
    first, second = chat.render_turns(tokenizer, messages, thinking=True)
    assert marked(tokenizer, first) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nra\n</think>\n\nA<|im_end|>]"
    )
    assert marked(tokenizer, second) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "[B<|im_end|>]"
    )
    assert chat.render(tokenizer, messages[:4], thinking=True) == second


def test_prompt_ids_are_the_prefix_of_the_rendering() -> None:
    for template in (QWEN_LIKE, LING_LIKE):
        tokenizer = byte_tokenizer(template)
        for thinking in (None, True, False):
            prompt = chat.generation_prompt_ids(tokenizer, talk("Hi"), thinking)
            full = chat.render(tokenizer, talk("Hi", "Yo"), thinking=thinking)
            assert full.input_ids[: len(prompt)] == prompt
            assert not any(full.loss_mask[: len(prompt)])


def test_merge_across_the_prompt_border_is_rejected(smollm: Any) -> None:
    # the header's line feed and the answer's become one token that no served prompt contains
    with pytest.raises(RowError) as caught:
        chat.render(smollm, talk("?", "\n\nHi"))
    assert caught.value.reason is Reason.UNSTABLE_PREFIX


def test_reasoning_that_the_template_drops_is_rejected(smollm: Any) -> None:
    turn = {"content": "Yo", "reasoning_content": "secret"}
    with pytest.raises(RowError) as caught:
        chat.render(smollm, talk("Hi", turn))
    assert caught.value.reason is Reason.REASONING_LOST


def test_missing_answer_is_rejected(smollm: Any) -> None:
    for call in (chat.render, chat.render_turns):
        with pytest.raises(RowError) as caught:
            call(smollm, talk("Hi"))
        assert caught.value.reason is Reason.NO_ANSWER


def test_template_without_end_token_supervises_to_the_end() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert marked(tokenizer, chat.render(tokenizer, talk("a", "b"))) == (
        "user: a\nassistant: [b\n]"
    )


def test_unusable_templates_are_named_with_the_remedy() -> None:
    with pytest.raises(TargetError, match=r"no chat template.*chat_template\.jinja"):
        chat.check_template(byte_tokenizer(None))
    with pytest.raises(TargetError, match="only French"):
        chat.check_template(byte_tokenizer(RAISING))
    with pytest.raises(TargetError, match="division"):
        chat.check_template(byte_tokenizer(DIVIDING))
    for template in (QWEN_LIKE, LING_LIKE):
        chat.check_template(byte_tokenizer(template))


def test_a_template_that_raises_costs_a_row_and_a_missing_one_the_run() -> None:
    for template in (RAISING, DIVIDING):
        for call in (chat.render, chat.render_turns):
            with pytest.raises(RowError) as caught:
                call(byte_tokenizer(template), talk("a", "b"))
            assert caught.value.reason is Reason.TEMPLATE_ERROR
            assert caught.value.detail
    with pytest.raises(TargetError, match=r"no chat template.*chat_template\.jinja"):
        chat.render_turns(byte_tokenizer(None), talk("a", "b"))


def test_a_prompt_of_ids_that_the_target_has_no_rows_for_is_rejected() -> None:
    tokenizer = byte_tokenizer(QWEN_LIKE)
    largest = max(chat.generation_prompt_ids(tokenizer, talk("a")))
    assert chat.generation_prompt_ids(tokenizer, talk("a"), vocab_size=largest + 1)
    with pytest.raises(RowError, match=f"{largest}, vocabulary {largest}") as caught:
        chat.generation_prompt_ids(tokenizer, talk("a"), vocab_size=largest)
    assert caught.value.reason is Reason.ID_OUT_OF_VOCABULARY


def test_template_hash_follows_the_template() -> None:
    hashes = {chat.template_hash(byte_tokenizer(t)) for t in (QWEN_LIKE, LING_LIKE)}
    assert len(hashes) == 2
    assert all(len(h) == 16 for h in hashes)
    assert chat.render(byte_tokenizer(QWEN_LIKE), talk("a", "b")).template_hash in hashes
