"""Where the lines of figures go: `metrics.jsonl` and, when asked, a tracker. Rank 0 only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from dspark.config import Config
from dspark.training.monitor import MetricsFile
from dspark.training.tracker import Tracker

__all__ = ["Journal"]


class Journal:
    """Context manager; in processes that are not ``active`` it does nothing."""

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        *,
        last_step: int,
        tracker_run: str | None,
        active: bool,
    ) -> None:
        self.tracker_run = tracker_run
        self._file: MetricsFile | None = None
        self._tracker: Tracker | None = None
        if active:
            self._file = MetricsFile(output_dir / "metrics.jsonl", last_step=last_step)
            self._tracker = Tracker(config, output_dir, run_id=tracker_run)
            self.tracker_run = self._tracker.run_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._tracker is not None:
            self._tracker.close(exit_code=0 if kind is None else 1)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Append one line everywhere."""
        if self._file is not None and self._tracker is not None:
            self._file.write(step, figures)
            self._tracker.write(step, figures)
