"""A small model whose states lie in various places, and what a user may do to it between calls."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tiered.optim import update
from tiered.zero.model import MODEL_ATTRIBUTE

WIDTH, LAYERS = 64, 6
PLACES: dict[str, dict[str, Any]] = {
    "drive": {"param_tier": "nvme", "optimizer_tier": "nvme"},
    "states on a drive": {"param_tier": "host", "optimizer_tier": "nvme"},
    "beside a device": {"device": "emulated", "param_tier": "host", "optimizer_tier": "host"},
    "drive and device": {"device": "emulated", "param_tier": "nvme", "optimizer_tier": "nvme"},
}


class Net(nn.Module):
    """Layers in an order that may be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.order = list(range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x).tanh() + x
        return (x * self.scale).square().mean()


def backward(model: nn.Module, seed: int) -> float:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss = model(x)
    loss.backward()
    return loss.item()


class Trained:
    """A sharded model with its optimizer, and the chunks that have been updated on the host."""

    def __init__(self, model: Any, optimizer: Any, counted: list[int]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.counted = counted

    @property
    def kept(self) -> int:
        """Groups whose update was computed before their step, in all steps."""
        return getattr(self.model, MODEL_ATTRIBUTE).early.kept

    @property
    def lazy(self) -> bool:
        """A part of the last step is not over."""
        return getattr(self.model, MODEL_ATTRIBUTE).lazy is not None

    def step(self, seed: int) -> float:
        loss = backward(self.model, seed)
        self.optimizer.step()
        return loss


@contextlib.contextmanager
def training(swap: Path, monkeypatch: pytest.MonkeyPatch, place: str = "", **settings: Any) -> Iterator[Trained]:
    torch.manual_seed(7)
    nvme = swap if "drive" in place else None
    config = tiered.Config(
        **{"device": "cpu", "host_budget": "3MiB", "nvme": nvme, **PLACES.get(place, {}), **settings}
    )
    model = tiered.shard(Net(), config)
    counted: list[int] = []
    on_host = update.on_host

    def counting(*chunk: Any) -> None:
        counted.append(len(counted))
        on_host(*chunk)

    with monkeypatch.context() as patch:
        patch.setattr(update, "on_host", counting)
        try:
            yield Trained(model, tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5), counted)
        finally:
            tiered.close(model, keep_weights=False)


Between = Callable[[Trained, Path], object]


def read_in_reverse(trained: Trained, _: Path) -> list[float]:
    return [p.sum().item() for p in reversed(list(trained.model.parameters()))]


def edit(trained: Trained, _: Path) -> None:
    with torch.no_grad():
        trained.model.layers[3].weight.mul_(0.5)
        trained.model.layers[1].bias.fill_(0.25)


def edit_gathered(trained: Trained, _: Path) -> None:
    with tiered.gather(trained.model.layers[2], modify=True), torch.no_grad():
        trained.model.layers[2].weight.add_(0.1)


def read_gradients(trained: Trained, _: Path) -> list[float]:
    return [p.grad.sum().item() for p in trained.model.parameters()]


def change_gradients(trained: Trained, _: Path) -> None:
    for param in trained.model.parameters():
        param.grad.mul_(3.0)


def another_batch(trained: Trained, _: Path) -> float:
    return backward(trained.model, 99)  # its gradients are added


def step_again(trained: Trained, _: Path) -> None:
    trained.optimizer.step()


def change_settings(trained: Trained, _: Path) -> None:
    trained.optimizer.param_groups[0].update(lr=0.5, betas=(0.1, 0.2), weight_decay=0.9)


def another_order(trained: Trained, _: Path) -> None:
    trained.model.order.reverse()


def leave_layers_out(trained: Trained, _: Path) -> None:
    trained.model.order = [4, 1]


def evaluate(trained: Trained, _: Path) -> float:
    with torch.no_grad():
        return trained.model(torch.ones(2, WIDTH)).item()


def save_and_load(trained: Trained, folder: Path) -> None:
    tiered.save(trained.model, trained.optimizer, folder / "saved")
    tiered.load(trained.model, trained.optimizer, folder / "saved")


def save_beside(trained: Trained, folder: Path) -> None:
    tiered.save(trained.model, trained.optimizer, folder / "saved", background=True)


def load_state_dicts(trained: Trained, _: Path) -> None:
    values = {name: value.clone() for name, value in trained.model.state_dict().items()}
    states = trained.optimizer.state_dict()
    trained.model.load_state_dict(values)
    trained.optimizer.load_state_dict(states)


def freeze(trained: Trained, _: Path) -> None:
    trained.model.layers[2].requires_grad_(False)


def another_optimizer(trained: Trained, _: Path) -> None:
    tiered.AdamW(trained.model.layers[0].parameters(), lr=0.1).step()


BETWEEN: dict[str, Between] = {
    f.__name__.replace("_", " "): f
    for f in (
        *(read_in_reverse, edit, edit_gathered, read_gradients, change_gradients, another_batch, step_again),
        *(change_settings, another_order, leave_layers_out, evaluate, save_and_load, save_beside, load_state_dicts),
        *(freeze, another_optimizer),
    )
}
