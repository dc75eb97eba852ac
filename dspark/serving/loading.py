"""From settings to a model that decodes: what `dspark serve` has its engine process do."""

from collections.abc import Set
from itertools import islice

from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, Draft, SamplingParams, nextn_draft, nextn_proposals
from dspark.export.load import load_draft
from dspark.serving.choice import choose, foresee
from dspark.serving.engine import LocalModel
from dspark.serving.settings import ServeSettings
from dspark.target import load

__all__ = ["load_model"]


def load_model(
    target: TargetSettings, draft: str | None, ends: Set[int], settings: ServeSettings
) -> LocalModel:
    """Plan the memory, load target and draft, choose the engine.

    ``ends``: ids that end an output beside the target's own.

    Raises:
        DSparkError: one of these cannot be done.
    """
    planned = foresee(target, draft, settings)
    depth = None if draft is None else nextn_proposals(draft)
    loaded = load(target, nextn=depth is not None)
    drafted: Draft | None = None
    if draft is not None:
        drafted = load_draft(draft, target=loaded) if depth is None else nextn_draft(loaded, depth)
    # the plan's context is the graph engine's alone
    decoder = choose(loaded, drafted, ends, planned)
    model = LocalModel(loaded, drafted, settings, decoder)
    if loaded.device.type == "cuda":
        # kernels are compiled and libraries begun now, not in the time of the first request's steps
        params = DecodeParams(max_new_tokens=3, sampling=SamplingParams(), ignore_eos=True)
        list(islice(model.stream([0], params, lambda: True), 3))
    return model
