"""Progress with an ETA, on stderr, for anything that takes longer than about two seconds."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Bar", "quiet_transformers", "track"]

T = TypeVar("T")


class Bar:
    """A progress bar as a context manager; silent when stderr is not a terminal."""

    def __init__(self, description: str, total: int | None, *, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(description, total=total, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def advance(self, n: int = 1, **fields: str) -> None:
        """Move on by ``n``; ``fields`` are shown behind the bar as ``name value``."""
        note = " ".join(f"{name} {value}" for name, value in fields.items())
        if note:
            self._progress.update(self._task, advance=n, note=note)
        else:
            self._progress.update(self._task, advance=n)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield ``items`` while a `Bar` advances; ``total`` is taken from a sized iterable."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Bar(description, total) as bar:
        for item in items:
            yield item
            bar.advance()


def quiet_transformers() -> None:
    """No progress bars of the library's own between ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
