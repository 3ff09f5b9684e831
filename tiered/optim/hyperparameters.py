"""Hyperparameters of AdamW, one parameter group at a time: checked, described, and to and from JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiered.errors import ConfigError


def described(group: Mapping[str, Any]) -> str:
    """What of a parameter group an update is made of, but for the parameters."""
    return " ".join(f"{name}={group[name]}" for name in ("lr", "betas", "eps", "weight_decay", "maximize"))


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """All but the parameters, as JSON has it."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def like(group: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `plain`, each in the type that `group` has it in."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in ("params", "param_names"):
            old = group.get(name)
            if isinstance(old, torch.Tensor):
                found[name] = torch.full_like(old, value)
            else:
                found[name] = tuple(value) if isinstance(value, list) else value
    return found


def arranged(
    mine: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> list[Mapping[str, Any] | None]:
    """For each list of parameters the one of `groups` that all of them were in, as far as they were in any; None where
    that is not one. names: {name in `groups`: name in `mine`}, where they differ."""
    place = {names.get(name, name): number for number, group in enumerate(groups) for name in group["params"]}
    found: list[Mapping[str, Any] | None] = []
    for number, each in enumerate(mine):
        where = {place[name] for name in each if name in place} or {number} & set(range(len(groups)))
        found.append(groups[where.pop()] if len(where) == 1 else None)
    return found


def check(group: dict[str, Any]) -> None:
    betas = group["betas"]
    checks = {
        "lr": float(group["lr"]) >= 0,
        "betas": len(betas) == 2 and all(0 <= float(b) < 1 for b in betas),
        "eps": float(group["eps"]) >= 0,
        "weight_decay": float(group["weight_decay"]) >= 0,
    }
    for name, fine in checks.items():
        if not fine:
            wanted = "two numbers in [0, 1)" if name == "betas" else "a number >= 0"
            raise ConfigError(f"{name}={group[name]!r}: use {wanted}")
    for name, fine in (("amsgrad", False), ("decoupled_weight_decay", True)):
        if bool(group.get(name, fine)) is not fine:
            raise ConfigError(f"{name}={group[name]!r}: tiered.AdamW supports {name}={fine}")
