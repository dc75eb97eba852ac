"""Every layout is read by those it is for, and each rule of a reader refuses what breaks it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dspark.export.hf import export_draft
from dspark.export.layouts import FORMATS, Format
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_ling, tiny_target
from tests.contract.readers import READERS, Refused, Served, Shapes, Taken, read

ROOT = Path(__file__).parents[2]
READ_BY: dict[Format, tuple[str, ...]] = {
    "hf": ("sglang", "vllm", "deepspec"),
    "sglang": ("sglang", "vllm"),
    "vllm": ("vllm",),
    "deepspec": ("sglang", "vllm", "deepspec"),
}
TINY = Served(vocabulary=260, layers=6)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def exported(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> dict[Format, tuple[dict[str, Any], Shapes]]:
    place = tmp_path_factory.mktemp("exports")
    draft = tiny_draft(target)
    # a key of which readers need not know
    draft.config.sts_temperatures = [0.5, 1.0, 1.5, 2.0]
    for format in FORMATS:
        export_draft(draft, place / format, target, format=format, check=False)
    return {format: read(place / format) for format in FORMATS}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_layout_is_read_by_those_it_is_for(
    exported: dict[Format, tuple[dict[str, Any], Shapes]], format: Format, reader: str
) -> None:
    config, shapes = exported[format]
    if reader not in READ_BY[format]:
        with pytest.raises(Refused):
            READERS[reader](config, shapes, TINY)
        return
    assert READERS[reader](config, shapes, TINY) == Taken(
        proposals=4, mask=259, taps=(1, 2, 3), rank=8, theta=10000.0, positions=512
    )


@pytest.mark.parametrize("confidence", ["none", "plain", "markov"])
@pytest.mark.parametrize(
    ("format", "head"),
    [
        (format, head)
        for format in FORMATS
        for head in ("vanilla", "gated", "rnn")
        if (format, head == "vanilla") != ("vllm", False)  # refused on export
    ],
)
def test_every_kind_of_head_has_the_tensors_that_readers_look_for(
    target: Target, tmp_path: Path, format: Format, head: str, confidence: str
) -> None:
    draft = tiny_draft(
        target,
        markov_head_type=head,
        enable_confidence_head=confidence != "none",
        confidence_head_with_markov=confidence == "markov",
    )
    export_draft(draft, tmp_path / "out", target, format=format, check=False)
    config, shapes = read(tmp_path / "out")
    for reader in READ_BY[format]:
        if reader == "vllm" and head != "vanilla":
            with pytest.raises(Refused, match="markov_head_type"):
                READERS[reader](config, shapes, TINY)
        else:
            READERS[reader](config, shapes, TINY)


@pytest.mark.parametrize("format", FORMATS)
def test_a_draft_of_ling_is_read_too(tmp_path: Path, format: Format) -> None:
    ling = tiny_ling()
    draft = tiny_draft(ling, mask_token_id=ling.config.pad_token_id, block_size=8)
    export_draft(draft, tmp_path / "out", ling, format=format, check=False)
    served = Served(ling.vocab_size, ling.num_layers)
    for reader in READ_BY[format]:
        taken = READERS[reader](*read(tmp_path / "out"), served)
        assert (taken.proposals, taken.mask, taken.theta) == (8, ling.config.pad_token_id, 6e6)


@pytest.mark.parametrize("reader", ["sglang", "vllm"])
def test_the_released_draft_is_read(reader: str) -> None:
    config, shapes = read(ROOT / "checkpoints" / "smollm2-135m-dspark-block16")
    taken = READERS[reader](config, shapes, Served(vocabulary=49152, layers=30))
    assert (taken.proposals, taken.taps) == (16, (1, 8, 14, 20, 27))


def changed(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """With ``key`` (`a.b`: b in block a; None removes it), there and in the repeating block."""
    copy = {name: dict(one) if isinstance(one, dict) else one for name, one in config.items()}
    *blocks, name = key.split(".")
    places = [copy[block] for block in blocks] or [copy, copy.get("dflash_config", {})]
    for place in places:
        if value is None:
            place.pop(name, None)
        elif place is places[0] or name in place:
            place[name] = value
    return copy


_PLAIN = (
    ("architectures", ["Qwen3ForCausalLM"]),
    ("model_type", "dspark"),
    ("markov_head_type", "lstm"),
    *((key, None) for key in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank")),
    ("mask_token_id", 260),
    ("target_layer_ids", [1, 2, 5]),
    ("markov_rank", 0),
    ("rope_theta", None),
    ("rope_parameters", None),
    ("vocab_size", 300),
)
_OF_SGLANG = (("num_target_layers", 5), ("num_nextn_predict_layers", 1))
_OF_DEEPSPEC = (
    ("num_target_layers", None),
    ("tie_word_embeddings", True),
    ("layer_types", None),
    ("num_anchors", None),
    ("confidence_head_with_markov", None),
)
_OF_VLLM = (
    ("speculators_model_type", "eagle3"),
    ("transformer_layer_config", None),
    ("speculators_config.verifier", None),
    ("speculators_config.proposal_methods", None),
    ("draft_vocab_size", None),
    ("draft_vocab_size", 100),
    ("sample_from_anchor", None),
    ("sample_from_anchor", False),
    ("aux_hidden_state_layer_ids", None),
    ("aux_hidden_state_layer_ids", [0, 2, 3]),
    ("markov_head_type", "gated"),
    ("mask_token_id", None),
    ("transformer_layer_config.rope_theta", None),
    # vLLM then takes it for a plain config
    ("model_type", "qwen3"),
)


@pytest.mark.parametrize(
    ("format", "reader", "key", "value"),
    [
        *(("hf", reader, *one) for reader in READERS for one in _PLAIN),
        *(("sglang", "sglang", *one) for one in _OF_SGLANG),
        *(("deepspec", "deepspec", *one) for one in _OF_DEEPSPEC),
        *(("vllm", "vllm", *one) for one in _OF_VLLM),
    ],
)
def test_a_config_without_what_a_reader_needs_is_refused(
    exported: dict[Format, tuple[dict[str, Any], Shapes]],
    format: Format,
    reader: str,
    key: str,
    value: Any,
) -> None:
    config, shapes = exported[format]
    said = {"proposal_methods": "speculative_tokens", "model_type": "(model_type|architectures)"}
    name = key.rpartition(".")[2]
    if key == "aux_hidden_state_layer_ids" and value:
        name = "target_layer_ids"
    with pytest.raises(Refused, match=said.get(name, name)):
        READERS[reader](changed(config, key, value), shapes, TINY)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("confidence_head.proj.bias", None),
        ("layers.1.self_attn.k_norm.weight", None),
        ("markov_head.markov_w2.weight", (260, 4)),
        ("markov_head.gate_proj.weight", (8, 72)),
        ("fc.weight", (64, 128)),
    ],
)
def test_weights_that_are_not_the_configs_are_refused(
    exported: dict[Format, tuple[dict[str, Any], Shapes]],
    reader: str,
    name: str,
    shape: tuple[int, ...] | None,
) -> None:
    config, shapes = exported["hf"]
    other = {key: value for key, value in shapes.items() if key != name}
    if shape is not None:
        other[name] = shape
    with pytest.raises(Refused, match=name):
        READERS[reader](config, other, TINY)


def test_prefixed_names_are_for_sglang_alone(
    exported: dict[Format, tuple[dict[str, Any], Shapes]],
) -> None:
    config, shapes = exported["hf"]
    prefixed = {f"model.{name}": shape for name, shape in shapes.items()}
    READERS["sglang"](config, prefixed, TINY)
    for reader in ("vllm", "deepspec"):
        with pytest.raises(Refused):
            READERS[reader](config, prefixed, TINY)
