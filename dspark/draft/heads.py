"""The sequential ("Markov") head and the confidence head of the draft.

The Markov head adds to each slot's logits a low-rank bias that depends on the token entering the
slot, so that the slots of a block, which the backbone fills in parallel, agree with each other.
Source: DSpark, arXiv 2607.05147, section on the sequential head; DeepSpec for the gated and rnn
variants.

Symbols: V vocabulary, D hidden, K slots, r rank.
"""

import torch
from torch import Tensor, nn

from dspark.draft.config import DSparkConfig

__all__ = ["ConfidenceHead", "MarkovHead"]


_START_SIZE = 3.0


class MarkovHead(nn.Module):
    """bias_k = W2 latent_k, latent from the previous token's embedding e_k = W1[prev_k].

    vanilla: latent = e. gated: latent = sigmoid(G [h; e]) * e. rnn: with z = [s; e; h] and
    (g, c, o) = J z, the state goes s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), latent =
    tanh(o), and s = 0 at the first slot of every block.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    @torch.no_grad()
    def start_from(self, embedding: Tensor) -> None:
        """Set W1 to the first r principal components of ``embedding`` [V, D], each of size 3.

        Tokens that the target treats alike then start alike, so that a pair seen in training tells
        something about pairs that were not. The size speeds up W2: Adam moves a weight by about
        the learning rate, whatever it is multiplied with. Needs r <= D.
        """
        rows = embedding.float() - embedding.float().mean(0)
        variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
        scale = variances[-self.rank :].clamp_min(1e-12).rsqrt() * _START_SIZE
        self.markov_w1.weight.copy_(rows @ directions[:, -self.rank :] * scale)

    def embed(self, prev_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., r]."""
        embedding: Tensor = self.markov_w1(prev_ids)
        return embedding

    def latent(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """All slots of whole blocks, teacher forced: [..., K, r], [..., K, D] -> [..., K, r]."""
        if self.kind != "rnn":
            return self.step(embedding, hidden, None)[0]
        state: Tensor | None = None
        latents = []
        for k in range(embedding.shape[-2]):
            latent, state = self.step(embedding[..., k, :], hidden[..., k, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)

    def step(
        self,
        embedding: Tensor,  # [..., r]
        hidden: Tensor,  # [..., D]
        state: Tensor | None,  # [..., r], None at the first slot
    ) -> tuple[Tensor, Tensor | None]:
        """One slot: the latent and the state that the next slot gets (rnn only)."""
        if self.kind == "vanilla":
            return embedding, None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], -1)))
            return gate * embedding, None
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], -1))
        forget, candidate, output = joint.chunk(3, dim=-1)
        forget = torch.sigmoid(forget)
        state = forget * state + (1 - forget) * torch.tanh(candidate)
        return torch.tanh(output), state

    def bias(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[..., K, r], [..., K, D] -> [..., K, V]."""
        out: Tensor = self.markov_w2(self.latent(embedding, hidden))
        return out


class ConfidenceHead(nn.Module):
    """Logit of the chance that a slot is accepted, given that all earlier ones were."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """[..., D], [..., r] or None -> [...] float32."""
        if self.with_markov:
            assert embedding is not None
            hidden = torch.cat([hidden, embedding], -1)
        # float32 whatever autocast says: the product over slots amplifies rounding
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = self.proj.weight.float(), self.proj.bias.float()
            return nn.functional.linear(hidden.float(), weight, bias)[..., 0]
