"""Deferred initialisation: what is parked comes back, and nothing of it stays behind."""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tiered


def config(swap: Path) -> tiered.Config:
    return tiered.Config(device="cpu", host_budget="1MiB", nvme=swap, param_tier="nvme", optimizer_tier="nvme")


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))  # 0.8 MiB, of which a quarter MiB may stay
    for module in model:
        nn.init.normal_(module.bias)  # a second pass over values that are away
    model[3].weight = model[2].weight  # the first weight of layer 3 is nobody's any more
    return model


def whole_bytes(model: nn.Module) -> int:
    """Of all parameters that are in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.untyped_storage().nbytes() for param in model.parameters())


def test_values_are_those_of_plain_construction_and_the_drive_is_given_back(tmp_path: Path) -> None:
    with tiered.deferred_init(config(tmp_path)):
        model = build()
    assert sum(p.untyped_storage().nbytes() for p in model.parameters() if type(p) is nn.Parameter) < 1 << 19
    assert os.listdir(tmp_path)
    plain = build().state_dict()
    with tiered.shard(model, config(tmp_path)):
        torch.testing.assert_close(dict(model.state_dict()), dict(plain), rtol=0, atol=0)
        assert len(os.listdir(tmp_path)) == 1, "the drive of the construction is still held"
    assert not os.listdir(tmp_path)


def test_a_construction_that_fails_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    kept = []
    with pytest.raises(ZeroDivisionError), tiered.deferred_init(config(tmp_path)):
        kept.append(build())
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)
    with pytest.raises(tiered.TieredError):
        kept[0][0].weight.sum()


def test_a_model_that_fits_is_never_parked(tmp_path: Path) -> None:
    with tiered.deferred_init(config(tmp_path)):
        small = nn.Linear(8, 8)
    assert type(small.weight) is nn.Parameter
    assert not os.listdir(tmp_path)


def test_a_model_that_is_dropped_gives_the_drive_back(tmp_path: Path) -> None:
    with tiered.deferred_init(config(tmp_path)):
        model = build()
    del model
    gc.collect()
    assert not os.listdir(tmp_path)


def copied(model: nn.Sequential) -> None:
    with torch.no_grad():
        for first, second in itertools.pairwise(model):
            second.weight.copy_(first.weight)  # each with values that are away, into values that may go meanwhile
            second.weight.add_(torch.stack([first.weight, second.weight, model[0].weight]).mean(0))


def halved(model: nn.Sequential) -> None:
    model.to(torch.bfloat16).to(torch.float32)  # assigns .data


@pytest.mark.parametrize("change", [copied, halved])
def test_what_an_operation_takes_is_there_for_it_however_little_may_stay(
    change: Callable[[nn.Sequential], None], tmp_path: Path
) -> None:
    def changed() -> nn.Sequential:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(12)))
        change(model)
        return model

    with tiered.deferred_init(config(tmp_path)):  # a quarter MiB: not even two of the weights
        model = changed()
    assert whole_bytes(model) < 1 << 19
    plain = changed().state_dict()
    with tiered.shard(model, tiered.Config(device="cpu", host_budget="8MiB", nvme=tmp_path)):
        torch.testing.assert_close(dict(model.state_dict()), dict(plain), rtol=0, atol=0)


def test_values_that_something_else_views_stay_with_it_as_long_as_it_does(tmp_path: Path) -> None:
    with tiered.deferred_init(config(tmp_path)):
        first = nn.Linear(128, 128)
        view = first.weight.detach()
        seen = nn.Linear(128, 128)
        seen.weight.detach().numpy()[:] = 2
        model = nn.Sequential(first, seen, *(nn.Linear(128, 128) for _ in range(10)))
        view.fill_(3)
        assert first.weight.eq(3).all(), "the view and the parameter have come apart"
        for module in model[2:]:
            nn.init.normal_(module.weight)
        before = whole_bytes(first)
        del view
        nn.Linear(128, 128)
        assert whole_bytes(first) < before, "it is viewed by nothing, and has not gone"
    assert seen.weight.eq(2).all()
    assert first.weight.eq(3).all()


def test_a_parked_parameter_that_cannot_be_read_stays_parked(tmp_path: Path) -> None:
    with tiered.deferred_init(config(tmp_path)):
        model = build()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "lock":
            path.write_bytes(b"\xa5" * path.stat().st_size)
    for _ in range(2):
        with pytest.raises(tiered.CorruptDataError):
            model[0].weight.sum()
    assert model[0].weight.shape == (128, 128)


def test_layers_that_are_copied_are_parked_too(tmp_path: Path) -> None:
    def transformer() -> nn.Module:
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
        return nn.TransformerEncoder(layer, 16, enable_nested_tensor=False)  # 2 MiB

    with tiered.deferred_init(config(tmp_path)):
        model = transformer()
    assert whole_bytes(model) <= 1 << 18
    plain = transformer().state_dict()
    with tiered.shard(model, tiered.Config(device="cpu", host_budget="8MiB", nvme=tmp_path)):
        torch.testing.assert_close(dict(model.state_dict()), dict(plain), rtol=0, atol=0)
    assert nn.Parameter.__deepcopy__.__qualname__ == "Parameter.__deepcopy__", "torch was left changed"


@pytest.mark.parametrize("parked", [False, True])
def test_two_parameters_over_the_same_memory_are_refused_as_in_plain_construction(parked: bool, tmp_path: Path) -> None:
    with tiered.deferred_init(config(tmp_path)):
        model = nn.Linear(64, 64)
        model.other = nn.Parameter(model.weight.detach())
        if parked:
            model.more = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    with pytest.raises(tiered.UsageError, match="share memory"):
        tiered.shard(model, config(tmp_path))
    with contextlib.suppress(tiered.TieredError):
        tiered.close(model)
