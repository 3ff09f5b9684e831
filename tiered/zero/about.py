"""What is said of a model's states wherever they are kept: versions, settings, and where each parameter lies in them.

For people, and for whoever looks at a drive without the model: nothing goes on from it.
"""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from tiered.zero.lasting import LASTING

if TYPE_CHECKING:
    from tiered.zero.model import ShardedModel


def about(model: ShardedModel) -> dict[str, Any]:
    """Versions and settings."""
    config = {f.name: str(getattr(model.config, f.name)) for f in dataclasses.fields(model.config)}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "tiered": version("tiered")}
    return {"versions": versions, "config": config}


def about_blocks(model: ShardedModel) -> dict[str, Any]:
    """Those; this rank among all; by group, the elements [start, stop) that a block of each kind holds of it, and its
    parameters with theirs."""
    ranks = model.runtime.ranks
    groups: dict[str, Any] = {
        str(group.index): {"spans": {kind: group.span(kind) for kind in LASTING}, "parameters": []}
        for group in model.groups
    }
    for home in model.homes:
        groups[str(home.group.index)]["parameters"].append([home.name, home.slot.start, home.slot.stop])
    return {**about(model), "rank": ranks.rank, "ranks": ranks.size, "stage": model.runtime.stage, "groups": groups}
