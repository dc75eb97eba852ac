"""The export check: a clean process decodes again, and a figure that is off or exactly 1 fails."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import target as targets
from dspark.acceptance import AcceptStats
from dspark.errors import CheckpointError, ConfigError, RunError
from dspark.export.check import (
    PROBE_NAME,
    Probe,
    check,
    check_in_clean_process,
    main,
    measure,
    read_probe,
    save_probe,
)
from dspark.export.hf import export_draft
from dspark.export.prompts import fixed_prompts
from dspark.target import Target
from dspark.testing import save_tiny_target, tiny_draft, tiny_tokenizer

pytestmark = pytest.mark.slow

# a random draft of a tied target repeats the anchor now and then, and that is accepted here
PROMPTS = fixed_prompts(tiny_tokenizer())[4:7]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = save_tiny_target(tmp_path_factory.mktemp("target"))
    return targets.load(str(directory), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def probe(target: Target) -> Probe:
    stats = measure(target, tiny_draft(target), PROMPTS, NEW_TOKENS)
    assert stats.accepted > 0
    return Probe(
        prompt_ids=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        expected=stats.accept_length,
        expected_from="the trainer",
    )


@pytest.fixture(scope="module")
def exported(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "draft"
    export_draft(tiny_draft(target), out, target, check=False)
    return out


def test_a_good_export_passes_in_a_clean_process(
    target: Target, probe: Probe, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    record = export_draft(tiny_draft(target), out, target, probe=probe)
    assert record["check"]["accept_length"] == pytest.approx(probe.expected, abs=0.05)
    assert record["check"]["expected_from"] == "the trainer"
    assert read_probe(out) == probe
    assert "(the trainer)" in (out / "README.md").read_text()


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check without the seconds that a new interpreter takes."""
    monkeypatch.setattr(
        "dspark.export.hf.check_in_clean_process", lambda out, t: check(out, t, read_probe(out))
    )


@pytest.mark.usefixtures("same_process")
def test_a_wrong_figure_fails_with_both_numbers_and_leaves_nothing(
    target: Target, probe: Probe, tmp_path: Path
) -> None:
    wrong = replace(probe, expected=2.5)
    with pytest.raises(RunError, match=r"accept_length 1\.\d+ .*expected 2\.5000 \(the trainer\)"):
        export_draft(tiny_draft(target), tmp_path / "draft", target, probe=wrong)
    assert list(tmp_path.iterdir()) == []


def test_an_accept_length_of_exactly_one_fails_even_if_expected(
    target: Target, exported: Path
) -> None:
    # this prompt accepts nothing: the sign of untrained weights, or of a shifted layout
    probe = Probe(
        prompt_ids=fixed_prompts(tiny_tokenizer())[7:],
        max_new_tokens=NEW_TOKENS,
        expected=1.0,
        expected_from="the trainer",
    )
    with pytest.raises(RunError, match=r"1\.0000 .*train longer, or export with --no-check"):
        check(exported, target, probe)
    with pytest.raises(RunError, match=r"1\.0000 .*no drafted token was ever accepted"):
        check(exported, target, replace(probe, expected=1.4))


@pytest.mark.parametrize(
    ("accepted", "expected", "passes"),
    [
        (50, 1.549, True),  # 0.05 of a token
        (50, 1.451, True),
        (50, 1.58, False),  # more than 0.05 and than 5%
        (50, 1.42, False),
        (300, 4.2, True),  # 5% of a longer length
        (300, 4.22, False),
    ],
)
def test_the_gap_may_be_what_rounding_explains_and_no_more(
    target: Target,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    accepted: int,
    expected: float,
    passes: bool,
) -> None:
    stats = AcceptStats(4, rounds=100, accepted=accepted, emitted=accepted + 100)
    monkeypatch.setattr("dspark.export.check.measure", lambda *args: stats)
    probe = Probe(prompt_ids=((1,),), max_new_tokens=8, expected=expected, expected_from="x")
    if passes:
        assert check(exported, target, probe)["expected"] == expected
    else:
        with pytest.raises(RunError, match=f"{expected:.4f} .*allowed gap"):
            check(exported, target, probe)


@pytest.mark.parametrize(("accepted", "warned"), [(1, True), (5, True), (6, False)])
@pytest.mark.usefixtures("same_process")
def test_a_draft_that_keeps_next_to_nothing_is_warned_about(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    accepted: int,
    warned: bool,
) -> None:
    # what an untrained draft keeps by chance, before the export and after it
    stats = AcceptStats(4, rounds=100, accepted=accepted, emitted=accepted + 100)
    for place in ("check", "hf"):
        monkeypatch.setattr(f"dspark.export.{place}.measure", lambda *args: stats)
    out = tmp_path / "draft"
    record = export_draft(tiny_draft(target), out, target, tokenizer=tiny_tokenizer())
    sentence = f"only {accepted} drafted tokens were accepted in 100 rounds"
    assert ("warning" in record["check"]) is warned
    assert (sentence in caplog.text) is warned
    assert (sentence in (out / "README.md").read_text()) is warned


def test_a_damaged_export_is_found(
    target: Target, exported: Path, probe: Probe, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "draft"))
    tensors = load_file(copy / "model.safetensors")
    tensors["norm.weight"] = -tensors["norm.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(RunError, match="export check failed"):
        check(copy, target, probe)


@pytest.mark.usefixtures("same_process")
def test_without_a_recorded_figure_the_unrounded_weights_set_it(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.export.hf.fixed_prompts", lambda tokenizer: PROMPTS)
    monkeypatch.setattr("dspark.export.hf._PROBE_TOKENS", NEW_TOKENS)
    draft = tiny_draft(target)
    record = export_draft(draft, tmp_path / "draft", target, tokenizer=tiny_tokenizer())
    expected = measure(target, draft, PROMPTS, NEW_TOKENS).accept_length
    assert record["check"]["expected"] == expected
    assert "unrounded" in record["check"]["expected_from"]


def test_nothing_to_decode_is_said(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        export_draft(tiny_draft(target), tmp_path / "draft", target)


def test_the_program_answers_with_exit_codes(
    target: Target, exported: Path, probe: Probe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "draft"))
    words = [str(copy), "--target", target.name, "--dtype", "float32", "--device", "cpu"]
    assert main(words) == 2
    assert "has no check.json" in capsys.readouterr().err
    save_probe(copy, probe)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 3
    (copy / PROBE_NAME).write_text('{"prompt_ids": 3}')
    assert main(words) == 2
    assert main([*words[:2], "nowhere/at/all", *words[3:], "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)


def test_a_check_that_dies_is_an_error_not_a_pass(
    target: Target, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.export.check.sys.executable", shutil.which("false"))
    with pytest.raises(RunError, match="ended with code 1 and no answer"):
        check_in_clean_process(exported, target)


def test_a_clean_process_that_cannot_load_says_why(
    target: Target, exported: Path, probe: Probe, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "draft"))
    save_probe(copy, probe)
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "extra": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="not expected extra"):
        check_in_clean_process(copy, target)
