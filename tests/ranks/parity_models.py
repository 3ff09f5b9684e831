"""Models and batches of the parity tests of several ranks; those of one rank, in `models`, serve here too.

Owns: what a rank may do that its neighbours do not (branches, experts), as a model that is told which part of the
joined batch it has. Invariants:
1. `model(*rows)` or `model(*rows, part=p)` returns the scalar loss, a mean over rows: the mean of the losses of equal
   parts is the loss of the joined batch.
2. Only `part` makes a rank's forward differ from its neighbours', so one rank can play the others.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models import CONTEXT, VOCABULARY, Adapted, ConvNet, Gpt, OddShapes
from torch import Tensor, nn

ROWS = 12  # of a joined batch: 2, 3 and 4 ranks divide it
WIDTH = 16


class Net(nn.Module):
    """Residual blocks, with parameters at the root: the first used, a 0-dim one, and an odd one."""

    def __init__(self, layers: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(3))
        self.entry = nn.Parameter(torch.randn(width) / 4)  # used first: its gradient is the last to come
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        x = x + self.entry
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return (self.head(x) * self.scale + self.shift).square().mean()


class Branching(Net):
    """Uses a root parameter in part 0 alone, block 1 in even parts, block 2 in the last of `parts` alone, and one
    parameter and one block never."""

    def __init__(self, parts: int) -> None:
        super().__init__(5)
        self.parts = parts
        self.extra = nn.Parameter(torch.randn(WIDTH) / 4)
        self.never = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, *, part: int) -> Tensor:
        x = x + self.entry
        used = (True, part % 2 == 0, part == self.parts - 1, True, False)
        for block, uses in zip(self.blocks, used, strict=True):
            if uses:
                x = x + torch.tanh(block(x))
        return self.loss(x * self.extra if part == 0 else x)


class Expert(nn.Module):
    """A feed-forward layer; being an element of a list it is a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Every part sends its rows to experts of its own choice, and visits them in an order of its own."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor, part: int) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        choice = (choice % 2 + part) % len(self.experts)  # two experts of each part, and not the same everywhere
        mixed = torch.zeros_like(x)
        order = range(len(self.experts))
        time.sleep(1e-3 * (3 * part % 4))  # and at a pace of its own
        for index in reversed(order) if part % 2 else order:
            rows = (choice == index).nonzero().flatten()
            if rows.numel():
                mixed = mixed.index_add(0, rows, self.experts[index](x[rows]) * weight[rows, None])
        return x + mixed


class Experts(nn.Module):
    """Two mixtures of experts in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, part: int) -> Tensor:
        for mixture in self.mixtures:
            x = mixture(x, part)
        return self.head(x).square().mean()


class Everything(nn.Module):
    """What is awkward, all at once, small: branches, tied, frozen, odd, empty, 0-dim and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.randn(1))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.odd = nn.Linear(WIDTH, 7)
        self.never = nn.Parameter(torch.randn(5))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor, *, part: int) -> Tensor:
        x = self.first(x) * self.gain
        order = (0, 1, 2, 3) if part == 0 else (1, 0, 2)
        for index in order:
            x = x + torch.tanh(self.blocks[index](x))
        if part == 1:
            x = x * self.one
        return self.odd(self.last(x)).square().mean() + self.nothing.sum()


def float_rows(seed: int, widths: tuple[int, ...] = (WIDTH,)) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ROWS, width, generator=rng) for width in widths)


def token_rows(seed: int) -> tuple[Tensor, ...]:
    """Tokens and next tokens, int64 (ROWS, CONTEXT) each."""
    tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def image_rows(seed: int) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 3, 8, 8, generator=rng), torch.randint(10, (ROWS,), generator=rng)


@dataclass(frozen=True)
class Case:
    """How to build a model and to make joined batch number `seed`; `by_part`: it is told its part."""

    build: Callable[[], nn.Module]
    rows: Callable[[int], tuple[Tensor, ...]]
    by_part: bool = False


def branching(parts: int) -> Case:
    """`Branching` for so many parts."""
    return Case(partial(Branching, parts), float_rows, by_part=True)


def gpt(**settings: Any) -> Case:
    """Two blocks, the output projection tied to the embedding."""
    return Case(partial(Gpt, 2, **settings), token_rows)


NET = Case(Net, float_rows)
LARGE = Case(partial(Net, 12, 256), partial(float_rows, widths=(256,)))  # 3 MiB
EXPERTS = Case(Experts, float_rows, by_part=True)
EVERYTHING = Case(Everything, float_rows, by_part=True)
ODD = Case(OddShapes, partial(float_rows, widths=(13, 5)))
CONV = Case(ConvNet, image_rows)
ADAPTED = Case(Adapted, token_rows)
