"""`dspark hub push` against a hub on this machine: what it sends, and what it says when refused."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from dspark.cli import main
from dspark.export.card import CardFacts
from dspark.export.hf import export_draft
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer

from .fake_hub import Hub, serve

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def target() -> Target:
    tiny = tiny_target()
    tiny.name = "owner/tiny"
    return tiny


@pytest.fixture(scope="module")
def draft(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "draft"
    facts = CardFacts(licence="mit")
    tokenizer = tiny_tokenizer()
    export_draft(tiny_draft(target), out, target, facts=facts, tokenizer=tokenizer, check=False)
    return out


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()
    server = serve(state)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", state.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield state
    server.shutdown()
    server.server_close()


def push(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", "hub", "push", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_all_files_go_up_in_one_commit(
    draft: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(monkeypatch, draft, "me/draft", "--message", "first", "--json") == 0
    out = capsys.readouterr()
    told = json.loads(out.out.splitlines()[-1])
    (commit,) = hub.commits
    assert (commit["branch"], commit["message"], commit["deleted"]) == ("main", "first", [])
    names = json.loads((draft / "provenance.json").read_text())["files"]
    assert sorted(commit["added"]) == names
    sums = {one["path"]: (one["bytes"], one["sha256"]) for one in told["files"]}
    assert sums == {
        name: (len(data), hashlib.sha256(data).hexdigest())
        for name, data in commit["added"].items()
    }
    for name in ("model.safetensors", "tokenizer.json", "README.md", "config.json"):
        assert commit["added"][name] == (draft / name).read_bytes(), name
    assert load(commit["added"]["model.safetensors"])
    assert (told["commit"], told["dry_run"]) == ("c0ffee", False)
    assert f"uploaded: {hub.url}/me/draft/commit/c0ffee" in out.out
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in out.out + out.err


def test_weights_of_another_draft_leave_with_the_same_commit(
    draft: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    hub.files = dict.fromkeys((*old, "notes.md", "more/x.safetensors", "model.safetensors"), b"x")
    assert push(monkeypatch, draft, "me/draft", "--branch", "v2") == 0
    (commit,) = hub.commits
    assert (commit["branch"], sorted(commit["deleted"])) == ("v2", sorted(old))
    assert {"main", "v2"} == hub.branches
    assert {"notes.md", "more/x.safetensors"} < set(hub.files)
    assert "removed there, as weights of another draft: model-00001" in capsys.readouterr().out


def test_a_public_repository_takes_nothing_private(
    draft: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(monkeypatch, draft, "me/draft", "--private") == 2
    assert "me/draft is public already" in capsys.readouterr().err
    assert hub.commits == []
    hub.private = True
    assert push(monkeypatch, draft, "me/draft", "--private") == 0
    assert len(hub.commits) == 1
    # told in this way or in that by one release of the library or another
    assert all(one.get("private") or one["visibility"] == "private" for one in hub.created)


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        ("/api/", 401, "the hub does not accept HF_TOKEN for me/draft (401: no, HF_TOKEN)"),
        ("/commit/", 403, "HF_TOKEN may not write to me/draft (403: no, HF_TOKEN)"),
        ("/preupload/", 404, "the hub knows no me/draft with the branch main (404: no, HF_TOKEN)"),
        ("/tree/", 418, "the hub refused the upload to me/draft (418: no, HF_TOKEN)"),
    ],
)
def test_a_refusal_is_one_sentence_without_the_token(
    draft: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: str,
    status: int,
    words: str,
) -> None:
    hub.refuse, hub.said = {part: status}, f"no, {TOKEN}\nand so on"
    assert push(monkeypatch, draft, "me/draft") == 2
    said = capsys.readouterr()
    assert f"error: {words}; nothing was uploaded\n" in said.err
    assert TOKEN not in said.out + said.err
    assert "Traceback" not in said.err
    assert hub.commits == []


def test_a_hub_that_is_not_there_is_one_sentence(
    draft: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert push(monkeypatch, draft, "me/draft") == 2
    assert re.search(
        r"error: cannot upload to http://127\.0\.0\.1:1: .+\n$", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("token", "offline", "words"),
    [
        (None, False, "HF_TOKEN is not set"),
        ("  ", False, "HF_TOKEN is not set"),
        ("hf_a b", False, "HF_TOKEN is no token: it holds blanks"),
        (TOKEN, True, "HF_HUB_OFFLINE is set, which forbids the network"),
    ],
)
def test_without_access_nothing_is_asked_and_a_dry_run_shows_all(
    draft: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    offline: bool,
    words: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert push(monkeypatch, draft, "me/draft") == 2
    said = capsys.readouterr()
    assert f"error: {words}" in said.err
    assert "hf_" not in said.err
    assert push(monkeypatch, draft, "me/draft", "--dry-run") == 0
    shown = capsys.readouterr().out
    weights = (draft / "model.safetensors").read_bytes()
    line = f"{hashlib.sha256(weights).hexdigest()}  {len(weights):>14,}  model.safetensors\n"
    assert line in shown
    assert shown.endswith((draft / "README.md").read_text() + "\n")
    found = re.findall(r"^[0-9a-f]{64} +([\d,]+)  ", shown, re.MULTILINE)
    total = sum(int(one.replace(",", "")) for one in found)
    assert f"{len(found)} files, {total:,} bytes, to me/draft, branch main\n" in shown
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("draft",), "REPO_ID must be owner/name, as the hub allows them, got 'draft'"),
        (("me/a--b",), "got 'me/a--b'"),
        (("me/x", "--branch", "refs/pr/1"), "--branch must be the name of a branch"),
        (("me/x", "--licence", "mit"), "--licence is for a new card: give --card too"),
        (("me/x", "--eval", "x.json"), "--eval is for a new card: give --card too"),
    ],
)
def test_a_name_that_no_hub_takes_is_refused_first(
    draft: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    assert push(monkeypatch, draft, *words, "--dry-run") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smollm2-135m", "ling3-nano"])
def test_a_released_draft_can_be_pushed_as_it_lies_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    place = ROOT / f"checkpoints/{name}-dspark-block16"
    # the nano target is on no hub: a card must be told where it will be
    card = ("--card", "--target", "me/nano") if name == "ling3-nano" else ()
    assert push(monkeypatch, place, "me/x", *card, "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {one["path"] for one in said["files"]} == {one.name for one in place.iterdir()}
    assert re.search(r'^license: "?apache-2.0"?$', said["card"], re.MULTILINE)


def test_a_token_is_no_option(
    draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(monkeypatch, draft, "me/x", "--token", TOKEN, "--dry-run") == 2
    assert TOKEN not in capsys.readouterr().out
