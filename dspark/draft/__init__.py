"""The DSpark draft: a few decoder layers that fill a block of slots from target features."""

from dspark.draft.anchors import Blocks, sample_blocks
from dspark.draft.config import DSparkConfig
from dspark.draft.model import DraftContext, DSparkDraftModel

__all__ = ["Blocks", "DSparkConfig", "DSparkDraftModel", "DraftContext", "sample_blocks"]
