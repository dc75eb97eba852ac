"""A user's mistake on the command line: one sentence, exit code 2, and nothing left behind."""

import sys
from pathlib import Path

import pytest

from dspark.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample"], "sample.prompts"),
        (["sample", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["sample", "--prompts", "x", "sample.sed=1"], "'sample.seed'"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "train.stesp=1"], "'train.steps'"),
        (["train", "train.features=offline"], "data.shards"),
        (["capture", "draft.init_from=nowhere"], "nowhere"),
        (["export", "nowhere", "there"], "nowhere"),
        (["eval", "--draft", "nowhere"], "eval.prompts"),
        (["serve", "--target", "nowhere/at/all"], "nowhere/at/all"),
        (["serve", "--target", "smollm2-135m", "--drain-s", "-1"], "drain_s"),
        (["doctor", "nowhere.jsonl"], "nowhere.jsonl"),
        (["demo"], "checkout"),
        (["frobnicate"], "frobnicate"),
        (["serve"], "--target"),
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


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dspark.demo.run", stopped)
    monkeypatch.setattr(sys, "argv", ["dspark", "demo"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err.count("the same command goes on") == 1
