"""What cannot work is refused by name before anything is changed: settings, budgets, directories, calls.

Every message must carry the field or call, the value that was given and a remedy. After a refusal the model is as it
was, nothing is left in the swap directory, and the right call still works.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT, Gpt
from parity.harness import (
    ADAM,
    HOST,
    NVME,
    PROMPT,
    Placement,
    budgets,
    config_for,
    copied,
    refused,
    same,
    tiered_session,
)
from torch import nn

import tiered
from tiered.errors import BudgetError, ConfigError, StorageError, SwapDirectoryError, TieredError, UsageError


@pytest.fixture(params=PROMPT, ids=lambda placement: placement.name)
def placement(request: pytest.FixtureRequest) -> Placement:
    """What is checked here is the store's, whenever the device computes: `LATE` would only take its time."""
    return request.param


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"param_tier": "disk"}, ["param_tier", "disk", "nvme"]),
        ({"optimizer_tier": "gpu"}, ["optimizer_tier", "gpu", "host"]),
        ({"device": "tpu"}, ["device", "tpu", "cpu"]),
        ({"host_budget": "12 parsecs"}, ["host_budget", "12 parsecs", "GiB"]),
        ({"host_budget": -5}, ["host_budget", "-5"]),
        ({"device_budget": 1.5}, ["device_budget", "1.5"]),
        ({"device_budget": True}, ["device_budget", "True"]),
        ({"stage": 4}, ["stage", "4", "3"]),
        ({"param_tier": "nvme"}, ["param_tier", "nvme="]),
        ({"optimizer_tier": "nvme"}, ["optimizer_tier", "nvme="]),
        ({"precision": "bf16"}, ["precision", "bf16", "MixedPrecision"]),
        ({"emulation": 3}, ["emulation", "3", "Emulation"]),
    ],
    ids=str,
)
def test_an_impossible_setting_names_field_value_and_remedy(settings: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        tiered.Config(**{"device": "cpu", **settings})
    assert all(word in str(caught.value) for word in said), str(caught.value)


@pytest.mark.parametrize("make", [tiered.Config, tiered.MixedPrecision, tiered.Emulation])
def test_an_unknown_setting_is_refused_by_name(make: Callable[..., Any]) -> None:
    with pytest.raises((ConfigError, TypeError), match="devise_budget"):
        make(devise_budget=5)


def test_an_impossible_dtype_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"param_dtype.*int8"):
        tiered.MixedPrecision(param_dtype=torch.int8)


def test_a_config_cannot_be_changed_after_its_check() -> None:
    with pytest.raises(AttributeError):
        tiered.Config(device="cpu").param_tier = "disk"


def untouched(model: nn.Module, weights: Any, swap: Path) -> None:
    """The model is plain, whole and usable, and nothing lies in the swap directory."""
    assert all(type(p) is nn.Parameter for p in model.parameters())
    same(copied(model.state_dict()), weights, exact=True)
    model(*GPT.make_batch(0)).backward()
    assert not list(swap.iterdir())


@pytest.mark.parametrize("place", [NVME, Placement(name="e", device="emulated", param="nvme", optimizer="nvme")])
@pytest.mark.parametrize("budget", ["host_budget", "device_budget"])
def test_a_budget_too_small_for_the_model_says_what_is_needed(budget: str, place: Placement, swap: Path) -> None:
    if budget == "device_budget" and place.device == "cpu":
        place = HOST
    model = Gpt()
    weights = copied(model.state_dict())
    config = config_for(GPT.build, place, swap, **{budget: 2000})
    if budget == "device_budget":
        config = tiered.Config(
            device=place.device, device_budget=2000, host_budget="1GiB", nvme=swap, param_tier="nvme"
        )
    with pytest.raises((ConfigError, BudgetError)) as caught:
        tiered.shard(model, config)
    message = str(caught.value)
    assert budget in message
    assert any(character.isdigit() for character in message.replace("2000", "").replace("2.0", "")), message
    untouched(model, weights, swap)


def test_host_tiers_larger_than_the_host_budget_are_refused_at_sharding(swap: Path) -> None:
    model = Gpt()
    weights = copied(model.state_dict())
    _, enough = budgets(GPT.build, NVME)
    config = tiered.Config(device="cpu", host_budget=enough // 2, nvme=swap, param_tier="host", optimizer_tier="host")
    with pytest.raises((ConfigError, BudgetError), match="host_budget"):
        tiered.shard(model, config)
    untouched(model, weights, swap)


@pytest.mark.parametrize("kind", ["missing", "file", "link"])
def test_a_swap_directory_that_cannot_serve_is_refused_before_anything_is_written(
    kind: str, tmp_path: Path, swap: Path
) -> None:
    path = tmp_path / "elsewhere"
    if kind == "file":
        path.write_text("not a directory")
    elif kind == "link":
        path.symlink_to(swap)
    model = Gpt()
    weights = copied(model.state_dict())
    with pytest.raises((SwapDirectoryError, ConfigError), match="elsewhere"):
        tiered.shard(model, config_for(GPT.build, NVME, path))
    untouched(model, weights, swap)


def test_sharding_twice_is_refused_by_name(placement: Placement, swap: Path) -> None:
    with tiered_session(GPT, placement, swap) as session:
        with pytest.raises(UsageError, match=r"(?i)already|twice|close"):
            tiered.shard(session.model, session.config)
        with pytest.raises(UsageError):
            tiered.shard(session.model.blocks[1], session.config)
        session.train(0)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to dtype": lambda m: m.to(torch.float64),
    "to meta": lambda m: m.to("meta"),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "child half": lambda m: m.blocks[2].half(),
    "child to": lambda m: m.blocks[2].to(torch.float16),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moving_or_casting_a_sharded_model_is_refused_and_changes_nothing(
    move: Callable[[nn.Module], Any], placement: Placement, swap: Path
) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
        before = session.weights()
        with pytest.raises(TieredError) as caught:
            move(session.model)
        assert len(str(caught.value)) > 20
        same(session.weights(), before, exact=True)
        assert all(p.dtype == torch.float32 for p in session.model.parameters())
        session.train(1)


def test_moves_that_move_nothing_are_allowed_or_refused_by_name(placement: Placement, swap: Path) -> None:
    """`.to(device)` and `.float()` stand in many loops; on a model that is there already they mean nothing."""
    with tiered_session(GPT, placement, swap) as session:
        for call in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.cpu()):
            try:
                assert call(session.model) is session.model
            except TieredError as refusal:
                refused(refusal)
            session.train(0)


def test_everything_after_close_is_plain_or_refused_by_name(placement: Placement, swap: Path) -> None:
    model = Gpt()
    tiered.shard(model, config_for(GPT.build, placement, swap))
    optimizer = tiered.AdamW(model.parameters(), **ADAM)
    model(*GPT.make_batch(0)).backward()
    optimizer.step()
    tiered.close(model)
    tiered.close(model)  # closing again is nothing
    model(*GPT.make_batch(1)).backward()
    assert all(p.grad is not None for p in model.parameters())
    for call in (optimizer.step, lambda: tiered.stats(model)):
        with pytest.raises(UsageError, match=r"(?i)shard|close"):
            call()
    model.to(torch.float64)
    assert model.embed.weight.dtype == torch.float64


def test_a_closed_model_trains_on_in_plain_torch_and_can_be_sharded_again(placement: Placement, swap: Path) -> None:
    with tiered_session(GPT, placement, swap) as session:
        session.train(0)
    model = session.model
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.zero_grad()
    model(*GPT.make_batch(1)).backward()
    before = copied(model.state_dict())
    plain.step()
    assert not torch.equal(before["embed.weight"], model.embed.weight.detach())
    want = copied(model.state_dict())
    plain.zero_grad()
    with tiered.shard(model, config_for(GPT.build, placement, swap)) as again:
        assert again is model
        same(copied(model.state_dict()), want, exact=True)
        optimizer = tiered.AdamW(model.parameters(), **ADAM)
        model(*GPT.make_batch(2)).backward()
        optimizer.step()
    assert not list(swap.iterdir())
    assert type(model) is Gpt


def test_leaving_the_scope_by_an_error_closes_the_model(placement: Placement, swap: Path) -> None:
    model = Gpt()

    def body() -> None:
        with tiered.shard(model, config_for(GPT.build, placement, swap)):
            model(*GPT.make_batch(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert not list(swap.iterdir())
    assert type(model) is Gpt
    assert all(p.untyped_storage().nbytes() >= p.nbytes for p in model.parameters())
    assert model(*GPT.make_batch(0)).isfinite()


def test_storage_errors_are_os_errors_and_budget_errors_memory_errors() -> None:
    """Generic code around a training loop keeps working."""
    assert issubclass(StorageError, OSError)
    assert issubclass(BudgetError, MemoryError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(UsageError, RuntimeError)


def test_gradients_from_before_sharding_are_kept_or_refused_by_name(placement: Placement, swap: Path) -> None:
    model = Gpt()
    model(*GPT.make_batch(0)).backward()
    want = {name: copied(p.grad) for name, p in model.named_parameters()}
    try:
        tiered.shard(model, config_for(GPT.build, placement, swap))
    except TieredError as refusal:
        refused(refusal, "grad")
    else:
        same({name: copied(p.grad) for name, p in model.named_parameters()}, want, exact=True)
    tiered.close(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_trainable_parameter_of_an_unsupported_dtype_is_right_or_refused_by_name(
    dtype: torch.dtype, swap: Path
) -> None:
    model = nn.Module()
    model.odd_one = nn.Parameter(torch.ones(3, dtype=dtype))
    try:
        tiered.shard(model, tiered.Config(device="cpu", nvme=swap))
    except TieredError as refusal:
        refused(refusal, "odd_one", str(dtype))
    else:
        assert torch.equal(model.odd_one.detach().clone(), torch.ones(3, dtype=dtype))
    tiered.close(model)


def test_a_model_without_parameters_is_served_or_refused_by_name(swap: Path) -> None:
    model = nn.Sequential(nn.ReLU())
    try:
        tiered.shard(model, tiered.Config(device="cpu", nvme=swap))
    except TieredError as refusal:
        refused(refusal, "parameter")
    else:
        assert torch.equal(model(torch.ones(2)), torch.ones(2))
    tiered.close(model)
    assert not list(swap.iterdir())
