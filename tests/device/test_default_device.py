"""A default device set by the user (torch.set_default_device, `with torch.device`) is for the user's tensors only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.harness import same
from torch import nn

import tiered

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "emulated": {"device": "emulated"},
    "drive": {"device": "emulated", "param_tier": "nvme", "optimizer_tier": "nvme"},
    "resident": {"device": "emulated", "param_tier": "device", "optimizer_tier": "device"},
    "16 bits": {"device": "cpu", "precision": tiered.MixedPrecision(param_dtype=torch.bfloat16)},
}


def train(settings: dict[str, Any], swap: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        x = torch.randn(4, 16)
    with tiered.shard(model, tiered.Config(host_budget="4MiB", nvme=swap, **settings)):
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for _ in range(3):
            model(x.to(model[0].weight.dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        with tiered.gather(model[1], modify=True):
            model[1].bias.data.fill_(1)
        return {"weights": dict(model.state_dict()), "moments": optimizer.state_dict()["state"]}


@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES.keys())
def test_training_is_the_same_whatever_the_default_device(settings: dict[str, Any], tmp_path: Path) -> None:
    want = train(settings, tmp_path)
    with torch.device("meta"):  # a tensor that goes there by mistake has no values to compute with
        got = train(settings, tmp_path)
    same(got, want, exact=True)
