"""Partitioning: which parameters form a group, and where each one lies in its group's flat shard. Pure arithmetic.

Invariants:
1. Every parameter belongs to exactly one group; a group has one dtype and one `requires_grad`.
2. A parameter starts at a multiple of ALIGN elements, so that it is 64-byte aligned in every dtype of 2 bytes or more.
3. The flat size is a multiple of ALIGN x ranks: shards are equal, and rank r owns elements [r * S, (r + 1) * S).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import nn

ALIGN = 32  # elements


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the flat tensor of its group, in elements."""

    start: int
    shape: torch.Size
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSpec:
    """The flat layout of one group over `ranks` ranks."""

    slots: tuple[Slot, ...]
    numel: int  # of the whole flat tensor, padded
    ranks: int

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.ranks

    def shard(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat tensor that are one rank's shard."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def owned_shard(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of `slot` in one rank's shard, counted from the shard's start; none: start == stop."""
        base, end = self.shard(rank)
        start, stop = overlap(slot, base, end)
        return start - base, stop - base


def overlap(slot: Slot, start: int, stop: int) -> tuple[int, int]:
    """The elements of `slot` among [start, stop) of the flat tensor; none: the two are equal."""
    low = max(slot.start, start)
    return low, max(low, min(slot.stop, stop))


def layout(shapes: Sequence[torch.Size], ranks: int) -> ShardSpec:
    """The flat layout of parameters with these shapes, in this order."""
    slots = []
    end = 0
    for shape in shapes:
        slots.append(Slot(end, shape, shape.numel()))
        end += -(-shape.numel() // ALIGN) * ALIGN
    step = ALIGN * ranks
    return ShardSpec(tuple(slots), max(-(-end // step), 1) * step, ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class UnitPlan:
    """A module whose forward gathers groups: those of its own parameters, and those it shares with other modules."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]  # owned: first met here
    borrowed: tuple[nn.Parameter, ...]  # used here, owned by an earlier unit (tied weights)


def find_units(model: nn.Module, classes: tuple[type[nn.Module], ...] | None) -> list[UnitPlan]:
    """The units of `model`, the root first. `classes`: module classes that are units, instead of the default rule.

    Default rule: each element of a ModuleList, and of a Sequential outside such an element, that holds at least a
    thousandth of the model; each single layer outside an element with at least 1/64 of it; the root takes the rest.
    """
    sizes = _sizes(model)
    chosen = {id(model): ""}
    for name, module in _by_class(model, classes) if classes is not None else _by_default(model, sizes):
        if sizes[id(module)]:
            chosen.setdefault(id(module), name)
    owner: set[int] = set()
    plans: list[UnitPlan] = []
    modules = {id(m): m for m in model.modules()}
    for key, name in chosen.items():
        found = {id(p): p for m in _region(modules[key], chosen) for p in m._parameters.values() if p is not None}
        own = tuple(p for i, p in found.items() if i not in owner)
        borrowed = tuple(p for i, p in found.items() if i in owner)
        owner |= found.keys()
        plans.append(UnitPlan(name, modules[key], own, borrowed))
    return plans


def _sizes(model: nn.Module) -> dict[int, int]:
    """Bytes of distinct parameters below each module."""
    return {
        id(m): sum(p.numel() * p.element_size() for p in {id(p): p for p in m.parameters()}.values())
        for m in model.modules()
    }


def _region(module: nn.Module, chosen: dict[int, str]) -> Iterator[nn.Module]:
    """`module` and what is below it, without what is below another unit."""
    yield module
    for child in module.children():
        if id(child) not in chosen:
            yield from _region(child, chosen)


def _by_class(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in model.named_modules() if m is not model and isinstance(m, classes))


def _by_default(model: nn.Module, sizes: dict[int, int]) -> Iterator[tuple[str, nn.Module]]:
    total = sizes[id(model)]

    def walk(name: str, module: nn.Module, inside: bool) -> Iterator[tuple[str, nn.Module]]:
        elements = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and not inside)
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            is_element = elements and _callable(child) and sizes[id(child)] * 1024 >= total
            direct = any(p is not None for p in child._parameters.values())
            if is_element or (not inside and direct and _callable(child) and sizes[id(child)] * 64 >= total):
                yield path, child
            yield from walk(path, child, inside or (is_element and not isinstance(child, nn.Sequential)))

    return walk("", model, False)


def _callable(module: nn.Module) -> bool:
    """Containers such as ModuleList have no forward of their own, so no hook on one would ever run. What
    torch.compile(module) returns has it as an attribute."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
