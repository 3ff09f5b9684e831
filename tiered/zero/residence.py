"""Residence: which blocks of a group live on a device of its own memory, and how they come there and go.

A group lives there with all its states or with none. The last gradients of a backward have no computation left to hide
behind, and the first parameters of the next forward nothing to arrive under: both belong to the first groups. So where
a measured step leaves device memory over, the first groups are promoted: they stay there and are updated there.

Invariants: 1. a promotion that finds no room changes nothing. 2. What moves are the same bits. 3. A group is promoted
between steps, when nothing of it is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiered.device.buffer import Buffer
from tiered.device.memory import page_ceil
from tiered.store.block import Block, BlockKey
from tiered.store.store import TieredStore
from tiered.store.tier import Tier
from tiered.store.window import WINDOW_BYTES
from tiered.zero.group import ParamGroup


def add_block(group: ParamGroup, kind: str, nbytes: int, home: Tier) -> None:
    """Make one more block of a group. Raises BudgetError or SwapFullError where its home has no room."""
    runtime, memory = group.runtime, None
    if home is Tier.DEVICE:
        memory = runtime.device.allocate(nbytes)
        runtime.budget.charge(page_ceil(nbytes), f"{kind} of group '{group.name}'")
        runtime.device.commit(memory)
    group.blocks[kind] = runtime.store.create(BlockKey(group.index, kind), nbytes, home, memory=memory)


def remove_block(group: ParamGroup, kind: str) -> None:
    """Give up a block of a group, other than `param`, and its memory."""
    runtime, block = group.runtime, group.blocks.pop(kind)
    memory = block.memory
    runtime.store.remove(block)
    if block.home is Tier.DEVICE and memory is not None:
        if not memory.exported():
            runtime.device.release(memory)
        runtime.budget.refund(page_ceil(block.nbytes))


def renew_if_viewed(group: ParamGroup, kind: str) -> None:
    """Where somebody outside views a block on the device, leave them the memory and give the block other."""
    runtime, block = group.runtime, group.blocks[kind]
    if block.memory is not None and block.memory.exported():
        memory = runtime.device.allocate(block.nbytes)
        runtime.device.commit(memory)
        runtime.store.lend(block, memory)


def fitting(groups: Sequence[ParamGroup], room: int) -> list[ParamGroup]:
    """The groups to promote: from the first on, as many as `room` bytes hold with all their states."""
    chosen: list[ParamGroup] = []
    for group in groups:
        if group.resident or "grad" not in group.blocks:
            continue
        room -= group.nbytes + sum(_state_bytes(group).values())
        if room < 0:
            break
        chosen.append(group)
    return chosen


def promote(group: ParamGroup) -> bool:
    """Make `group` resident; False where the device has no room for it."""
    budget, device = group.runtime.budget, group.runtime.device
    sizes = _state_bytes(group)
    if sum(sizes.values()) + (0 if group.present else group.nbytes) > budget.free:
        return False
    try:
        if not group.present:
            group.begin_fetch()
        group.wait()
    except MemoryError:
        return False
    group.absorb()
    budget.charge(sum(sizes.values()), f"the states of group '{group.name}'")
    made: dict[str, Buffer] = {}
    try:
        for kind in sizes:
            made[kind] = device.allocate(group.blocks[kind].nbytes)
            device.commit(made[kind])
    except MemoryError:  # the device has less than the budget says
        for buffer in made.values():
            device.release(buffer)
        budget.refund(sum(sizes.values()))
        return False
    for kind, buffer in made.items():
        _copy(group.runtime.store, group.blocks[kind], buffer)
        _replace(group, kind, buffer)
    _replace(group, "param", group.buffer)
    group.stay()
    return True


def _state_bytes(group: ParamGroup) -> dict[str, int]:
    return {kind: page_ceil(block.nbytes) for kind, block in group.blocks.items() if kind != "param"}


def _copy(store: TieredStore, block: Block, buffer: Buffer) -> None:
    for start in range(0, block.nbytes, WINDOW_BYTES):
        part = torch.empty(min(WINDOW_BYTES, block.nbytes - start), dtype=torch.uint8, device="cpu")
        store.load(block, part, start)
        buffer.write(part, start)


def _replace(group: ParamGroup, kind: str, buffer: Buffer) -> None:
    store, old = group.runtime.store, group.blocks[kind]
    store.remove(old)
    group.blocks[kind] = store.create(old.key, old.nbytes, Tier.DEVICE, memory=buffer)
