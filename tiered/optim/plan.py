"""StepPlan: what one step does to which elements if it is taken; pure data, frozen before anything is changed.

Invariants: 1. Only parameters that have a gradient are in it. 2. The segments of a group are sorted and lie apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiered.optim.kernels import Segment
from tiered.zero.home import ParamHome

Member = tuple[Mapping[str, Any], ParamHome]
"""A parameter, and the settings it has."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """See the file's contract."""

    steps: dict[int, int]  # by id of the Parameter: updates taken after this one
    touched: list[ParamHome]
    segments: dict[int, list[Segment]]  # by index of the group, in elements of this rank's shard


def plan_step(
    param_groups: Iterable[Mapping[str, Any]], homes: Mapping[int, ParamHome], steps: Mapping[int, int]
) -> StepPlan:
    """The plan for the gradients there are now. `homes`, `steps`: by id of the Parameter; `steps` taken so far."""
    plan = StepPlan(dict(steps), [], {})
    for options in param_groups:
        for param in options["params"]:
            home = homes[id(param)]
            if home.grads.present[home.position]:
                plan.steps[id(param)] = plan.steps.get(id(param), 0) + 1
                plan.touched.append(home)
                segments = plan.segments.setdefault(home.group.index, [])
                segments.extend(_segment(home, options, plan.steps[id(param)]))
    for segments in plan.segments.values():
        segments.sort(key=lambda s: s.start)
    return plan


def by_group(param_groups: Iterable[Mapping[str, Any]], homes: Mapping[int, ParamHome]) -> dict[int, list[Member]]:
    """By index of the group: its parameters, each with the settings it has."""
    found: dict[int, list[Member]] = {}
    for options in param_groups:
        for param in options["params"]:
            home = homes[id(param)]
            found.setdefault(home.group.index, []).append((options, home))
    return found


def plan_group(members: Iterable[Member], updates_of: Callable[[ParamHome], int]) -> list[Segment]:
    """What `plan_step` would have for one group now. updates_of: updates taken of a parameter so far."""
    segments: list[Segment] = []
    for options, home in members:
        if home.grads.present[home.position]:
            segments.extend(_segment(home, options, updates_of(home) + 1))
    return sorted(segments, key=lambda s: s.start)


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """`segments` cut to [start, stop), counted from `start`."""
    cut = []
    for s in segments:
        low, high = max(s.start, start), min(s.stop, stop)
        if low < high:
            cut.append(dataclasses.replace(s, start=low - start, stop=high - start))
    return cut


def _segment(home: ParamHome, options: Mapping[str, Any], step: int) -> list[Segment]:
    """The part of a parameter that this rank owns; empty where it owns none."""
    start, stop = home.group.spec.owned_shard(home.slot, home.group.runtime.ranks.rank)
    if start == stop:
        return []
    return [
        Segment(
            start=start,
            stop=stop,
            lr=float(options["lr"]),
            beta1=float(options["betas"][0]),
            beta2=float(options["betas"][1]),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            step=step,
            maximize=bool(options["maximize"]),
        )
    ]
