"""Greedy accept length of a DSpark draft by plain recomputation: no cache, nothing shared.

    python tests/independent_tau.py TARGET DRAFT PROMPTS.jsonl MAX_NEW_TOKENS PROPOSALS [PROMPTS]

Directories in Hugging Face layout; rows with `messages`, or `turns`, of which the first counts. It
has nothing in common with `dspark eval`, which it is to agree with, but definitions. Vanilla Markov
head, float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def propose(ids: Tensor, target: Any, c: dict[str, Any], w: dict[str, Tensor]) -> list[int]:
    """The block behind the last of ``ids`` [S]."""
    size, eps, block, s = c["head_dim"], c["rms_norm_eps"], c["block_size"], len(ids) - 1

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}norm.weight"], eps)

    def heads(x: Tensor, name: str, at: Tensor) -> Tensor:
        x = norm((x @ w[f"{name}_proj.weight"].T).view(len(x), -1, size), f"{name}_")
        angle = at[:, None] / c["rope_theta"] ** (torch.arange(0, size, 2) / size)
        cos, sin = (part.repeat(1, 2)[:, None] for part in (angle.cos(), angle.sin()))
        turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return torch.addcmul(x * cos, turned, sin)

    hidden = target(ids[None, :-1], output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[i + 1][0] for i in c["target_layer_ids"]], -1)
    context = norm(taps @ w["fc.weight"].T, "hidden_")
    embed, head = (m.weight for m in (target.get_input_embeddings(), target.lm_head))
    h = embed[torch.tensor([int(ids[-1]), *[c["mask_token_id"]] * (block - 1)])]
    at = torch.arange(s + block)
    for layer in range(c["num_hidden_layers"]):
        name = f"layers.{layer}."
        x = norm(h, f"{name}input_layer")
        both = torch.cat([context, x])
        a = f"{name}self_attn."
        q, k = heads(x, f"{a}q", at[s:]), heads(both, f"{a}k", at)
        v = (both @ w[f"{a}v_proj.weight"].T).view(len(both), -1, size)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        mass = (torch.einsum("qhn,khn->hqk", q, k) / size**0.5).softmax(-1)
        h = h + torch.einsum("hqk,khn->qhn", mass, v).flatten(1) @ w[f"{a}o_proj.weight"].T
        x = norm(h, f"{name}post_attention_layer")
        gate, up = (x @ w[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ w[f"{name}mlp.down_proj.weight"].T
    tokens = [int(ids[-1])]
    for logits in norm(h, "") @ head.T:
        # the head only reorders the best 256: the one thing here that is not in the paper
        best = logits.topk(min(256, len(logits))).indices
        bias = w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][tokens[-1]]
        tokens.append(int(best[(logits + bias)[best].argmax()]))
    return tokens[1:]


@torch.no_grad()
def count(target_dir: str, draft_dir: str, prompts: list[Any], most: int, width: int) -> list[int]:
    """Rounds, and the tokens they add; ``prompts`` are lists of messages."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    config = json.loads((Path(draft_dir) / "config.json").read_text())
    weights = {k: v.float() for k, v in load_file(Path(draft_dir) / "model.safetensors").items()}
    ends = torch.tensor(target.generation_config.eos_token_id).flatten().tolist()
    rounds = tokens = 0
    for messages in prompts:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        end = len(ids) + most
        anchor = len(ids)
        while len(ids) < end and (len(ids) == anchor or int(ids[-1]) not in ends):
            ids = torch.cat([ids, target(ids[None]).logits[0, -1:].argmax(-1)])
        while anchor < len(ids) - 1:
            proposals = propose(ids[: anchor + 1], target, config, weights)[:width]
            pairs = zip(proposals, ids[anchor + 1 :].tolist(), strict=False)
            kept = next((i for i, (a, b) in enumerate(pairs) if a != b), len(proposals))
            added = min(kept + 1, len(ids) - 1 - anchor)
            rounds, tokens, anchor = rounds + 1, tokens + added, anchor + added
    return [rounds, tokens]


if __name__ == "__main__":
    target_dir, draft_dir, file, most, width, *limit = sys.argv[1:]
    lines = Path(file).read_text().splitlines()[: int(limit[0]) if limit else None]
    read = [json.loads(line) for line in lines]
    rows = [r.get("messages") or [{"role": "user", "content": r["turns"][0]}] for r in read]
    rounds, tokens = count(target_dir, draft_dir, rows, int(most), int(width))
    print(json.dumps({"rounds": rounds, "emitted": tokens, "accept_length": tokens / rounds}))
