"""Public sets by name: what is asked of the hub, and what is said about names that are wrong."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.bench.prompt_sets import read_sets
from dspark.corpus import presets
from dspark.corpus.files import expand, read_rows
from dspark.corpus.presets import PRESETS, HubSource, hub_sources
from dspark.corpus.prompts import read_prompts
from dspark.corpus.rejects import Rejects
from dspark.errors import ConfigError, DataError

EVAL = "speculator-benchmarks"
ROWS = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]


class Hub:
    """Stands in for `datasets` and keeps what it was asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def load_dataset(self, path: str, **options: Any) -> list[dict[str, Any]]:
        self.calls.append((path, options))
        return self.rows


def read(source: str) -> list[dict[str, Any]]:
    return [row.value for row in read_rows(source, Rejects())]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


@pytest.mark.parametrize("name", [n for n in PRESETS if not PRESETS[n].evaluation])
def test_every_set_is_streamed_from_its_place(hub: Hub, name: str) -> None:
    for source in expand([name]):
        assert read(source) == ROWS
    preset = PRESETS[name]
    assert [path for path, _ in hub.calls] == [preset.hub_id] * len(preset.splits)
    assert [options["split"] for _, options in hub.calls] == list(preset.splits)
    assert all(options["streaming"] is True for _, options in hub.calls)
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", path) for path, _ in hub.calls)


def test_an_evaluation_set_is_read_file_by_file_as_prompts(hub: Hub) -> None:
    hub.rows = [{"prompt": "def f():", "turns": None}]
    sources = expand([EVAL])
    prompts = read_prompts([f"{EVAL}:train"], limit=1)
    assert prompts[0].messages == [{"role": "user", "content": "def f():"}]
    assert len(sources) == 8
    assert sources[0] == "hub://RedHatAI/speculator_benchmarks#HumanEval.jsonl:train"
    assert hub.calls[0][1]["data_files"] == "HumanEval.jsonl"
    hub.rows = [{"prompt": ["one", "two"]}]
    assert read_prompts([sources[1].removeprefix("hub://")])[0].followups == ("two",)


def test_configs_and_revisions_reach_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    read(*expand(["owner/name@v1.0:zh:test"]))
    assert hub.calls == [
        ("owner/name", {"name": "zh", "revision": "v1.0", "split": "test", "streaming": True})
    ]
    one = presets.Preset(hub_id="o/n", config="main", shape="messages", licence="mit")
    monkeypatch.setitem(PRESETS, "configured", one)
    read(*expand(["configured:dev"]))
    assert hub.calls[1] == ("o/n", {"name": "main", "split": "dev", "streaming": True})


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("owner/name", "hub://owner/name:train"),
        ("owner/name:a:b", "hub://owner/name:a:b"),
        ("ultrachat", "hub://HuggingFaceH4/ultrachat_200k:train_sft"),
        ("ultrachat:test_sft", "hub://HuggingFaceH4/ultrachat_200k:test_sft"),
        ("HuggingFaceH4/ultrachat_200k", "hub://HuggingFaceH4/ultrachat_200k:train_sft"),
        ("HuggingFaceH4/ultrachat_200k@v2", "hub://HuggingFaceH4/ultrachat_200k@v2:train_sft"),
        ("HuggingFaceH4/ultrachat_200k:gen", "hub://HuggingFaceH4/ultrachat_200k:gen"),
    ],
)
def test_a_source_means_the_same_however_it_is_written(written: str, means: str) -> None:
    assert expand([written]) == [means]
    parsed = HubSource.parse(means)
    assert parsed is not None
    assert str(parsed) == means
    assert hub_sources(parsed.written()) == [parsed]


def test_a_folder_comes_before_a_set_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "magpie").mkdir()
    (tmp_path / "magpie/rows.jsonl").write_text('{"text": "q"}\n')
    assert expand(["magpie"]) == ["magpie/rows.jsonl"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("open-perfectblnd", "did you mean 'open-perfectblend'?"),
        ("UltraChat", "did you mean 'ultrachat'?"),
        ("zzz", "sets known by name: open-perfectblend, ling-open-perfectblend, sharegpt"),
        ("ultrachat:a/b", "neither an existing file"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        expand([name])


def test_a_file_of_that_name_is_no_evaluation_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (EVAL, "RedHatAI/speculator_benchmarks@x", *expand([EVAL])):
        with pytest.raises(ConfigError, match="sources: 'RedHatAI/speculator_benchmarks' is an"):
            presets.refuse_evaluation(["a.jsonl", name], "sources")
    Path(EVAL).write_text("")
    presets.refuse_evaluation([EVAL, "a.jsonl"], "sources")


def test_the_library_reads_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real `datasets`, whose hub is a folder here."""
    datasets = pytest.importorskip("datasets")

    (tmp_path / "data").mkdir()
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"q{n}"}]} for n in range(3)]
    for split, part in (("train_sft", rows), ("test_sft", rows[:1])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"data/{split}-0.jsonl").write_text(lines)
    load = datasets.load_dataset
    splits = {name: f"data/{name}-*.jsonl" for name in ("train_sft", "test_sft")}

    def local(path: str, **options: Any) -> Any:
        assert path == "HuggingFaceH4/ultrachat_200k"
        return load(str(tmp_path), data_files=splits, cache_dir=str(tmp_path / "c"), **options)

    monkeypatch.setattr(datasets, "load_dataset", local)
    assert [p.id for p in read_prompts(["ultrachat"])] == ["0", "1", "2"]
    assert [p.id for p in read_prompts(["ultrachat:test_sft"])] == ["0"]


def test_what_the_hub_client_tries_is_told_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no way there")

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    with pytest.raises(DataError, match="it cannot be read: no way there"):
        read("hub://owner/name:train")
    assert not caplog.records
    assert logger.level == level


@pytest.mark.parametrize(
    ("name", "column", "options"),
    [
        ("gsm8k", "question", ("openai/gsm8k", {"name": "main", "split": "test"})),
        ("math500", "problem", ("HuggingFaceH4/MATH-500", {"split": "test"})),
        ("humaneval", "prompt", ("openai/openai_humaneval", {"split": "test"})),
        ("mt-bench", "prompt", ("HuggingFaceH4/mt_bench_prompts", {"split": "train"})),
    ],
)
def test_sets_to_measure_on_are_known_by_name(
    hub: Hub, name: str, column: str, options: tuple[str, dict[str, Any]]
) -> None:
    asked: Any = ["one", "two"] if name == "mt-bench" else "one"
    hub.rows = [{column: asked, "answer": "42", "test": "assert f() == 1"}]
    assert read_sets([name]) == {name: [[{"role": "user", "content": "one"}]]}
    path, given = hub.calls[0]
    assert (path, given) == (options[0], {**options[1], "streaming": True})
    with pytest.raises(ConfigError, match="is an evaluation set"):
        presets.refuse_evaluation([name], "sources")


def test_sets_are_named_after_their_files(hub: Hub, tmp_path: Path) -> None:
    hub.rows = [{"prompt": "q"}]
    assert list(read_sets(["speculator-benchmarks"])) == ["HumanEval"]  # the rest are repeats
    hub.rows = [{"text": "q"}]
    assert list(read_sets(["owner/some.set@v1:a:b"])) == ["some.set"]
    paths = [tmp_path / folder / "rows.jsonl" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"text": path.parent.name}) + "\n")
    assert list(read_sets([str(tmp_path)])) == ["rows", str(paths[1])]


def test_a_set_that_cannot_be_asked_for_names_the_way_out(hub: Hub) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline")

    hub.load_dataset = offline  # type: ignore[method-assign, assignment]
    with pytest.raises(DataError, match=r"'openai/gsm8k' .*: offline; without a network, give a "):
        read_sets(["gsm8k"])
