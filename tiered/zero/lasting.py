"""Lasting: whether what a sharded model has learnt outlasts its process on the drives, and how it is known again there.

A step can be gone on from where every value and moment of it lives on a drive. A copy in 16 bits need not: it is the
rounded master. Pure arithmetic; what is committed, and when, is for others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from torch import nn

from tiered.config import Config, format_size
from tiered.device.memory import page_ceil
from tiered.store.tier import Tier
from tiered.zero.build import GroupPlan
from tiered.zero.placing import Placement

LASTING = ("param", "master", "exp_avg", "exp_avg_sq")  # kinds; gradients are of a step that is not over


def ephemeral(groups: Sequence[GroupPlan], placement: Placement, config: Config) -> str | None:
    """Why nothing of a killed run can be gone on from, in words; None where it can."""
    if not config.directories:
        return "there is no swap directory"
    if config.durability == "none":
        return "durability='none'"
    elsewhere: dict[str, int] = {}
    masters = {index: home for (index, kind), home in placement.homes.items() if kind == "master"}
    for group in groups:
        shard = group.sizes().shard
        for kind in LASTING:
            home = placement.homes.get((group.index, kind))
            derived = kind == "param" and kind not in group.sizes().whole and masters.get(group.index) is Tier.NVME
            if kind in shard and home is not Tier.NVME and not derived:
                where = "the device" if home is Tier.DEVICE else "RAM"
                elsewhere[where] = elsewhere.get(where, 0) + shard[kind]
    if elsewhere:
        told = " and ".join(f"{format_size(nbytes)} in {where}" for where, nbytes in elsewhere.items())
        return (
            f"of the states, {told} would be lost (param_tier='nvme' and optimizer_tier='nvme' keep all on the drive)"
        )
    return None


def bytes_needed(groups: Sequence[GroupPlan], placement: Placement) -> int:
    """Of the drives, for two slots of everything that lasts there, and one of what else is there."""
    shards = [(group.index, kind, n) for group in groups for kind, n in group.sizes().shard.items()]
    there = [(kind, n) for index, kind, n in shards if placement.homes[index, kind] is Tier.NVME]
    return sum(page_ceil(n) * (2 if kind in LASTING else 1) for kind, n in there)


def identity(
    module: nn.Module, groups: Sequence[GroupPlan], placement: Placement, config: Config, rank: int, ranks: int
) -> tuple[str, str, str]:
    """What a rank's states are known by: the model's parameters; how all of it is laid out; and that in words."""
    names = {id(param): name for name, param in module.named_parameters()}
    model = [[names[id(param)], list(param.shape)] for group in groups for param in group.params]
    blocks = [
        [group.index, str(group.dtype), [[slot.start, *slot.shape] for slot in group.spec.slots], kind, nbytes]
        for group in groups
        for kind, nbytes in group.sizes().shard.items()
        if kind in LASTING and placement.homes[group.index, kind] is Tier.NVME
    ]
    words = f"of rank {rank} of {ranks} at stage {config.stage}, over {len(config.directories)} drives"
    return _digest(sorted(model)), _digest([model, blocks, ranks, rank, config.stage, len(config.directories)]), words


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
