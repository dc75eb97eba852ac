"""Sources of rows: JSONL, JSON and Parquet files, globs, folders, data sets of the hub.

Everything that is wrong with one line is that line's problem: it is counted and reading goes on.
Lines are split at LF only (U+2028 inside a string is text); CR before it, a byte-order mark and
blank lines are ignored, the last without being counted as rows.
"""

import glob
import gzip
import importlib.util
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dspark.corpus.nested import MOST, too_deep
from dspark.corpus.presets import HubSource, hub_sources, unknown
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.errors import DataError, MissingPackageError

__all__ = ["RawRow", "expand", "read_rows"]

_LINES = (".jsonl", ".jsonl.gz", ".ndjson")
_SUFFIXES = (*_LINES, ".json", ".json.gz", ".parquet")
_PREPARED = "prepare.json"
_DEEP = f"nested too deeply (more than {MOST} levels)"
_ROWS = "a .json must hold an array of rows, or one row a line"


@dataclass(frozen=True)
class RawRow:
    """A parsed row and where it stands."""

    place: str
    """`file:line` (rows of Parquet and hub sets are numbered from 1 too)."""
    source: str
    value: dict[str, Any]


def expand(sources: Sequence[str], *, heldout: bool = False) -> list[str]:
    """Files (as paths) and hub ids (as `hub://owner/name:split`) behind ``sources``, in order.

    A file or folder comes before a set of the same name (`presets`). Folders are searched
    recursively; what a glob or folder finds is sorted by name. A sampler's list of failed rows
    (`.errors.jsonl`) and the report of `dspark prepare` are passed over unless they are named; so
    is what that command held out, where a folder is searched and ``heldout`` does not ask for it.

    Raises:
        DataError: no source is given, one does not exist, or one holds no readable file.
    """
    if not sources:
        raise DataError("no data source was given; name a file, a glob, a folder or a hub id")
    found: list[str] = []
    for source in sources:
        try:
            path = Path(source).expanduser()
            there = path.exists()
        except (OSError, RuntimeError, ValueError):  # a name too long, or of no user
            path, there = Path(source), False
        if source and there and path.is_dir():
            inside = sorted(p for p in path.rglob("*") if _is_data(p))
            if not heldout:
                inside = [p for p in inside if p.name != "heldout.jsonl" or not _is_prepared(p)]
            if not inside:
                raise DataError(f"folder '{source}' holds no {', '.join(_SUFFIXES)} file")
            found += map(str, inside)
        elif source and there:
            if not _readable(path):
                raise DataError(
                    f"cannot tell the format of '{source}': it should end in {', '.join(_SUFFIXES)}"
                )
            found.append(str(path))
        elif glob.has_magic(source):
            matches = sorted(p for p in glob.glob(str(path), recursive=True) if _is_data(Path(p)))
            if not matches:
                raise DataError(f"glob '{source}' matches no {', '.join(_SUFFIXES)} file")
            found += matches
        elif not source.endswith(_SUFFIXES) and (sets := hub_sources(source)):
            found += map(str, sets)
        else:
            shown = source if len(source) < 200 else source[:200] + "…"
            raise DataError(
                f"data source '{shown}' is neither an existing file or folder nor a hub id "
                f"like owner/name or owner/name:split{unknown(source)}"
            )
    return list(dict.fromkeys(found))


def read_rows(source: str, rejects: Rejects) -> Iterator[RawRow]:
    """Rows of one item of `expand`; every row read is counted in ``rejects``, bad ones as such.

    Raises:
        DataError: the source as a whole cannot be read.
        MissingPackageError: Parquet or a hub id without `dspark[data]`.
    """
    if source.startswith("hub://"):
        pairs = _hub(source)
    elif source.endswith(".parquet"):
        pairs = _parquet(source)
    else:
        pairs = _text(source)
    for number, value in pairs:
        rejects.read += 1
        place = f"{source.removeprefix('hub://')}:{number}"
        try:
            if isinstance(value, RowError):
                raise value
            row = value if not isinstance(value, bytes) else _parse(value)
            if not (isinstance(value, bytes) and _flat(value)) and too_deep(row):
                raise RowError(Reason.INVALID_JSON, _DEEP)
            if not isinstance(row, dict):
                raise RowError(Reason.NOT_AN_OBJECT, f"a {type(row).__name__}")
        except RowError as error:
            rejects.add(error, place)
            continue
        yield RawRow(place, source, row)


def _is_data(path: Path) -> bool:
    if not _readable(path) or path.name.endswith(".errors.jsonl"):
        return False
    return path.name != _PREPARED or not _is_prepared(path)


def _is_prepared(path: Path) -> bool:
    """Whether the file stands in a folder that `dspark prepare` made."""
    try:
        with path.with_name(_PREPARED).open("rb") as file:
            return b'"dspark.prepare/' in file.read(200)
    except OSError:
        return False


def _readable(path: Path) -> bool:
    return path.is_file() and path.name.endswith(_SUFFIXES)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(Reason.INVALID_UTF8, f"byte {error.start}") from None
    except RecursionError:
        raise RowError(Reason.INVALID_JSON, _DEEP) from None
    except ValueError as error:
        raise RowError(Reason.INVALID_JSON, str(error)) from None


def _flat(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") <= MOST


def _text(source: str) -> Iterator[tuple[int, Any]]:
    try:
        with gzip.open(source) if source.endswith(".gz") else open(source, "rb") as file:
            head = file.read(4096)
            # JSON holds no zero bytes, and wider encodings hold one in every ASCII character
            if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:4]:
                raise DataError(
                    f"'{source}' is written in UTF-16 or UTF-32; the encoding must be UTF-8"
                )
            if source.endswith(_LINES) or not _is_array(head):
                file.seek(0)
                if not source.endswith(_LINES):
                    _refuse_one_object(source, file)
                for number, line in enumerate(file, 1):
                    text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    if text.strip():
                        yield number, text
                return
            rows = _parse(head.removeprefix(b"\xef\xbb\xbf") + file.read())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read '{source}': {error}") from error
    except RowError as error:
        raise DataError(f"'{source}' is not valid JSON: {error.detail}") from None
    yield from enumerate(rows, 1)


def _refuse_one_object(source: str, file: "IO[bytes] | gzip.GzipFile") -> None:
    """Leaves ``file`` at its start; it is read whole only if its first line is no row."""
    line = next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:
        json.loads(line.removeprefix(b"\xef\xbb\xbf") or b"0")
    except (ValueError, RecursionError):
        file.seek(0)
        try:
            json.loads(file.read().removeprefix(b"\xef\xbb\xbf"))
        except (ValueError, RecursionError):
            pass  # lines, of which the first is damaged
        else:
            raise DataError(f"'{source}' is one object over several lines; {_ROWS}") from None
    file.seek(0)


def _is_array(head: bytes) -> bool:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _parquet(source: str) -> Iterator[tuple[int, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError(f"reading '{source}' needs pyarrow: pip install 'dspark[data]'")
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=1024):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError, pyarrow.ArrowException):
                    rows = [_readable_fields(batch, index) for index in range(len(batch))]
                for row in rows:
                    number += 1
                    if isinstance(row, dict):
                        # a column exists for every row; an absent field is a null
                        row = {key: value for key, value in row.items() if value is not None}
                    yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read '{source}': {error}") from error


def _readable_fields(batch: Any, index: int) -> "dict[str, Any] | RowError":
    """A row of a batch that cannot be read at once: without dates that Python has no value for."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except UnicodeDecodeError as error:
            return RowError(Reason.INVALID_UTF8, f"column '{name}', byte {error.start}")
        except Exception:  # whatever dates and times raise; no row needs one
            continue
    return row


@contextmanager
def _no_retries_told() -> Iterator[None]:
    """The hub client logs each attempt, twice; what comes of them is said in one sentence."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _hub(source: str) -> Iterator[tuple[int, Any]]:
    hub = HubSource.parse(source)
    assert hub is not None, source
    if importlib.util.find_spec("datasets") is None:
        raise MissingPackageError(
            f"reading '{hub.name}' from the hub needs datasets: pip install 'dspark[data]'"
        )
    import datasets

    try:
        with _no_retries_told():
            rows = datasets.load_dataset(hub.name, streaming=True, **hub.options())
        for number, row in enumerate(rows, 1):
            yield number, hub.shaped(row)
    except Exception as error:  # the hub client raises a dozen unrelated types
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"'{hub.name}' is no file or folder here, and as a data set of the hub "
            f"(split {hub.split}) it cannot be read: {first}; without a network, give a file of "
            'its prompts, one {"text": ...} a line'
        ) from error
