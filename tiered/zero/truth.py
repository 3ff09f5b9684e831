"""The truth of a group: what its blocks hold of each parameter, read and written wherever they live.

With several ranks a block may hold this rank's shard only. Then reading one parameter is a call that all ranks make,
and writing one changes what this rank has of it. Invariant: no more than one parameter's values, or a window of a
group's, are in memory for it.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from tiered.store.window import WINDOW_BYTES
from tiered.zero.agreement import Call
from tiered.zero.partition import Slot, overlap

if TYPE_CHECKING:
    from tiered.zero.group import ParamGroup


def values(group: ParamGroup, slot: Slot, kind: str, name: str) -> torch.Tensor:
    """A copy of one parameter's elements of a block: `slot.shape`, the block's dtype; gathered from every rank where
    the kind is partitioned, and a call of all of them in every stage. `name`: of the parameter, for messages."""
    full = torch.empty(slot.numel, dtype=_dtype(group, kind), device="cpu")
    read = _unite if group.runtime.partitions(kind) else _load
    detail = zlib.crc32(f"{kind} {group.index} {slot.start}".encode())
    doing = f"reading {kind} of '{name}', for a state dict"
    group.runtime.together(Call.VALUES, doing, lambda: read(group, kind, full, slot), detail=detail)
    return full.view(slot.shape)


def set_values(group: ParamGroup, slot: Slot, kind: str, value: torch.Tensor) -> None:
    """Replace one parameter's elements of a block, as far as this rank has them."""
    base, end = group.span(kind)
    start, stop = overlap(slot, base, end)
    if start < stop:
        dtype = _dtype(group, kind)
        flat = group.runtime.device.to_host(value.detach()).to(dtype).reshape(-1)
        part = flat[start - slot.start : stop - slot.start].contiguous()
        group.runtime.store.patch(group.blocks[kind], part.view(torch.uint8), (start - base) * dtype.itemsize)


def fill_master(group: ParamGroup) -> None:
    """Give the `master` block, which is new, the values of `param`."""
    _cast(group, "param", "master")


def derive_param(group: ParamGroup) -> None:
    """Give the `param` block, which holds the same elements, the rounded values of `master`."""
    _cast(group, "master", "param")


def _cast(group: ParamGroup, source: str, target: str) -> None:
    """Fill what `target` has of the elements of `master` with what `source` has, in its own dtype."""
    store, (first, last), step = group.runtime.store, group.span("master"), WINDOW_BYTES // 4
    given, wanted = _dtype(group, source), _dtype(group, target)
    for start in range(first, last, step):
        part = torch.empty(min(step, last - start), dtype=given, device="cpu")
        place = (start - group.span(source)[0]) * given.itemsize
        store.load(group.blocks[source], part.view(torch.uint8), place)
        place = (start - group.span(target)[0]) * wanted.itemsize
        store.patch(group.blocks[target], part.to(wanted).view(torch.uint8), place)


def absorb(group: ParamGroup, kind: str, part: torch.Tensor, start: int) -> None:
    """Bring `part` (compute dtype) of the group's buffer into a block, from its element `start` on. The master takes it
    wherever its rounded value is not what the parameter is now."""
    store, block = group.runtime.store, group.blocks[kind]
    if kind == "param":
        store.patch(block, part.view(torch.uint8), start * group.dtype.itemsize)
        return
    master = torch.empty(part.numel(), dtype=torch.float32, device="cpu")
    store.load(block, master.view(torch.uint8), start * 4)
    same = (master.to(group.dtype) == part) | (part.isnan() & master.isnan())
    store.patch(block, torch.where(same, master, part.float()).view(torch.uint8), start * 4)


def overwrite(group: ParamGroup, slot: Slot, value: torch.Tensor) -> None:
    """Replace the values of one parameter of a group that is away by `value` (any dtype, `slot.shape`), as copying it
    into the parameter would: rounded to the compute dtype, and into the master where that makes a difference."""
    flat = group.runtime.device.to_host(value.detach()).reshape(-1)
    step = WINDOW_BYTES // 4
    for kind in ("param", "master"):
        if kind in group.blocks:
            base, end = group.span(kind)
            first, last = overlap(slot, base, end)
            for start in range(first, last, step):
                part = flat[start - slot.start : min(start + step, last) - slot.start]
                absorb(group, kind, part.to(group.dtype).contiguous(), start - base)


def _dtype(group: ParamGroup, kind: str) -> torch.dtype:
    return group.dtype if kind == "param" else torch.float32


def _load(group: ParamGroup, kind: str, full: torch.Tensor, slot: Slot) -> None:
    """Fill what this rank's block has of `full`, the values of `slot`."""
    base, end = group.span(kind)
    start, stop = overlap(slot, base, end)
    if start < stop:
        part = full[start - slot.start : stop - slot.start]
        group.runtime.store.load(group.blocks[kind], part.view(torch.uint8), (start - base) * part.element_size())


def _unite(group: ParamGroup, kind: str, full: torch.Tensor, slot: Slot) -> None:
    """Fill `full`, the values of `slot`, with every rank's part; on every rank."""
    ranks, size = group.runtime.ranks, full.element_size()
    shards = [overlap(slot, *group.spec.shard(rank)) for rank in range(ranks.size)]
    spans = [((start - slot.start) * size, (stop - slot.start) * size) for start, stop in shards]
    _load(group, kind, full, slot)
    whole = full.view(torch.uint8)
    start, stop = spans[ranks.rank]
    ranks.unite(whole, whole[start:stop], spans, range(ranks.size))
