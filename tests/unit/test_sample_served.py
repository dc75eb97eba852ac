"""`dspark sample` asks `dspark serve`: ids, stop ids, and the rows of the in-process sampler."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.config import SampleSettings, SamplingSetting
from dspark.corpus.endpoint import sample_endpoint
from dspark.corpus.prompts import Prompt
from dspark.corpus.responses import Response, read_responses
from dspark.corpus.sampler import sample_responses
from dspark.decoding import Commit
from dspark.serving.card import card_of
from dspark.serving.engine import Decoder, Engine, LocalModel
from dspark.serving.prepare import Preparer
from dspark.serving.protocol import ApiError, CompletionRequest, parse
from dspark.serving.server import running
from dspark.serving.settings import ServeSettings
from dspark.target import HFTarget
from dspark.target.remote import Remote
from dspark.testing import tiny_target, tiny_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER: Any = tiny_tokenizer()
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
PROMPTS = [Prompt(f"p{n}", [{"role": "user", "content": "ab" * n}], "m") for n in range(1, 5)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HFTarget:
    """Ends some of its greedy answers and not the others."""
    target = tiny_target()
    out = tmp_path_factory.mktemp("first") / "r.jsonl"
    sample_responses(target, TOKENIZER, PROMPTS, settings(None), out)
    said = [row.input_ids[row.loss_mask.index(1) :] for row in read_responses([str(out)])]
    early = said[0][4]
    assert not all(early in ids for ids in said)
    target.model.generation_config.eos_token_id = [TOKENIZER.eos_token_id, early]
    ending = HFTarget(target.model, "tiny")
    assert early in ending.eos_ids
    return ending


@pytest.fixture(scope="module")
def url(target: HFTarget) -> Iterator[str]:
    with running(target, None, TOKENIZER, model_name="it") as address:
        yield address


def settings(url: str | None, **changes: Any) -> SampleSettings:
    greedy = (SamplingSetting(temperature=0),)
    return SampleSettings(endpoint=url, settings=greedy, max_new_tokens=8, **changes)


def rows(path: Path) -> dict[str, Response]:
    return {row.key: row for row in read_responses([str(path)])}


@pytest.mark.parametrize("api", ["auto", "openai", "sglang"])
def test_rows_are_those_of_the_in_process_sampler(
    target: HFTarget, url: str, tmp_path: Path, api: str
) -> None:
    sample_responses(target, TOKENIZER, PROMPTS, settings(None), tmp_path / "h.jsonl")
    outline = Remote("tiny", None, target.vocab_size, 512, target.eos_ids)
    chosen = settings(f"{url}/v1", endpoint_api=api, max_retries=0)
    report = sample_endpoint(outline, TOKENIZER, PROMPTS, chosen, tmp_path / "e.jsonl")
    assert (report.written, report.errors) == (len(PROMPTS), {})
    here, there = rows(tmp_path / "h.jsonl"), rows(tmp_path / "e.jsonl")
    assert set(here) == set(there)
    assert {row.finish_reason for row in here.values()} == {"stop", "length"}
    for key, row in here.items():
        for name in ("input_ids", "loss_mask", "finish_reason", "messages", "sampling"):
            assert getattr(there[key], name) == getattr(row, name), (key, name)
        assert (there[key].engine, there[key].retokenized) == ("dspark:it", False)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def test_ids_stand_where_vllm_has_them(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = TOKENIZER(rendered, add_special_tokens=False)["input_ids"]
    text = post(url, "/v1/completions", {**BODY, "prompt": prompt}).json()
    chat = post(url, "/v1/chat/completions", {**BODY, "messages": messages}).json()
    ids = text["choices"][0]["token_ids"]
    assert len(ids) == text["usage"]["completion_tokens"] > 0
    assert chat["choices"][0]["token_ids"] == ids
    assert text["choices"][0]["prompt_token_ids"] == chat["prompt_token_ids"] == prompt
    plain = post(url, "/v1/completions", {**BODY, "prompt": "a", "return_token_ids": False}).json()
    assert "token_ids" not in plain["choices"][0]
    refused = post(url, "/v1/completions", {**BODY, "prompt": "a", "stream": True})
    assert refused.status_code == 400
    assert "'return_token_ids' needs 'stream': false" in refused.text


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_the_output_and_is_none_of_its_text(url: str, ignore_eos: bool) -> None:
    asked = {**BODY, "prompt": "ba", "ignore_eos": ignore_eos}
    free = post(url, "/v1/completions", {**asked, "ignore_eos": True}).json()["choices"][0]
    stop = free["token_ids"][4]
    body = {**asked, "stop_token_ids": [stop], "skip_special_tokens": False}
    (choice,) = post(url, "/v1/completions", body).json()["choices"]
    end = free["token_ids"].index(stop) + 1
    assert choice["finish_reason"] == "stop"
    ids = choice["token_ids"]
    assert ids == free["token_ids"][: len(ids)]
    assert len(ids) <= end
    if ignore_eos:
        assert len(ids) == end
    assert choice["text"] == TOKENIZER.decode(ids[:-1], skip_special_tokens=False)


def test_special_tokens_stand_in_the_text_if_asked_for(target: HFTarget) -> None:
    ids = [97, TOKENIZER.pad_token_id, 98]

    def play(*_: Any) -> Iterator[Commit]:
        yield Commit(ids, "length", None, 0, 0.001)

    model = LocalModel(target, None, decoder=Decoder("scripted", play))
    preparer = Preparer(model.card, TOKENIZER, ServeSettings())
    engine = Engine(model, TOKENIZER)
    try:
        for skip in (True, False, None):
            raw = json.dumps({"prompt": "a", "skip_special_tokens": skip}).encode()
            params = preparer.completion(parse(CompletionRequest, raw)).params
            text = engine.generate([1], params).text
            assert text == TOKENIZER.decode(ids, skip_special_tokens=skip is not False)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("ids", "most", "words"),
    [
        ([5, 6, 7, 8, 9, 10], 8, None),
        ([5, 6, 7, 8, 9, 10, 11], 8, "makes 9 ids that end an output, the model's own 2 .*most 8"),
        (list(range(20)), None, None),
        ([100_000], None, r"holds the id 100000; ids are 0\.\."),
        ([-1], None, "holds the id -1"),
        ("5", None, "must be a list of token ids"),
        ([True], None, "must be a list of token ids"),
    ],
)
def test_stop_ids_that_cannot_be_are_refused(
    target: HFTarget, ids: Any, most: int | None, words: str | None
) -> None:
    preparer = Preparer(card_of(target, most_stops=most), TOKENIZER, ServeSettings())
    raw = json.dumps({"prompt": "a", "stop_token_ids": ids}).encode()
    if words is None:
        work = preparer.completion(parse(CompletionRequest, raw))
        assert work.params.stop_ids == frozenset(ids)
        return
    with pytest.raises(ApiError, match="'stop_token_ids' " + words) as told:
        preparer.completion(parse(CompletionRequest, raw))
    assert (told.value.status, told.value.param) == (400, "stop_token_ids")
