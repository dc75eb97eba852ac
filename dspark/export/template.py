"""The chat template that a draft was trained under, against the one it is served under."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from dspark.export.place import PROVENANCE_NAME

__all__ = ["template_sha256", "warn_of_another"]

log = logging.getLogger(__name__)


def template_sha256(tokenizer: Any) -> str:
    """Of the template's text; of an empty one where the tokenizer has none."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return hashlib.sha256(template.encode()).hexdigest()


def warn_of_another(path: str | Path, tokenizer: Any) -> None:
    """Say so when the draft in ``path`` was exported with another template than ``tokenizer``'s.

    The output stays the target's own, but fewer drafted tokens are accepted in contexts that the
    draft was not trained in. Drafts of other trainers do not tell their template.
    """
    try:
        text = (Path(path).expanduser() / PROVENANCE_NAME).read_text(encoding="utf-8")
        theirs = json.loads(text)["template_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    ours = template_sha256(tokenizer)
    if isinstance(theirs, str) and theirs != ours:
        log.warning(
            "the draft %s was exported with another chat template (%s) than the target's (%s): "
            "fewer of its tokens will be accepted",
            path,
            theirs[:16],
            ours[:16],
        )
