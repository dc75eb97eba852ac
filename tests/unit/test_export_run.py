"""What an export takes from a run, what it tells the checking process, and a disk that fails."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dspark
from dspark import config_io
from dspark.errors import CheckpointError, DSparkError, RunError
from dspark.export.card import CardFacts
from dspark.export.check import Probe, check_in_clean_process, save_probe
from dspark.export.hf import export_draft
from dspark.export.source import read_source, target_dtype
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_ling, tiny_target

PROBE = Probe(prompt_ids=((5, 6), (7,)), max_new_tokens=3, expected=1.5, expected_from="trainer")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def checkpoint(target: Target, directory: Path, *, step: int, best: int) -> Path:
    draft = tiny_draft(target)
    directory.mkdir()
    save_file(
        {n: p.detach().clone() for n, p in draft.trainable()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(draft.config.to_dict()))
    state = {"step": step, "best": {"step": best, "accept_length": 2.125}}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    settings = [
        "train.seed=77",
        "data.responses=[some/rows.jsonl]",
        "sample.settings=[{temperature: 0.7, top_p: 0.95}]",
    ]
    config_io.save(config_io.load(None, settings), directory / "config.yaml")
    versions = {"dspark": "0.0.9", "packages": {"torch": "2.99"}, "command": ["train.py", "a=1"]}
    told = {"data": {"rows": 5, "thinking": {"on": 3, "off": 2}}, "git_commit": "abc", **versions}
    (directory / "provenance.json").write_text(json.dumps(told))
    save_probe(directory, PROBE)
    (directory / "COMPLETE").write_text("{}")
    return directory


def test_a_figure_of_another_checkpoint_is_not_claimed(target: Target, tmp_path: Path) -> None:
    best = checkpoint(target, tmp_path / "checkpoint-7", step=7, best=7)
    later = checkpoint(target, tmp_path / "checkpoint-9", step=9, best=7)
    assert read_source(best, target).accept_length == 2.125
    assert read_source(later, target).accept_length is None


def test_a_run_knows_the_dtype_that_its_target_had(target: Target, tmp_path: Path) -> None:
    place = checkpoint(target, tmp_path / "checkpoint-7", step=7, best=7)
    export_draft(place, tmp_path / "draft", target, check=False)
    assert target_dtype(tmp_path / "draft") == "auto"
    config_io.save(config_io.load(None, ["target.dtype=float32"]), place / "config.yaml")
    assert target_dtype(place) == target_dtype(tmp_path) == "float32"
    (place / "config.yaml").unlink()
    assert target_dtype(place) == "auto"
    (place / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="half written"):
        target_dtype(place)


def test_the_card_tells_the_settings_of_the_run(target: Target, tmp_path: Path) -> None:
    run = checkpoint(target, tmp_path / "checkpoint-7", step=7, best=7)
    record = export_draft(run, tmp_path / "out", target, check=False)
    assert record["config"]["train"]["seed"] == 77
    assert record["training"]["data"]["thinking"] == {"on": 3, "off": 2}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- optimizer steps: 7" in card
    assert "- rows by the template's thinking switch: on 3, off 2" in card
    assert "- seed: 77" in card
    assert "validation prompts: 2.125" in card
    assert "| 0.7 | 0.95 |" in card
    assert "- responses: some/rows.jsonl\n- rows: 5\n" in card
    assert "|  | training | export |" in card
    assert f"| dspark | 0.0.9 | {dspark.__version__} |" in card
    assert f"| torch | 2.99 | {torch.__version__.partition('+')[0]}" in card
    assert "| commit | abc | " in card
    assert "- training: `train.py a=1`" in card
    assert f"- checkpoint: {run}" in card
    # what the caller says is not overruled
    facts = CardFacts(training={"hours": 3})
    export_draft(run, tmp_path / "out", target, check=False, facts=facts)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- hours: 3" in card
    assert "- seed: 77" not in card


def test_the_trainers_probe_is_the_one_to_meet_unless_another_is_given(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = checkpoint(target, tmp_path / "checkpoint-7", step=7, best=7)
    met: list[dict[str, Any]] = []

    def look(out: Path, _: Target) -> None:
        met.append(json.loads((out / "check.json").read_text()))

    monkeypatch.setattr("dspark.export.hf.check_in_clean_process", look)
    export_draft(run, tmp_path / "out", target)
    export_draft(run, tmp_path / "out", target, probe=replace(PROBE, expected=3.0))
    assert [one["expected"] for one in met] == [1.5, 3.0]
    assert met[0]["prompt_ids"] == [[5, 6], [7]]


@pytest.mark.parametrize(("code", "kind"), [(1, RunError), (2, CheckpointError)])
def test_the_clean_process_reads_the_same_target_and_its_failure_keeps_its_kind(
    target: Target, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[DSparkError]
) -> None:
    commands: list[list[str]] = []

    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code, 'noise\n{"error": "no good"}\n')

    monkeypatch.setattr("dspark.export.check.subprocess.run", fails)
    monkeypatch.setattr(target, "revision", "abc")
    monkeypatch.setattr(Target, "dtype", torch.bfloat16)
    with pytest.raises(DSparkError, match="no good") as caught:
        check_in_clean_process(Path("draft"), target)
    assert type(caught.value) is kind
    (command,) = commands
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert options == {
        "--target": "tiny",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--revision": "abc",
    }


def test_the_clean_process_spreads_the_target_as_it_is_spread_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def looks(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "{}\n")

    monkeypatch.setattr("dspark.export.check.subprocess.run", looks)
    spread = tiny_ling()
    first, second = (torch.device(f"cuda:{index}") for index in range(2))
    spread.model.placement = (first, first, second, second)
    check_in_clean_process(Path("draft"), spread)
    assert commands[0][commands[0].index("--device") + 1] == "cuda:0+cuda:1"


def test_a_disk_that_refuses_is_one_sentence_and_nothing_is_left(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark.provenance.save_tensors", full)
    with pytest.raises(RunError, match=r"cannot write the export .*No space left"):
        export_draft(tiny_draft(target), tmp_path / "out", target, check=False)
    assert list(tmp_path.iterdir()) == []


def test_the_old_export_outlives_a_rename_that_fails(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_draft(tiny_draft(target), out, target, check=False)
    weights = (out / "model.safetensors").read_bytes()
    real = os.replace

    def fails(source: Path, place: Path) -> None:
        if Path(place) == out:
            raise OSError(5, "Input/output error")
        real(source, place)

    monkeypatch.setattr("dspark.export.place.os.replace", fails)
    with pytest.raises(RunError, match="Input/output error"):
        export_draft(tiny_draft(target, seed=1), out, target, check=False)
    kept = [path.read_bytes() for path in tmp_path.rglob("model.safetensors")]
    assert kept == [weights]
