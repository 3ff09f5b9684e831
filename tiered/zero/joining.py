"""Joining: ranks come to `shard` together, or not at all.

Before there is anything that could hang, every rank lays open what it is about to shard, and whether it can; when it
has built its part, whether it has. Where ranks differ, or one has failed, each raises, and nothing stays behind.

Invariant: a rank that fails inside `joined` tells the others at the next meeting, so that they fail too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import secrets
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiered.config import Config, format_size
from tiered.device.host import memory_limit
from tiered.errors import ConfigError, RankError
from tiered.zero.build import GroupPlan
from tiered.zero.collectives import Ranks, first_line

HOST_SHARE = 0.8  # of what is available, where no host_budget is given
_OWN = (
    "nvme",
    "host_budget",
    "device_budget",
    "io_threads",
    "drive_timeout_s",
    "emulation",
)  # settings each rank may have of its own


@dataclasses.dataclass(frozen=True, slots=True)
class NodeLimits:
    """The memory of this rank's node, and the ranks that share it."""

    ranks: int  # of this node
    available: int  # bytes, as the rank that found least has it
    limit: int  # bytes of the machine or its cgroup
    given: int | None  # by all ranks of the node together, where all of them give a host_budget

    def host_bytes(self, config: Config) -> int:
        """This rank's host budget. Raises ConfigError where those of the node add up to more than it has."""
        if self.ranks > 1 and self.given is not None and self.given > self.limit:
            raise ConfigError(
                f"host_budget={config.host_budget} ({format_size(int(config.host_budget or 0))}): the {self.ranks} "
                f"ranks of this node together are given {format_size(self.given)}, but it has "
                f"{format_size(self.limit)}: give less, or use budgets='node'"
            )
        if isinstance(config.host_budget, int):
            return config.host_budget // (self.ranks if config.budgets == "node" else 1)
        return int(self.available * HOST_SHARE) // self.ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The generation that all ranks have, and what they make from now on."""

    serial: int | None
    run: str
    after: int  # serials that are made are larger
    ephemeral: str | None  # why none is made, on any rank


class Joining:
    """One rank's way through `shard` beside the others."""

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.ranks = ranks
        self._what = what
        self._pending = 3  # meetings that the others expect this rank at

    def compare(self, module: nn.Module, config: Config, groups: Sequence[GroupPlan], available: int) -> NodeLimits:
        """Meet, and compare what all are about to shard. Raises RankError where ranks differ or one has failed."""
        facts = {"versions": _versions(), "config": _settings(config), "layout": _layout(module, groups)}
        node = {"node": _node(), "available": available, "limit": memory_limit(), "host_budget": config.host_budget}
        everybody = self._meet({"facts": facts, **node})
        _check_alike([one["facts"] for one in everybody], self._what)
        mine = [one for one in everybody if one["node"] == node["node"]]
        budgets = [one["host_budget"] for one in mine]
        share = len(mine) if config.budgets == "node" else 1
        given = sum(budgets) // share if None not in budgets else None
        return NodeLimits(len(mine), min(one["available"] for one in mine), int(node["limit"]), given)  # type: ignore[call-overload]

    def choose(self, offers: Sequence[tuple[int, str]], ephemeral: str | None) -> Chosen:
        """Meet, and choose what of dead runs is protected: the last generation that every rank has. `ephemeral`: why
        this rank has none and will make none."""
        mine = {"offers": offers, "run": secrets.token_hex(8), "ephemeral": ephemeral}
        everybody = self._meet(mine)
        offered = [{(serial, run) for serial, run in one["offers"]} for one in everybody]
        common = set.intersection(*offered)
        why = [f"rank {rank}: {one['ephemeral']}" for rank, one in enumerate(everybody) if one["ephemeral"]]
        return Chosen(
            serial=max(common)[0] if common else None,
            run=everybody[0]["run"],
            after=max((serial for some in offered for serial, _ in some), default=0),
            ephemeral=ephemeral or next(iter(why), None),
        )

    def agree(self) -> None:
        """Meet again: this rank has built its part. Raises RankError where another has not."""
        self._meet({})

    def failed(self, error: BaseException) -> None:
        """Tell the others, who wait at the next meeting."""
        if self._pending and self.ranks.size > 1 and not isinstance(error, RankError):
            with contextlib.suppress(RankError):
                self.ranks.meet(self._what, json.dumps({"error": f"{type(error).__name__}: {first_line(error, 800)}"}))

    def _meet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        self._pending -= 1
        try:
            everybody = [json.loads(text) for text in self.ranks.meet(self._what, json.dumps(mine))]
        except BaseException:
            self._pending = 0
            raise
        if failed := {rank: one["error"] for rank, one in enumerate(everybody) if "error" in one}:
            self._pending = 0
            said = "; ".join(f"rank {rank} failed: {error}" for rank, error in failed.items())
            raise RankError(f"{self._what}: {said}")
        return everybody


@contextlib.contextmanager
def joined(ranks: Ranks, what: str) -> Iterator[Joining]:
    """The others are told of what fails inside."""
    joining = Joining(ranks, what)
    try:
        yield joining
    except BaseException as error:
        joining.failed(error)
        raise


def _check_alike(facts: Sequence[dict[str, Any]], what: str) -> None:
    """Raise RankError naming the first thing in which a rank differs from rank 0."""
    for rank, other in enumerate(facts):
        for kind, ours in facts[0].items():
            for key in dict.fromkeys((*ours, *other[kind])):
                if ours.get(key) != other[kind].get(key):
                    raise RankError(
                        f"{what}: the ranks differ in {kind}: '{key}' is {ours.get(key, 'missing')!r} on rank 0 and "
                        f"{other[kind].get(key, 'missing')!r} on rank {rank}: build the same model with the same "
                        f"settings on every rank"
                    )


def _layout(module: nn.Module, groups: Sequence[GroupPlan]) -> dict[str, str]:
    """What each parameter is, and where it lies."""
    names = {id(param): name for name, param in module.named_parameters()}
    return {
        names[id(param)]: (
            f"{tuple(param.shape)} {param.dtype}, {'trained' if param.requires_grad else 'frozen'}, "
            f"computed in {group.dtype}, number {position} of group {group.index}"
        )
        for group in groups
        for position, param in enumerate(group.params)
    }


def _settings(config: Config) -> dict[str, str]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: str(value) for name, value in fields.items() if name not in _OWN}


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "tiered": version("tiered")}


def _node() -> str:
    """The same for ranks that share one machine's memory, under one limit."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else platform.node()} {memory_limit()}"
