"""What goes between ranks goes beside computation: a layer that computes, and waits in the middle of it, sees it done.

Each wait is for what the ranks' threads can do alone. Were a gather made when a group is used, or a reduction when
backward is over, it would never come, and the wait ends as an error.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from threaded_ranks import World, sharded
from torch import nn

from tiered.zero.model import ShardedModel
from tiered.zero.shared import SharedGrads

WIDTH, LAYERS = 16, 4
LATE_S = 1e-3
PATIENCE_S = 10.0


class Watched(nn.Module):
    """A layer during whose forward and backward something may be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forwards: Callable[[], None] | None = None
        self.backwards: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forwards is not None:
            self.forwards()
        out = self.linear(x).tanh()
        if self.backwards is not None:
            seen = self.backwards
            out.register_hook(lambda grad: seen())
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Watched() for _ in range(LAYERS)))


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen while a layer was computing"
        time.sleep(1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def seen_inside(hook: str, happened: Callable[[ShardedModel, int], bool], what: str, **how: Any) -> list[int]:
    """How often, on each of three ranks, a layer saw in the middle of its forward or backward (`hook`) that something
    had happened to the group after its own; in the second step, when the order is learnt."""
    models = [network() for _ in range(3)]

    def program(rank: int) -> int:
        with sharded(models[rank], device="cpu", **how) as (model, optimizer, inside):
            step(model, optimizer)
            seen = 0

            def looking(index: int) -> Callable[[], None]:
                def look() -> None:
                    nonlocal seen
                    until(lambda: happened(inside, index + 1), f"{what} of group {index + 1}")
                    seen += 1

                return look

            for index in range(LAYERS - 1):
                setattr(model[index], hook, looking(index))
            step(model, optimizer)
            return seen

    with World(3, late_s=LATE_S).installed() as world:
        return world.run(program)


def test_the_next_group_arrives_from_all_ranks_while_one_computes() -> None:
    two = 2 * 4096  # bytes: a group is less than a page
    assert seen_inside("forwards", is_there, "the gather", stage=3, device_budget=two) == [LAYERS - 1] * 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_over_all_ranks_while_backward_goes_on(stage: int) -> None:
    assert seen_inside("backwards", is_reduced, "the reduction", stage=stage) == [LAYERS - 1] * 3


def is_there(inside: ShardedModel, index: int) -> bool:
    """A group has arrived, and nothing of it is in flight."""
    return inside.groups[index].present and inside.groups[index].poll()


def is_reduced(inside: ShardedModel, index: int) -> bool:
    """Every gradient of a group has been taken in by a reduction, which is over."""
    grads = inside.grads[index]
    assert isinstance(grads, SharedGrads)
    if grads.reduction is None:
        return all(grads.present) and not any(grads.left)
    return grads.done is not None and grads.done.done()
