"""The same training in plain PyTorch with everything in memory: what a tiered run is compared with.

Owns the reference arithmetic and the verdict. With 16-bit weights it keeps an fp32 master by hand, as the tiered run
does. Nothing here uses the runtime, and one process does it all: it trains the joined batches of all ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tiered.cli.corpus import Corpus
from tiered.cli.gpt import GPT
from tiered.cli.options import Order, Recipe
from tiered.cli.ranks import Place
from tiered.cli.signals import StopSignal
from tiered.cli.train import Batches, run_steps

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of two losses, in nats, that still counts as rounding: sums are taken in another order, and what
one step rounds differently the next ones amplify. Several ranks add their gradients in yet another order, to which the
same limit applies."""


class PlainLearner:
    """A model with `torch.optim.AdamW` over fp32 masters."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self._model = model.to(device)
        self._device = device
        self._max_grad_norm = recipe.max_grad_norm
        full = recipe.dtype == torch.float32
        originals = list(model.parameters())
        self._masters = originals if full else [nn.Parameter(p.detach().clone()) for p in originals]
        self._model.to(recipe.dtype)
        self._weights = list(model.parameters())
        self._full = full
        self._optimizer = torch.optim.AdamW(self._masters, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)

    def backward(self, tokens: Tensor, targets: Tensor, share: float) -> float:
        """Forward and backward of `share` times the loss; returns the whole loss."""
        loss: Tensor = self._model(tokens.to(self._device), targets.to(self._device))
        (loss * share).backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def step(self) -> None:
        """Applies the gradients and drops them."""
        if not self._full:
            for master, weight in zip(self._masters, self._weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        if self._max_grad_norm is not None:
            clip_grad_norm_(self._masters, self._max_grad_norm)
        self._optimizer.step()
        if not self._full:
            with torch.no_grad():
                for master, weight in zip(self._masters, self._weights, strict=True):
                    weight.copy_(master)
        self.drop()

    def drop(self) -> None:
        """Drops the gradients."""
        self._optimizer.zero_grad()
        self._model.zero_grad()

    def mean(self, value: float) -> float:
        """The value itself: there is no other rank."""
        return value

    def save(self, steps: int, *, over: bool) -> None:
        """Saves nothing: its run is only compared."""


def train_plain(order: Order, corpus: Corpus, device: torch.device, stop: StopSignal) -> list[float]:
    """The losses of the order's recipe in plain PyTorch, fewer where a stop signal came."""
    torch.manual_seed(order.recipe.seed)
    learner = PlainLearner(GPT(order.shape), order.recipe, device)
    losses: list[float] = []
    batches = Batches(corpus, order.recipe, Place())
    run_steps(learner, batches, stop, lambda step, loss, seconds: losses.append(loss))
    return losses


def largest_difference(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Largest absolute difference of two runs' losses over the steps both made, in nats; NaN if any loss is NaN."""
    gaps = torch.tensor([abs(a - b) for a, b in zip(ours, plain, strict=False)], dtype=torch.float64)
    return gaps.max().item() if gaps.numel() else 0.0
