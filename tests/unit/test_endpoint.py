"""Rows from a server are the rows of the in-process sampler, asked for as the settings say."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark.config import SampleSettings, SamplingSetting, TargetSettings
from dspark.corpus import sampling
from dspark.corpus.chat import generation_prompt_ids
from dspark.corpus.endpoint import errors_file, sample_endpoint
from dspark.corpus.prompts import Prompt
from dspark.corpus.rejects import Reason
from dspark.corpus.responses import Response, read_responses
from dspark.corpus.sampler import sample_responses
from dspark.corpus.sampling import SampleReport
from dspark.errors import ConfigError, DataError
from dspark.target.remote import Remote, describe
from dspark.testing import save_tiny_target, tiny_target, tiny_tokenizer
from tests.unit.fake_engine import FakeEngine

MIXED = (
    SamplingSetting(weight=1, temperature=0),
    SamplingSetting(weight=2, temperature=0.8, top_p=0.9),
    SamplingSetting(weight=1, temperature=1.2, top_k=20, min_p=0.01),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer: Any) -> Remote:
    return Remote("tiny", None, len(tokenizer), 512, frozenset({tokenizer.eos_token_id}))


def prompts(count: int) -> list[Prompt]:
    texts = [f"{i}" + "abc" * (i * 7 % 11) for i in range(count)]
    return [
        Prompt(f"p{i}", [{"role": "user", "content": text}], "memory", "odd" if i % 2 else None)
        for i, text in enumerate(texts)
    ]


def settings(engine: FakeEngine | str, **changes: Any) -> SampleSettings:
    url = engine if isinstance(engine, str) else engine.url
    values = {
        "settings": MIXED,
        "max_new_tokens": 40,
        "seed": 5,
        "endpoint": url,
        "concurrency": 8,
        "max_retries": 3,
        "request_timeout_s": 20,
        **changes,
    }
    return SampleSettings(**values)


def read_back(out: Path) -> dict[str, Response]:
    rows = list(read_responses([str(out)]))
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row for row in rows}


def adds_up(report: SampleReport) -> bool:
    parts = (report.written, report.resumed, report.rejects.rejected, report.errors.total())
    return report.rejects.read == sum(parts)


@pytest.mark.parametrize("api", ["vllm", "sglang", "openai"])
def test_the_body_says_the_settings_field_by_field(
    target: Remote, tokenizer: Any, tmp_path: Path, api: str
) -> None:
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer) as engine:
        chosen = settings(engine, endpoint_api=api)
        sample_endpoint(target, tokenizer, prompts(24), chosen, out)
        bodies = {}
        for seen in engine.seen:
            if "messages" in seen.body:
                ids = generation_prompt_ids(tokenizer, seen.body["messages"])
            else:
                ids = seen.body["input_ids" if api == "sglang" else "prompt"]
            bodies[tuple(ids)] = seen
    rows = read_back(out)
    assert len(rows) == len(bodies) == 24
    used = set()
    for row in rows.values():
        prompt = row.input_ids[: row.loss_mask.index(1)]
        seen = bodies[tuple(prompt)]
        body = dict(seen.body)
        assert row.setting_index is not None
        setting = MIXED[row.setting_index]
        used.add(row.setting_index)
        key = sampling.seed_key(5, row.id, 0)
        seed = int.from_bytes(key[8:16]) % 2**31
        common = {
            "temperature": setting.temperature,
            "top_p": setting.top_p,
            "top_k": setting.top_k,
            "min_p": setting.min_p,
            # a penalty that a peer sends in place of another: none of them is ours to set
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [tokenizer.eos_token_id],
            "skip_special_tokens": False,
            "n": 1,
        }
        if api == "sglang":
            assert seen.path == "/generate"
            assert body == {
                "input_ids": prompt,
                "stream": False,
                "sampling_params": {**common, "max_new_tokens": 40, "sampling_seed": seed},
            }
            continue
        asked = {"prompt": prompt} if api == "vllm" else {"messages": row.messages[:-1]}
        assert seen.path == {"vllm": "/v1/completions", "openai": "/v1/chat/completions"}[api]
        more = {"max_tokens": 40, "seed": seed, "stream": False, "return_token_ids": True}
        assert body == {"model": "served", **common, **more, **asked}
    assert used == {0, 1, 2}


def test_top_k_zero_is_no_limit_for_either_engine(
    target: Remote, tokenizer: Any, tmp_path: Path
) -> None:
    # SGLang turns 0 away
    option = (SamplingSetting(top_k=0),)
    with FakeEngine(tokenizer, owner="sglang") as engine:
        chosen = settings(engine, settings=option)
        sample_endpoint(target, tokenizer, prompts(1), chosen, tmp_path / "r.jsonl")
    assert engine.bodies[0]["sampling_params"]["top_k"] == -1


@pytest.mark.slow
@pytest.mark.parametrize("api", ["vllm", "sglang", "openai"])
def test_rows_agree_with_the_in_process_samplers(
    target: Remote, tokenizer: Any, tmp_path: Path, api: str
) -> None:
    here = tiny_target()
    sample_responses(here, tokenizer, prompts(10), settings("http://none/v1"), tmp_path / "h.jsonl")
    with FakeEngine(tokenizer) as engine:
        chosen = settings(engine, endpoint_api=api, samples_per_prompt=2)
        report = sample_endpoint(target, tokenizer, prompts(10), chosen, tmp_path / "e.jsonl")
        local, remote = read_back(tmp_path / "h.jsonl"), read_back(tmp_path / "e.jsonl")
        assert len(remote) == report.written == 20
        assert adds_up(report)
        assert report.new_tokens == sum(row.num_supervised for row in remote.values())
        for key, row in local.items():
            other = remote[key]
            start = row.loss_mask.index(1)
            assert other.input_ids[:start] == row.input_ids[:start]
            assert other.loss_mask.index(1) == start
            assert other.loss_mask[start:] == [1] * (len(other.loss_mask) - start)
            for name in (
                "setting_index",
                "sampling",
                "seed",
                "thinking",
                "template_hash",
                "target",
                "source",
                "category",
                "tools",
            ):
                assert getattr(other, name) == getattr(row, name), name
            assert other.messages[:-1] == row.messages[:-1]
            # exactly what the engine drew, and nothing of ours
            prompt = other.input_ids[:start]
            seeds = int.from_bytes(sampling.seed_key(5, key, 0)[8:16]) % 2**31
            assert other.input_ids[start:] == engine.answer(prompt, seeds)
            assert other.finish_reason == "stop"
            assert (other.engine, other.retokenized) == (f"{api}:served", False)
            assert row.engine is None
    assert remote["p3"].input_ids != remote["p3#1"].input_ids
    # the same rule over what is known: one file never mixes the two
    assert (
        row.settings_hash
        == sampling.origin_of(here, tokenizer, settings("http://x"))["settings_hash"]
    )
    assert other.settings_hash == sampling.origin_of(target, tokenizer, chosen)["settings_hash"]
    with FakeEngine(tokenizer) as engine, pytest.raises(ConfigError, match="another target finger"):
        sample_endpoint(target, tokenizer, prompts(2), settings(engine), tmp_path / "h.jsonl")
    assert engine.seen == []


def test_what_rows_must_share_has_its_part_in_the_settings_hash(
    target: Remote, tokenizer: Any
) -> None:
    def digest(asked: Remote = target, **changes: Any) -> str:
        return sampling.origin_of(asked, tokenizer, settings("http://a", **changes))[
            "settings_hash"
        ]

    different = {
        digest(),
        digest(replace(target, name="other")),
        digest(replace(target, revision="other")),
        digest(model="other"),
        digest(regenerate="all"),
        digest(allow_retokenized=True),
        digest(seed=6),
        digest(max_new_tokens=41),
        digest(settings=MIXED[:2]),
    }
    assert len(different) == 9
    # where it runs and how fast is nobody's business
    assert digest() == digest(endpoint="http://b", concurrency=3, max_retries=9)


def test_auto_asks_the_server_what_it_is(target: Remote, tokenizer: Any, tmp_path: Path) -> None:
    for owner, path in (
        ("vllm", "/v1/completions"),
        ("sglang", "/generate"),
        ("dspark", "/v1/completions"),
        ("someone", "/v1/chat/completions"),
    ):
        with FakeEngine(tokenizer, owner=owner) as engine:
            out = tmp_path / f"{owner}.jsonl"
            sample_endpoint(target, tokenizer, prompts(2), settings(engine), out)
            assert {one.path for one in engine.seen} == {path}
            kind = {"someone": "openai"}.get(owner, owner)
            assert read_back(out)["p0"].engine == f"{kind}:served"
            other = settings(engine, model="other")
            with pytest.raises(ConfigError, match=r"'other' is not served.*served"):
                sample_endpoint(target, tokenizer, prompts(2), other, tmp_path / "o.jsonl")


def test_thinking_is_the_templates(target: Remote, tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    options = tuple(SamplingSetting(thinking=mode) for mode in (True, False, None))
    for api in ("vllm", "openai"):
        out = tmp_path / f"{api}.jsonl"
        with FakeEngine(tokenizer, say=lambda ids: "2+2</think>\n\n4") as engine:
            chosen = settings(engine, settings=options, endpoint_api=api)
            sample_endpoint(target, tokenizer, prompts(12), chosen, out)
        rows = read_back(out)
        assert {row.thinking for row in rows.values()} == {True, False, None}
        for row in rows.values():
            prompt = row.input_ids[: row.loss_mask.index(1)]
            assert tokenizer.decode(prompt).endswith("<think>") is (row.thinking is True)
            if row.thinking:
                message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
                assert row.messages[-1] == message
    switches = [body.get("chat_template_kwargs") for body in engine.bodies]
    assert {"enable_thinking": True} in switches
    assert {"enable_thinking": False} in switches
    assert None in switches


def test_a_cut_answer_teaches_no_end(target: Remote, tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer, say=lambda ids: "x" * 50) as engine:
        chosen = settings(engine, max_new_tokens=7)
        report = sample_endpoint(target, tokenizer, prompts(4), chosen, out)
    assert report.by_finish_reason == {"length": 4}
    for row in read_back(out).values():
        assert (row.finish_reason, row.num_supervised) == ("length", 7)
        assert tokenizer.eos_token_id not in row.input_ids[row.loss_mask.index(1) :]


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_an_end_that_is_named_beside_the_ids_is_put_behind_them(
    target: Remote, tokenizer: Any, tmp_path: Path, api: str
) -> None:
    # SGLang names the id that ended the turn; where no engine names it, nothing is made up
    with FakeEngine(tokenizer, fault=lambda n, ids: "no_end") as engine:
        chosen = settings(engine, endpoint_api=api)
        if api == "sglang":
            sample_endpoint(target, tokenizer, prompts(2), chosen, tmp_path / "r.jsonl")
            rows = read_back(tmp_path / "r.jsonl").values()
            assert all(row.input_ids[-1] == tokenizer.eos_token_id for row in rows)
        else:
            with pytest.raises(DataError, match="no_end_of_turn 2"):
                sample_endpoint(target, tokenizer, prompts(2), chosen, tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("out_of_vocabulary", Reason.ID_OUT_OF_VOCABULARY),
        ("goes_on", Reason.BAD_TOKEN_IDS),
        ("empty", Reason.NO_ANSWER),
    ],
)
def test_answers_that_cannot_be_used_are_rejected_and_counted(
    target: Remote, tokenizer: Any, tmp_path: Path, kind: str, reason: Reason
) -> None:
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer, fault=lambda n, ids: kind if n == 1 else None) as engine:
        report = sample_endpoint(target, tokenizer, prompts(5), settings(engine), out)
    assert report.rejects.counts == {reason: 1}
    assert (len(read_back(out)), report.written) == (4, 4)
    assert adds_up(report)
    assert not errors_file(out).exists()


def test_a_server_with_another_template_is_told_apart(
    target: Remote, tokenizer: Any, tmp_path: Path
) -> None:
    other = tiny_tokenizer()
    other.chat_template = "Hello. " + other.chat_template
    with FakeEngine(other) as engine:
        chosen = settings(engine, endpoint_api="openai")
        with pytest.raises(DataError, match="other_prompt 3"):
            sample_endpoint(target, tokenizer, prompts(3), chosen, tmp_path / "r.jsonl")
        # an engine without ids tells by its count
        engine.gives_ids = False
        chosen = settings(engine, endpoint_api="openai", allow_retokenized=True)
        with pytest.raises(DataError, match=r"other_prompt 3.*\d+ tokens, not \d+"):
            sample_endpoint(target, tokenizer, prompts(3), chosen, tmp_path / "s.jsonl")


def test_a_file_of_one_engine_is_not_gone_on_with_by_another(
    target: Remote, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer) as engine:
        sample_endpoint(target, tokenizer, prompts(2), settings(engine), out)
        before = out.read_bytes()
        engine.owner = "sglang"
        with pytest.raises(ConfigError, match=r"sampled from vllm:served, .* now sglang:served"):
            sample_endpoint(target, tokenizer, prompts(3), settings(engine), out)
    assert out.read_bytes() == before


@pytest.mark.parametrize("api", ["vllm", "sglang", "openai"])
def test_an_engine_without_ids_is_refused_at_its_first_answer(
    target: Remote, tokenizer: Any, tmp_path: Path, api: str
) -> None:
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer, gives_ids=False) as engine:
        one = settings(engine, endpoint_api=api, concurrency=1)
        with pytest.raises(ConfigError, match=r"returns no token ids.*sample\.allow_retokenized"):
            sample_endpoint(target, tokenizer, prompts(9), one, out)
        assert len(engine.seen) == 1
        assert not out.read_bytes()
        chosen = settings(engine, endpoint_api=api, allow_retokenized=True, max_new_tokens=15)
        report = sample_endpoint(target, tokenizer, prompts(9), chosen, out)
        rows = read_back(out)
        assert len(rows) == report.written == 9
        assert set(report.by_finish_reason) == {"stop", "length"}
        for row in rows.values():
            assert row.retokenized
            start = row.loss_mask.index(1)
            seed = int.from_bytes(sampling.seed_key(5, row.id, 0)[8:16]) % 2**31
            drawn = engine.answer(row.input_ids[:start], seed)
            # a byte tokenizer reads every text as it was written
            assert row.input_ids[start:] == drawn[:15]
            assert (row.finish_reason == "length") is (len(drawn) > 15)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", None])
def test_reasoning_of_a_chat_answer_goes_where_the_template_wants_it(
    target: Remote, tmp_path: Path, key: str | None
) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    out = tmp_path / "r.jsonl"
    message = {"content": "4", key: "2+2"} if key else {"content": "<think>2+2</think>4"}
    with FakeEngine(tokenizer, gives_ids=False, message=message) as engine:
        chosen = settings(engine, endpoint_api="openai", allow_retokenized=True)
        sample_endpoint(target, tokenizer, prompts(2), chosen, out)
    for row in read_back(out).values():
        said = row.input_ids[row.loss_mask.index(1) :]
        assert tokenizer.decode(said) == "<think>2+2</think>4<|im_end|>"
        assert row.messages[-1]["reasoning_content"] == "2+2"


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    target: Remote,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer, fault=lambda n, ids: "400" if n == 0 else None) as engine:
        chosen = settings(engine, api_key_env="MY_KEY")
        report = sample_endpoint(target, tokenizer, prompts(3), chosen, out)
        assert report.errors == {"refused": 1}
        # this server repeats the key in its complaint
        listed = errors_file(out).read_text()
        assert "***" in listed
        assert "s3cret" not in listed
        assert all(one.headers["authorization"] == "Bearer s3cret" for one in engine.seen)
        monkeypatch.delenv("MY_KEY")
        engine.seen.clear()
        sample_endpoint(target, tokenizer, prompts(3), chosen, out)
        assert all("authorization" not in one.headers for one in engine.seen)
    monkeypatch.setenv("MY_KEY", "s3cret\u20ac")
    with pytest.raises(ConfigError, match="the key in MY_KEY cannot be sent") as told:
        sample_endpoint(target, tokenizer, prompts(4), chosen, out)
    assert "s3cret" not in str(told.value)
    written = "".join(one.read_text() for one in tmp_path.iterdir()) + caplog.text
    assert "s3cret" not in written + chosen.model_dump_json()


@pytest.mark.parametrize("kind", ["moved_with_key", "key_as_reason", "key_as_model"])
def test_a_key_that_the_server_repeats_is_hidden(
    target: Remote, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    key = "s3cret/+\\"
    monkeypatch.setenv("MY_KEY", key)
    name = key if kind == "key_as_model" else "served"
    told = ""
    with FakeEngine(tokenizer, fault=lambda n, ids: kind, name=name) as engine:
        chosen = settings(engine, api_key_env="MY_KEY", max_retries=0)
        try:
            report = sample_endpoint(target, tokenizer, prompts(2), chosen, tmp_path / "r.jsonl")
            told += json.dumps(report.to_dict())
            other = settings(engine, api_key_env="MY_KEY", model="other")
            sample_endpoint(target, tokenizer, prompts(2), other, tmp_path / "s.jsonl")
        except ConfigError as error:
            told += str(error)
    written = told + "".join(one.read_text() for one in tmp_path.iterdir())
    assert "***" in written
    assert "s3cret" not in written


def test_prompts_are_taken_as_answers_come(target: Remote, tokenizer: Any, tmp_path: Path) -> None:
    taken = 0
    with FakeEngine(tokenizer, delay_s=0.005, gate=4) as engine:

        def lazily() -> Iterator[Prompt]:
            nonlocal taken
            for prompt in prompts(60):
                # one may be on its way into the file while the next is taken
                assert taken - len(engine.seen) <= 2 * 4
                taken += 1
                yield prompt

        chosen = settings(engine, concurrency=4)
        report = sample_endpoint(target, tokenizer, lazily(), chosen, tmp_path / "r.jsonl")
    assert (report.written, taken) == (60, 60)
    assert engine.most_in_flight == 4


def test_a_source_that_breaks_off_loses_no_answer(
    target: Remote, tokenizer: Any, tmp_path: Path
) -> None:
    def broken() -> Iterator[Prompt]:
        yield from prompts(9)
        raise DataError("cannot read the rest")

    out = tmp_path / "r.jsonl"
    # the last answer is still on its way when the source breaks off
    with (
        FakeEngine(tokenizer, fault=lambda n, ids: "slow" if n == 8 else None) as engine,
        pytest.raises(DataError, match="cannot read the rest"),
    ):
        sample_endpoint(target, tokenizer, broken(), settings(engine, concurrency=2), out)
    assert len(read_back(out)) == 9


def test_the_outline_of_a_target_is_the_targets(tmp_path: Path) -> None:
    whole = tiny_target()
    save_tiny_target(tmp_path / "t")
    told = describe(TargetSettings(path=str(tmp_path / "t")))
    assert told.vocab_size == whole.vocab_size
    assert told.max_position_embeddings == whole.max_position_embeddings
    assert told.eos_ids == whole.eos_ids
    assert told.fingerprint() is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"endpoint": "host:30000"}, "must be a URL"),
        ({"endpoint": "http://me:s3cret@host/v1"}, "must hold no key"),
        ({"endpoint": "me:s3cret@host/v1"}, "must hold no key"),
        ({"endpoint": "http://host/v1?key=s3cret"}, "must hold no key"),
        ({"endpoint": ["http://host/v1?key=s3cret"]}, "endpoint: input should be a valid string$"),
        ({"api_key_env": "sk-s3cret"}, "name of an environment variable"),
        ({"endpoint": "http://127.0.0.1:99999/v1"}, "a port of 1 to 65535.*:99999"),
        ({"endpoint": "http://host:0/v1"}, "a port of 1 to 65535"),
        ({"endpoint": "http://host:/v1"}, "a port of 1 to 65535"),
        ({"endpoint": "http://host:1/v1/completions/"}, "up to /v1, .*: http://host:1/v1, got"),
        ({"endpoint": "http://host:1/v1/chat/completions"}, "up to /v1, .*: http://host:1/v1, got"),
        ({"endpoint": "http://host:1/generate"}, "up to /v1, .*: http://host:1/v1, got"),
        ({"out": "rows.jsonl.gz"}, "sample.out: .*plain lines.*got 'rows.jsonl.gz'"),
        ({"endpoint_api": "tgi"}, "endpoint_api"),
        ({"concurrency": 0}, "concurrency"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"max_retries": -1}, "max_retries"),
    ],
)
def test_wrong_settings_end_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    from dspark.config_io import load

    with pytest.raises(ConfigError, match=sentence) as told:
        load(None, [f"sample.{key}={json.dumps(value)}" for key, value in changes.items()])
    assert "s3cret" not in str(told.value)


def test_regenerating_all_needs_an_endpoint(tokenizer: Any, tmp_path: Path) -> None:
    chosen = SampleSettings(regenerate="all")
    with pytest.raises(ConfigError, match=r"regenerate is all, which needs sample\.endpoint"):
        sample_responses(tiny_target(), tokenizer, prompts(1), chosen, tmp_path / "r.jsonl")
    assert not os.listdir(tmp_path)


def test_the_command_asks_the_endpoint_and_tells_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dspark.cli import main

    save_tiny_target(tmp_path / "t")
    # the weights are elsewhere
    (tmp_path / "t" / "model.safetensors").unlink()
    out = tmp_path / "rows.jsonl"
    rows = [{"id": prompt.id, "messages": prompt.messages} for prompt in prompts(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def told(code: int) -> tuple[dict[str, Any], str]:
        words = ["--target", str(tmp_path / "t"), "--prompts", str(tmp_path / "prompts.jsonl")]
        words += ["--out", str(out), "--endpoint", engine.url, "--json", "sample.concurrency=2"]
        monkeypatch.setattr("sys.argv", ["dspark", "sample", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        said = capsys.readouterr()
        return json.loads(said.out.splitlines()[-1]), said.err

    with FakeEngine(tiny_tokenizer(), fault=lambda n, ids: "400" if n == 0 else None) as engine:
        report, stderr = told(1)
        assert report["errors"] == {"refused": 1}
        assert (report["written"], report["rows"]["read"]) == (4, 5)
        assert f"1 rows were not answered (refused 1), see {errors_file(out)}" in stderr
        assert "the first refused: 400 told to fail" in stderr
        report, stderr = told(0)
        assert "error" not in stderr
        assert (report["written"], report["resumed"], report["errors"]) == (1, 4, {})
    assert len(read_back(out)) == 5
