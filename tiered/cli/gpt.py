"""The GPT that the command line trains and the benchmarks time: plain PyTorch, nothing of this package in it.

Owns the shape of the model and its forward pass. Leaves where the parameters live to whoever shards it.

1. A shape alone decides every parameter: `GPTShape.parameters` equals the sum of `numel()` over the model.
2. Positions come from the causal mask alone (no position table), so no parameter depends on the context length.
3. Logits reach the loss in fp32 whatever the dtype of the weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tiered.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """Sizes of a GPT. The defaults are the reference model of the benchmarks: 117.5 M parameters."""

    vocabulary: int = 8192
    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    tied_head: bool = False
    """The output head is the embedding's own matrix."""
    checkpoint_activations: bool = False
    """Keep only each block's input during the forward pass and compute the block again in the backward pass."""

    def __post_init__(self) -> None:
        for field in ("vocabulary", "hidden", "layers", "heads"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}: got {getattr(self, field)}, expected at least 1")
        if self.hidden % self.heads:
            raise ConfigError(
                f"heads: got {self.heads}, expected a divisor of hidden={self.hidden}; "
                "each head takes an equal share of the hidden size"
            )

    @property
    def parameters(self) -> int:
        """Number of parameters: 12 h^2 + 13 h a block (weights, biases, two norms), the embedding, norm and head."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        tables = self.vocabulary * self.hidden * (1 if self.tied_head else 2)
        return self.layers * block + tables + 2 * self.hidden


class Block(nn.Module):
    """One transformer block: causal self-attention, then a two-layer perceptron, each behind a norm and added."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, stream: Tensor) -> Tensor:
        """Takes and returns (batch, time, hidden)."""
        stream = stream + self._attend(self.attention_norm(stream))
        gated: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))
        return stream + gated

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, hidden = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.heads, hidden // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, hidden / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, time, hidden)
        out: Tensor = self.attention_out(joined)
        return out


class GPT(nn.Module):
    """A decoder-only transformer that returns its loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        # Scaled so that a tied head starts with logits of about unit size, and an untied one with the same stream.
        nn.init.normal_(self.embed.weight, std=shape.hidden**-0.5)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, fp32 0-dim; both arguments are int64 (batch, time)."""
        stream = self.embed(tokens)  # (batch, time, hidden)
        for block in self.blocks:
            if self.shape.checkpoint_activations and torch.is_grad_enabled():
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        logits = self.head(self.norm(stream)).float()  # (batch, time, vocabulary)
        return F.cross_entropy(logits.view(-1, self.shape.vocabulary), targets.reshape(-1))
