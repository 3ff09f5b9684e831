"""Placement and eviction: pure decisions over sizes; nothing here moves a byte.

`place` fills the fastest tier first, kind by kind and group by group, and says what would be enough where it cannot.
`victims` evicts what is used furthest in the future.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tiered.config import format_size
from tiered.errors import ConfigError
from tiered.store.tier import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """A block to be placed: its size and the tiers it may live on, fastest first (several: the first that fits)."""

    group: int
    kind: str
    nbytes: int
    tiers: tuple[Tier, ...]


def place(demands: Sequence[Demand], free: dict[Tier, int]) -> dict[tuple[int, str], Tier]:
    """Home of every demand, by (group, kind), filling in the order given.

    `free` is what each tier has for homes, in bytes. Raises ConfigError, naming the budget and the bytes it would
    need, where a demand fits nowhere it may live.
    """
    left = dict(free)
    homes: dict[tuple[int, str], Tier] = {}
    for demand in sorted(demands, key=_freedom):
        fitting = [t for t in demand.tiers if t is Tier.NVME or demand.nbytes <= left.get(t, 0)]
        if not fitting:
            raise ConfigError(_too_small(demand, demands, free))
        homes[demand.group, demand.kind] = fitting[0]
        left[fitting[0]] = left.get(fitting[0], 0) - demand.nbytes
    return homes


def _freedom(demand: Demand) -> int:
    """How late a demand can be placed: what cannot go to a drive must find its room first, the least choice first."""
    return len(Tier) if Tier.NVME in demand.tiers else len(demand.tiers)


def _too_small(demand: Demand, demands: Sequence[Demand], free: dict[Tier, int]) -> str:
    tier = demand.tiers[-1]
    total = sum(d.nbytes for d in demands if d.tiers[-1] is tier)
    return (
        f"{tier.value}_budget leaves {free.get(tier, 0)} bytes ({format_size(free.get(tier, 0))}) for states that must "
        f"live on the {tier.value}, but they take {total} bytes ({format_size(total)}); {demand.kind} of group "
        f"{demand.group} does not fit: raise {tier.value}_budget by at least {total - free.get(tier, 0)} bytes, or set "
        f"nvme='/path/on/a/drive' with tier 'auto' or 'nvme'"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A block that may be evicted: what it would free, and when it is used next (larger is later)."""

    key: object
    nbytes: int
    next_use: int


def victims(candidates: Sequence[Candidate], need: int) -> list[object] | None:
    """Keys to evict to free `need` bytes, furthest next use first; None (evict nothing) if all is too little."""
    chosen: list[object] = []
    for candidate in sorted(candidates, key=lambda c: -c.next_use):
        if need <= 0:
            break
        chosen.append(candidate.key)
        need -= candidate.nbytes
    return chosen if need <= 0 else None
