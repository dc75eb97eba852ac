"""Absolute paths of the machine, which nobody else can follow and which name its users."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

__all__ = ["absolute_paths", "is_absolute", "local_text", "public", "public_text"]

# a slash behind any of these is a URL's, a fraction's, a closing tag's or a relative path's
_ABSOLUTE = re.compile(
    r"(?:\bfile://(?=/)|(?<![\w.~/\\\]})<$-]))(?:/(?=[\w.])|[A-Za-z]:\\|\\\\(?=\w))[^\s\"'`,;:()\[\]{}<>|]*"
)


def is_absolute(text: str) -> bool:
    """Is the whole of it a path, in the manner of any system?"""
    return "\n" not in text and (
        (text.startswith(("/", "file:///")) and not text.startswith("//"))
        or PureWindowsPath(text).is_absolute()
    )


def _public_path(path: str) -> str:
    """Relative to the working directory where it lies in it, else its last name."""
    path = path.removeprefix("file://")
    if not path.startswith("/"):
        return PureWindowsPath(path).name
    here = Path.cwd()
    if here != Path("/") and Path(path).is_relative_to(here):
        return str(Path(path).relative_to(here))
    # the last name of somebody's home is that of somebody
    return "~" if Path(path) == Path.home() else PurePosixPath(path).name


def _in_text(text: str) -> str:
    return _ABSOLUTE.sub(lambda found: _public_path(found[0]), text)


def _in_string(text: str) -> str:
    name, equals, value = text.partition("=")
    # an argument such as data.shards=/a b/c is one path, blanks included
    if is_absolute(text):
        return _public_path(text)
    if equals and re.fullmatch(r"[\w.-]+", name) and is_absolute(value):
        return f"{name}={_public_path(value)}"
    return _in_text(text)


def public(value: Any) -> Any:
    """A JSON value without absolute paths."""
    if isinstance(value, str):
        return _in_string(value)
    if isinstance(value, list):
        return [public(one) for one in value]
    if isinstance(value, dict):
        return {_in_string(key): public(one) for key, one in value.items()}
    return value


def absolute_paths(value: Any) -> set[str]:
    """Those of a JSON value that are deep enough to be no word of a vocabulary."""
    return {path for path in _found(value) if len(PurePosixPath(path).parts) > 2}


def _found(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from ([value] if is_absolute(value) else _ABSOLUTE.findall(value))
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _found(one)


def public_text(text: str, known: set[str]) -> str:
    """Prose without ``known`` paths and without any that begins as a path of this machine does.

    Prose also speaks of routes of a server and of switches of a template, which begin otherwise.
    """
    for path in sorted(known, key=len, reverse=True):
        text = text.replace(path, _public_path(path))
    return _ABSOLUTE.sub(
        lambda found: _public_path(found[0]) if _is_here(found[0]) else found[0], text
    )


def _is_here(path: str) -> bool:
    parts = PurePosixPath(path.removeprefix("file://")).parts
    return not path.startswith("/") or (len(parts) > 2 and os.path.isdir(f"/{parts[1]}"))


def local_text(text: str, known: set[str]) -> str | None:
    """The first of ``known`` paths in a text, as it is or as JSON spells it."""
    for path in sorted(known):
        if path in text or json.dumps(path)[1:-1] in text:
            return path
    return None
