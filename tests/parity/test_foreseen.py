"""Real models on a drive, with room for a few groups: what is used is foreseen, and results do not depend on it.

The hit rate of each step is what the meter behind `tiered.stats` has counted in it.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
from models import CONTEXT, VOCABULARY, Gpt, LayerDrop, class_batch, token_batch
from torch import nn

import tiered
from tiered.zero.module import sharded_model

STEPS = 12
Train = Callable[[nn.Module, int], torch.Tensor]


def whole(model: nn.Module, step: int) -> torch.Tensor:
    return model(*token_batch(step))


def with_evaluation(model: nn.Module, step: int) -> torch.Tensor:
    if step % 2:
        with torch.no_grad():
            model(*token_batch(90))
    return whole(model, step)


def with_generation(model: nn.Module, step: int) -> torch.Tensor:
    with torch.no_grad():
        tokens = token_batch(step)[0][:, :1]
        while tokens.shape[1] < CONTEXT - step % 3:
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1) % VOCABULARY], 1)
    return whole(model, step)


def accumulated(model: nn.Module, step: int) -> torch.Tensor:
    for part in range(step % 2):
        whole(model, 20 + part).backward()
    return whole(model, step)


MASKS = ([0, 1, 3, 4, 6, 7, 9, 11], [11, 2, 3, 5, 6, 8, 9, 1], [0, 2, 4, 6, 8, 10, 1, 3])


def masked(model: nn.Module, step: int, masks: int) -> torch.Tensor:
    return model(*class_batch(step), MASKS[step % masks])


def two_masks(model: nn.Module, step: int) -> torch.Tensor:
    return masked(model, step, 2)


def three_masks(model: nn.Module, step: int) -> torch.Tensor:
    return masked(model, step, 3)


def gpt() -> nn.Module:
    return Gpt(12)


def layers() -> nn.Module:
    return LayerDrop(12)


@contextlib.contextmanager
def trained_from(build: Callable[[], nn.Module], budget: str | None) -> Iterator[tuple[nn.Module, tiered.AdamW]]:
    """A model and its optimizer: all on a drive within `budget` of the device, or in memory where that is None."""
    torch.manual_seed(0)
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        where = {"param_tier": "nvme", "optimizer_tier": "nvme"} if budget else {}
        config = tiered.Config(device="cpu", device_budget=budget or "64MiB", host_budget="64MiB", nvme=folder, **where)
        tiered.shard(model, config)
        yield model, tiered.AdamW(model.parameters(), lr=1e-2)
        tiered.close(model)


def run(build: Callable[[], nn.Module], train: Train, budget: str | None) -> tuple[list[object], list[float]]:
    """Losses and weights, and the share of each step's uses that was foreseen."""
    seen: list[object] = []
    rates = []
    with trained_from(build, budget) as (model, optimizer):
        before = 0.0, 0.0
        for step in range(STEPS):
            loss = train(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            meter = sharded_model(model).runtime.meter
            uses, hits = meter.uses - before[0], meter.hits - before[1]
            rates.append(hits / uses if uses else 1.0)
            before = meter.uses, meter.hits
        assert budget is None or 0 < tiered.stats(model).hit_rate < 1
    return seen + [value.clone() for value in model.state_dict().values()], rates


@pytest.mark.parametrize(
    ("build", "train", "budget"),
    [
        pytest.param(gpt, whole, "160KiB", id="stable"),
        pytest.param(gpt, with_evaluation, "160KiB", id="evaluation"),
        pytest.param(gpt, with_generation, "160KiB", id="generation"),
        pytest.param(gpt, accumulated, "160KiB", id="accumulation"),
        pytest.param(layers, two_masks, "40KiB", id="two masks"),
        pytest.param(layers, three_masks, "40KiB", id="three masks"),
    ],
)
def test_most_uses_are_foreseen_once_steps_repeat_and_results_are_those_without(
    build: Callable[[], nn.Module], train: Train, budget: str
) -> None:
    expected, _ = run(build, train, None)
    found, rates = run(build, train, budget)
    for value, same in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(same))
    assert min(rates[6:]) > 0.8, rates
