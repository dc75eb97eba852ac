"""Texts to train a small target on from nothing: sampled conversations, plain rows, Python source.

A document is one text as the model will see it, under a key by which it is held out: answers to one
prompt, and pieces of one file, share theirs. Nothing is repeated: of equal texts the first is kept.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.corpus.files import expand, read_rows
from dspark.corpus.harvest import library_files
from dspark.corpus.messages import Message, conversation
from dspark.corpus.overlap import Overlap
from dspark.corpus.own_bpe import END, MARKS, START, chat_text
from dspark.corpus.rejects import Rejects, RowError

__all__ = ["Document", "Gathered", "gather", "library_documents", "row_documents"]


@dataclass(frozen=True)
class Document:
    """One text."""

    kind: str
    """chat, text or code."""
    key: str
    """What it shares with texts that must not stand on the other side of the held-out split."""
    text: str
    """With turn marks, if it is a conversation."""
    messages: Sequence[Message] = ()
    cut: bool = False
    """The last answer was stopped by length and has no end of turn."""


@dataclass
class Gathered:
    """Documents to train on, those held out, and what became of the others."""

    train: list[Document] = field(default_factory=list)
    heldout: list[Document] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, object]:
        """For the log and the card."""

        def of(documents: list[Document]) -> dict[str, dict[str, int]]:
            return {
                kind: {
                    "documents": sum(one.kind == kind for one in documents),
                    "bytes": sum(len(one.text.encode()) for one in documents if one.kind == kind),
                }
                for kind in sorted({one.kind for one in documents})
            }

        return {
            "train": of(self.train),
            "heldout": of(self.heldout),
            "dropped": dict(sorted(self.dropped.items())),
        }


def row_documents(sources: Sequence[str], rejects: Rejects) -> Iterator[Document]:
    """Rows with `messages` (what `dspark sample` writes) and rows with `text` of files and folders.

    Raises:
        DataError: a source cannot be read.
    """
    for source in expand(sources):
        for raw in read_rows(source, rejects):
            row = raw.value
            text = row.get("text")
            if isinstance(text, str) and text and not row.get("messages"):
                yield Document("text", text[:200], text)
                continue
            try:
                messages = conversation(row)
            except RowError as error:
                rejects.add(error, raw.place)
                continue
            cut = row.get("finish_reason") == "length"
            before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            key = "\n".join(str(message.get("content")) for message in before)
            yield Document("chat", key, chat_text(messages, cut=cut), messages, cut)


def library_documents(root: Path | None = None, size: int = 4096) -> Iterator[Document]:
    """This Python's library (or ``root``), tests left out, in pieces of whole paragraphs.

    A piece ends before the blank line with which it would exceed ``size`` characters; what has no
    blank line for so long is cut at a line, and of a longer line the rest is left out.
    """
    for name, source in library_files(root):
        for piece in _pieces(source, size):
            if text := piece.strip("\n"):
                yield Document("code", name, text + "\n")


def _pieces(source: str, size: int) -> Iterator[str]:
    held = ""
    for paragraph in source.split("\n\n"):
        for line in paragraph.split("\n") if len(paragraph) > size else (paragraph,):
            if held and len(held) + len(line) > size:
                yield held
                held = ""
            held += line[:size] + "\n"
        held += "\n"
    yield held


def gather(documents: Iterable[Document], excluded: Overlap, heldout_share: float) -> Gathered:
    """Split ``documents``; those that are empty, repeated, hold marks or share text with
    ``excluded`` are dropped and counted.
    """
    found = Gathered()
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.blake2b(document.text.encode(), digest_size=12).digest()
        inside = [str(message.get("content")) for message in document.messages] or [document.text]
        plain = "\n".join(inside)
        reason = None
        if not plain.strip():
            reason = "empty"
        elif digest in seen:
            reason = "repeated"
        elif any(mark in plain for mark in MARKS):
            reason = f"holds {START}, {END} or another mark"
        else:
            overlap = excluded.find(plain)
            reason = overlap and f"{overlap[0]} of {overlap[1]}"
        seen.add(digest)
        if reason:
            found.dropped[f"{document.kind}: {reason}"] += 1
        elif _place(document.key) < heldout_share:
            found.heldout.append(document)
        else:
            found.train.append(document)
    return found


def _place(key: str) -> float:
    """Where in [0, 1) the key falls."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
