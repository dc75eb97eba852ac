# ruff: noqa: RUF001 - digits of other scripts
"""`dspark prepare`: where it writes, what is there already, and the folders and files it reads."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import main
from dspark.corpus.files import expand
from dspark.corpus.prepare import PrepareSettings
from dspark.corpus.prepared import prepare
from dspark.corpus.prompts import parse_prompt, read_prompts
from dspark.errors import ConfigError, DataError, DSparkError


def asks(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


ROWS = [asks(f"question about the number {n} and its {n * n} friends") for n in range(12)]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path / "in.jsonl", *ROWS)


def settings(*sources: str, **more: Any) -> PrepareSettings:
    return PrepareSettings(sources=sources, **{"heldout": "3", **more})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("files", [], r"prepare\.json is damaged \('files' is no object\)"),
        ("files", {"train.jsonl": 1}, "does not describe train.jsonl"),
        ("sources", [1], "'sources' is no list of objects"),
        ("excluded", None, "'excluded' is no list of objects"),
        ("counts", {"read": "many"}, "'counts' lacks the number 'read'"),
        ("reasons", "none", "'reasons' is no object"),
        ("settings", 3, "'settings' is no object"),
    ],
)
def test_a_damaged_report_is_told_in_a_sentence(
    tmp_path: Path, source: str, key: str, value: Any, said: str
) -> None:
    out = tmp_path / "out"
    report, _ = prepare(settings(source), out)
    (out / "prepare.json").write_text(json.dumps({**report, key: value}))
    with pytest.raises(ConfigError, match=said):
        prepare(settings(source), out)


def test_files_are_those_described_byte_for_byte_and_no_others(tmp_path: Path, source: str) -> None:
    out = tmp_path / "out"
    prepare(settings(source), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds other files \('notes.txt'\)"):
        prepare(settings(source), out)
    (out / "notes.txt").unlink()
    assert not prepare(settings(source), out)[1]
    data = (out / "heldout.jsonl").read_bytes()
    (out / "heldout.jsonl").write_bytes(data.replace(b"question", b"Question", 1))
    with pytest.raises(ConfigError, match=r"heldout.jsonl is not the file that"):
        prepare(settings(source), out)


def test_a_file_is_the_same_however_its_path_is_written(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    eval_file = write(tmp_path / "e.jsonl", asks("something else"))
    prepare(settings("in.jsonl", exclude=("e.jsonl",)), tmp_path / "out")
    for written in ("./in.jsonl", source, "i*.jsonl"):
        assert not prepare(settings(written, exclude=(eval_file,)), tmp_path / "out")[1]
    with pytest.raises(ConfigError, match="is a source and in --exclude"):
        prepare(settings("in.jsonl", exclude=(source,)), tmp_path / "other")
    same = write(tmp_path / "copy.jsonl", *ROWS)
    with pytest.raises(ConfigError, match="a preparation of other sources;"):
        prepare(settings(same, exclude=(eval_file,)), tmp_path / "out")


def test_links_are_followed(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    for name, target in (("full", "empty"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    for name in ("full", "dangling"):
        for new in (True, False):
            assert prepare(settings(source), tmp_path / name)[1] == new
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name / "prepare.json").is_file()
    with pytest.raises(ConfigError, match=r"--out .*loop cannot be made"):
        prepare(settings(source), tmp_path / "loop")


def test_places_that_cannot_be_are_refused_and_long_names_are_made(
    tmp_path: Path, source: str
) -> None:
    with pytest.raises(ConfigError, match="--out / is the root of all files"):
        prepare(settings(source), Path("/"))
    for out, said in ((tmp_path / ("n" * 300), "too long"), (Path(source) / "x", "not a dir")):
        with pytest.raises(ConfigError, match=said) as told:
            prepare(settings(source), out)
        assert len(str(told.value)) < 200
    for name in ("n" * 250, "ü" * 125):
        assert prepare(settings(source), tmp_path / name)[1]
    assert sorted(os.listdir(tmp_path)) == sorted(["in.jsonl", "n" * 250, "ü" * 125])
    with pytest.raises(DataError, match="neither an existing file"):
        prepare(settings("x" * 300), tmp_path / "out")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ('[{"a": ' + nested(900) + "}]", "invalid_json"),
        (json.dumps('[{"a": ' + nested(900) + "}]"), "bad_tools"),
        (json.dumps('[{"a": ' + nested(100_000) + "}]"), "bad_tools"),
        (nested(100_000), "invalid_json"),
    ],
    ids=["row", "string", "deeper string", "deeper row"],
)
@pytest.mark.parametrize("name", ["in.jsonl", "in.json"])
def test_rows_nested_too_deeply_are_counted(
    tmp_path: Path, tools: str, reason: str, name: str
) -> None:
    fine = json.dumps(asks("a fine row", tools=[{"a": [[[["[{"]]]]}]))
    row = json.dumps(asks("a deep row"))[:-1] + f', "tools": {tools}}}'
    source = tmp_path / name
    array = name.endswith(".json")
    source.write_text(f"[{fine}, {row}]" if array else f"{fine}\n{row}\n")
    if array and reason == "invalid_json" and len(tools) > 100_000:
        with pytest.raises(DataError, match="is not valid JSON: nested too deeply"):
            prepare(settings(str(source), heldout="0"), tmp_path / "out")
        return
    report, _ = prepare(settings(str(source), heldout="0"), tmp_path / "out")
    assert report["reasons"] == {reason: 1}
    assert "nested too deeply" in report["places"][reason][0] or len(tools) > 100_000


def test_a_prepared_folder_stands_for_what_is_to_be_trained_on(tmp_path: Path, source: str) -> None:
    first = tmp_path / "sets/first"
    prepare(settings(source), first)
    (tmp_path / "sets/mine").mkdir()
    mine = write(tmp_path / "sets/mine/heldout.jsonl", asks("not held out by the command"))
    train, held = str(first / "train.jsonl"), str(first / "heldout.jsonl")
    assert expand([str(first)]) == [train]
    assert expand([str(tmp_path / "sets")]) == [train, mine]
    assert expand([str(tmp_path / "sets/**/*.json*")]) == [held, train, mine]
    assert expand([str(first)], heldout=True) == [held, train]
    assert len(read_prompts([str(first)])) == 9
    # named, it is read: somebody's own file may have that name
    assert expand([str(first / "prepare.json")]) == [str(first / "prepare.json")]
    (tmp_path / "sets/mine/prepare.json").write_text(json.dumps([asks("a row")]))
    assert expand([str(tmp_path / "sets/mine")]) == [mine, str(tmp_path / "sets/mine/prepare.json")]
    report, _ = prepare(settings(str(first), heldout="0"), tmp_path / "second")
    assert report["counts"] == {"read": 9, "train": 9, "heldout": 0, "rejected": 0}
    report, _ = prepare(
        settings(source, write(tmp_path / "more.jsonl", asks("new")), exclude=(str(first),),
                 heldout="0"),
        tmp_path / "third",
    )  # fmt: skip
    assert report["reasons"] == {"overlap": 12}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", json.dumps(ROWS[0], indent=1), "one object over several lines; a .json must"),
        ("b.json", json.dumps({"data": ROWS}, indent=1), "one object over several lines"),
        ("c.json", json.dumps({"data": ROWS}), "if 'data' holds the rows, write them as an array"),
        ("d.jsonl", json.dumps(ROWS[0]).encode("utf-16"), "in UTF-16 or UTF-32; .* must be UTF-8"),
        ("e.jsonl", json.dumps(ROWS[0]).encode("utf-16-be"), "the encoding must be UTF-8"),
        ("f.json", json.dumps(ROWS).encode("utf-32"), "the encoding must be UTF-8"),
    ],
)
def test_files_of_another_form_are_told_what_form_is_read(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        prepare(settings(str(tmp_path / name)), tmp_path / "out")


def test_a_json_of_lines_may_begin_with_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"torn\n' + "".join(json.dumps(row) + "\n" for row in ROWS))
    report, _ = prepare(settings(str(tmp_path / "a.json")), tmp_path / "out")
    assert report["counts"]["read"] == 13
    assert report["reasons"] == {"invalid_json": 1}


@pytest.mark.parametrize("which", ["in.jsonl", "e.jsonl"])
def test_a_file_that_changes_while_it_is_read_is_told(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    write(tmp_path / "e.jsonl", asks("something else"))
    changes = iter([True])

    def late(row: Any) -> Any:
        if next(changes, False):
            file = tmp_path / which
            text, then = file.read_text(), file.stat()
            if which == "in.jsonl":  # its size tells, though its clock is set back
                file.write_text(text + json.dumps(asks("one more")) + "\n")
                os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
            else:  # and its clock, though its size is what it was
                file.write_text(text.replace("something", "Something"))
        return parse_prompt(row)

    monkeypatch.setattr("dspark.corpus.prepare.parse_prompt", late)
    wanted = settings(source, exclude=(str(tmp_path / "e.jsonl"),))
    with pytest.raises(DataError, match=rf"{which}' changed while it was read"):
        prepare(wanted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert prepare(wanted, tmp_path / "out")[1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--heldout", value) for value in ("٣", "-0.0", "1_0", "０.5", "+3")),
        *(("--near", value) for value in ("٠.8", "0.8_0", "-0.0")),
        *(("--limit", value) for value in ("٣", "-0.0", "1_0", "0", "2.0", "x")),
    ],
)
def test_numbers_are_written_in_plain_digits(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], option: str, value: str,
) -> None:  # fmt: skip
    words = ["dspark", "prepare", source, "--out", str(tmp_path / "out"), f"{option}={value}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == DSparkError.exit_code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {option} must be ")
    assert f"got '{value}'" in said
    assert os.listdir(tmp_path) == ["in.jsonl"]
