"""What a draft was trained for, against what it is served with: chat template and target."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from dspark.export.place import PROVENANCE_NAME
from dspark.target import Target

__all__ = ["template_sha256", "warn_of_another", "warn_of_another_target"]

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


def warn_of_another_target(path: str | Path, fingerprint: object, target: Target) -> None:
    """Say so when what lies in ``path`` was made for weights with another fingerprint.

    Not refused: weights rounded to another dtype have another fingerprint too.
    """
    if not isinstance(fingerprint, str):
        return
    ours = target.fingerprint_like(fingerprint)
    if fingerprint != ours:
        log.warning(
            "%s was made for a target with the fingerprint %s, and '%s' has %s: if these are other "
            "weights, fewer drafted tokens will be accepted",
            path,
            fingerprint,
            target.name,
            ours,
        )
