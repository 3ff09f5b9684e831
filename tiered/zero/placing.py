"""Where each group's states go: turns settings and sizes into demands on the tiers, and budgets into room for them.

Pure arithmetic over group sizes; `store.policy.place` decides. Stated formulas, all in bytes:

    device    the groups that stay + max over modules of (the groups that move, of the module and those it is inside of)
    host      homes + reserve; reserve covers the staging of a step, of a gather and of the gradients in backward

Invariant: what `place_groups` returns fits the budgets, or it raises ConfigError with the bytes that would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tiered.config import Config, format_size
from tiered.device.memory import page_ceil
from tiered.errors import ConfigError
from tiered.store.policy import Demand, place
from tiered.store.store import WINDOW_BYTES
from tiered.store.tier import Tier

CHUNK_ALIGN = 1 << 19  # elements: 1 MiB of a 16-bit kind, so that a chunk is whole pieces of every kind
PIPELINE_SLOTS = 3
_SOFT_RESERVE = 96 << 20  # what a step's staging should have where the budget can spare it


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSizes:
    """Bytes of one group's blocks on this rank, and of the gathered group."""

    index: int
    gathered: int
    shard: dict[str, int]  # kind -> bytes; "param" always, the others where the group trains
    numel: int  # elements of the shard


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Homes by (group, kind), the groups that stay on the device, the device budget in force, and the bytes of the host
    budget that staging needs."""

    homes: dict[tuple[int, str], Tier]
    sticky: frozenset[int]
    device_limit: int
    reserve: int


def place_groups(
    groups: Sequence[GroupSizes], paths: Sequence[Sequence[int]], config: Config, host_limit: int, *, in_place: bool
) -> Placement:
    """Place every block of every group.

    paths: for each module, the indices of the groups it and the modules around it gather at once.
    in_place: a shard on the host is the gathered group itself. Raises ConfigError where a budget is too small.
    """
    limit = config.device_budget if isinstance(config.device_budget, int) else None
    if not in_place:
        sticky, limit = _sticky(groups, paths, config, limit)
        homes = _place_fastest(groups, config, 0, host_limit, in_place=False)
        return Placement(homes, sticky, limit, _reserve(groups, drives=True, in_place=False))
    if config.param_tier == "device":
        spare = sum(page_ceil(g.gathered) for g in groups) if limit is None else limit
    else:
        spare = 0 if limit is None else max(0, limit - _window(groups, paths))
    homes = _place_fastest(groups, config, spare, host_limit, in_place=True)
    moving = [g for g in groups if homes[g.index, "param"] is Tier.NVME]
    window = _window(moving, paths)
    stays = sum(page_ceil(g.gathered) for g in groups if homes[g.index, "param"] is Tier.DEVICE)
    if limit is None:
        limit = stays + max(window, 3 * max((page_ceil(g.gathered) for g in moving), default=0))
    if stays + window > limit:
        raise ConfigError(_window_error(moving, limit, window))
    sticky = frozenset(g.index for g in groups if homes[g.index, "param"] is Tier.DEVICE)
    return Placement(homes, sticky, limit, _reserve(groups, drives=True, in_place=True))


def _window(groups: Sequence[GroupSizes], paths: Sequence[Sequence[int]]) -> int:
    size = {g.index: page_ceil(g.gathered) for g in groups}
    return max((sum(size.get(i, 0) for i in set(path)) for path in paths), default=0)


def _window_error(groups: Sequence[GroupSizes], limit: int, window: int) -> str:
    return (
        f"device_budget={limit} ({format_size(limit)}) is too small: the groups gathered at once take up to {window} "
        f"bytes ({format_size(window)}; the largest single group {max(g.gathered for g in groups)}): set "
        f"device_budget to at least {window}, or make groups smaller with groups=(YourLayer, ...)"
    )


def _sticky(
    groups: Sequence[GroupSizes], paths: Sequence[Sequence[int]], config: Config, limit: int | None
) -> tuple[frozenset[int], int]:
    """The groups that stay on a device of its own memory, and its budget."""
    total = sum(page_ceil(g.gathered) for g in groups)
    window = _window(groups, paths)
    if limit is None:
        largest = max((page_ceil(g.gathered) for g in groups), default=0)
        limit = total if config.param_tier in ("auto", "device") else max(3 * largest, window)
    if config.param_tier in ("host", "nvme"):
        if window > limit:
            raise ConfigError(_window_error(groups, limit, window))
        return frozenset(), limit
    if total <= limit:
        return frozenset(g.index for g in groups), limit
    if config.param_tier == "device":
        raise ConfigError(
            f"device_budget={limit} ({format_size(limit)}) is too small for param_tier='device': all parameters take "
            f"{total} bytes ({format_size(total)}): raise it, or use param_tier='auto'"
        )
    if window > limit:
        raise ConfigError(_window_error(groups, limit, window))
    stay: set[int] = set()
    left = limit - window
    for group in groups:
        if page_ceil(group.gathered) <= left:
            stay.add(group.index)
            left -= page_ceil(group.gathered)
    return frozenset(stay), limit


def _place_fastest(
    groups: Sequence[GroupSizes], config: Config, spare: int, host_limit: int, *, in_place: bool
) -> dict[tuple[int, str], Tier]:
    """First without any drive, which needs the least staging; then with drives."""
    lone: dict[str, tuple[Tier, ...]] = {
        "param": {
            "auto": (Tier.DEVICE, Tier.HOST) if in_place else (Tier.HOST,),
            "device": (Tier.DEVICE,) if in_place else (Tier.HOST,),
            "host": (Tier.HOST,),
            "nvme": (),
        }[config.param_tier],
        "state": (Tier.HOST,) if config.optimizer_tier != "nvme" else (),
        "grad": (Tier.HOST,),
    }
    reserve = _reserve(groups, drives=False, in_place=in_place)
    if all(lone.values()):
        try:
            return place(_demands(groups, lone), {Tier.DEVICE: spare, Tier.HOST: host_limit - reserve})
        except ConfigError:
            if not config.directories:
                raise
    for kind, fixed in (("param", config.param_tier), ("state", config.optimizer_tier), ("grad", "auto")):
        if fixed in ("auto", "nvme") or (fixed == "device" and not in_place):
            lone[kind] = (*lone[kind], Tier.NVME)
    reserve = _reserve(groups, drives=True, in_place=in_place)
    bound = sum(d.nbytes for d in _demands(groups, lone) if d.tiers == (Tier.HOST,))
    if reserve + bound > host_limit:
        raise ConfigError(
            f"host_budget={host_limit} ({format_size(host_limit)}) is too small: staging for the largest group takes "
            f"{reserve} bytes and states that must live on the host {bound}: set host_budget to at least "
            f"{reserve + bound} ({format_size(reserve + bound)}), or make groups smaller with groups=(YourLayer, ...)"
        )
    soft = max(reserve, min(_SOFT_RESERVE, host_limit // 3))
    try:
        return place(_demands(groups, lone), {Tier.DEVICE: spare, Tier.HOST: host_limit - soft})
    except ConfigError:
        return place(_demands(groups, lone), {Tier.DEVICE: spare, Tier.HOST: host_limit - reserve})


def _demands(groups: Sequence[GroupSizes], tiers: dict[str, tuple[Tier, ...]]) -> list[Demand]:
    """In the order of bytes moved per byte kept: parameters, gradients, optimizer states."""

    def of(kinds: Iterable[str], tier: str) -> list[Demand]:
        return [
            Demand(g.index, kind, page_ceil(g.shard[kind]), tiers[tier])
            for g in groups
            for kind in kinds
            if kind in g.shard
        ]

    return of(["param"], "param") + of(["grad"], "grad") + of(["master", "exp_avg", "exp_avg_sq"], "state")


def slot_bytes(shard: dict[str, int], numel: int, chunk: int) -> int:
    """Bytes of staging one chunk of `chunk` elements takes, if every kind has to be staged."""
    part = min(chunk, numel)
    return sum(page_ceil(part * nbytes // max(numel, 1)) for nbytes in shard.values())


def _reserve(groups: Sequence[GroupSizes], *, drives: bool, in_place: bool) -> int:
    param = max((page_ceil(g.shard["param"]) for g in groups), default=0)
    grad = max((page_ceil(g.shard.get("grad", 0)) for g in groups), default=0)
    window = min(WINDOW_BYTES, max((page_ceil(n) for g in groups for n in g.shard.values()), default=0))
    leaving = 0 if in_place else 3 * max(grad, param)
    if not drives:
        return window + leaving
    step = PIPELINE_SLOTS * max((slot_bytes(g.shard, g.numel, CHUNK_ALIGN) for g in groups), default=0)
    backward = grad + leaving + (0 if in_place else param)
    return window + max(step, backward)
