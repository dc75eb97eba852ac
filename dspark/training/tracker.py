"""Figures to Weights & Biases, when asked. `metrics.jsonl` is written in any case.

Keys and modes come from wandb's own environment (WANDB_API_KEY, WANDB_MODE=offline, …) and are
never read or written here.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark import provenance
from dspark.config import Config, TrackerSettings
from dspark.errors import MissingPackageError, RunError

__all__ = ["Tracker", "check_installed"]


def check_installed(settings: TrackerSettings) -> None:
    """Refuse a tracker whose package is missing, before anything is loaded.

    Raises:
        MissingPackageError: names the extra that brings it.
    """
    if settings.kind == "wandb" and importlib.util.find_spec("wandb") is None:
        raise MissingPackageError(
            "train.tracker.kind wandb needs the package wandb: pip install 'dspark[train]' "
            "(or set train.tracker.kind=none; metrics.jsonl is always written)"
        )


class Tracker:
    """One run at the tracker; does nothing for ``kind: none``."""

    def __init__(self, config: Config, output_dir: Path, *, run_id: str | None) -> None:
        """Start a run, or continue ``run_id``.

        Raises:
            RunError: the tracker refuses (no key, no network).
        """
        self._run: Any = None
        settings = config.train.tracker
        if settings.kind == "none":
            return
        import wandb

        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name,
                entity=settings.entity,
                tags=list(settings.tags) or None,
                dir=str(output_dir),
                id=run_id,
                resume="allow",
                config={**config.model_dump(mode="json"), "provenance": provenance.collect()},
            )
        except wandb.Error as error:
            raise RunError(
                f"wandb does not start: {str(error).splitlines()[0]} (WANDB_MODE=offline works "
                "without a network)"
            ) from error
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str | None:
        """To continue the same curve after a resume."""
        return None if self._run is None else str(self._run.id)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log one line."""
        if self._run is not None:
            # no step=: after a resume wandb drops steps at or below the last it saw
            self._run.log({"step": step, **figures})

    def close(self, exit_code: int = 0) -> None:
        """Flush and close, also when the run failed."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
