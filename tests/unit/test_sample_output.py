"""The file that a sampler appends to: whose it is, how its rows are named, a disk that is full."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspark.config import SampleSettings
from dspark.corpus import endpoint, sampler
from dspark.corpus.endpoint import sample_endpoint
from dspark.corpus.prompts import Prompt
from dspark.corpus.response_file import ResponseWriter
from dspark.corpus.responses import Response, read_responses
from dspark.corpus.row_names import RowNames
from dspark.corpus.sampler import sample_responses
from dspark.corpus.sampling import SampleReport
from dspark.errors import ConfigError, unwritable
from dspark.target.remote import Remote
from dspark.testing import tiny_target, tiny_tokenizer
from tests.unit.fake_engine import FakeEngine

TOKENIZER: Any = tiny_tokenizer()
ROW = Response(id="a", input_ids=[1, 2], loss_mask=[0, 1]).to_json()


def ask(ids: list[str], out: Path, where: str = "endpoint", **changes: Any) -> SampleReport:
    prompts = [Prompt(name, [{"role": "user", "content": name}], "m") for name in ids]
    if where == "process":
        chosen = SampleSettings(max_new_tokens=2, **changes)
        return sample_responses(tiny_target(), TOKENIZER, prompts, chosen, out)
    target = Remote("tiny", None, len(TOKENIZER), 512, frozenset({TOKENIZER.eos_token_id}))
    with FakeEngine(TOKENIZER) as engine:
        chosen = SampleSettings(endpoint=engine.url, max_new_tokens=20, concurrency=1, **changes)
        return sample_endpoint(target, TOKENIZER, prompts, chosen, out)


@pytest.mark.parametrize("where", ["process", "endpoint"])
@pytest.mark.parametrize(
    "text",
    [
        "milk\nbread, no line feed",
        "a: 1\nb:\n  - 2\n",
        "Some Licence\n\nYou may.\n",
        "one line",
        '{"id": 1}',
        '{"id": 1}\n{"id": ',
        "[1, 2]\n",
        "\n\n",
        f'{ROW}\n{{"id": 1}}\n{{"id": ',
        f"{ROW}\nnotes\nmore no",
    ],
)
def test_a_file_that_no_sampler_began_stays_as_it_is(tmp_path: Path, text: str, where: str) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(text)
    with pytest.raises(ConfigError, match=r"notes\.txt' holds rows that no sampler wrote") as told:
        ask(["p"], out, where)
    assert told.value.exit_code == 2
    assert out.read_text() == text


@pytest.mark.parametrize("size", [1, 9, 25, 40, len(ROW) - 1])
def test_half_a_first_row_is_dropped(tmp_path: Path, size: int) -> None:
    out = tmp_path / "r.jsonl"
    out.write_text(ROW[:size])
    ask(["p"], out)
    assert [row.id for row in read_responses([str(out)])] == ["p"]


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.parquet"])
def test_a_packed_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="plain lines"):
        ask(["p"], tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [{"part": "x"}, {"parts": None}, {"sample": 0.5}])
def test_a_row_that_was_changed_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    out = tmp_path / "r.jsonl"
    ask(["a", "b", "c"], out)
    lines = out.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    out.write_text("\n".join(lines) + "\n")
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"rows that no sampler wrote \(.*r.jsonl:2\)"):
        ask(["a", "b", "c"], out)
    assert out.read_bytes() == before


def test_a_device_is_no_file_of_rows(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"sample.out '{path}' is a device or pipe"):
            ResponseWriter(path)


@pytest.mark.parametrize("where", ["process", "endpoint"])
def test_rows_are_looked_up_by_the_run_that_holds_the_file(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = sampler if where == "process" else endpoint
    read, tried = module.rows_present, []

    def look(out: Path, *rest: Any) -> Any:
        with pytest.raises(BlockingIOError):
            ResponseWriter(out)
        tried.append(out)
        return read(out, *rest)

    monkeypatch.setattr(module, "rows_present", look)
    ask(["p"], tmp_path / "r.jsonl", where)
    assert tried == [tmp_path / "r.jsonl"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", ["process", "endpoint"])
def test_a_file_that_may_not_grow_is_named_and_gone_on_with(tmp_path: Path, where: str) -> None:
    out, ids = tmp_path / "r.jsonl", [f"p{number}" for number in range(20)]
    with largest_file(8192), pytest.raises(OSError, match="File too large") as told:
        ask(ids, out, where, batch_size=4)
    assert f"cannot write {out}: file too large" in str(unwritable(told.value))
    begun = sum(line.endswith("\n") for line in out.read_text().splitlines(keepends=True))
    report = ask(ids, out, where)
    assert (report.resumed, report.written) == (begun, 20 - begun)
    assert 0 < begun < 20
    assert sorted(json.loads(line)["id"] for line in out.open()) == sorted(ids)


@pytest.mark.parametrize(
    ("ids", "rejected"),
    [
        (["a", "a#1", "b"], ["a#1"]),
        (["a#1", "a"], ["a#1"]),
        (["a#2", "a", "a#01", "a#0", "a/1"], []),
    ],
)
def test_a_name_is_given_once(tmp_path: Path, ids: list[str], rejected: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    for written, resumed in ((2 * len(ids) - len(rejected), 0), (0, 2 * len(ids) - len(rejected))):
        report = ask(ids, out, samples_per_prompt=2)
        assert report.rejects.counts == ({"duplicate_id": 1} if rejected else {})
        assert (report.written, report.resumed) == (written, resumed)
        places = report.rejects.places.get("duplicate_id", [])  # type: ignore[call-overload]
        assert [place.split()[0] for place in places] == rejected
    keys = [row.key for row in read_responses([str(out)])]
    assert len(set(keys)) == len(keys) == len(out.read_text().splitlines())


def test_a_further_sample_does_not_take_the_name_of_a_row_that_is_there(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    assert ask(["a", "a#1"], out).written == 2
    report = ask(["a", "a#1"], out, samples_per_prompt=2)
    # a's second answer would be called as what stands there
    assert (report.resumed, report.written, report.rejects.rejected) == (2, 1, 1)
    assert [row.key for row in read_responses([str(out)])] == ["a", "a#1", "a#1#1"]


@pytest.mark.parametrize(
    ("ids", "clash"),
    [
        (["x", "x/1"], "x"),
        (["x/1", "x"], "x/1"),
        (["x/2", "x"], None),  # three turns would be needed
        (["x", "x/1#1"], "x"),
        (["x/1#1", "x"], "x/1#1"),
        (["HumanEval/1", "HumanEval/2"], None),
    ],
)
def test_sequences_of_a_conversation_keep_their_names(ids: list[str], clash: str | None) -> None:
    chosen = SampleSettings(regenerate="all", samples_per_prompt=2)
    names = RowNames(chosen, set())
    last: set[str] = set()
    for name in ids:
        prompt = Prompt(name, [{"role": "user", "content": "q"}], "m", followups=("r",))
        names.add(prompt)
        last = {found for n in (0, 1) if (found := names.clash(prompt, n)) is not None}
    assert last == ({clash} if clash else set())
