"""Ling-3.0's chat format, token by token: what the prompt holds and what the target has to say."""

import json
from typing import Any

import pytest

from dspark.corpus.chat import Rendered, check_template, generation_prompt_ids, render
from dspark.corpus.messages import conversation
from dspark.target.config import LingConfig
from dspark.target.ling_chat import synthetic_tokenizer
from dspark.testing import TINY_LING

CONFIG = LingConfig.from_dict(TINY_LING["flash"])
LARGE = LingConfig.from_dict(
    {**TINY_LING["flash"], "vocab_size": 157184, "eos_token_id": 156895, "pad_token_id": 156892}
)
TOKENIZER = synthetic_tokenizer(CONFIG)
TAGS = ("<|role_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def ids_of(text: str) -> list[int]:
    """Tags are one token each, everything else is a token a byte: no tokenizer involved."""
    found: list[int] = []
    while text:
        tag = next((one for one in TAGS if text.startswith(one)), None)
        if tag is not None:
            found.append(TOKENIZER.convert_tokens_to_ids(tag))
            text = text[len(tag) :]
        else:
            found += TOKENIZER(text[0], add_special_tokens=False)["input_ids"]
            text = text[1:]
    return found


def assert_golden(messages: list[dict[str, Any]], thinking: bool | None, marked: str) -> None:
    """``marked`` is the rendering with what is supervised between ⟦ and ⟧."""
    rendered = render(TOKENIZER, conversation({"messages": messages}), thinking=thinking)
    ids: list[int] = []
    mask: list[int] = []
    for number, part in enumerate(marked.replace("⟧", "⟦").split("⟦")):
        found = ids_of(part)
        ids += found
        mask += [number % 2] * len(found)
    assert rendered.input_ids == ids
    assert rendered.loss_mask == mask


ON = "<role>SYSTEM</role>detailed thinking on<|role_end|>"
OFF = "<role>SYSTEM</role>detailed thinking off<|role_end|>"
HI = "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_reasoning_is_supervised_behind_the_prompts_tag() -> None:
    answer = {"role": "assistant", "content": "Yo", "reasoning_content": "Hm."}
    for thinking in (None, True):
        assert_golden([user("Hi"), answer], thinking, f"{ON}{HI}<think>⟦Hm.</think>Yo<|role_end|>⟧")


def test_without_thinking_the_whole_pair_is_prompt() -> None:
    answer = {"role": "assistant", "content": "Yo"}
    assert_golden([user("Hi"), answer], False, f"{OFF}{HI}<think></think>⟦Yo<|role_end|>⟧")


def test_earlier_turns_keep_their_reasoning_and_are_supervised() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Y", "thinking": "a"},
        user("Hi"),
        {"role": "assistant", "content": "<think>b</think>Z"},
    ]
    assert_golden(
        messages,
        True,
        "<role>SYSTEM</role>Be brief.\ndetailed thinking on<|role_end|>"
        f"{HI}<think>⟦a</think>Y<|role_end|>⟧{HI}<think>⟦b</think>Z<|role_end|>⟧",
    )


def test_a_system_text_that_names_the_mode_gets_no_second_one() -> None:
    messages = [
        {"role": "system", "content": "detailed thinking on"},
        user("Hi"),
        {"role": "assistant", "content": "Y", "reasoning": "a"},
    ]
    assert_golden(messages, True, f"{ON}{HI}<think>⟦a</think>Y<|role_end|>⟧")


def test_tool_calls_are_supervised_and_their_results_are_not() -> None:
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "two"}'}},
        {"type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    messages = [
        user("Hi"),
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "Done", "reasoning_content": "s"},
    ]
    assert_golden(
        messages,
        True,
        f"{ON}{HI}<think>⟦r</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1"
        "</arg_value>\n<arg_key>b</arg_key>\n<arg_value>two</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call><|role_end|>⟧"
        "<role>OBSERVATION</role>\n<tool_response>\n3\n</tool_response>\n<tool_response>\nnoon\n"
        "</tool_response><|role_end|><role>ASSISTANT</role>\n<think>⟦s</think>Done<|role_end|>⟧",
    )


@pytest.mark.parametrize(("thinking", "end"), [(None, "<think>"), (False, "<think></think>")])
def test_the_prompt_ends_where_the_answer_begins(thinking: bool | None, end: str) -> None:
    mode = OFF if thinking is False else ON
    assert generation_prompt_ids(TOKENIZER, [user("Hi")], thinking) == ids_of(mode + HI + end)


@pytest.mark.parametrize("config", [CONFIG, LARGE])
def test_special_tokens_stand_where_the_config_and_the_release_put_them(
    config: LingConfig,
) -> None:
    tokenizer = synthetic_tokenizer(config)
    check_template(tokenizer)
    assert tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.pad_token_id == config.pad_token_id
    text = "é <think>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    if config is LARGE:
        names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        assert tokenizer.convert_tokens_to_ids(list(names)) == [156896, 156897, 156903, 156904]


def supervised(rendered: Rendered) -> str:
    pairs = zip(rendered.input_ids, rendered.loss_mask, strict=True)
    text: str = TOKENIZER.decode([token for token, on in pairs if on])
    return text


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_are_rendered_and_never_supervised() -> None:
    answer = {"role": "assistant", "content": "Yo", "reasoning_content": "Hm."}
    messages = [user("Hi"), answer, user("Hi"), answer]
    rendered = render(TOKENIZER, messages, thinking=True, tools=[TOOL])
    text = TOKENIZER.decode(rendered.input_ids)
    assert text.count("<tools>\n" + json.dumps(TOOL) + "\n</tools>") == 1
    assert supervised(rendered) == "Hm.</think>Yo<|role_end|>" * 2
    prompt = generation_prompt_ids(TOKENIZER, [user("Hi")], True, tools=[TOOL])
    assert rendered.input_ids[: len(prompt)] == prompt
    assert rendered.loss_mask[: len(prompt)] == [0] * len(prompt)
    # the empty pair that stands for thinking off is found behind the tools too
    short = {"role": "assistant", "content": "Yo"}
    rendered = render(TOKENIZER, [user("Hi"), short], tools=[TOOL])
    assert supervised(rendered) == "Yo<|role_end|>"
