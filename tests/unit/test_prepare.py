"""`dspark prepare`: where every row goes, and that the same input gives the same files."""

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import main
from dspark.corpus import prepared
from dspark.corpus.prepare import PrepareSettings
from dspark.corpus.prepared import prepare
from dspark.corpus.prompts import read_prompts
from dspark.errors import ConfigError, DataError

WORDS = [a + b for a in "bdfgklmnprst" for b in ("al", "en", "ir", "os", "um")]


def text(number: int, count: int = 30) -> str:
    rng = random.Random(number)
    return " ".join(rng.choice(WORDS) for _ in range(count)) + f" {number}"


def asked(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"p{number}", "messages": [{"role": "user", "content": text(number)}], **more}


def write(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def made(out: Path, *sources: str, **more: Any) -> dict[str, Any]:
    report, new = prepare(PrepareSettings(sources=sources, **more), out)
    assert new
    return report


def test_every_row_read_is_accounted_for(tmp_path: Path) -> None:
    words = text(7).split()
    rows = [asked(n, category="math") for n in range(20)]
    rows[5]["messages"].append({"role": "assistant", "content": "an answer"})
    bad = ["not json", {"id": "n"}, {"messages": [{"role": "user", "content": " "}]}]
    same = {"text": f"  {text(3)}\n".replace(" ", "  ")}
    near = {"text": " ".join([*words[:-1], "8"])}
    a = write(tmp_path / "a.jsonl", *rows, *bad, same, near, asked(4))
    b = write(tmp_path / "b.jsonl", asked(2), asked(100), asked(101))
    excluded = [
        write(tmp_path / "e1.jsonl", {"q": text(100)}, {"q": text(11)[:120]}),
        write(tmp_path / "e2.jsonl", {"turns": [text(100), text(12)]}),
    ]
    out = tmp_path / "out"
    report = made(out, a, b, exclude=tuple(excluded), heldout="5", seed=3)
    assert report["counts"] == {"read": 29, "train": 14, "heldout": 5, "rejected": 10}
    assert report["reasons"] == {
        "overlap": 3,
        "duplicate_id": 2,
        "invalid_json": 1,
        "no_messages": 1,
        "empty_content": 1,
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert [(one["rows"], one["overlaps"]) for one in report["excluded"]] == [(2, 2), (1, 1)]
    assert [(one["rows"], one["kept"]) for one in report["sources"]] == [(26, 18), (3, 1)]
    assert report["places"]["near_duplicate"] == [f"{a}:25"]
    assert f"{a}:12 (13-gram of {excluded[0]})" in report["places"]["overlap"]
    train, heldout = ids(out / "train.jsonl"), ids(out / "heldout.jsonl")
    kept = [f"p{n}" for n in range(20) if n not in (11, 12)] + ["p101"]
    assert sorted([*train, *heldout]) == sorted(kept)
    # both in the order of the input
    assert train == [name for name in kept if name in train]
    assert heldout == [name for name in kept if name in heldout]
    assert json.loads((out / "prepare.json").read_text()) == report


def test_prompts_come_back_as_they_went_in(tmp_path: Path) -> None:
    rows = [
        {"turns": [text(1), text(2)], "category": "chat"},
        {"messages": [{"role": "system", "content": "Be brief."}, *asked(3)["messages"]]},
        {**asked(4), "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"id": 12, "conversations": [{"from": "human", "value": "中文\u2028" + text(5)}]},
        {"id": "x", "messages": [*asked(6)["messages"], {"role": "assistant", "content": "a"},
                                 {"role": "user", "content": "and then?"}]},
    ]  # fmt: skip
    source = write(tmp_path / "in.jsonl", *rows)
    made(tmp_path / "out", source, heldout="0")
    before = read_prompts([source], with_tools=True)
    after = read_prompts([str(tmp_path / "out/train.jsonl")], with_tools=True)
    for one, two in zip(before, after, strict=True):
        assert (one.id, one.messages, one.followups) == (two.id, two.messages, two.followups)
        assert (one.tools, one.category) == (two.tools, two.category)
    lines = (tmp_path / "out/train.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 6
    assert {json.loads(line)["source"] for line in lines[:-1]} == {source}
    assert (tmp_path / "out/heldout.jsonl").read_bytes() == b""


def test_parquet_and_gzip_are_read_too(tmp_path: Path) -> None:
    import gzip

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([asked(n) for n in range(3)])
    parquet.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps(asked(1)).encode()))
    excluded = (str(tmp_path / "e.jsonl.gz"),)
    report = made(tmp_path / "out", str(tmp_path / "in.parquet"), exclude=excluded, heldout="0")
    assert ids(tmp_path / "out/train.jsonl") == ["p0", "p2"]
    assert report["excluded"][0]["overlaps"] == 1


def test_every_text_of_a_prompt_is_compared_with_excluded_ones(tmp_path: Path) -> None:
    leak = {"role": "user", "content": "So: " + text(50)}
    rows = [
        {"turns": [text(1), leak["content"]]},
        {"messages": [{**leak, "role": "system"}, *asked(2)["messages"]]},
        {"messages": [*asked(3)["messages"], {**leak, "role": "assistant"}, *asked(4)["messages"]]},
        # an answer that would be made anew is no part of the prompt
        {"messages": [*asked(5)["messages"], {**leak, "role": "assistant"}]},
        {"turns": [text(6), text(7)]},
        {"turns": [text(6), text(8)]},
    ]
    excluded = write(tmp_path / "e.jsonl", {"x": {"y": ["z", text(50)]}})
    source = write(tmp_path / "in.jsonl", *rows)
    report = made(tmp_path / "out", source, exclude=(excluded,), heldout="0")
    assert report["reasons"] == {"overlap": 3}
    assert report["counts"]["train"] == 3


def test_near_texts_stay_when_the_search_is_off(tmp_path: Path) -> None:
    one = text(1)
    rows = [{"text": one}, {"text": one + "!"}, {"text": one.replace(" ", "\n")}]
    source = write(tmp_path / "in.jsonl", *rows)
    counts = made(tmp_path / "on", source, heldout="0")["counts"]
    assert counts == {"read": 3, "train": 1, "heldout": 0, "rejected": 2}
    off = made(tmp_path / "off", source, heldout="0", near="off")
    assert off["reasons"] == {"exact_duplicate": 1}
    assert made(tmp_path / "capitals", source, heldout="0", near=" OFF ")["counts"] == off["counts"]
    # a sign is a difference, and the highest similarity allows none
    assert made(tmp_path / "one", source, heldout="0", near="1")["counts"]["train"] == 2
    # a power is no digit: compatibility forms are not folded for exact equality
    powers = write(tmp_path / "p.jsonl", {"text": "What is 2²?"}, {"text": "What is 22?"})
    assert made(tmp_path / "powers", powers, heldout="0", near="off")["counts"]["train"] == 2
    accents = write(tmp_path / "q.jsonl", {"text": "caf\u00e9"}, {"text": "cafe\u0301"})
    assert made(tmp_path / "accents", accents, heldout="0", near="off")["counts"]["train"] == 1


def test_who_is_held_out_does_not_depend_on_other_rows(tmp_path: Path) -> None:
    rows = [asked(n) for n in range(200)]
    some = write(tmp_path / "some.jsonl", *rows[::2])
    every = write(tmp_path / "every.jsonl", *random.Random(0).sample(rows, len(rows)))

    def held(name: str, source: str, heldout: str, seed: int = 0) -> set[str]:
        made(tmp_path / name, source, heldout=heldout, seed=seed)
        names = ids(tmp_path / name / "heldout.jsonl")
        assert not set(names) & set(ids(tmp_path / name / "train.jsonl"))
        return set(names)

    those = {f"p{n}" for n in range(0, 200, 2)}
    share, shared = held("a", some, "0.2"), held("b", every, "0.2")
    assert share == shared & those
    assert 20 < len(shared) < 60
    assert held("c", every, "0.2", seed=1) != shared
    # by count: added rows may take a place, and give none
    count, counted = held("d", some, "15"), held("e", every, "15")
    assert len(count) == len(counted) == 15
    assert counted & those < count


def test_a_limit_counts_what_is_kept(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *[asked(n) for n in range(10)], asked(3), asked(10))
    b = write(tmp_path / "b.jsonl", asked(11))
    report = made(tmp_path / "out", a, b, limit=11, heldout="4")
    assert report["counts"] == {"read": 12, "train": 7, "heldout": 4, "rejected": 1}
    assert [(one["rows"], one["kept"]) for one in report["sources"]] == [(12, 11), (0, 0)]
    report = made(tmp_path / "fewer", a, b, limit=6, heldout="0.5")
    assert [(one["rows"], one["kept"]) for one in report["sources"]] == [(6, 6), (0, 0)]


def test_the_same_command_finds_its_work_done(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *[asked(n) for n in range(6)])
    settings = PrepareSettings(sources=(source,), heldout="2")
    out = tmp_path / "out"
    report, new = prepare(settings, out)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    assert set(before) == {"train.jsonl", "heldout.jsonl", "prepare.json"}
    again, new = prepare(settings, out)
    assert not new
    assert again == report
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    assert after == before
    # and from the same input elsewhere come the same bytes
    prepare(settings, tmp_path / "other")
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "other" / name).read_bytes() == before[name][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "other", "out"]


def test_another_preparation_is_never_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *[asked(n) for n in range(6)])
    out = tmp_path / "out"
    made(out, source, heldout="2")
    kept = (out / "train.jsonl").read_bytes()

    def refused(said: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            prepare(PrepareSettings(**{"sources": (source,), "heldout": "2", **more}), out)

    refused(r"other settings \(seed: 0, now 1\)", seed=1)
    refused(r"other settings \(near: 0.8, now off\)", near="off")
    refused("holds '.*train.jsonl', which is to be read", sources=(str(out / "train.jsonl"),))
    refused("holds '.*', which is to be read", sources=(str(tmp_path),))
    write(tmp_path / "in.jsonl", *[asked(n) for n in range(7)])
    refused("other content of sources")
    write(tmp_path / "in.jsonl", *[asked(n) for n in range(6)])
    assert (out / "train.jsonl").read_bytes() == kept
    (out / "train.jsonl").write_text("")
    refused("is not the file that .*prepare.json describes")
    (out / "prepare.json").write_text("[]")
    refused("must hold a JSON object")
    (out / "prepare.json").unlink()
    refused("holds other files")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give a directory"):
        prepare(PrepareSettings(sources=(source,)), tmp_path / "file")


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({"heldout": "6"}, DataError, "--heldout 6 leaves none of 6 prompts to train on"),
        ({"heldout": "1.5"}, ConfigError, "--heldout must be a count such as 500 or a share"),
        ({"heldout": "1.0"}, ConfigError, "--heldout must be a count such as 500 or a share"),
        ({"heldout": "0.99999999"}, DataError, "no prompt is left to train on: all are held out"),
        ({"heldout": "-3"}, ConfigError, "--heldout must be"),
        ({"heldout": "nan"}, ConfigError, "--heldout must be"),
        ({"near": "0.3"}, ConfigError, "--near must be a similarity from 0.5 to 1, or off"),
        ({"near": "1.5"}, ConfigError, "--near must be"),
        ({"near": "nan"}, ConfigError, "--near must be"),
        ({"exclude": ("nowhere/*.jsonl",)}, DataError, "matches no"),
        ({"exclude": ("speculator-benchmarkz",)}, DataError, "did you mean 'speculator-bench"),
        ({"sources": ("speculator-benchmarks",)}, ConfigError, "is an evaluation set"),
        ({"exclude": ("{bad}",)}, DataError, "cannot be excluded whole: 1 of 2 rows rejected"),
        ({"exclude": ("{empty}",)}, DataError, "cannot be excluded whole: it is empty"),
        ({"sources": ("{source}", "{empty}")}, DataError, "holds no usable prompt: it is empty"),
        ({"exclude": ("{source}",)}, ConfigError, r"in\.jsonl' is a source and in --exclude"),
        ({"exclude": ("{copy}",)}, DataError, "no prompt is left to train on: .*overlap 6"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, more: dict[str, Any], kind: type[Exception], said: str
) -> None:
    rows = [asked(n) for n in range(6)]
    places = {
        "source": write(tmp_path / "in.jsonl", *rows),
        "copy": write(tmp_path / "copy.jsonl", *rows),
        "bad": write(tmp_path / "bad.jsonl", asked(50), "{"),
        "empty": write(tmp_path / "empty.jsonl"),
    }
    filled: dict[str, Any] = {"sources": (places["source"],)}
    for key, value in more.items():
        single = isinstance(value, str)
        filled[key] = value if single else tuple(one.format(**places) for one in value)
    with pytest.raises(kind, match=said):
        prepare(PrepareSettings(**filled), tmp_path / "made/out")
    names = {"in.jsonl", "copy.jsonl", "bad.jsonl", "empty.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_hub_sets_are_pinned_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    def load_dataset(path: str, **options: Any) -> list[dict[str, Any]]:
        calls.append((path, options))
        evaluation = path == "RedHatAI/speculator_benchmarks"
        return [{"prompt": text(1)}] if evaluation else [asked(n) for n in range(4)]

    class Api:
        def dataset_info(self, name: str, **_: Any) -> Any:
            if name != "HuggingFaceH4/ultrachat_200k":
                raise OSError("offline")
            return type("Info", (), {"sha": "c0ffee"})

    library = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    excluded = ("speculator-benchmarks",)
    report = made(tmp_path / "out", "ultrachat", exclude=excluded, heldout="1")
    assert calls[-1] == (
        "HuggingFaceH4/ultrachat_200k",
        {"split": "train_sft", "revision": "c0ffee", "streaming": True},
    )
    (one,) = report["sources"]
    assert {key: one[key] for key in ("hub_id", "split", "revision", "licence", "kept")} == {
        "hub_id": "HuggingFaceH4/ultrachat_200k",
        "split": "train_sft",
        "revision": "c0ffee",
        "licence": "mit",
        "kept": 3,
    }
    assert [one["revision"] for one in report["excluded"]] == [None] * 8
    assert "the commit of RedHatAI/speculator_benchmarks is not known" in caplog.text
    assert [one["overlaps"] for one in report["excluded"]] == [1] + [0] * 7
    row = json.loads((tmp_path / "out/train.jsonl").read_text().splitlines()[0])
    assert row["source"] == "HuggingFaceH4/ultrachat_200k:train_sft"
    # one commit by two names
    twice = ("ultrachat", "HuggingFaceH4/ultrachat_200k@c0ffee")
    own = write(tmp_path / "own.jsonl", asked(3), asked(9))
    both = made(tmp_path / "twice", own, exclude=twice, heldout="0")
    assert [one["overlaps"] for one in both["excluded"]] == [1, 1]
    # nothing is read again
    count = len(calls)
    settings = PrepareSettings(sources=("ultrachat",), exclude=excluded, heldout="1")
    assert prepare(settings, tmp_path / "out") == (report, False)
    assert len(calls) == count


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", "prepare", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command_hands_on_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[PrepareSettings, Path]] = []

    def stage(settings: PrepareSettings, out: Path) -> tuple[dict[str, Any], bool]:
        calls.append((settings, out))
        counts = {"read": 5, "train": 2, "heldout": 1, "rejected": 2}
        return {"counts": counts, "reasons": {"overlap": 2}}, True

    monkeypatch.setattr(prepared, "prepare", stage)
    words = ("a", "b", "--out", "o", "--exclude", "x", "y", "--heldout", "9", "--limit", "3",
             "--exclude=z", "w", "--seed", "4", "--near", "off", "--json")  # fmt: skip
    assert run(monkeypatch, *words) == 0
    settings, out = calls[0]
    assert settings == PrepareSettings(
        sources=("a", "b"), exclude=("x", "y", "z", "w"), heldout="9", limit=3, seed=4, near="off"
    )
    assert out == Path("o")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "o: 5 rows read = 2 train + 1 held out + 2 rejected (overlap 2)"
    assert json.loads(said[1]) == {
        "out": "o",
        "made": True,
        "counts": {"read": 5, "train": 2, "heldout": 1, "rejected": 2},
        "reasons": {"overlap": 2},
    }
    assert run(monkeypatch, "a", "--out", "o") == 0
    assert calls.pop()[0] == PrepareSettings(sources=("a",))
    # what a shell makes of --exclude eval/*.jsonl is not half trained on
    assert run(monkeypatch, "--out", "o", "--exclude", "x", "y") == 2
    assert run(monkeypatch, "a", "--out", "o", "--limit", "0") == 2
    assert len(calls) == 1


def test_errors_are_a_sentence_and_code_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", *[asked(n) for n in range(3)])
    assert run(monkeypatch, source, "--out", "/proc/x") == 2
    assert run(monkeypatch, "open-perfectblnd", "--out", str(tmp_path / "o")) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: cannot write /proc/")
    assert "did you mean 'open-perfectblend'?" in said[1]
    assert len(said) == 2
    for ending in ("", " is there already"):
        assert run(monkeypatch, source, "--out", str(tmp_path / "o")) == 0
        assert capsys.readouterr().out == (
            f"{tmp_path / 'o'}{ending}: 3 rows read = 3 train + 0 held out + 0 rejected\n"
        )
