"""Texts for a target of one's own: what is kept, what is held out, how it becomes tokens."""

import json
from pathlib import Path

import pytest
import torch

from dspark.corpus.overlap import Overlap
from dspark.corpus.own_bpe import MARKS, chat_text, train_tokenizer
from dspark.corpus.pretraining import Document, gather, library_documents, row_documents
from dspark.corpus.rejects import Rejects
from dspark.corpus.token_stream import TokenStream
from dspark.errors import ConfigError, DataError

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"


def rows_of(path: Path, rows: list[object]) -> list[Document]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(row_documents([str(path)], Rejects()))


def test_rows_become_conversations_and_plain_texts(tmp_path: Path) -> None:
    rows: list[object] = [
        {"messages": TURNS, "finish_reason": "stop", "input_ids": [1, 2]},
        {"messages": TURNS, "finish_reason": "length"},
        {"text": "Once upon a time"},
        {"nothing": 1},
    ]
    chat, cut, text = rows_of(tmp_path / "rows.jsonl", rows)
    whole = SYSTEM + "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello."
    assert chat.text == whole + "<|im_end|>\n"
    assert (cut.text, cut.cut) == (whole, True)
    assert chat.key == cut.key == "Hi"
    assert (text.kind, text.text) == ("text", "Once upon a time")


def test_evaluation_text_repeats_marks_and_nothing_are_dropped_and_counted() -> None:
    texts = [f"A story. {WORDS}.", "the same", "the same", "a <|im_end|> inside", "  \n"]
    found = gather(
        (Document("text", text, text) for text in texts), Overlap([f"Count: {WORDS}!"]), 0.0
    )
    assert [one.text for one in found.train] == ["the same"]
    assert sum(found.dropped.values()) == 4
    assert found.dropped["text: 13-gram of excluded"] == 1
    assert found.dropped["text: repeated"] == found.dropped["text: empty"] == 1
    assert found.counts()["train"] == {"text": {"documents": 1, "bytes": 8}}


def test_what_shares_a_key_stands_on_one_side() -> None:
    documents = [Document("text", f"key {n % 200}", f"text {n}") for n in range(800)]
    found = gather(documents, Overlap(), 0.1)
    out = {one.key for one in found.heldout}
    assert 5 < len(out) < 40
    assert len(found.heldout) == 4 * len(out)
    assert out.isdisjoint(one.key for one in found.train)


def test_pieces_of_a_library_are_its_files_in_order_without_tests(tmp_path: Path) -> None:
    source = "".join(f"def f{n}():\n    return {n}\n\n\n" for n in range(60)) + "x = 1\n" * 400
    (tmp_path / "test").mkdir()
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "test" / "b.py").write_text("never")
    pieces = list(library_documents(tmp_path, 500))
    assert {one.key for one in pieces} == {"a.py"}
    assert "".join(one.text for one in pieces).split() == source.split()
    assert max(len(one.text) for one in pieces) <= 500
    assert pieces[1].text.startswith("def f")


def test_a_tokenizer_of_the_same_text_is_the_same_and_renders_what_is_trained() -> None:
    texts = [f"{WORDS} 2026 {n}\n    return x_{n}" for n in range(200)]
    first, second = train_tokenizer(texts, 300), train_tokenizer(iter(texts), 300)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert first.convert_tokens_to_ids(list(MARKS)) == [0, 1, 2, 3]
    assert (first.eos_token_id, first.pad_token_id, len(first)) == (2, 0, 300)
    assert first.apply_chat_template(TURNS, tokenize=False) == chat_text(TURNS)
    prompt = first.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert chat_text(TURNS).startswith(prompt)
    own = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert first.apply_chat_template(own, tokenize=False) == chat_text(own)
    assert first.decode(first.encode("täglich 12 ≠ 3\n\tx")) == "täglich 12 ≠ 3\n\tx"
    assert len(first.encode("2026")) == 4


@pytest.mark.parametrize(
    ("size", "told"), [(200, "must be above 260"), (4000, "needs more text: it holds")]
)
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(size: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train_tokenizer([WORDS], size)


def test_a_pass_holds_every_token_once_and_teaches_no_beginning() -> None:
    documents = [list(range(10 * n, 10 * n + 5 + n % 4)) for n in range(40)]
    stream = TokenStream(documents)
    assert stream.num_tokens == sum(map(len, documents)) == 260
    batches = stream.batches(4, 16, 0, torch.device("cpu"))
    one_pass = [next(batches) for _ in range(4)]  # 16 rows of 16: 256 of 258
    read = torch.cat([ids[:, :16].flatten() for ids, _ in one_pass]).tolist()
    assert len(set(read)) == len(read) == 256
    for ids, labels in one_pass:
        assert ids.shape == labels.shape == (4, 18)
        assert torch.equal(ids[:-1, 16:], ids[1:, :2])
        begins = ids % 10 == 0
        assert torch.equal(labels == -100, begins)
        assert torch.equal(labels[~begins], ids[~begins])
    assert next(batches)[0].tolist() != one_pass[0][0].tolist()
    with pytest.raises(DataError, match="no batch of 64 rows"):
        next(stream.batches(64, 16, 0, torch.device("cpu")))
