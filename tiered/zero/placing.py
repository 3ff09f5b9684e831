"""Where each group's states go: turns settings and sizes into demands on the tiers, and budgets into room for them.

Pure arithmetic over group sizes; `store.policy.place` decides. Stated formulas, all in bytes:

    device    the groups that stay, with what of their states is there, and the states of those that move
              where optimizer_tier="device"
              + max over modules of (the groups that move, of the module and those it is inside of)
    host      homes + reserve; reserve covers the staging of a step, of a gather and of the gradients in backward,
              with several ranks before they are reduced too

Invariant: what `place_groups` returns fits the budgets, or it raises ConfigError with the bytes that would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tiered.config import Config, format_size
from tiered.device.memory import page_ceil
from tiered.errors import ConfigError
from tiered.store.policy import Demand, place
from tiered.store.tier import Tier
from tiered.store.window import WINDOW_BYTES
from tiered.zero.traffic import scratch_bytes

CHUNK_ALIGN = 1 << 19  # elements: 1 MiB of a 16-bit kind, so that a chunk is whole pieces of every kind
PIPELINE_SLOTS = 3
_STATES = frozenset(("master", "exp_avg", "exp_avg_sq"))
_DEPARTING = 2  # times the largest group's gradient: what may be on its way from the device at once
_SOFT_RESERVE = 96 << 20  # what a step's staging should have where the budget can spare it


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSizes:
    """Bytes of one group's blocks on this rank, and of the gathered group."""

    index: int
    gathered: int
    shard: dict[str, int]  # kind -> bytes; "param" always, the others where the group trains
    numel: int  # elements of the shard
    gradient: int = 0  # of the whole group, before it is reduced
    whole: frozenset[str] = frozenset()  # with several ranks: kinds of which each rank has all

    @property
    def trained(self) -> dict[str, int]:
        """`shard` as it is once the group trains, which a frozen one may do later."""
        states = dict.fromkeys(("exp_avg", "exp_avg_sq"), 4 * self.numel)
        return {"grad": self.shard["param"], **states, **self.shard}

    @property
    def staged(self) -> dict[str, int]:
        """What of `trained` a step may have to move in chunks."""
        return {kind: nbytes for kind, nbytes in self.trained.items() if kind not in self.whole}


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lives."""

    homes: dict[tuple[int, str], Tier]  # by (group, kind)
    sticky: frozenset[int]  # the groups that stay on the device
    device_limit: int  # the device budget in force
    reserve: int  # bytes of the host budget that staging needs
    window: int  # bytes that the moving groups need on the device at once
    departing: int  # bytes of gradients that may be on their way to the host at once


def place_groups(
    groups: Sequence[GroupSizes],
    paths: Sequence[Sequence[int]],
    config: Config,
    host_limit: int,
    *,
    in_place: bool,
    apart: bool | None = None,
    ranks: int = 1,
    free: int | None = None,
) -> Placement:
    """Place every block of every group.

    paths: for each module, the indices of the groups it and the modules around it gather at once.
    in_place: a shard on the host is the gathered group itself. apart: the device has memory of its own (by default
    where not in_place). ranks: how many there are. free: bytes of the device where no device_budget is given (None: as
    many as are of use). Raises ConfigError where a budget is too small.
    """
    limit = config.device_budget if isinstance(config.device_budget, int) else None
    if not in_place:
        there = config.optimizer_tier == "device" and (apart is None or apart)
        free = limit if limit is not None else free
        return _place_beside(groups, paths, config, host_limit, free, ranks=ranks, states_there=there)
    if config.param_tier == "device":
        spare = sum(page_ceil(g.gathered) for g in groups) if limit is None else limit
    else:
        spare = 0 if limit is None else max(0, limit - _window(groups, paths))
    homes = _place_fastest(groups, paths, config, spare, host_limit, in_place=True, ranks=ranks)
    moving = [g for g in groups if homes[g.index, "param"] is Tier.NVME]
    window = _window(moving, paths)
    stays = sum(page_ceil(g.gathered) for g in groups if homes[g.index, "param"] is Tier.DEVICE)
    if limit is None:
        limit = stays + max(window, 3 * max((page_ceil(g.gathered) for g in moving), default=0))
    if stays + window > limit:
        raise ConfigError(_window_error(moving, limit, window))
    sticky = frozenset(g.index for g in groups if homes[g.index, "param"] is Tier.DEVICE)
    return Placement(homes, sticky, limit, _reserve(groups, paths, drives=True, in_place=True, ranks=ranks), window, 0)


def _place_beside(
    groups: Sequence[GroupSizes],
    paths: Sequence[Sequence[int]],
    config: Config,
    host_limit: int,
    limit: int | None,
    *,
    ranks: int,
    states_there: bool,
) -> Placement:
    """`place_groups` for a device that groups are gathered into: those that live there wholly, and those that move,
    whose optimizer states may be there all the same."""
    resident = [g for g in groups if "grad" in g.shard] if states_there and _whole_groups(config, ranks) else []
    others = [g for g in groups if g not in resident]
    kinds = _STATES if states_there else frozenset()
    homes = {(g.index, kind): Tier.DEVICE for g in resident for kind in g.shard}
    homes |= {(g.index, kind): Tier.DEVICE for g in others for kind in kinds & g.shard.keys()}
    there = sum(page_ceil(g.shard[kind]) for g in groups for kind in g.shard if (g.index, kind) in homes)
    need = there + _window(others, paths)
    if there and limit is not None and need > limit:
        raise ConfigError(
            f"device_budget={limit} ({format_size(limit)}) is too small for optimizer_tier='device': what stays there "
            f"takes {there} bytes and what moves {need - there}: set it to at least {need} ({format_size(need)}), or "
            f"use optimizer_tier='auto'"
        )
    sticky, limit = _sticky(others, paths, config, None if limit is None else limit - there, there)
    moved = [dataclasses.replace(g, shard={k: n for k, n in g.shard.items() if k not in kinds}) for g in others]
    homes |= _place_fastest(moved, paths, config, 0, host_limit, in_place=False, ranks=ranks)
    grad = max((page_ceil(g.trained["grad"]) for g in others), default=0)
    reserve = _reserve(moved, paths, drives=True, in_place=False, ranks=ranks)
    filling = min(WINDOW_BYTES, max((page_ceil(n) for g in resident for n in g.shard.values()), default=0))
    if filling > host_limit:
        raise ConfigError(
            f"host_budget={host_limit} is too small to bring the model to the device: set it to at least {filling}"
        )
    return Placement(homes, sticky, limit + there, reserve, _window(others, paths), _DEPARTING * grad)


def _whole_groups(config: Config, ranks: int) -> bool:
    """Groups whose optimizer states are on the device live there with all they have: nothing of theirs ever moves.
    With several ranks what goes between them is in host memory."""
    return ranks == 1 and config.param_tier in ("auto", "device")


def _window(groups: Sequence[GroupSizes], paths: Sequence[Sequence[int]]) -> int:
    return _deepest({g.index: page_ceil(g.gathered) for g in groups}, paths)


def _deepest(sizes: dict[int, int], paths: Sequence[Sequence[int]]) -> int:
    """The most that the groups of one path take together."""
    return max((sum(sizes.get(i, 0) for i in set(path)) for path in paths), default=0)


def _window_error(groups: Sequence[GroupSizes], limit: int, window: int) -> str:
    return (
        f"device_budget={limit} ({format_size(limit)}) is too small: the groups gathered at once take up to {window} "
        f"bytes ({format_size(window)}; the largest single group {max(g.gathered for g in groups)}): set "
        f"device_budget to at least {window}, or make groups smaller with groups=(YourLayer, ...)"
    )


def _sticky(
    groups: Sequence[GroupSizes], paths: Sequence[Sequence[int]], config: Config, limit: int | None, there: int
) -> tuple[frozenset[int], int]:
    """The groups that stay on a device of its own memory, and its budget; both beside `there` bytes of groups that live
    there with all their states."""
    total = sum(page_ceil(g.gathered) for g in groups)
    window = _window(groups, paths)
    if limit is None:
        largest = max((page_ceil(g.gathered) for g in groups), default=0)
        limit = total if config.param_tier in ("auto", "device") else max(3 * largest, window)
    if config.param_tier == "device":
        if total <= limit:
            return frozenset(g.index for g in groups), limit
        raise ConfigError(
            f"device_budget={limit + there} ({format_size(limit + there)}) is too small for param_tier='device': what "
            f"stays there takes {total + there} bytes ({format_size(total + there)}): raise it, or use "
            f"param_tier='auto'"
        )
    if window > limit:
        raise ConfigError(_window_error(groups, limit, window))
    return frozenset(), limit  # what fits is kept by next use


def _place_fastest(
    groups: Sequence[GroupSizes],
    paths: Sequence[Sequence[int]],
    config: Config,
    spare: int,
    host_limit: int,
    *,
    in_place: bool,
    ranks: int,
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
    reserve = _reserve(groups, paths, drives=False, in_place=in_place, ranks=ranks)
    if all(lone.values()):
        try:
            return place(_demands(groups, lone), {Tier.DEVICE: spare, Tier.HOST: host_limit - reserve})
        except ConfigError:
            if not config.directories:
                raise
    for kind, fixed in (("param", config.param_tier), ("state", config.optimizer_tier), ("grad", "auto")):
        if fixed in ("auto", "nvme") or (fixed == "device" and not in_place):
            lone[kind] = (*lone[kind], Tier.NVME)
    reserve = _reserve(groups, paths, drives=True, in_place=in_place, ranks=ranks)
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


def serving_bytes(groups: Sequence[GroupSizes]) -> int:
    """Of the memory in which a rank reads a shard that another wants; one of a group that may be on a drive."""
    return max((page_ceil(g.shard["param"]) for g in groups if "param" not in g.whole), default=0)


def _reserve(
    groups: Sequence[GroupSizes], paths: Sequence[Sequence[int]], *, drives: bool, in_place: bool, ranks: int
) -> int:
    param = max((page_ceil(g.shard["param"]) for g in groups), default=0)
    grad = max((page_ceil(g.trained["grad"]) for g in groups), default=0)
    window = min(WINDOW_BYTES, max((page_ceil(n) for g in groups for n in g.trained.values()), default=0))
    leaving = 0 if in_place else (_DEPARTING + 1) * max(grad, param)
    between = scratch_bytes(ranks, 0)
    if ranks > 1:  # what modules inside of each other have added up, and one more that is being reduced
        gradients = {g.index: page_ceil(g.gradient) for g in groups if "grad" not in g.whole}
        between += _deepest(gradients, paths) + max(gradients.values(), default=0)
    if not drives:
        return window + leaving + between
    between += serving_bytes(groups) if ranks > 1 else 0
    whole = max((sum(page_ceil(g.trained[kind]) for kind in g.whole) for g in groups), default=0)
    step = PIPELINE_SLOTS * max((slot_bytes(g.staged, g.numel, CHUNK_ALIGN) for g in groups), default=0)
    backward = grad + leaving + (0 if in_place else param)
    return window + max(step + whole, backward) + between
