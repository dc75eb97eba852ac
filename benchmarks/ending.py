"""How a script here ends on a wrong use: with one sentence and exit code 2, as the commands do."""

import sys
from collections.abc import Callable

import torch

from dspark.errors import ConfigError, DSparkError

__all__ = ["needs_gpu", "run"]


def needs_gpu(script: str) -> None:
    """Refuse to go on without one.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"{script} needs a GPU, and torch finds none")


def run(main: Callable[[], None]) -> None:
    """``main``, whose errors are the user's."""
    try:
        main()
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
