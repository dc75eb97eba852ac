"""The `dspark` command. Each stage is a subcommand and is imported only when it is asked for.

Exit codes: 0 done, 1 a run or a check failed, 2 wrong use, 75 a training run was told to stop and
has saved (run it again to go on), 130 interrupted.
"""

import os
import signal
import sys
from typing import Any

import typer
from pydantic import ValidationError

from dspark.cli import corpus, distill, evaluate, hub, models, serve
from dspark.cli.common import set_up
from dspark.errors import DSparkError, unwritable, wanted

__all__ = ["app", "main"]

_INTERRUPTED = 130
_GO_ON = ("prepare", "sample", "capture", "train", "demo")
"""Commands that keep what was done; `eval` does with --out."""
# typer's own copy of click's class in new releases, click's in old ones
_UsageError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="dspark",
    help="Sample a target LLM, distil a DSpark block draft from it, serve both.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
corpus.register(app)
distill.register(app)
hub.register(app)
evaluate.register(app)
serve.register(app)
models.register(app)


def main() -> None:
    """Run the command line and exit with its code; users' mistakes end in one sentence."""
    set_up()
    at_once = False
    try:
        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            # new releases of typer catch the signal themselves
            _interrupted()
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        code, at_once = error.exit_code, error.at_once
    except _UsageError as error:
        cause = error.__cause__
        if isinstance(cause, ValidationError) and cause.errors()[0]["type"] != "value_error":
            # new releases of typer check ranges by pydantic and do not say what was given
            error.message = f"{wanted(cause.errors()[0])}, got {cause.errors()[0]['input']}"
        error.show(file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _interrupted()
        code = _INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left, which is its right
        sys.stderr.close()
        code = 0
    except OSError as error:
        refused = unwritable(error)
        if refused is None:
            raise
        print(f"error: {refused}", file=sys.stderr)
        code = refused.exit_code
    _forgive_log()
    if at_once:
        os._exit(code)
    sys.exit(code)


def _interrupted() -> None:
    """Say what the same command would do, and take a second Ctrl-C as an end at once.

    Python would be aborted by it: the threads that it waits for at its end are then taken for done.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    kept = name in _GO_ON or (name == "eval" and any(one.startswith("--out") for one in sys.argv))
    again = "goes on where this one stopped" if kept else "starts anew"
    print(f"interrupted; the same command {again}", file=sys.stderr)


def _forgive_log() -> None:
    """A log that cannot be written is no failure: Python would end with 120 at its last flush."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except (ValueError, AttributeError):
        pass  # closed, above or before we began
