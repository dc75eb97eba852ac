"""Errors that a user can cause, each one clear sentence, and the exit code it leads to.

Exit codes of every command: 0 done, 1 a run or a check failed, 2 wrong use (settings, files,
checkpoints that do not fit). A training that a signal stopped after saving ends with 75, anything
that Ctrl-C stopped with 130. Anything else that escapes is a bug and shows its traceback.
"""

import difflib
import errno
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DSparkError",
    "DataError",
    "HubError",
    "MissingPackageError",
    "RunError",
    "TargetError",
    "nearest",
    "unwritable",
    "wanted",
]


class DSparkError(Exception):
    """Base of all errors whose message is meant for the user.

    ``exit_code`` is the process's; ``at_once``: it has put everything away and ends as it stands.
    """

    exit_code = 2
    at_once = False


class ConfigError(DSparkError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(DSparkError):
    """A data file cannot be used at all (single bad rows are counted, not raised)."""


class TargetError(DSparkError):
    """A target cannot be found, loaded or used for what was asked."""


class CheckpointError(DSparkError):
    """A draft or training checkpoint is missing, incomplete or does not fit."""


class HubError(DSparkError):
    """A hub refuses what was asked of it, or cannot be reached."""


class MissingPackageError(DSparkError):
    """An optional package is needed for what was asked; the message names the extra."""


class RunError(DSparkError):
    """The settings were right but the run or the check failed."""

    exit_code = 1


def nearest(name: str, known: Iterable[str], section: str = "") -> str:
    """`` (did you mean 'x'?)`` for the closest of ``known``, or an empty string.

    ``section`` (`train.`) is shown in front of it.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{section}{close[0]}'?)" if close else ""


_WANTED = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must match {pattern}",
    "string_type": "must be a string",
    "too_short": "must have {min_length} or more entries",
}


def wanted(problem: Mapping[str, Any]) -> str:
    """`must be …` for an entry of pydantic's `errors()`, whose own words are about Python."""
    if problem["type"] in _WANTED:
        return _WANTED[problem["type"]].format_map(problem.get("ctx", {}))
    said: str = problem["msg"]
    return said[:1].lower() + said[1:]


_PLACE = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG,
)  # fmt: skip
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritable(error: OSError) -> DSparkError | None:
    """A place that a user gave and that takes no files; None for any other fault.

    Commands turn what escapes into a sentence by this, so that no stage needs to know every place
    at which a disk may refuse.
    """
    where = f" {error.filename}" if error.filename else ""
    reason = (error.strerror or str(error)).lower()
    if error.errno in _PLACE:
        return ConfigError(f"cannot write{where}: {reason}; give a place that can be written")
    if error.errno in _HELD and error.filename:
        return ConfigError(f"cannot write{where}: {reason}; wait for its end or give another place")
    if error.errno in _FULL:
        return RunError(f"cannot write{where}: {reason}")
    return None
