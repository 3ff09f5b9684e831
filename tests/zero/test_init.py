"""Deferred initialisation: what is parked comes back, and nothing of it stays behind."""

import os
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
