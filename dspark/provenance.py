"""Where an artefact came from, and how files are written so that a kill leaves none half done.

Every artefact directory holds `provenance.json` beside its resolved settings.
"""

import errno
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import dspark

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is claimed
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check_writable",
    "claim",
    "claimed",
    "collect",
    "free_bytes",
    "making",
    "read_object",
    "save_tensors",
    "temporary_name",
    "versions",
    "write_json",
    "write_text",
]

LOCK = ".lock"
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "deepspeed", "triton")


def _git(*args: str) -> str | None:
    root = Path(dspark.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Of the packages that decide what is computed."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _program() -> str:
    """As a person would call it: `python -m dspark` is `dspark`."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def collect(**extra: Any) -> dict[str, Any]:
    """Versions, revision, command line and time, plus whatever the caller adds."""
    return {
        "dspark": dspark.__version__,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": [_program(), *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": versions(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **extra,
    }


def claim(file: IO[Any]) -> None:
    """Hold an open file for this process until it is closed, by whatever end of the process.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another run is writing there", file.name) from None
    except OSError:
        pass  # a file system without locks


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """`claim` a directory by a file in it that goes away again, like the directory if left empty.

    Raises:
        BlockingIOError: another process holds it.
    """
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    with making():
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / LOCK
        file = path.open("w")
    with file:
        claim(file)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                for one in made:
                    one.rmdir()


@contextmanager
def making() -> Iterator[None]:
    """Wraps the making of files and directories, so that a refused place is told from a lost file.

    /proc and its like say "not found" of what they do not let one make.

    Raises:
        PermissionError: in place of FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise PermissionError(errno.EACCES, "nothing can be made there", error.filename) from error


def free_bytes(path: Path) -> int:
    """Room on the disk that holds ``path``, or will hold it.

    Raises:
        PermissionError: the nearest directory that exists takes no files.
    """
    place = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only here", str(place))
    disk = shutil.disk_usage(place)
    # a file system without blocks is not full; /proc refuses by itself
    return disk.free if disk.total else sys.maxsize


@contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """Yield a neighbour of ``path`` to write to; rename it onto ``path`` if the block succeeds."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with making():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.touch()
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_object(path: Path, kind: type[Exception]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        kind: it cannot be read, or holds something else; one sentence that names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise kind(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise kind(f"cannot read {path}: it is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise kind(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def write_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` so that a reader sees the old file or the new one."""
    with temporary_name(path) as aside:
        aside.write_text(text, encoding="utf-8")


def check_writable(path: Path, setting: str, kind: type[Exception]) -> None:
    """Refuse a place to which `write_text` could not write; its directories are made.

    Raises:
        kind: names ``setting`` and ``path``.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory: name a file")
        with making():
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise kind(f"{setting} {path} cannot be written: {reason}") from None


def write_json(path: Path, value: Any) -> None:
    """`write_text` of ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file that others may read as far as the umask lets them.

    The library itself leaves it readable by its owner alone, so that a server under another
    account could not open an export.

    Raises:
        OSError: the disk refuses, for which the library has an error of its own.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
