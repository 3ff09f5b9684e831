"""One training run: the loop that both the tiered and the plain run go through, and the tiered run itself.

Owns the order of calls and when to stop. Leaves what is shown to an `Observer`, memory to the package under test.

1. Tiered and plain differ only in the `Learner`: the same seed gives both the same weights and the same batches.
2. A stop signal ends the loop between two backward passes, on every rank between the same two; gradients without a
   step are dropped.
3. A checkpoint holds whole steps, and a resumed run goes on with the batch after them. Those on the way are written
   while training goes on; one that fails ends the run when the next is due, or at its end.
4. However the run ends, the model is closed, which waits for what is in flight and removes the swap files; where an
   error ended it, and all states lived there, the last step stays in them for a run that resumes.
5. Every rank makes the same calls in the same order and sees the same losses: the means over ranks, which are those of
   the joined batches, as all shares are of one size.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import tiered
from tiered.cli.corpus import Corpus
from tiered.cli.gpt import GPT, GPTShape
from tiered.cli.memory import ResidentGrowth
from tiered.cli.options import Order, Recipe, Saving
from tiered.cli.ranks import Place
from tiered.cli.signals import StopSignal


class Learner(Protocol):
    """A model with its optimizer."""

    def backward(self, tokens: Tensor, targets: Tensor, share: float) -> float:
        """Forward and backward of `share` times the loss; returns the whole loss."""

    def step(self) -> None:
        """Applies the gradients and drops them."""

    def drop(self) -> None:
        """Drops the gradients."""

    def mean(self, value: float) -> float:
        """The mean of a number over ranks; every rank must ask."""

    def save(self, steps: int, *, over: bool) -> None:
        """`steps` are done; `over`: and no more follow."""


@dataclass(frozen=True, slots=True)
class Batches:
    """What one rank trains on: its share of every batch of a recipe."""

    corpus: Corpus
    recipe: Recipe
    place: Place

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """This rank's share of joined batch number `index`: inputs and targets, each int64 (batch / ranks, context)."""
        recipe = self.recipe
        rows = self.place.share(recipe.batch)
        return self.corpus.batch(rows, batch=recipe.batch, context=recipe.context, seed=recipe.seed, index=index)


Observer = Callable[[int, float, float], None]
"""Called after each step with its number from 1, its mean loss and the seconds it took."""


@dataclass(slots=True)
class Outcome:
    """What a tiered run gave: as many losses and seconds as steps were finished."""

    losses: list[float] = field(default_factory=list)
    """Means over ranks."""
    seconds: list[float] = field(default_factory=list)
    peak_growth_bytes: int = 0
    """Peak resident bytes above those of the process before the model was made; of this rank, as are the stats."""
    stats: tiered.Stats | None = None
    """None where the run was stopped before its first step."""


def run_steps(learner: Learner, batches: Batches, stop: StopSignal, observe: Observer, done: int = 0) -> None:
    """Trains until the recipe's steps are done or a stop signal comes to any rank; `done`: steps taken before."""
    recipe = batches.recipe
    for step in range(done, recipe.steps):
        start, loss = time.perf_counter(), 0.0
        for micro in range(recipe.accumulate):
            if stop.agreed(learner.mean):
                learner.drop()
                learner.save(step, over=True)
                return
            tokens, targets = batches[step * recipe.accumulate + micro]
            loss += learner.backward(tokens, targets, 1 / recipe.accumulate) / recipe.accumulate
        learner.step()
        loss = learner.mean(loss)
        observe(step + 1, loss, time.perf_counter() - start)
        learner.save(step + 1, over=step + 1 == recipe.steps)
    if done >= recipe.steps:
        learner.save(done, over=True)  # killed after the last step, before its checkpoint


class TieredLearner:
    """A sharded model and the package's AdamW."""

    def __init__(self, model: nn.Module, recipe: Recipe, saving: Saving | None) -> None:
        self._model = model
        self._saving = saving
        self._saved = 0  # steps that a checkpoint has
        self.device = next(model.parameters()).device
        self._scaled = recipe.dtype == torch.float16  # small fp16 gradients vanish unless the loss is scaled
        self._optimizer = tiered.AdamW(
            model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, max_grad_norm=recipe.max_grad_norm
        )

    def backward(self, tokens: Tensor, targets: Tensor, share: float) -> float:
        """Forward and backward of `share` times the loss; returns the whole loss."""
        loss: Tensor = self._model(tokens.to(self.device), targets.to(self.device))
        scaled = self._optimizer.scale_loss(loss * share) if self._scaled else loss * share
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def step(self) -> None:
        """Applies the gradients and drops them."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def finish(self) -> None:
        """Completes the last step."""
        self._optimizer.keep()

    def drop(self) -> None:
        """Drops the gradients."""
        self._optimizer.zero_grad()

    def mean(self, value: float) -> float:
        """The mean of a number over ranks; every rank must ask."""
        return tiered.average(self._model, value)

    def save(self, steps: int, *, over: bool) -> None:
        """Writes a checkpoint where it is time for one, in the background unless it is the last."""
        saving = self._saving
        due = saving is not None and (over or (saving.every is not None and steps % saving.every == 0))
        if saving is not None and due and steps > self._saved:
            extra = {"steps": steps}
            beside = not over  # more steps follow, which it need not hold up
            tiered.save(self._model, self._optimizer, saving.folder, extra, keep=saving.keep, background=beside)
            self._saved = steps

    def resume(self) -> tuple[int, str]:
        """Takes the newer of what a killed run left in the swap directory and the last checkpoint; returns the steps
        it has, and where it was: in words, empty where there was neither."""
        if self._saving is None or not self._saving.resume:
            return 0, ""
        newest = _newest(self._saving.folder)
        steps, where = 0, "the swap directory"
        try:
            steps = tiered.resume(self._model, self._optimizer)
        except (tiered.UsageError, tiered.StorageError) as error:  # of another rank it is a StorageError
            if isinstance(error, tiered.CorruptDataError) or (newest is None and "laid out otherwise" in str(error)):
                raise
        if newest is not None and newest > steps:
            steps = int(tiered.load(self._model, self._optimizer, self._saving.folder)["steps"])
            where = f"the checkpoint in {self._saving.folder}"
            self._saved = steps
        elif newest is not None:
            self._saved = newest
        return steps, where if steps else ""


def _newest(folder: Path) -> int | None:
    """The updates that the last checkpoint in `folder` has; None where there is none."""
    found = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/manifest.json")]
    return max(found, default=None)


def train_tiered(
    order: Order, batches: Batches, stop: StopSignal, outcome: Outcome, observe: Callable[[nn.Module], Observer]
) -> torch.device:
    """Trains within the order's memory and fills `outcome` as it goes, so that what is done survives an error.

    Returns the device that computed.
    """
    _warm_up(order.recipe)
    growth = ResidentGrowth()
    torch.manual_seed(order.recipe.seed)
    with tiered.deferred_init(order.config) if order.deferred else contextlib.nullcontext():
        model = GPT(order.shape)
    sharded: Any = tiered.shard(model, order.config)
    with sharded:
        try:
            show = observe(model)

            def note(step: int, loss: float, seconds: float) -> None:
                outcome.losses.append(loss)
                outcome.seconds.append(seconds)
                show(step, loss, seconds)

            learner = TieredLearner(model, order.recipe, order.saving)
            done, where = learner.resume()
            if where and batches.place.first:
                print(f"going on after step {done}, from {where}", file=sys.stderr)
            run_steps(learner, batches, stop, note, done)
            learner.finish()
        finally:
            outcome.peak_growth_bytes = growth.peak_bytes()
            outcome.stats = tiered.stats(model)
        tiered.close(model, keep_weights=False)  # all weights at once may be more than there is memory
    return learner.device


def _warm_up(recipe: Recipe) -> None:
    """Runs one tiny plain step, so that code pages and thread pools of torch do not count as the model's memory."""
    model = GPT(GPTShape(vocabulary=8, hidden=8, layers=1, heads=1)).to(recipe.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
