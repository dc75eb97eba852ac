"""Text for the client: whole code points, stop strings, the same however the tokens are blocked."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from dspark.serving.stream import REPLACEMENT, Detokenizer, StopMatcher, TextStream
from dspark.testing import tiny_tokenizer

TEXT = "né 東京 👩‍🚀 a\u0301 שלום 🇯🇵!"  # two- to four-byte code points, joiners, combining marks


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Pieces with ▁ for spaces, bytes as <0xNN>, the leading space dropped: as Llama 2 decodes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"Helowrd", "▁H", "▁w", "el", "ll"]
    merges = [("▁", "H"), ("▁", "w"), ("e", "l"), ("l", "l")]
    inner = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token="</s>", unk_token="<unk>"
    )


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def pushed(tokenizer: Any, blocks: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(block) for block in blocks), detokenizer.flush()]


def random_blocks(ids: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    blocks, at = [], 0
    while at < len(ids):
        step = rng.randint(1, 5)
        blocks.append(ids[at : at + step])
        at += step
    return blocks


def splits(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        pieces = [text[0]]
        for cut, letter in zip(cuts, text[1:], strict=True):
            if cut:
                pieces.append(letter)
            else:
                pieces[-1] += letter
        yield pieces


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_like])
def test_pieces_add_up_and_no_code_point_is_ever_broken(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer(f"Hello world {TEXT} Hello", add_special_tokens=False)["input_ids"]
    expected = whole(tokenizer, ids)
    assert REPLACEMENT not in expected
    assert TEXT in expected
    rng = random.Random(0)
    blockings = [[ids[:at], ids[at:]] for at in range(1, len(ids))]
    blockings += [[[one] for one in ids], *(random_blocks(ids, rng) for _ in range(200))]
    for blocks in blockings:
        pieces = pushed(tokenizer, blocks)
        assert "".join(pieces) == expected
        assert REPLACEMENT not in "".join(pieces)


def test_a_code_point_is_sent_with_its_last_byte() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer("x🚀y", add_special_tokens=False)["input_ids"]
    assert [detokenizer.push([one]) for one in ids] == ["x", "", "", "", "🚀", "y"]


def test_random_bytes_decode_as_they_do_in_one_go() -> None:
    tokenizer = tiny_tokenizer()
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(256) for _ in range(rng.randint(1, 24))]
        for blocks in ([[one] for one in ids], random_blocks(ids, rng)):
            assert "".join(pushed(tokenizer, blocks)) == whole(tokenizer, ids)


def test_bytes_that_never_become_a_code_point_come_with_the_flush() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a🚀", add_special_tokens=False)["input_ids"][:-1]
    assert pushed(tokenizer, [ids]) == ["a", REPLACEMENT]


def test_a_replacement_character_of_the_model_itself_is_kept() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(f"a{REPLACEMENT}b{REPLACEMENT}", add_special_tokens=False)["input_ids"]
    assert "".join(pushed(tokenizer, [[one] for one in ids])) == f"a{REPLACEMENT}b{REPLACEMENT}"


def test_the_space_behind_a_special_token_is_kept() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer("Hello", add_special_tokens=False)["input_ids"]
    ids = [*ids, tokenizer.eos_token_id, *tokenizer("world", add_special_tokens=False)["input_ids"]]
    assert "".join(pushed(tokenizer, [[one] for one in ids])) == "Hello world"


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By the definition: grow the text letter by letter until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    "stops",
    [["abc"], ["ca", "abcab"], ["b", "abca"], ["aab", "ab"], ["xyz", "\n\n"], ["cabx", "abc "]],
)
def test_the_stop_found_does_not_depend_on_the_pieces(stops: list[str]) -> None:
    text = "aabcab\n\nxca"
    expected, matched = first_stop(text, stops)
    for pieces in splits(text):
        matcher = StopMatcher(stops)
        sent = ""
        for piece in pieces:
            sent += matcher.push(piece)
            assert expected.startswith(sent), "text was sent that belongs to a stop string"
        sent += matcher.flush()
        assert (sent, matcher.matched) == (expected, matched)


def test_only_text_that_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("theE") == "the"
    assert matcher.push("N") == ""
    assert matcher.push("x") == "ENx"


def test_nothing_comes_behind_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("aENDb") == "a"
    assert matcher.push("c") == ""
    assert matcher.flush() == ""


def test_tokens_count_through_the_one_that_completes_the_stop() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("one 🚀STOP two", add_special_tokens=False)["input_ids"]
    through = len(tokenizer("one 🚀STOP", add_special_tokens=False)["input_ids"])
    rng = random.Random(2)
    for blocks in [[ids], [[one] for one in ids], *(random_blocks(ids, rng) for _ in range(100))]:
        stream = TextStream(tokenizer, ["STOP", "wo"])
        text, count, stop = "", 0, None
        for block in blocks:
            piece = stream.push(block)
            text += piece.text
            count += piece.num_tokens
            if (stop := piece.stop) is not None:
                break
        assert (text, count, stop) == ("one 🚀", through, "STOP")


def test_a_stop_may_be_completed_by_the_flush() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a🚀", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(tokenizer, [REPLACEMENT])
    assert stream.push(ids).text == "a"
    assert stream.flush().stop == REPLACEMENT


def test_held_back_text_comes_with_the_flush() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, ["abcd"])
    assert stream.push(tokenizer("xabc", add_special_tokens=False)["input_ids"]).text == "x"
    assert stream.flush().text == "abc"
