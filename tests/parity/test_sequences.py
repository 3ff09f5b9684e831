"""Whatever is done between backward and step, in whatever order, gives to the last bit what it gives in memory.

Sequences are drawn at random, from the same seed for both runs: one with everything in memory and nothing beside
computation, one with everything on a drive, little memory, and what `overlap` allows.
"""

import contextlib
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiered
from tiered.schedule.choice import Balance
from tiered.zero.model import MODEL_ATTRIBUTE

WIDTH, WORDS = 48, 20
IN_MEMORY: dict[str, Any] = {"host_budget": "256MiB", "overlap": "none"}


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


class Net(nn.Module):
    """Layers of which one may be left out, or used twice, or checkpointed; weights that may be tied, or unused."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(draw.randint(3, 7)))
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(WIDTH, 3)
        self.checkpointed = draw.choice([None, None, "reentrant", "plain"])
        self.twice = draw.random() < 0.2
        self.left_out: int | None = None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for index, layer in enumerate([*self.layers, *self.layers[:1]] if self.twice else self.layers):
            if index == self.left_out:
                continue
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant").tanh() + x
            else:
                x = layer(x).tanh() + x
        return self.head(x * self.scale).float().logsumexp(-1).square().mean()


class Sequence:
    """One run: what is drawn, done and seen."""

    def __init__(self, seed: int, folder: Path, settings: dict[str, Any]) -> None:
        self.draw = random.Random(seed)
        self.folder = folder
        self.seen: list[Any] = []
        self.others: list[Any] = []
        torch.manual_seed(seed)
        self.model: Any = Net(self.draw)
        half = self.draw.random() < 0.25
        precision = tiered.MixedPrecision(param_dtype=torch.bfloat16 if half else None)
        tiered.shard(self.model, tiered.Config(device="cpu", precision=precision, **settings))
        params = list(self.model.parameters())
        first, second = params[: len(params) // 2], params[len(params) // 2 :]
        groups = [{"params": first, "lr": 1e-2}, {"params": second, "weight_decay": 0.1}]
        limit = self.draw.choice([None, None, 1e9, 0.5])
        self.optimizer = tiered.AdamW(groups, lr=3e-3, max_grad_norm=limit)

    def train(self) -> None:
        actions: list[Callable[[torch.Tensor, float], object]] = [
            *(self.evaluate, self.settings, self.settings, self.read_gradient, self.edit_gradient, self.drop_gradient),
            *(self.edit, self.gather, self.weights, self.moments, self.load_moments, self.save, self.save_beside),
            *(self.load, self.keep, self.not_finite, self.limit, self.freeze, self.fail, self.leave_out, self.clear),
            *(self.another, self.half_a_pass, self.load_weights, self.clip),
        ]
        for _ in range(self.draw.randint(8, 12)):
            for _ in range(self.draw.choice([1, 1, 1, 1, 2, 3])):
                self.backward()
            for _ in range(self.draw.choice([0, 0, 0, 0, 1, 1, 2])):
                params = list(self.model.parameters())
                action, param, x = self.draw.choice(actions), self.draw.choice(params), self.draw.random()
                try:
                    action(param, x)
                except (tiered.TieredError, RuntimeError) as error:  # what is refused is refused alike
                    self.seen.append((action.__name__, type(error).__name__))
            self.optimizer.step()
            self.seen.append(self.optimizer.grad_norm)
            if (to_none := self.draw.choice([True, True, True, False, None])) is not None:
                self.optimizer.zero_grad(to_none)
        self.weights()
        self.moments()
        self.optimizer.keep()

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        loss = self.model(torch.randint(WORDS, (2, 5), generator=generator))
        loss.backward()
        self.seen.append(loss.item())

    # --- what may be done between ---

    def evaluate(self, *_: Any) -> None:
        with torch.no_grad():
            self.half_a_pass()

    def half_a_pass(self, *_: Any) -> None:
        self.seen.append(self.model(torch.arange(6).view(2, 3)).item())

    def settings(self, _: Any, x: float) -> None:
        self.optimizer.param_groups[x > 0.5]["lr"] = 0.02 * x

    def limit(self, *_: Any) -> None:
        self.optimizer.max_grad_norm = self.draw.choice([None, 1e9, 0.5, 0.01])

    def read_gradient(self, param: torch.Tensor, _: float) -> None:
        self.seen.append(None if param.grad is None else param.grad.clone())

    def edit_gradient(self, param: torch.Tensor, x: float) -> None:
        if param.grad is not None:
            param.grad.mul_(x)

    def drop_gradient(self, param: torch.Tensor, _: float) -> None:
        param.grad = None

    def not_finite(self, param: torch.Tensor, _: float) -> None:
        if param.grad is not None:
            param.grad.view(-1)[0] = float("nan")

    def clip(self, _: Any, x: float) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5 * x)))

    def clear(self, _: Any, x: float) -> None:
        self.optimizer.zero_grad(x < 0.5)

    def edit(self, param: torch.Tensor, x: float) -> None:
        with torch.no_grad():
            param.mul_(1 - 0.1 * x)

    def gather(self, _: Any, x: float) -> None:
        with tiered.gather(self.model.layers[0], modify=True), torch.no_grad():
            self.model.layers[0].weight.add_(0.01 * x)

    def weights(self, *_: Any) -> None:
        self.seen += [value.clone() for value in self.model.state_dict().values()]

    def load_weights(self, *_: Any) -> None:
        self.model.load_state_dict({name: value * 1.001 for name, value in self.model.state_dict().items()})

    def moments(self, *_: Any) -> None:
        states = self.optimizer.state_dict()["state"]
        self.seen += [states[key][kind].clone() for key in states for kind in states[key]]

    def load_moments(self, *_: Any) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def save(self, *_: Any) -> None:
        tiered.save(self.model, self.optimizer, self.folder / "saved", {"seen": len(self.seen)})

    def save_beside(self, *_: Any) -> None:
        tiered.save(self.model, self.optimizer, self.folder / "saved", {"seen": len(self.seen)}, background=True)

    def load(self, *_: Any) -> None:
        tiered.saving(self.model, wait=True)
        if (self.folder / "saved").exists():
            self.seen.append(tiered.load(self.model, self.optimizer, self.folder / "saved")["seen"])

    def keep(self, *_: Any) -> None:
        self.optimizer.keep()

    def freeze(self, param: torch.Tensor, _: float) -> None:
        param.requires_grad_(not param.requires_grad)

    def leave_out(self, _: Any, x: float) -> None:
        self.model.left_out = int(x * len(self.model.layers)) if x < 0.7 else None

    def fail(self, _: Any, x: float) -> None:
        def broken(_: torch.Tensor) -> None:
            raise ArithmeticError("half way")

        weight = self.model.layers[int(x * len(self.model.layers))].weight
        if weight.requires_grad:
            handle = weight.register_hook(broken)
            with contextlib.suppress(ArithmeticError):
                self.backward()
            handle.remove()

    def another(self, _: Any, x: float) -> None:
        other = tiered.AdamW([self.model.scale], lr=0.01 * x)
        other.step()
        if x < 0.3:
            self.others.append(other)
        del other
        gc.collect()


def ran(seed: int, folder: Path, settings: dict[str, Any]) -> tuple[list[Any], int]:
    """What a run saw, and how many groups it kept that were updated before their step."""
    folder.mkdir()
    run = Sequence(seed, folder, settings)
    try:
        run.train()
        early = getattr(run.model, MODEL_ATTRIBUTE).early
        assert tiered.stats(run.model).staging_buffers == 0
        return run.seen, 0 if early is None else early.kept
    finally:
        tiered.close(run.model, keep_weights=False)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.shape == other.shape
        return alike and torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0), other.nan_to_num(0))
    return one == other or (isinstance(one, float) and one != one and other != other)


def compare(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balance, "share", 1.0, raising=False)
    monkeypatch.setattr(Balance, "__init__", lambda self: None)
    kept = 0
    for seed in seeds:
        (folder := tmp_path / str(seed)).mkdir()
        (swap := folder / "swap").mkdir()
        draw = random.Random(seed + 5)
        overlap = draw.choice(["backward", "backward", "backward", "auto", "forward"])
        places = {"nvme": swap, "param_tier": "nvme", "optimizer_tier": "nvme", "overlap": overlap}
        settings = {"host_budget": draw.choice(["3MiB", "6MiB", "20MiB"]), **places}
        expected, _ = ran(seed, folder / "memory", IN_MEMORY)
        found, groups = ran(seed, folder / "drive", settings)
        kept += groups
        assert len(found) == len(expected), (seed, settings)
        differ = [n for n, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)]
        assert not differ, f"seed {seed}, {settings}: the first of {len(differ)} differences is number {differ[0]}"
    assert kept > len(seeds), "hardly any update was computed before its step"


@pytest.mark.filterwarnings("ignore:.*")  # of torch, of what a sequence does
@pytest.mark.parametrize("first", [0, 10, 20])
def test_sequences_of_whatever_a_loop_may_do(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(range(first, first + 10), tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*")
def test_many_sequences_of_whatever_a_loop_may_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(range(1000, 1400), tmp_path, monkeypatch)
