"""`dspark capture` and `dspark inspect` of feature shards, as a person meets them."""

import json
import sys
from pathlib import Path

import pytest

from dspark.cli import main
from dspark.testing import save_tiny_run, tiny_rows


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0), *capsys.readouterr()


def test_shards_are_captured_shown_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save_tiny_run(tmp_path, tiny_rows(5, seed=1))
    words = [f"target.path={place / 'target'}", f"data.responses=[{place / 'rows.jsonl'}]"]
    words += ["capture.dtype=float8_e4m3fn", "draft.num_taps=3", "target.dtype=float32"]
    shards = str(tmp_path / "s")
    code, out, _ = run(monkeypatch, capsys, "capture", *words, "--out", shards, "--json")
    assert code == 0
    assert "s in the target" in out
    captured = json.loads(out.splitlines()[-1])
    assert captured["forward_s"] > 0

    code, out, _ = run(monkeypatch, capsys, "inspect", shards, "--verify", "--json")
    assert code == 0
    shown = json.loads(out.splitlines()[-1])
    assert (shown["rows"], shown["tokens"]) == (5, captured["tokens"])
    # three taps of 64 bytes and a scale each, a final state in 16 bits, an id and its mask
    assert shown["token_bytes"] == 3 * (64 + 2) + 128 + 5
    assert (shown["verified"], shown["damaged"]) == (True, [])

    path = tmp_path / "s" / "shard-00000.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 4
    path.write_bytes(damaged)
    assert run(monkeypatch, capsys, "inspect", shards)[0] == 0
    code, out, err = run(monkeypatch, capsys, "inspect", shards, "--verify", "--json")
    assert code == 2
    assert "are damaged: shard-00000.safetensors; run the same capture again" in err
    assert json.loads(out.splitlines()[-1])["damaged"] == ["shard-00000.safetensors"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["configs/targets/ling-3.0-flash.json", "--verify"], "--verify is for feature shards"),
        (["{shards}", "--tp", "2"], "holds feature shards: of the options, only --verify"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "dspark.features/9"}')
    own = [word.format(shards=tmp_path) for word in words]
    code, _, err = run(monkeypatch, capsys, "inspect", *own)
    assert code == 2
    assert sentence in err
    code, _, err = run(monkeypatch, capsys, "inspect", str(tmp_path))
    assert code == 2
    assert "has format 'dspark.features/9'; this version reads" in err
