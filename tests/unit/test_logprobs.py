"""Logprobs: the target's own, the same with and without the draft, in three servers' shapes."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from dspark.decoding import (
    Commit,
    DecodeParams,
    Logprob,
    ReferenceStep,
    SamplingParams,
    stream,
)
from dspark.decoding.logprobs import logprobs_of
from dspark.errors import ConfigError
from dspark.serving.engine import Decoder, LocalModel
from dspark.serving.likelihood import TokenNames
from dspark.serving.prepare import Preparer
from dspark.serving.protocol import ApiError, ChatMessage, ChatRequest
from dspark.serving.settings import ServeSettings
from tests.unit.served import CHAT, MESSAGES, answer, chunks_of, client_of, refusal, tokenizer_of
from tests.unit.test_stream import sentencepiece_like

TOKENIZER = tokenizer_of()
PROMPT = list(range(40, 52))
FILTERED = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=3)


@pytest.fixture(scope="module")
def client(pair: tuple[Any, Any]) -> Iterator[httpx.Client]:
    with client_of(*pair, TOKENIZER) as http:
        yield http


def commits(pair: tuple[Any, Any], **options: Any) -> list[Commit]:
    return list(stream(*pair, PROMPT, DecodeParams(max_new_tokens=20, **options)))


def foreknown(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Proposals are what follows, but for every third place: blocks are kept in part."""

    def propose(step: ReferenceStep, most: int) -> torch.Tensor:
        at = step.position - len(PROMPT) + 1
        following = [token ^ (place % 3 == 2) for place, token in enumerate(ids)][at : at + most]
        return torch.tensor(following, dtype=torch.int64)

    monkeypatch.setattr(ReferenceStep, "propose", propose)


@pytest.mark.parametrize("sampling", [SamplingParams(), FILTERED])
def test_they_are_the_targets_whatever_is_drawn_and_drafted(
    pair: tuple[Any, Any], sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sampling": sampling, "ignore_eos": True, "top_logprobs": 4}
    runs = [commits((pair[0], draft), **options) for draft in (None, pair[1])]
    foreknown(monkeypatch, [token for one in runs[0] for token in one.token_ids])
    runs.append(commits(pair, **options))
    assert len(runs[2]) < len(runs[0]) / 2, "blocks of several tokens"
    ids, *others = ([token for one in run for token in one.token_ids] for run in runs)
    entries, *drafted = ([one for step in run for one in step.logprobs or []] for run in runs)
    assert others == [ids] * 2
    assert drafted == [entries] * 2, "to the bit"
    assert [entry.token_id for entry in entries] == ids
    with torch.no_grad():
        logits = pair[0].model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )
        if sampling.greedy:
            assert entry.top[0] == (entry.token_id, entry.logprob)


def test_none_are_computed_unless_asked_for(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.decoding.reference_step.logprobs_of", None)
    assert all(one.logprobs is None for one in commits(pair))


def test_a_stop_inside_a_block_cuts_them(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [token for one in commits(pair, ignore_eos=True) for token in one.token_ids]
    foreknown(monkeypatch, ids)
    for stop in set(ids):
        run = commits(pair, ignore_eos=True, stop_ids=frozenset({stop}), top_logprobs=0)
        for one in run:
            assert one.logprobs is not None
            assert [entry.token_id for entry in one.logprobs] == one.token_ids
            assert all(entry.top == () for entry in one.logprobs)


def test_ties_and_infinities_can_be_written() -> None:
    row = torch.tensor([[0.0, 1.0, 1.0, float("-inf")]])
    (entry,) = logprobs_of(row, [3], 20)
    assert entry.logprob == -9999.0
    assert [token for token, _ in entry.top] == [1, 2, 0, 3]


@pytest.mark.parametrize("top", [-1, 21])
def test_a_number_out_of_range_is_refused(top: int) -> None:
    with pytest.raises(ConfigError, match=r"top_logprobs must lie in 0\.\.20"):
        DecodeParams(max_new_tokens=1, top_logprobs=top)


def named(tokenizer: Any, token_id: int) -> tuple[str, list[int] | None]:
    name = TokenNames(tokenizer).likelihood(Logprob(token_id, 0.0, ()), 0).name
    return name.token, name.raw


def test_bytes_of_tokens_add_up_to_the_text() -> None:
    text = "né 東"
    pieces = [named(TOKENIZER, token) for token in TOKENIZER(text)["input_ids"]]
    assert bytes(byte for _, raw in pieces for byte in raw or []) == text.encode()
    other = sentencepiece_like()
    ids = {piece: other.convert_tokens_to_ids(piece) for piece in ("▁w", "<0xE6>", "el")}
    assert named(other, ids["▁w"]) == (" w", list(b" w"))
    assert named(other, ids["<0xE6>"])[1] == [0xE6]
    assert named(other, ids["el"]) == ("el", list(b"el"))


OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_a_chat_has_openais_shape_whole_and_streamed(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, **OPTIONS, "logprobs": True, "top_logprobs": 2}
    whole = answer(client, CHAT, {**body, "return_token_ids": True})["choices"][0]
    content = whole["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(one) for one in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"], "greedy"
    raw = bytes(byte for entry in content for byte in entry["bytes"])
    assert raw == b"".join(
        TOKENIZER.convert_ids_to_tokens(one).encode() if one >= 256 else bytes_of(one)
        for one in whole["token_ids"]
    )
    for interval in (None, 1, 5):
        chunks = chunks_of(client, CHAT, {**body, "stream_interval": interval})
        told = [
            entry
            for chunk in chunks
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert told == content, interval
    assert len(chunks) > 2
    bare = answer(client, CHAT, {"messages": MESSAGES, **OPTIONS, "logprobs": True})
    assert all(one["top_logprobs"] == [] for one in bare["choices"][0]["logprobs"]["content"])


def bytes_of(token_id: int) -> bytes:
    return bytes(named(TOKENIZER, token_id)[1] or [])


def test_a_completion_has_openais_older_shape(client: httpx.Client) -> None:
    body = {"prompt": "ab", **OPTIONS}
    choice = answer(client, "/v1/completions", {**body, "logprobs": 3})["choices"][0]
    logprobs = choice["logprobs"]
    assert {name: len(logprobs[name]) for name in logprobs} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 12
    )
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == pytest.approx(logprob)
        assert max(top.values()) == pytest.approx(logprob), "greedy"
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    clean = len(choice["text"].partition("\ufffd")[0])
    begun = [pair for pair in zip(logprobs["tokens"], offsets, strict=True) if pair[1] < clean]
    assert begun
    for token, offset in begun:
        assert choice["text"][offset : offset + len(token)] == token
    for chosen, number in ((0, 1), (False, None), (None, None)):
        one = answer(client, "/v1/completions", {**body, "logprobs": chosen})["choices"][0]
        got = one["logprobs"]
        assert (got and len(got["top_logprobs"][0])) == number


def test_a_stop_string_cuts_them_with_the_usage(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": PROMPT, **OPTIONS, "logprobs": 0}
    choice = answer(client, "/v1/completions", {**body, "return_token_ids": True})["choices"][0]
    text = choice["text"]
    foreknown(monkeypatch, choice["token_ids"])
    letters = [letter for letter in text if letter != "\ufffd"]
    assert len(letters) > 2
    for letter in letters:
        cut = answer(client, "/v1/completions", {**body, "stop": letter})
        count = cut["usage"]["completion_tokens"]
        assert len(cut["choices"][0]["logprobs"]["tokens"]) == count


def test_the_token_that_ends_a_stream_has_one_too(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, **OPTIONS, "logprobs": True}
    ids = answer(client, CHAT, {**body, "return_token_ids": True})["choices"][0]["token_ids"]
    for end in set(ids):
        body["stop_token_ids"] = [end]
        whole = answer(client, CHAT, body)
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == whole["usage"]["completion_tokens"] == ids.index(end) + 1
        choices = [chunk["choices"][0] for chunk in chunks_of(client, CHAT, body)]
        told = [entry for one in choices for entry in (one["logprobs"] or {}).get("content", ())]
        assert told == content


def test_generate_has_sglangs_shape(client: httpx.Client) -> None:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"text": "ab", "sampling_params": params, "return_logprob": True}
    whole = answer(client, "/generate", {**body, "top_logprobs_num": 2})
    info = whole["meta_info"]
    assert [token for _, token, _ in info["output_token_logprobs"]] == whole["output_ids"]
    assert [top[0][:2] for top in info["output_top_logprobs"]] == [
        entry[:2] for entry in info["output_token_logprobs"]
    ]
    chunks = chunks_of(client, "/generate", {**body, "top_logprobs_num": 2})
    assert chunks[-1]["meta_info"]["output_token_logprobs"] == info["output_token_logprobs"]
    for chunk in chunks:
        count = chunk["meta_info"]["completion_tokens"]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == count
    assert "output_top_logprobs" not in answer(client, "/generate", body)["meta_info"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs"),
        ("/generate", {"text": "a", "top_logprobs_num": 1}, "top_logprobs_num"),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 0}, None),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    assert refusal(client, path, body)["param"] == (param or "logprob_start_len")


def test_an_engine_without_them_says_so(pair: tuple[Any, Any]) -> None:
    model = LocalModel(*pair, decoder=Decoder("graph", lambda *_: iter(())))
    preparer = Preparer(model.card, TOKENIZER, ServeSettings())
    messages = [ChatMessage(role="user", content="a")]
    with pytest.raises(ApiError, match="--engine reference") as caught:
        preparer.chat(ChatRequest(messages=messages, logprobs=True))
    assert (caught.value.status, caught.value.param) == (400, "logprobs")
    preparer.chat(ChatRequest(messages=messages, logprobs=False))
