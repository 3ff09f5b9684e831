"""What must be alike on every rank is compared, and named where it is not; what need not be, works."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threaded_ranks import World, ranks_threads, sharded
from torch import nn

import tiered
from tiered.zero.model import ShardedModel

WIDTH = 8
STAGES = (1, 2, 3)


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


def network(layers: int = 3, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(2, WIDTH)).float().square().mean() * scale).backward()


@contextlib.contextmanager
def ranks(size: int) -> Iterator[World]:
    with World(size).installed() as world:
        yield world
    assert ranks_threads() == []


def refused(program: Callable[[int], Any], size: int = 2) -> list[str]:
    """What the RankError says that ends `program` on each rank."""
    with ranks(size) as world:
        ends = world.ended(program)
    assert [type(end) for end in ends] == [tiered.RankError] * size, ends
    return [str(end) for end in ends]


# --- optimizers ---

OPTIMIZERS: dict[str, Callable[[nn.Module, int], tiered.AdamW]] = {
    "clipping": lambda model, rank: tiered.AdamW(model.parameters(), max_grad_norm=1e-3 if rank else None),
    "decay": lambda model, rank: tiered.AdamW(model.parameters(), weight_decay=0.1 * rank),
    "members": lambda model, rank: tiered.AdamW(
        [{"params": list(model[index].parameters()), "lr": lr} for index, lr in ((rank, 0.1), (1 - rank, 0.0))]
    ),
    "parameters": lambda model, rank: tiered.AdamW(list(model.parameters())[2 * rank :]),
    "updates": lambda model, rank: _updated(tiered.AdamW(model.parameters()), 100 * rank),
}


def _updated(optimizer: tiered.AdamW, more: int) -> tiered.AdamW:
    for key in optimizer._homes:
        optimizer._steps[key] = more
    return optimizer


@pytest.mark.parametrize("what", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_that_differ_are_refused_at_the_first_step_on_every_rank(stage: int, what: str) -> None:
    def program(rank: int) -> None:
        with sharded(network(), device="cpu", stage=stage) as (model, _, _):
            optimizer = OPTIMIZERS[what](model, rank)
            backward(model)
            optimizer.step()

    for message in refused(program):
        assert message.startswith("the ranks wait for different things: rank 0: waits 0 s in step()"), message


# --- buffers ---


class Buffered(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.table.sum()


def trained_once(model: nn.Module, optimizer: Any) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("other", [torch.zeros(8), torch.zeros(4, dtype=torch.float64)])
def test_buffers_of_another_shape_or_dtype_are_named_on_every_rank(other: torch.Tensor, later: bool) -> None:
    def program(rank: int) -> None:
        table = torch.zeros(4)
        with sharded(Buffered(other if rank and not later else table), device="cpu", stage=2) as (model, optimizer, _):
            if rank and later:
                model.table = other
            trained_once(model, optimizer)

    said = refused(program)
    assert any("'table' is not alike on every rank" in message for message in said), said
    assert any(str(tuple(other.shape)) in message and "(4,)" in message for message in said), said


def test_a_buffer_that_is_an_expanded_view_is_rank_0s_too() -> None:
    def program(rank: int) -> float:
        with sharded(Buffered(torch.full((1,), float(rank + 1)).expand(4)), device="cpu") as (model, optimizer, _):
            trained_once(model, optimizer)
            return float(model.table.sum())

    with ranks(2) as world:
        assert world.run(program) == [4.0, 4.0]


# --- what is trained ---


@pytest.mark.parametrize("stage", STAGES)
def test_what_only_one_rank_thaws_is_named_on_every_rank(stage: int) -> None:
    def program(rank: int) -> None:
        model = network()
        model[1].requires_grad_(False)
        with sharded(model, device="cpu", stage=stage) as (_, optimizer, _):
            if rank:
                model[1].requires_grad_(True)
            trained_once(model, optimizer)

    for message in refused(program):
        assert "group '1' is trained on one rank and frozen on another" in message


def kept_norms(stage: int, size: int) -> list[float]:
    """Of two steps whose gradients are kept, near the largest number of fp16."""
    precision = tiered.MixedPrecision(param_dtype=torch.float16)

    def program(rank: int) -> list[float]:
        with sharded(network(1), device="cpu", stage=stage, precision=precision) as (model, _, _):
            optimizer = tiered.AdamW(model.parameters(), max_grad_norm=1.0)
            norms = []
            for _ in range(3):
                (model(torch.ones(1, WIDTH)).float().sum() * 15000).backward()
                optimizer.step()
                norms.append(optimizer.grad_norm)
            assert optimizer.skipped_steps == 0
            return norms

    with ranks(size) as world:
        results = world.run(program)
    assert results == results[:1] * size
    return results[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gradient_that_is_kept_counts_as_it_is_at_every_stage(size: int) -> None:
    one, two, three = (kept_norms(stage, size) for stage in STAGES)
    assert one == two == three


# --- memory ---


@pytest.mark.parametrize("size", [1, 2])
def test_many_small_gradients_on_a_slow_link_keep_to_the_least_budgets(size: int, tmp_path: Path) -> None:
    def program(rank: int) -> bool:
        settings: dict[str, Any] = {"device_budget": 1, "host_budget": 1, "nvme": tmp_path, "stage": 1}
        model = network(30, 4)
        for _ in range(8):
            try:
                with sharded(model, emulation=tiered.Emulation(max_delay_s=5e-3), **settings) as (_, optimizer, inside):
                    for _ in range(2):
                        model(torch.ones(1, 4)).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    assert isinstance(inside, ShardedModel)
                    return True
            except tiered.ConfigError as refusal:
                named = re.match(r"^(device_budget|host_budget)=.* at least (\d+)", str(refusal))
                assert named is not None, refusal
                settings[named[1]] = int(named[2])
        raise AssertionError("the least budgets named do not suffice")

    if size == 1:
        assert program(0)
        return
    with ranks(size) as world:
        assert world.run(program) == [True] * size


# --- joining ---


JOINS = """
import torch, tiered
try:
    tiered.shard(torch.nn.Linear(2, 2), tiered.Config(device="cpu", rank_timeout_s=1))
except tiered.RankError as error:
    print(error)
"""


def test_a_rank_that_does_not_join_is_waited_for_as_long_as_the_limit_says_though_a_launcher_keeps_the_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "2"}
    env = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = subprocess.run([sys.executable, "-c", JOINS], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("joining for shard(): not all of 2 ranks joined within 1 s"), done
