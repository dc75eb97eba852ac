"""Features of the rows that neither shards nor the window hold: computed here, and kept.

They are rounded as the shards store them, wherever they come from: which rows happen to be there
changes how fast a run is, and on a CPU no bit of it; on a GPU no number beyond the order of sums in
the target.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dspark.corpus.hybrid import HybridRows
from dspark.corpus.rolling import RollingWindow
from dspark.corpus.storage import Encoded, decoded, encode
from dspark.corpus.store import ShardRow
from dspark.target import Features, Target
from dspark.training.features import batch_features
from dspark.training.window import Pass

__all__ = ["MissingFeatures", "open_window"]

_STORED = ("taps", "last_hidden", "tap_scales", "last_scales")


def open_window(
    rows: HybridRows, window_bytes: int, target: Target, *, index: int, count: int
) -> RollingWindow:
    """The window beside the shards, with this process's share of its bytes.

    Its rows are those that ``target`` computed, whatever the shards tell of theirs.
    """
    directory = rows.directory.with_name(f"{rows.directory.name}-window")
    share = window_bytes // count
    header = replace(
        rows.header,
        target_fingerprint=target.fingerprint(),
        compute_dtype=str(target.dtype).removeprefix("torch."),
    )
    window = RollingWindow(directory, header, share, index=index, count=count)
    rows.use(window)
    return window


class MissingFeatures:
    """Completes the features of a pass.

    Args:
        dtype: of the shards, as `capture.dtype`.
        window: takes every row that was computed.
    """

    def __init__(self, dtype: str, window: RollingWindow) -> None:
        self._dtype = dtype
        self._window = window
        self._counts: Counter[str] = Counter()

    def complete(self, target: Target, layer_ids: Sequence[int], one: Pass) -> Features:
        """Features of every document of ``one``, which is on the target's device.

        Those that it has are written into its own tensors.
        """
        missing = [number for number, source in enumerate(one.sources) if not source]
        self._counts.update(source or "generated" for source in one.sources)
        held: Encoded | None = None
        if one.taps is not None:
            held = Encoded(**{name: getattr(one, name) for name in _STORED})
        if missing:
            spans = [one.spans[number] for number in missing]
            found = batch_features(
                target, layer_ids, one.input_ids, None, None, spans, partial=held is not None
            )
            computed = encode(found, self._dtype)
            self._keep(one, missing, computed)
            held = computed if held is None else _written(held, computed, spans)
        assert held is not None
        return _decoded(held)

    def _keep(self, one: Pass, missing: Sequence[int], stored: Encoded) -> None:
        if not self._window.active:
            return
        features = _decoded(stored)
        usable = features.usable_documents(one.documents, len(one.spans)).tolist()
        assert one.loss_mask is not None
        ids, masks = one.input_ids.cpu(), one.loss_mask.cpu()
        held = {name: tensor.cpu() for name, tensor in stored.tensors().items()}
        for number in missing:
            if usable[number]:
                row, first, tokens = one.spans[number]
                part = slice(first, first + tokens)
                own = {name: tensor[row, part].clone() for name, tensor in held.items()}
                name, mask = one.row_ids[number], masks[row, part].clone()
                self._window.keep(ShardRow(name, ids[row, part].clone(), mask, **own))

    def counts(self) -> dict[str, int]:
        """Documents since the last call, by where their features were from."""
        found = {name: self._counts[name] for name in ("shards", "window", "generated")}
        self._counts.clear()
        return found


def _decoded(held: Encoded) -> Features:
    return Features(
        decoded(held.taps, held.tap_scales), decoded(held.last_hidden, held.last_scales)
    )


def _written(held: Encoded, computed: Encoded, spans: Sequence[tuple[int, int, int]]) -> Encoded:
    """``held`` with the documents of ``spans`` (row, first position, tokens) from ``computed``."""
    theirs = computed.tensors()
    for name, tensor in held.tensors().items():
        for row, first, tokens in spans:
            part = slice(first, first + tokens)
            tensor[row, part] = theirs[name][row, part]
    return held
