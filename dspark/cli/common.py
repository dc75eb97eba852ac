"""What all subcommands share: logging, reading settings, the JSON line."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dspark.config import Config

__all__ = [
    "ConfigFile",
    "Json",
    "Overrides",
    "finish",
    "override",
    "read_config",
    "set_up",
]

Json = Annotated[
    bool, typer.Option("--json", help="Put one JSON object on the last line of stdout.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML settings; see configs/.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Override settings.")
]


def set_up() -> None:
    """Logs to stderr; libraries' chatter off unless DSPARK_LOG asks for more."""
    level = os.environ.get("DSPARK_LOG", "INFO").upper()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("dspark").setLevel(level if level in logging.getLevelNamesMapping() else 20)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated.*")


def override(path: str, value: Any) -> list[str]:
    """An option of the command line as an override; nothing when it was not given."""
    return [] if value is None else [f"{path}={json.dumps(value)}"]


def read_config(
    path: Path | None, overrides: Sequence[str] | None, *options: list[str]
) -> "Config":
    """Settings from file, then overrides, then the command's own options.

    Raises:
        ConfigError: a key or value is wrong.
    """
    from dspark import config_io
    from dspark.progress import quiet_transformers

    quiet_transformers()
    return config_io.load(path, [*(overrides or ()), *(one for group in options for one in group)])


def finish(report: dict[str, Any], as_json: bool) -> None:
    """The JSON line, when it was asked for."""
    if as_json:
        print(json.dumps(report, ensure_ascii=False), flush=True)
