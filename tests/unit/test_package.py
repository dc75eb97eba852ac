"""What is uploaded of an export: complete, with a card that tells enough, without local paths."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import CheckpointError, ConfigError, DataError, DSparkError
from dspark.export.card import CardFacts
from dspark.export.convert import convert_draft
from dspark.export.hf import export_draft
from dspark.export.package import Card, Package, package
from dspark.export.paths import public, public_text
from dspark.export.tensors import weights_sha256
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer

ALL = Card(licence="mit", target="owner/tiny")


@pytest.fixture(scope="module")
def target() -> Target:
    tiny = tiny_target()
    tiny.name = "owner/tiny"
    return tiny


@pytest.fixture(scope="module")
def exported(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "draft"
    facts = CardFacts(licence="mit")
    tokenizer = tiny_tokenizer()
    export_draft(
        tiny_draft(target), out, target, format="vllm", facts=facts, tokenizer=tokenizer,
        check=False,
    )  # fmt: skip
    return out


@pytest.fixture
def draft(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "home" / "draft"))


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))


def texts(packed: Package) -> dict[str, str]:
    return {
        one.path: (one.content if isinstance(one.content, bytes) else one.content.read_bytes())
        .decode()
        for one in packed.items
        if not one.path.endswith(".safetensors")
    }  # fmt: skip


def evaluation(draft: Path, **changes: Any) -> dict[str, Any]:
    """What `dspark eval --json` prints of it."""
    figures = {"num_prompts": 8, "rounds": 90, "accepted_drafts": 1.5}
    one = {**figures, "accept_length": 2.5, "interval": [2.25, 2.75]}
    settings = {"block_size": 4, "num_draft_tokens": 4, "temperature": 0.0, "top_p": 1.0}
    return {
        "draft_sha256": weights_sha256(draft),
        **one,
        "lossless": True,
        "lossless_checks": {"greedy": {}, "sampled": {}},
        "sets": {"gsm8k": one, "humaneval": {**one, "accept_length": 3.0, "interval": None}},
        "settings": settings,
        "environment": {"gpus": ["H200"], "dspark": "0.1.0", "command": ["dspark", "eval", "/x/p"]},
        **changes,
    }


# --- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/me/run 1/checkpoint-5", "checkpoint-5"),
        ("data.shards=/data/my run/x", "data.shards=x"),
        ("--out=/data/x", "--out=x"),
        ("data.responses=[/a/b.jsonl,/c/*.jsonl]", "data.responses=[b.jsonl,*.jsonl]"),
        ("from '/a/b/c', and more", "from 'c', and more"),
        ("file:///a/b/c", "c"),
        ("C:\\Users\\me\\run", "run"),
        ("see \\\\host\\share\\run.", "see run."),
        ("node:/a/b", "node:b"),
        ("http://host:30000/v1", "http://host:30000/v1"),
        ("owner/name, ~/x, ./y, 1/2, a / b", "owner/name, ~/x, ./y, 1/2, a / b"),
        ("</think>", "</think>"),
    ],
)  # fmt: skip
def test_an_absolute_path_keeps_its_last_name_alone(text: str, shown: str) -> None:
    assert public(text) == shown
    assert public([{text: [text]}]) == [{shown: [shown]}]


def test_a_path_in_the_working_directory_becomes_relative_and_a_home_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert public(f"{tmp_path}/outputs/run") == "outputs/run"
    monkeypatch.setenv("HOME", "/home/alice")
    assert public("cd /home/alice") == "cd ~"


def test_prose_keeps_what_is_no_path_of_this_machine(tmp_path: Path) -> None:
    text = f"POST /v1/completions with {tmp_path}/x.json; /cluster/me/run; /nowhere/but/there"
    shown = "POST /v1/completions with x.json; run; /nowhere/but/there"
    assert public_text(text, {"/cluster/me/run"}) == shown


@pytest.mark.parametrize("card", [None, ALL])
def test_no_path_of_this_machine_is_uploaded(
    draft: Path, tmp_path: Path, card: Card | None
) -> None:
    place = str(tmp_path / "home")
    record = json.loads((draft / "provenance.json").read_text())
    edit(
        draft / "provenance.json",
        source=f"{place}/run/checkpoint-7",
        command=["dspark", "export", f"{place}/run", "--to", f"data.shards={place}/a b"],
        config={"data": {"responses": [f"{place}/rows.jsonl"]}},
        training={"dspark": "1", "command": ["train.py", f"train.output_dir={place}/run"]},
        target={**record["target"], "name": f"{place}/model"},
    )
    probe = {"prompt_ids": [[1]], "max_new_tokens": 1, "expected": 1.5}
    (draft / "check.json").write_text(json.dumps({**probe, "expected_from": f"{place}/run"}))
    edit(draft / "provenance.json", files=[*record["files"], "check.json"])
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = f"{place}/model"
    (draft / "config.json").write_text(json.dumps(config))
    readme = draft / "README.md"
    readme.write_text(f"{readme.read_text()}\nMade in {place}/run by POST /v1/completions.\n")
    before = {path.name: path.read_bytes() for path in draft.iterdir()}
    packed = package(draft, "me/draft", card)
    shown = texts(packed)
    assert [name for name, text in shown.items() if place in text or str(tmp_path) in text] == []
    told = json.loads(shown["provenance.json"])
    assert told["source"] == "checkpoint-7"
    assert told["command"][4] == "data.shards=a b"
    assert told["target"]["name"] == "owner/tiny"
    assert json.loads(shown["check.json"])["expected_from"] == "run"
    verifier = json.loads(shown["config.json"])["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "owner/tiny"
    if card is None:
        assert packed.card.endswith("Made in run by POST /v1/completions.\n")
    else:
        assert "- checkpoint: checkpoint-7" in packed.card
        assert "--target owner/tiny --draft draft" in packed.card
    assert {path.name: path.read_bytes() for path in draft.iterdir()} == before


def test_a_path_in_a_file_that_is_uploaded_as_it_is_stops_it(draft: Path, tmp_path: Path) -> None:
    edit(draft / "tokenizer_config.json", vocab_file=str(draft / "vocab.txt"))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json holds the path .*home/draft"):
        package(draft, "me/draft")
    edit(draft / "tokenizer_config.json", vocab_file="hf_" + "a1" * 17)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json holds what looks like a token"):
        package(draft, "me/draft")


# --- what is no draft to share -----------------------------------------------------------------


def rid(draft: Path, name: str) -> None:
    (draft / name).unlink()


def cut(draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def narrow(draft: Path) -> None:
    layers = json.loads((draft / "config.json").read_text())["transformer_layer_config"]
    edit(draft / "config.json", transformer_layer_config={**layers, "intermediate_size": 64})


def recard(old: str, new: str) -> Any:
    def change(draft: Path) -> None:
        path = draft / "README.md"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / "trainer_state.json").write_text("{}"), "run `dspark export` first"),
        (lambda d: rid(d, "config.json"), "has no config.json: it is not a draft"),
        (lambda d: rid(d, "provenance.json"), "no export has written it; `dspark convert` takes"),
        (lambda d: edit(d / "provenance.json", kind="x"), "is not that of an export"),
        (lambda d: edit(d / "provenance.json", files=["../x"]), "is not that of an export"),
        (lambda d: rid(d, "tokenizer.json"), "lacks tokenizer.json, which an export has written"),
        (lambda d: rid(d, "model.safetensors"), "lacks model.safetensors, which an export"),
        (cut, "cannot read the weights"),
        (narrow, "does not fit its config: .*gate_proj"),
        (lambda d: edit(d / "config.json", block_size=3), "speculative_tokens is 4"),
        (recard('license: "mit"\n', ""), "does not state license in its fields: .* --licence ID"),
        (recard('base_model: "owner/tiny"\n', ""), "does not state base_model"),
        (recard('"owner/tiny"', "tiny"), "base_model is 'tiny', which is no owner/name"),
        (recard('"owner/tiny"', "owner/other"), "the verifier owner/tiny, and the card .*/other"),
        (recard("---\n", ""), r"has no fields \(YAML"),
        (recard("license", "license: ["), r"has no fields \(YAML"),
    ],
)
def test_what_is_no_complete_draft_is_refused(draft: Path, change: Any, words: str) -> None:
    change(draft)
    with pytest.raises(CheckpointError, match=words) as caught:
        package(draft, "me/draft")
    assert "\n" not in str(caught.value)


def test_a_draft_without_a_card_gets_one_when_asked(draft: Path) -> None:
    record = json.loads((draft / "provenance.json").read_text())
    rid(draft, "README.md")
    assert "README.md" in record["files"]
    edit(draft / "provenance.json", card=None, target=None)
    with pytest.raises(CheckpointError, match=r"has no card \(README\.md\): --card writes one"):
        package(draft, "me/draft")
    with pytest.raises(ConfigError, match=r"name is not known, .* give it by --target"):
        package(draft, "me/draft", Card(licence="mit"))
    with pytest.raises(ConfigError, match=r"the card states no licence: .* --licence"):
        package(draft, "me/draft", Card(target="owner/tiny"))
    with pytest.raises(ConfigError, match="'mit or so' is no id of a licence"):
        package(draft, "me/draft", Card(target="owner/tiny", licence="MIT or so"))
    packed = package(draft, "me/draft", ALL)
    assert "| target fingerprint | not known |" in packed.card
    assert "README.md" in json.loads(texts(packed)["provenance.json"])["files"]


def test_a_directory_is_no_name_of_the_hub_unless_it_is_said_to_be(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="base_model is 'owner/tiny', which is no owner/name"):
        package(draft, "me/draft")
    with pytest.raises(ConfigError, match=r"name is 'owner/tiny', .* give it by --target"):
        package(draft, "me/draft", Card())
    assert package(draft, "me/draft", Card(target="owner/tiny"))


def test_what_no_export_has_written_stays_here(draft: Path) -> None:
    (draft / "id_rsa").write_text("secret")
    (draft / "notes").mkdir()
    packed = package(draft, "me/draft")
    assert packed.left_out == ("id_rsa", "notes")
    assert not {"id_rsa", "notes"} & {one.path for one in packed.items}


def test_a_draft_of_another_trainer_can_be_shared_once_converted(
    draft: Path, tmp_path: Path
) -> None:
    rid(draft, "provenance.json")
    rid(draft, "README.md")
    convert_draft(draft, tmp_path / "out", "sglang")
    packed = package(tmp_path / "out", "me/draft", Card(licence="mit"))
    assert "must be 5):" in packed.card
    assert "- converted from: draft" in packed.card


# --- evaluations -------------------------------------------------------------------------------


def test_the_table_is_that_of_the_evaluations(draft: Path, tmp_path: Path) -> None:
    greedy, sampled = tmp_path / "greedy.json", tmp_path / "sampled.txt"
    told = evaluation(draft)
    greedy.write_text(json.dumps(told))
    settings = {**told["settings"], "temperature": 0.7, "top_p": 0.95, "thinking": False}
    one = {"gsm8k": told["sets"]["gsm8k"]}
    again = evaluation(draft, sets=one, settings=settings, lossless=False)
    # the line behind the tables that the command prints
    sampled.write_text(f"| table |\n{json.dumps(again)}\n")
    # a conversion changes no weight, and so no accept length
    convert_draft(draft, tmp_path / "out", "hf", slim=True)
    card = Card(evaluations=[greedy, sampled])
    packed = package(tmp_path / "out", "me/draft", card)
    assert packed.card.count("| greedy |") == 3
    assert "| gsm8k | greedy | 2.500 | 2.250 to 2.750 | 1.500 | 8 | 90 |" in packed.card
    assert "| humaneval | greedy | 3.000 | - | 1.500 | 8 | 90 |" in packed.card
    assert "| all of these | greedy | 2.500 |" in packed.card
    assert "| gsm8k | temperature 0.7, top_p 0.95, no thinking | 2.500 |" in packed.card
    assert "draft: identical (greedy, sampled); NOT identical (greedy, sampled)" in packed.card
    assert "- command: `dspark eval p`" in packed.card
    assert "- hardware: H200" in packed.card
    results = json.loads(texts(packed)["provenance.json"])["card"]["results"]
    assert len(results) == 4


def test_an_evaluation_in_conditions_of_several_drafts_gives_all_rows_of_this_one(
    draft: Path, tmp_path: Path
) -> None:
    told = evaluation(draft)
    made = told.pop("environment")
    other = {**told, "draft_sha256": "f" * 64, "accept_length": 9.0, "sets": {"gsm8k": {}}}
    conditions = []
    for temperature, rule in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection")):
        settings = {**told["settings"], "temperature": temperature, "verification": rule}
        same = None if rule == "rejection" else True
        mine = {**told, "settings": settings, "lossless": same}
        conditions.append({"condition": rule, "drafts": {"other": other, "mine": mine}})
    path = tmp_path / "eval.json"
    path.write_text(json.dumps({"conditions": conditions, "environment": made}))
    card = package(draft, "me/draft", Card(evaluations=[path])).card
    for sampling in ("greedy", "temperature 1.0, top_p 1.0"):
        assert f"| gsm8k | {sampling} | 2.500 |" in card
    assert "| gsm8k | temperature 1.0, top_p 1.0, rejection verification | 2.500 |" in card
    assert "9.000" not in card
    assert "draft: identical (greedy, sampled)\n" in card
    assert "NOT identical" not in card
    assert "- hardware: H200" in card
    # of one condition, two drafts
    path.write_text(json.dumps({**conditions[0], "environment": made}))
    assert "| gsm8k | greedy | 2.500 |" in package(draft, "me/d", Card(evaluations=[path])).card


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"conditions": [{"drafts": {}}]}', "a condition has no drafts"),
        ('{"conditions": [5]}', "a condition has no drafts"),
        ('{"conditions": 5}', "it has no sets"),
        (None, "cannot read --eval .*: no such file"),
        ("{", "holds no JSON object"),
        ("[1]", "holds no JSON object"),
        ("{}", "it has no sets"),
        ({"draft_sha256": "f" * 64}, r"weights are f{16} \(draft_sha256\), and this one's are"),
        ({"draft_sha256": None}, r"weights are None \(draft_sha256\)"),
        ({"settings": {"block_size": 8}}, "block_size 8, and this one has 4"),
        ({"sets": {"a": {"accept_length": 2.0}}}, "set 'a' lacks"),
        ({"sets": {"a": []}}, "set 'a' lacks"),
    ],
)
def test_an_evaluation_of_something_else_is_refused(
    draft: Path, tmp_path: Path, text: Any, words: str
) -> None:
    path = tmp_path / "eval.json"
    if isinstance(text, dict):
        text = json.dumps(evaluation(draft, **text))
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        package(draft, "me/draft", Card(evaluations=[path]))
    assert isinstance(caught.value, DSparkError)
    assert "\n" not in str(caught.value)


def test_the_digest_is_of_the_trained_weights(target: Target, draft: Path, tmp_path: Path) -> None:
    export_draft(tiny_draft(target, seed=1), tmp_path / "other", target, check=False)
    assert weights_sha256(tmp_path / "other") != weights_sha256(draft)
