"""One file of features: what safetensors reads is what we write, and the other way around."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.corpus.shard_file import MappedFile, checksum, write_file
from dspark.errors import CheckpointError

PARTS = {
    "b": [torch.arange(3), torch.arange(5)],
    "a": [torch.randn(2, 6).bfloat16(), torch.randn(4, 6).bfloat16()],
    "c": [torch.randn(7, 3).to(torch.float8_e4m3fn)],
    "d": [torch.empty(0, dtype=torch.uint8)],
    "e": [torch.tensor([1, 0, 1], dtype=torch.uint8)],
    "f": [torch.randn(3, 2)],
}


def written(path: Path) -> dict[str, torch.Tensor]:
    write_file(path, PARTS, {"ids": json.dumps(["x", 'of "crc32":"00000000" alone'])})
    return {name: torch.cat(parts) for name, parts in PARTS.items()}


def test_it_is_safetensors_in_both_directions(tmp_path: Path) -> None:
    expected = written(tmp_path / "ours")
    theirs = load_file(tmp_path / "ours")
    save_file(expected, tmp_path / "theirs", {"ids": "[]"})
    for path in ("ours", "theirs"):
        file = MappedFile(tmp_path / path)
        assert file.tensors.keys() == expected.keys() == theirs.keys()
        for name, value in expected.items():
            assert file.tensors[name].dtype == theirs[name].dtype == value.dtype
            for found in (file.tensors[name], theirs[name]):
                assert found.shape == value.shape
                assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
            assert file.tensors[name].data_ptr() % value.dtype.itemsize == 0
    assert json.loads(MappedFile(tmp_path / "ours").metadata["ids"])[0] == "x"


def test_tensors_are_the_files_own_pages_and_never_change_them(tmp_path: Path) -> None:
    written(tmp_path / "f")
    before = (tmp_path / "f").read_bytes()
    file = MappedFile(tmp_path / "f")
    file.tensors["a"].fill_(7)
    assert (tmp_path / "f").read_bytes() == before
    assert not torch.equal(MappedFile(tmp_path / "f").tensors["a"], file.tensors["a"])
    # views, not copies: what changes in the file shows
    file = MappedFile(tmp_path / "f")
    with (tmp_path / "f").open("r+b") as out:
        out.seek(len(before) - 3)
        out.write(b"\x09")
    assert int(file.tensors["e"][0]) == 9


def test_a_file_that_is_cut_is_a_sentence_before_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_file(path, {"a": [torch.zeros(100_000)]}, {})
    size = path.stat().st_size
    with pytest.raises(CheckpointError, match=f"has {size} bytes of {size + 1}"):
        MappedFile(path, size + 1)
    file = MappedFile(path, size)
    file.check()
    with path.open("r+b") as out:
        out.truncate(5000)
    with pytest.raises(CheckpointError, match=f"has 5000 bytes of {size}"):
        file.check()
    with pytest.raises(CheckpointError, match="a tensor lies outside the file"):
        MappedFile(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"\xff" * 64, "it would have"),
        ((20).to_bytes(8, "little") + b'{"a": {"dtype": "F9"' + b" " * 8, "header is damaged"),
        ((4).to_bytes(8, "little") + b"[12]", "no JSON object"),
        ((9).to_bytes(8, "little") + b'{"a": 1 }', "header is damaged"),
    ],
)
def test_damaged_headers_are_told(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"cannot be read: .*{reason}"):
        MappedFile(tmp_path / "f")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
    ],
)
def test_tensors_outside_the_file_or_of_another_size_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    text = json.dumps({"a": change}).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="header is damaged"):
        MappedFile(tmp_path / "f")


def test_the_checksum_sees_every_byte(tmp_path: Path) -> None:
    crc = write_file(tmp_path / "f", PARTS, {"format": "x"})
    assert checksum(tmp_path / "f") == crc == MappedFile(tmp_path / "f").metadata["crc32"]
    whole = (tmp_path / "f").read_bytes()
    place = whole.index(crc.encode())
    for number in range(len(whole)):
        damaged = bytearray(whole)
        damaged[number] ^= 0x10
        (tmp_path / "g").write_bytes(damaged)
        # the eight digits themselves are compared with the file's own or the manifest's
        assert (checksum(tmp_path / "g") != crc) == (number not in range(place, place + 8))
