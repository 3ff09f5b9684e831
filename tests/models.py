"""Small but real architectures, each with a batch maker, shared by every test that needs a model.

Owns: the model classes and `CASES`, those whose every parameter is float32 (all but
`MIXED`, which plain torch trains in bfloat16 without a float32 master). Invariants:
1. `model(*batch)` returns the scalar loss, so one training loop serves every architecture.
2. A batch is a pure function of its seed; a model is a pure function of torch's seed when it is built.
3. No dropout and one thread: a run repeats bit for bit.
Leaves to `parity.harness` how a model is trained and where its bytes live.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

VOCABULARY = 48
HIDDEN = 32
CONTEXT = 12

Batch = tuple[Any, ...]


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a feed-forward of twice the width."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)  # a key bias has no gradient but rounding noise
        self.out = nn.Linear(hidden, hidden)
        self.norm_feed = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, hidden) -> same
        batch, time, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, hidden / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, hidden))
        return x + self.down(F.gelu(self.up(self.norm_feed(x))))


class Gpt(nn.Module):
    """A decoder whose output projection is its token embedding; optional activation checkpointing per block."""

    def __init__(self, layers: int = 8, hidden: int = HIDDEN, *, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Parameter(torch.randn(CONTEXT, hidden) * 0.02)  # at the root, beside children
        self.blocks = nn.ModuleList(Block(hidden, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # (batch, time) int64 each
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class EncoderDecoder(nn.Module):
    """torch's own transformer layers: they read their children's weights directly, past any child's forward.

    With biases, evaluation takes torch's fused path, which reads even more of them at once.
    """

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, HIDDEN)
        self.target = nn.Embedding(VOCABULARY, HIDDEN)
        encoder = nn.TransformerEncoderLayer(HIDDEN, 2, 64, dropout=0.0, batch_first=True, bias=bias)
        decoder = nn.TransformerDecoderLayer(HIDDEN, 2, 64, dropout=0.0, batch_first=True, bias=bias)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self.encoder(self.source(source))
        mask = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        decoded = self.decoder(self.target(target), memory, tgt_mask=mask)
        return F.cross_entropy(self.head(decoded).flatten(0, 1), labels.flatten())


class MixtureOfExperts(nn.Module):
    """Top-1 routing by the data; the last expert is never chosen, others only on some batches."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.router = nn.Linear(HIDDEN, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(experts)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # (batch, time) int64 each
        x = self.embed(tokens).flatten(0, 1)  # (tokens, hidden)
        share = self.router(x).softmax(-1)[:, :-1]
        weight, choice = share.max(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if rows.numel():
                mixed = mixed.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return F.cross_entropy(self.head(x + mixed), labels.flatten())


class ConvNet(nn.Module):
    """Convolutions and BatchNorm: buffers change in forward and are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:  # (batch, 3, 8, 8) float32, (batch,) int64
        return F.cross_entropy(self.head(self.body(self.stem(image)).mean((2, 3))), label)


class LowRank(nn.Module):
    """A frozen linear with a trainable low-rank addition, as adapters do."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """A frozen GPT whose feed-forward layers carry adapters, with non-reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Gpt(layers=4, checkpointing="non-reentrant").requires_grad_(False)
        for block in self.base.blocks:
            block.up = LowRank(block.up)
            block.down = LowRank(block.down)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.base(tokens, targets)


class Siamese(nn.Module):
    """One encoder applied to both inputs in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x).tanh()
        return x

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:  # (batch, hidden) twice, (batch,)
        distance = (self.encode(left) - self.encode(right)).pow(2).mean(-1)
        return F.binary_cross_entropy_with_logits(self.scale - distance, same)


class OddShapes(nn.Module):
    """Parameters of every awkward shape, at the root and in a parent beside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))  # 0-dim
        self.nothing = nn.Parameter(torch.zeros(0))
        self.no_rows = nn.Parameter(torch.zeros(0, 5))
        self.bias = nn.Parameter(torch.randn(7))
        self.inner = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 7, bias=False))
        self.inner.register_parameter("shift", nn.Parameter(torch.randn(1, 7)))
        self.table = nn.Parameter(torch.randn(288))
        self.tall = nn.Parameter(torch.randn(7, 5))
        self.last = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 13) and (batch, 5) float32
        hidden = self.inner(x) * self.gain + self.bias + self.inner.shift
        empty = self.nothing.sum() + self.no_rows.sum() + self.last.sum()
        return F.mse_loss(hidden @ self.tall, y) + self.table.pow(2).mean() * 0.1 + empty


class WeightNormed(nn.Module):
    """Weights computed from other parameters by torch's parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.second = parametrizations.weight_norm(nn.Linear(HIDDEN, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, hidden), (batch,) int64
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


class MixedDtypes(nn.Module):
    """bfloat16 matrices between float32 norms and a float32 router: the dtypes must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.low = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.gate = nn.Linear(16, 1)
        self.mixed = nn.Module()
        self.mixed.low = nn.Parameter(torch.randn(9, dtype=torch.bfloat16))
        self.mixed.high = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 16), (batch,) float32
        hidden = self.low(self.norm(x).bfloat16()).float()
        return F.mse_loss(self.gate(hidden.tanh()).squeeze(-1), y) + (self.mixed.low.float() * self.mixed.high).mean()


class LayerDrop(nn.Module):
    """Which layers run, how often and in which order is decided by Python values in the batch."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, y: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = x + self.layers[index](x).tanh()
        return F.cross_entropy(self.head(x), y)


class Recurrent(nn.Module):
    """An LSTM, which keeps a second list of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # (batch, time) int64 each
        hidden, _ = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_batch(seed: int) -> Batch:
    """Tokens and next tokens, int64 (2, CONTEXT) each."""
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=_generator(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def translation_batch(seed: int) -> Batch:
    source, labels = token_batch(seed)
    return source, labels.roll(1, 1), labels


def image_batch(seed: int) -> Batch:
    rng = _generator(seed)
    return torch.randn(4, 3, 8, 8, generator=rng), torch.randint(10, (4,), generator=rng)


def pair_batch(seed: int) -> Batch:
    rng = _generator(seed)
    left, right = torch.randn(2, 4, HIDDEN, generator=rng)
    return left, right, torch.randint(2, (4,), generator=rng).float()


def odd_batch(seed: int) -> Batch:
    rng = _generator(seed)
    return torch.randn(3, 13, generator=rng), torch.randn(3, 5, generator=rng)


def class_batch(seed: int) -> Batch:
    rng = _generator(seed)
    return torch.randn(4, HIDDEN, generator=rng), torch.randint(4, (4,), generator=rng)


def value_batch(seed: int) -> Batch:
    rng = _generator(seed)
    return torch.randn(4, 16, generator=rng), torch.randn(4, generator=rng)


ORDERS = ((0, 1, 2, 3, 4, 5), (0, 2, 5), (5, 4, 1, 1, 0), (3,), ())


def branching_batch(seed: int) -> Batch:
    return (*class_batch(seed), ORDERS[seed % len(ORDERS)])


@dataclass(frozen=True)
class Case:
    """One architecture: how to build it and how to make batch number `seed`."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]


GPT = Case("gpt", Gpt, token_batch)
SHORT_GPT = Case("short_gpt", partial(Gpt, 4), token_batch)
MOE = Case("moe", MixtureOfExperts, token_batch)
ADAPTED = Case("adapted", Adapted, token_batch)
SIAMESE = Case("siamese", Siamese, pair_batch)
ODD = Case("odd", OddShapes, odd_batch)
CONV = Case("conv", ConvNet, image_batch)
MIXED = Case("mixed", MixedDtypes, value_batch)
LAYER_DROP = Case("layer_drop", LayerDrop, branching_batch)
ENCODER_DECODER = Case("encoder_decoder", EncoderDecoder, translation_batch)
WEIGHT_NORM = Case("weight_norm", WeightNormed, class_batch)
RECURRENT = Case("recurrent", Recurrent, token_batch)

CASES = (GPT, ENCODER_DECODER, MOE, CONV, ADAPTED, SIAMESE, ODD, WEIGHT_NORM, LAYER_DROP, RECURRENT)
