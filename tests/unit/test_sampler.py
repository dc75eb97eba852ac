import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import SampleSettings, SamplingSetting
from dspark.corpus import sampler, sampling
from dspark.corpus.chat import generation_prompt_ids, template_hash
from dspark.corpus.prompts import Prompt, read_prompts
from dspark.corpus.rejects import Reason
from dspark.corpus.responses import Response, read_responses
from dspark.corpus.sampler import SampleReport, sample_responses
from dspark.errors import ConfigError, DataError, RunError, TargetError
from dspark.target import HFTarget, Target, fingerprint, load, load_tokenizer
from dspark.testing import save_tiny_target, tiny_target, tiny_tokenizer

torch.set_num_threads(1)

MIXED = (
    SamplingSetting(weight=1, temperature=0),
    SamplingSetting(weight=2, temperature=0.8, top_p=0.9),
    SamplingSetting(weight=1, temperature=1.2, top_k=20, min_p=0.01),
)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def prompts(count: int) -> list[Prompt]:
    # lengths differ and are not sorted, so that batches are padded
    texts = [f"{i}" + "abc" * (i * 7 % 11) for i in range(count)]
    return [
        Prompt(f"p{i}", [{"role": "user", "content": text}], "memory", "odd" if i % 2 else None)
        for i, text in enumerate(texts)
    ]


def settings(**changes: Any) -> SampleSettings:
    values = {"settings": MIXED, "max_new_tokens": 40, "batch_size": 4, "seed": 5, **changes}
    return SampleSettings(**values)


def sample(
    target: Target, tokenizer: Any, count: int, out: Path, **changes: Any
) -> tuple[dict[str, Response], SampleReport]:
    report = sample_responses(target, tokenizer, prompts(count), settings(**changes), out)
    return read_back(out), report


def read_back(out: Path) -> dict[str, Response]:
    rows = list(read_responses([str(out)]))
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row for row in rows}


def test_tools_reach_the_target_and_stay_in_the_row(target: Target, tmp_path: Path) -> None:
    told: Any = tiny_tokenizer()
    told.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}" + told.chat_template
    )
    asked = [replace(prompt, tools=[{"name": "add"}]) for prompt in prompts(3)]
    out = tmp_path / "rows.jsonl"
    sample_responses(target, told, asked, settings(), out)
    rows = read_back(out)
    for prompt in asked:
        row, bare = rows[prompt.id], generation_prompt_ids(told, prompt.messages)
        ids = generation_prompt_ids(told, row.messages[:-1], row.thinking, tools=row.tools)
        assert row.tools == [{"name": "add"}]
        assert row.input_ids[: len(ids)] == ids
        assert told.decode(ids) == "add;" + told.decode(bare)
        assert row.loss_mask.index(1) == len(ids)
    # a template that passes over tools would ask another question than the row tells
    with pytest.raises(DataError, match=r"tools_unsupported 3.*template does not render tools"):
        sample_responses(target, tiny_tokenizer(), asked, settings(), tmp_path / "other.jsonl")


def greedy_by_transformers(target: Target, ids: Sequence[int], limit: int) -> list[int]:
    out = target.model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=limit, pad_token_id=0
    )
    return out[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_greedy_rows_equal_transformers_generate(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    # 130 new tokens cross many checks for finished rows and fill the buffers once; more ends than
    # the target's own make rows leave at different times
    ends = frozenset(range(0, 256, 64)) | target.eos_ids
    before, generation = target.eos_ids, target.model.generation_config.eos_token_id
    target.eos_ids = ends
    target.model.generation_config.eos_token_id = sorted(ends)
    try:
        greedy = (SamplingSetting(temperature=0),)
        rows, report = sample(
            target, tokenizer, 6, tmp_path / "r.jsonl", settings=greedy, max_new_tokens=130
        )
        for prompt in prompts(6):
            ids = generation_prompt_ids(tokenizer, prompt.messages)
            assert rows[prompt.id].input_ids == greedy_by_transformers(target, ids, 130)
    finally:
        target.eos_ids = before
        target.model.generation_config.eos_token_id = generation
    assert set(report.by_finish_reason) == {"stop", "length"}


@pytest.mark.slow
def test_a_sliding_window_target_is_sampled_with_its_window(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    windowed = HFTarget(Qwen2ForCausalLM(config), "windowed")
    greedy = (SamplingSetting(temperature=0),)
    rows, _ = sample(windowed, tokenizer, 4, tmp_path / "r.jsonl", settings=greedy)
    for prompt in prompts(4):
        ids = generation_prompt_ids(tokenizer, prompt.messages)
        assert rows[prompt.id].input_ids == greedy_by_transformers(windowed, ids, 40)


@pytest.mark.slow
def test_a_row_holds_what_was_sampled_and_how(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    rows, report = sample(target, tokenizer, 20, tmp_path / "r.jsonl", samples_per_prompt=2)
    assert len(rows) == report.written == report.rejects.read == 40
    assert sum(report.by_setting.values()) == sum(report.by_finish_reason.values()) == 40
    assert set(report.by_setting) == {0, 1, 2}
    assert report.new_tokens == sum(row.num_supervised for row in rows.values())
    for row in rows.values():
        prompt = next(p for p in prompts(20) if p.id == row.id)
        ids = generation_prompt_ids(tokenizer, prompt.messages)
        assert row.input_ids[: len(ids)] == ids
        new = row.input_ids[len(ids) :]
        assert row.loss_mask == [0] * len(ids) + [1] * len(new)
        stops = [i for i, token in enumerate(new) if token in target.eos_ids]
        if row.finish_reason == "stop":
            assert stops == [len(new) - 1]
        else:
            # nothing teaches an end of turn that the target never produced
            assert (row.finish_reason, stops, len(new)) == ("length", [], 40)
        assert row.messages[:-1] == prompt.messages
        text = tokenizer.decode(new[:-1] if stops else new)
        assert row.messages[-1] == {"role": "assistant", "content": text}
        index = row.setting_index
        assert index is not None
        chosen = MIXED[index].model_dump(exclude={"weight", "thinking"})
        assert row.sampling == {**chosen, "max_new_tokens": 40}
        assert (row.seed, row.target, row.source) == (5, "tiny", "memory")
        assert row.category == prompt.category
        assert row.template_hash == template_hash(tokenizer)
        assert row.target_fingerprint == target.fingerprint()
    assert rows["p3"].input_ids != rows["p3#1"].input_ids


@pytest.mark.slow
def test_rows_do_not_depend_on_the_batch(target: Target, tokenizer: Any, tmp_path: Path) -> None:
    alone, _ = sample(target, tokenizer, 6, tmp_path / "1.jsonl", batch_size=1)
    together, _ = sample(target, tokenizer, 6, tmp_path / "9.jsonl", batch_size=9)
    assert alone == together


def test_settings_are_chosen_by_weight() -> None:
    chosen = [sampling.choose(settings(), f"prompt {i}", 0) for i in range(4000)]
    shares = [chosen.count(index) / len(chosen) for index in range(3)]
    # three standard errors of a share of 1/2 over 4000 draws
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.024)


@pytest.mark.parametrize(
    "cut",
    [1, pytest.param(300, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.slow)],
)
def test_resuming_after_a_cut_gives_the_rows_of_one_run(
    target: Target, tokenizer: Any, tmp_path: Path, cut: int
) -> None:
    whole, _ = sample(target, tokenizer, 10, tmp_path / "whole.jsonl")
    out = tmp_path / "cut.jsonl"
    out.write_bytes((tmp_path / "whole.jsonl").read_bytes()[:-cut])
    # a cut of one byte takes the line feed only: the row is whole
    complete = out.read_bytes().count(b"\n") + (cut == 1)
    again, report = sample(target, tokenizer, 10, out)
    assert again == whole
    assert (report.resumed, report.written) == (complete, 10 - complete)
    _, report = sample(target, tokenizer, 10, out)
    assert (report.resumed, report.written) == (10, 0)


KILLED = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from dspark.config import SampleSettings
from dspark.corpus.prompts import read_prompts
from dspark.corpus.sampler import sample_responses
from dspark.target import load, load_tokenizer
folder = Path(sys.argv[1])
sample_responses(
    load(str(folder / "target"), device="cpu", dtype="float32"),
    load_tokenizer(str(folder / "target")),
    read_prompts([str(folder / "prompts.jsonl")]),
    SampleSettings.model_validate_json((folder / "settings.json").read_text()),
    folder / "killed.jsonl",
)
"""


@pytest.mark.slow
def test_a_killed_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    rows = [{"id": p.id, "messages": p.messages} for p in prompts(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen = settings(batch_size=2, max_new_tokens=48)
    (tmp_path / "settings.json").write_text(chosen.model_dump_json())
    out = tmp_path / "killed.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(sampler.__file__).parents[2])},
    )
    deadline = time.monotonic() + 240
    while child.poll() is None and time.monotonic() < deadline:
        if out.exists() and out.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    survived = out.read_bytes().count(b"\n")
    assert 4 <= survived < 30

    place = str(tmp_path / "target")
    target, tokenizer = load(place, device="cpu", dtype="float32"), load_tokenizer(place)
    asked = read_prompts([str(tmp_path / "prompts.jsonl")])
    report = sample_responses(target, tokenizer, asked, chosen, out)
    assert (report.resumed, report.written) == (survived, 30 - survived)
    sample_responses(target, tokenizer, asked, chosen, tmp_path / "whole.jsonl")
    assert read_back(out) == read_back(tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 6}, r"another settings hash .*: sample.seed \d+, now 6; choose"),
        ({"max_new_tokens": 41}, r"settings hash .*: sample.max_new_tokens \d+, now 41; choose"),
        ({"settings": MIXED[:2]}, "another settings hash"),
        ({"settings": (MIXED[0],) * 3}, r"another settings hash .*sample.settings"),
    ],
)
def test_other_settings_are_not_mixed_into_a_file(
    target: Target, tokenizer: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    out = tmp_path / "r.jsonl"
    sample(target, tokenizer, 2, out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=sentence):
        sample(target, tokenizer, 3, out, **changes)
    assert out.read_bytes() == before


def test_a_file_of_an_earlier_version_goes_on(
    target: Target, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.jsonl"
    old = fingerprint.of_version_1(target.model)
    with monkeypatch.context() as before:
        before.setattr(sampler, "fingerprint_for", lambda target, out: old)
        sample(target, tokenizer, 2, out)
    sample(target, tokenizer, 3, out)
    told = [row.target_fingerprint for row in read_responses([str(out)])]
    assert told == [old] * 3
    with pytest.raises(ConfigError, match="another target fingerprint"):
        sample(tiny_target(seed=1), tokenizer, 4, out)


def test_another_target_template_or_file_is_not_mixed_in(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    sample(target, tokenizer, 2, out)
    with pytest.raises(ConfigError, match="another target fingerprint"):
        sample(tiny_target(seed=1), tokenizer, 3, out)
    other = tiny_tokenizer()
    other.chat_template += " "
    with pytest.raises(ConfigError, match="another template hash"):
        sample(target, other, 3, out)
    with pytest.raises(ConfigError, match="exists already"):
        sample_responses(target, tokenizer, prompts(2), settings(), out, resume=False)
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"text": "q"}\n')
    with pytest.raises(ConfigError, match="no sampler wrote"):
        sample(target, tokenizer, 3, foreign)
    # more prompts and more samples are the same file's business
    rows, report = sample(target, tokenizer, 3, out, samples_per_prompt=2)
    assert (len(rows), report.resumed) == (6, 2)


def test_prompts_that_do_not_fit_are_rejected_and_counted(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    lengths = [len(generation_prompt_ids(tokenizer, p.messages)) for p in prompts(8)]
    limit = sorted(lengths)[5]
    rows, report = sample(target, tokenizer, 8, tmp_path / "r.jsonl", max_prompt_tokens=limit)
    assert len(rows) == sum(length <= limit for length in lengths) == 6
    assert report.rejects.counts == {Reason.PROMPT_TOO_LONG: 2}
    assert report.rejects.read == report.rejects.accepted + 2 == 8
    with pytest.raises(DataError, match="no prompt can be sampled"):
        sample(target, tokenizer, 8, tmp_path / "none.jsonl", max_prompt_tokens=2)


def test_the_longest_prompt_is_as_long_as_the_limit(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    length = len(generation_prompt_ids(tokenizer, prompts(1)[0].messages))
    rows, _ = sample(target, tokenizer, 1, tmp_path / "a.jsonl", max_prompt_tokens=length)
    assert rows.keys() == {"p0"}
    with pytest.raises(DataError, match=rf"prompt_too_long 1; first: p0 \({length} tokens"):
        sample(target, tokenizer, 1, tmp_path / "b.jsonl", max_prompt_tokens=length - 1)
    # one position is left for one token of an answer
    close = tiny_target(max_position_embeddings=length + 1)
    rows, _ = sample(close, tokenizer, 1, tmp_path / "c.jsonl")
    assert rows["p0"].num_supervised == 1
    full = tiny_target(max_position_embeddings=length)
    with pytest.raises(DataError, match="prompt_too_long 1"):
        sample(full, tokenizer, 1, tmp_path / "d.jsonl")


def test_prompts_of_ids_behind_the_target_are_rejected(tokenizer: Any, tmp_path: Path) -> None:
    short = tiny_target(vocab_size=len(tokenizer) - 2, pad_token_id=0, eos_token_id=0)
    with pytest.raises(DataError, match=r"id_out_of_vocabulary 2; first: p0 \(258, vocabulary 258"):
        sample(short, tokenizer, 2, tmp_path / "r.jsonl")


def test_the_context_limit_cuts_answers(tokenizer: Any, tmp_path: Path) -> None:
    small = tiny_target(max_position_embeddings=60)
    rows, _ = sample(small, tokenizer, 8, tmp_path / "r.jsonl", max_new_tokens=100)
    assert max(len(row.input_ids) for row in rows.values()) == 60
    assert all(row.finish_reason == "stop" or len(row.input_ids) == 60 for row in rows.values())


def test_ids_behind_the_tokenizer_are_never_drawn(tokenizer: Any, tmp_path: Path) -> None:
    padded = tiny_target(vocab_size=2 * len(tokenizer))
    rows, _ = sample(padded, tokenizer, 6, tmp_path / "r.jsonl")
    assert max(max(row.input_ids) for row in rows.values()) < len(tokenizer)


def test_reasoning_is_told_apart_from_the_answer(tokenizer: Any) -> None:
    def answer(prompt: str, text: str) -> Any:
        return sampling.assistant_message(tokenizer, tokenizer(prompt)["input_ids"], text)

    done = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert answer("A\n<think>", "2+2</think>\n\n4") == done
    assert answer("A\n<think>\n", "2+2\n</think>\n\n4") == done
    assert answer("A\n", "<think>\n2+2\n</think>\n\n4") == done
    assert answer("A\n<think>", "2+") == {**done, "content": "", "reasoning_content": "2+"}
    assert answer("A\n<think></think>", "4") == {"role": "assistant", "content": "4"}


def test_thinking_of_a_setting_reaches_template_and_row(target: Target, tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    options = tuple(SamplingSetting(thinking=mode) for mode in (True, False, None))
    rows, _ = sample(target, tokenizer, 12, tmp_path / "r.jsonl", settings=options)
    assert {row.thinking for row in rows.values()} == {True, False, None}
    for row in rows.values():
        prompt = row.input_ids[: row.loss_mask.index(1)]
        assert tokenizer.decode(prompt).endswith("<think>") is (row.thinking is True)
        assert ("reasoning_content" in row.messages[-1]) is (row.thinking is True)


def test_unusable_targets_end_in_a_sentence(
    target: Target, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(TargetError, match="no chat template"):
        sample(target, bare, 1, tmp_path / "a.jsonl")
    broken = tiny_target()
    with torch.no_grad():
        broken.model.get_decoder().norm.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="NaN"):
        sample(broken, tokenizer, 1, tmp_path / "b.jsonl")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(sampler, "generate", full)
    with pytest.raises(RunError, match=r"sample\.batch_size 4 does not fit"):
        sample(target, tokenizer, 1, tmp_path / "c.jsonl")
