"""A user's mistake on the command line: one sentence, exit code 2, and nothing left behind."""

import errno
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import main
from dspark.cli.common import set_up
from dspark.export.hf import export_draft
from dspark.testing import TINY_LING, save_tiny_target, tiny_draft, tiny_target, tiny_tokenizer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample"], "sample.prompts"),
        (["sample", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        # before a target is looked for
        (["sample", "--prompts", "nowhere.jsonl", "--target", "no/target"], "nowhere.jsonl"),
        (
            [
                "sample",
                "--prompts",
                "nowhere.jsonl",
                "--target",
                "no/target",
                "--endpoint",
                "http://localhost:1/v1",
            ],
            "nowhere.jsonl",
        ),
        (["sample", "--prompts", "x", "sample.sed=1"], "'sample.seed'"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "train.stesp=1"], "'train.steps'"),
        (["train", "train.features=offline"], "data.shards"),
        (["train", "--confg", "some.yaml"], "'confg'; a settings file is given as --config PATH"),
        (["train", "some.yaml"], "is given as --config some.yaml"),
        (["train", "-c", "some.yaml"], "cannot read the config some.yaml"),
        (["sample", "some.yaml"], "is given as --config some.yaml"),
        (["sample", "--prompts", "x", "sample.settings=[]"], "sample.settings"),
        (["sample", "--prompts", "x", "sample.settings=[{top_p: 0}]"], "top_p"),
        (["doctor", "x", "--max-length", "3"], "data.max_length"),
        (["doctor", "x", "--show", "-1"], "--show"),
        (["eval", "--draft", "x", "--top-p", "0"], "eval.top_p"),
        (["serve", "--target", "x", "--confidence-threshold", "nan"], "confidence_threshold"),
        (["capture", "draft.init_from=nowhere"], "nowhere"),
        (["export", "nowhere", "there"], "nowhere"),
        (["export", "nowhere", "there", "--calibrate", "no.jsonl"], "no.jsonl"),
        (["export", "a", "b", "--calibrate-limit", "1"], "--calibrate-limit"),
        (["eval", "--draft", "nowhere"], "eval.prompts"),
        (["serve", "--target", "nowhere/at/all"], "nowhere/at/all"),
        (["serve", "--target", "smollm2-135m", "--drain-s", "-1"], "drain_s"),
        (["serve", "--target", "x", "--engine", "fast"], "auto, reference, graph, got 'fast'"),
        (["serve", "--target", "x", "--context", "1"], "serve.context must be >= 2, got 1"),
        (["doctor", "nowhere.jsonl"], "nowhere.jsonl"),
        (["demo"], "checkout"),
        (["frobnicate"], "frobnicate"),
        (["serve"], "--target"),
        (["serve", "--target", "x", "--port", "99999"], "99999"),
        (["serve", "--target", "x", "--port", "www"], "must be a whole number, got www"),
        (["export", "a", "b", "--format", "onnx"], "'onnx'"),
        (["convert", "nowhere", "there", "--to", "hf"], "nowhere"),
        (["convert", "a", "b"], "--to"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_two(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert message in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["sample"], ["train"], ["capture"], ["demo"]])
@pytest.mark.parametrize(
    ("fault", "code"), [(errno.EROFS, 2), (errno.EACCES, 2), (errno.ENOSPC, 1), (errno.EIO, None)]
)
def test_a_place_that_cannot_be_written_is_one_sentence(
    words: list[str],
    fault: int,
    code: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(fault, os.strerror(fault), "some/place")

    for stage in ("config_io.load", "demo.run"):
        monkeypatch.setattr(f"dspark.{stage}", refuse)
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    if code is None:  # no fault of the user's: it is shown in full
        with pytest.raises(OSError, match="some/place"):
            main()
        return
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert "error: cannot write some/place: " in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
@pytest.mark.parametrize("place", ["/proc/nowhere/out", "/proc/nowhere.out"])
@pytest.mark.parametrize(
    "command", ["sample", "capture", "train", "export", "convert", "make-checkpoint"]
)
def test_a_place_that_says_not_found_is_no_lost_file(
    command: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, rows = str(save_tiny_target(tmp_path / "target")), tmp_path / "rows.jsonl"
    ling = tmp_path / "ling.json"
    ling.write_text(json.dumps(TINY_LING["tiny"]))
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    rows.write_text(json.dumps({"messages": said}) + "\n")
    loaded = tiny_target()
    export_draft(tiny_draft(loaded), tmp_path / "draft", loaded, check=False)
    settings = [f"target.path={target}", f"data.responses=[{rows}]", "draft.num_taps=2"]
    words = {
        "sample": ["--target", target, "--prompts", str(rows), "--out", place],
        "capture": [*settings, f"capture.out={place}"],
        "train": [*settings, "train.steps=2", f"train.output_dir={place}"],
        "export": [str(tmp_path / "draft"), place, "--target", target, "--no-check"],
        "convert": [str(tmp_path / "draft"), place, "--to", "vllm"],
        "make-checkpoint": ["--config", str(ling), "--out", place],
    }
    monkeypatch.setattr(sys, "argv", ["dspark", command, *words[command]])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().err
    assert end.value.code == 2, told
    assert "error: cannot write /proc/" in told
    assert "give a place that can be written" in told


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template; take the instruction-tuned model's tokenizer"),
        ("{{ raise_exception('only French is spoken here') }}", "only French is spoken here"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
@pytest.mark.parametrize("command", ["sample", "doctor", "capture", "train", "eval"])
def test_a_template_without_use_is_refused_before_the_weights_are_loaded(
    command: str,
    template: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "target")
    rows = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    rows.write_text(json.dumps({"messages": said}) + "\n")
    target = ["--target", str(tmp_path / "target")]
    settings = [f"target.path={tmp_path / 'target'}", f"data.responses=[{rows}]"]
    words = {
        "sample": [*target, "--prompts", str(rows)],
        "doctor": [str(rows), *target],
        "capture": settings,
        "train": settings,
        "eval": [*target, "--prompts", str(rows), "--draft", "nowhere"],
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dspark", command, *words[command]])
    # there are no weights in the directory: a run that went on would say so
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().err
    assert end.value.code == 2, told
    assert message in told
    assert "Traceback" not in told


def test_serving_a_draft_under_another_template_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, draft = save_tiny_target(tmp_path / "target"), tmp_path / "draft"
    loaded = tiny_target()
    export_draft(tiny_draft(loaded), draft, loaded, tokenizer=tiny_tokenizer(), check=False)
    served = []
    monkeypatch.setattr("dspark.serving.server.serve", lambda *a, **k: served.append(a))
    words = ["dspark", "serve", "--target", str(place), "--draft", str(draft)]
    monkeypatch.setattr(sys, "argv", words)
    for change, said in (("", False), (" ", True)):
        template = place / "chat_template.jinja"
        template.write_text(template.read_text() + change)
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        assert ("another chat template" in caplog.text) is said
    assert len(served) == 2


@pytest.mark.parametrize(("asked", "level"), [("nonsense", 20), ("debug", 10), (None, 20)])
def test_the_log_is_as_loud_as_asked_for(
    asked: str | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSPARK_LOG", raising=False)
    if asked is not None:
        monkeypatch.setenv("DSPARK_LOG", asked)
    log = logging.getLogger("dspark")
    before = log.level
    try:
        set_up()
        assert log.level == level
    finally:
        log.setLevel(before)


@pytest.mark.parametrize(
    ("stage", "words", "message"),
    [
        ("demo.run", ["demo"], "goes on where this one stopped"),
        (
            "config_io.load",
            ["eval", "--draft", "d", "--out", "o"],
            "goes on where this one stopped",
        ),
        ("config_io.load", ["eval", "--draft", "d"], "starts anew"),
        (
            "target.config.LingConfig.from_file",
            ["make-checkpoint", "--config=c", "--out=o"],
            "starts anew",
        ),
    ],
)
def test_an_interrupt_says_what_the_same_command_does(
    stage: str,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"dspark.{stage}", stopped)
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            main()
        # a second one ends the process at once
        assert signal.getsignal(signal.SIGINT) != before
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capsys.readouterr().err == f"interrupted; the same command {message}\n"
