"""Scopes and their ends, under unusual use: what torch allows works as in torch, what cannot work says so."""

import copy
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered

PLACES = ["host", "nvme", "emulated"]


def config(place: str, swap: Path) -> tiered.Config:
    if place == "host":
        return tiered.Config(device="cpu", host_budget="8MiB")
    return tiered.Config(
        device="cpu" if place == "nvme" else "emulated",
        host_budget="8MiB",
        device_budget="64KiB",
        nvme=swap,
        param_tier="nvme",
        optimizer_tier="nvme",
        emulation=tiered.Emulation(max_delay_s=0.001),
    )


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Checkpoints a child that is no unit, and a function over a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.w = nn.Parameter(torch.randn(16, 16) / 4)
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        def call(function: Any, value: Tensor) -> Tensor:
            return checkpoint(function, value, use_reentrant=False) if self.checkpointing else function(value)

        x = call(self.second, call(self.first, x))
        x = call(lambda value: torch.tanh(value @ self.w) @ self.w, x)
        for block in self.blocks:
            x = block(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("place", PLACES)
def test_checkpointing_inside_a_unit_gives_the_same_gradients(place: str, tmp_path: Path) -> None:
    plain = net()
    x = torch.randn(4, 16)
    plain(x).square().sum().backward()
    model = net()
    model.checkpointing = True
    with tiered.shard(model, config(place, tmp_path)):
        model(x).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("place", PLACES)
def test_a_view_taken_before_close_keeps_its_values_after_it(place: str, tmp_path: Path) -> None:
    model = net()
    want = model.blocks[1].a.weight.detach().clone()
    tiered.shard(model, config(place, tmp_path))
    view = model.blocks[1].a.weight.detach()
    tiered.close(model)
    assert torch.equal(view, want)


@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_failed_half_way_leaves_nothing_once_gradients_are_zeroed(place: str, tmp_path: Path) -> None:
    model = net()
    broken = [True]

    def fail(p: Tensor) -> None:
        if broken[0]:
            raise RuntimeError("broken")

    model.blocks[2].b.weight.register_post_accumulate_grad_hook(fail)
    x = torch.randn(4, 16)
    with tiered.shard(model, config(place, tmp_path)):
        with pytest.raises(RuntimeError, match="broken"):
            model(x).sum().backward()
        broken[0] = False
        model.zero_grad()
        model(2 * x).sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
    plain = net()
    plain(2 * x).sum().backward()
    for mine, p in zip(got, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=0, atol=0)


def test_gathers_that_overlap_without_nesting_guard_when_the_last_one_ends(tmp_path: Path) -> None:
    model = net()
    with tiered.shard(model, config("nvme", tmp_path)), torch.no_grad():
        weight = model.blocks[0].a.weight
        first, second = tiered.gather(model.blocks[0]), tiered.gather(model.blocks[0])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.isfinite(weight).all()
        second.__exit__(None, None, None)
        for _ in range(3):
            model(torch.randn(2, 16))  # other groups come, this one goes
        assert torch.isfinite(weight.sum())


def test_a_second_thread_is_refused_by_name_while_the_first_is_inside(tmp_path: Path) -> None:
    model = net()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            model(torch.randn(2, 16))
        except BaseException as error:
            errors.append(error)

    with tiered.shard(model, config("nvme", tmp_path)):
        with tiered.gather(model.blocks[0]):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert len(errors) == 1
        assert isinstance(errors[0], tiered.UsageError)
        assert "two threads" in str(errors[0])
        run()  # and afterwards all is well
        assert len(errors) == 1


def test_parameters_added_after_sharding_are_zeroed_too(tmp_path: Path) -> None:
    model = net()
    with tiered.shard(model, config("host", tmp_path)):
        model.extra = nn.Parameter(torch.ones(16))
        (model(torch.randn(2, 16)) * model.extra).sum().backward()
        model.zero_grad()
        assert model.extra.grad is None


def test_close_inside_a_gather_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = net()
    with tiered.shard(model, config("host", tmp_path)):
        with tiered.gather(model), pytest.raises(tiered.UsageError, match=r"close\(\) inside"):
            tiered.close(model)
        model(torch.randn(2, 16)).sum().backward()


def test_a_model_nobody_closed_is_collected_with_its_drive(tmp_path: Path) -> None:
    model = tiered.shard(net(), config("nvme", tmp_path))
    model(torch.randn(2, 16)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"decoupled_weight_decay": False}, {"betas": (2.0, 3.0)}])
def test_settings_that_mean_something_else_are_refused_when_loaded(option: dict[str, Any], tmp_path: Path) -> None:
    model = net()
    with tiered.shard(model, config("host", tmp_path)):
        optimizer = tiered.AdamW(model.parameters())
        state = optimizer.state_dict()
        state["param_groups"][0].update(option)
        with pytest.raises(tiered.ConfigError, match=next(iter(option))):
            optimizer.load_state_dict(state)
        with pytest.raises(tiered.UsageError, match="copied or pickled"):
            copy.deepcopy(optimizer)


def test_a_buffer_over_a_parameters_memory_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mirror", model.weight.data)
    with pytest.raises(tiered.UsageError, match=r"'mirror' and 'weight'|'weight' and 'mirror'"):
        tiered.shard(model, config("host", tmp_path))
