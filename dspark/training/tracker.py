"""Figures to Weights & Biases, when asked, by accelerate's tracker. `metrics.jsonl` is written in
any case.

Keys and modes come from wandb's own environment (WANDB_API_KEY, WANDB_MODE=offline, …) and are
never read or written here. wandb's files go to `output_dir/wandb`.
"""

import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate.tracking import WandBTracker
from pydantic import ValidationError

from dspark import provenance
from dspark.config import Config, TrackerSettings
from dspark.errors import ConfigError, DSparkError, MissingPackageError, RunError

__all__ = ["Tracker", "check_installed", "check_server"]

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_ONLINE = ("online", "run", "shared")
_CONNECT_S = 5.0
_REMEDY = "(WANDB_MODE=offline works without a network, train.tracker.kind=none without wandb)"


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


def check_server(settings: TrackerSettings) -> None:
    """Refuse an online tracker without server or key, before anything is loaded.

    wandb itself would try for minutes to reach its server, and ask after the key only then.

    Raises:
        ConfigError: a variable of wandb's environment holds what it does not know.
        RunError: the server cannot be reached, or no key is set and nobody is there to be asked.
    """
    if settings.kind == "none":
        return
    import wandb

    try:
        found = wandb.setup().settings
    except (wandb.Error, ValueError) as error:
        raise _refused(error) from error
    if found.mode not in _ONLINE:
        return
    if not any(os.environ.get(name) for name in _PROXIES):
        _connect(found.base_url)
    try:
        wandb.login()
    except (wandb.Error, OSError) as error:
        raise _refused(error) from error


class Tracker:
    """One run at the tracker; does nothing for ``kind: none``."""

    def __init__(self, config: Config, output_dir: Path, *, run_id: str | None) -> None:
        """Start a run, or continue ``run_id``.

        Raises:
            ConfigError: it knows no such tag.
            RunError: the tracker refuses (no key, no network).
        """
        self._tracker: Any = None
        settings = config.train.tracker
        if settings.kind == "none":
            return
        import wandb

        tracker = WandBTracker(
            settings.project,
            name=settings.name,
            entity=settings.entity,
            tags=list(settings.tags) or None,
            dir=str(output_dir),
            id=run_id,
            resume="allow",
        )
        try:
            tracker.start()
        except (wandb.Error, ValueError) as error:
            raise _refused(error) from error
        self._tracker = tracker
        # not with the start: there a value that a resumed run changes would be refused
        tracker.store_init_configuration(
            {**config.model_dump(mode="json"), "provenance": provenance.collect()}
        )
        tracker.tracker.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str | None:
        """To continue the same curve after a resume."""
        return None if self._tracker is None else str(self._tracker.tracker.id)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log one line."""
        if self._tracker is not None:
            # no step=: after a resume wandb drops steps at or below the last it saw
            self._tracker.log({"step": step, **figures})

    def close(self, exit_code: int = 0) -> None:
        """Flush and close, also when the run failed."""
        if self._tracker is not None:
            # accelerate's `finish` would call every run a success
            self._tracker.tracker.finish(exit_code=exit_code)


def _connect(url: str) -> None:
    place = urlsplit(url)
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((place.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise RunError(
            f"wandb's server {place.hostname}:{port} cannot be reached: "
            f"{error.strerror or error} {_REMEDY}"
        ) from error


def _refused(error: Exception) -> DSparkError:
    if isinstance(error, ValidationError):
        # not with the value, which may be a key
        problem = error.errors(include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        return ConfigError(
            f"wandb refuses {where} (environment or train.tracker): {problem['msg']}"
        )
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RunError(f"wandb does not start: {said} {_REMEDY}")
