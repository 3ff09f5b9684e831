"""GroupGrads: one group's gradients, accumulated on the host as they leave backward.

Each gradient that backward finishes is added to the group's `grad` block and its own memory given back: at once where
the device's memory is the host's, else by `zero.departures`, which uses `begin` and `end`. Which parameters have a
gradient at all (None or not, as torch means it) and each one's sum of squares are kept beside it, so that a step knows
the global norm without reading the gradients again.

Invariants:
1. A first gradient replaces, later ones add: whether a parameter has one is a flag of this class and of nothing else.
2. `sums[i]` is the sum of squares of what the block holds for parameter i, or None where it has to be measured again.
3. A gradient never leaves the device in a wider dtype than it is accumulated in: it is rounded first, wherever it is.
4. With several ranks, what `arrive` collects is this rank's full gradient; `reduce` turns it into the shard's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tiered.device.memory import Memory
from tiered.errors import UsageError
from tiered.store.block import Block
from tiered.zero.group import ParamGroup

if TYPE_CHECKING:
    from tiered.zero.departures import Departures


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """The arithmetic on gradients in host memory; 1-D tensors of equal sizes.

    accumulate(dst, src, add): dst = src or dst += src; returns the sum of squares of the result.
    """

    accumulate: Callable[[torch.Tensor, torch.Tensor, bool], float]
    sum_of_squares: Callable[[torch.Tensor], float]


class GroupGrads:
    """See the file's contract."""

    def __init__(self, group: ParamGroup, dtype: torch.dtype, kernels: Kernels, departures: Departures) -> None:
        self.group = group
        self.dtype = dtype
        self.present = [False] * len(group.params)
        self.sums: list[float | None] = [None] * len(group.params)
        self._kernels = kernels
        self._departures = departures
        self._whole: Memory | None = None  # several ranks: this backward's full gradient, not reduced yet
        self._arrived = [False] * len(group.params)

    @property
    def block(self) -> Block:
        """The block that holds this rank's shard of the gradients."""
        return self.group.blocks["grad"]

    def arrive(self, position: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient out of backward (any layout, on the device)."""
        if grad.requires_grad:
            raise UsageError(
                f"'{self.group.name}': backward(create_graph=True) would keep a graph of a gradient that leaves for "
                f"the host: use torch.autograd.grad(..., create_graph=True) instead"
            )
        if grad.layout is not torch.strided:
            raise UsageError(f"'{self.group.name}': sparse gradients are not supported: use sparse=False")
        flat = grad.detach().reshape(-1)
        if flat.element_size() > self.dtype.itemsize:
            flat = flat.to(self.dtype)
        self.take(position, flat)

    def take(self, position: int, flat: torch.Tensor) -> None:
        """Add one parameter's gradient (1-D, on the device)."""
        if self.group.runtime.device.in_place or not flat.numel():
            self.add(position, flat)
        else:
            self._departures.depart(self, position, flat.contiguous())

    def add(self, position: int, flat: torch.Tensor) -> None:
        """Add a gradient that is in host memory (1-D)."""
        target, add = self.begin(position)
        total = 0.0
        try:
            total = self._kernels.accumulate(target, flat.contiguous(), add)
        finally:
            del target
            self.end(position, total)

    def begin(self, position: int) -> tuple[torch.Tensor, bool]:
        """What a gradient of one parameter goes to (1-D, host memory, pinned until `end`), and whether it is added to
        what is there or replaces it. From now on the parameter has a gradient."""
        slot, store = self.group.spec.slots[position], self.group.runtime.store
        if self.group.runtime.ranks.size > 1:
            target = self._whole_memory().view(self.dtype, slot.start, slot.stop)
            add, self._arrived[position] = self._arrived[position], True
            return target, add
        memory = store.acquire(self.block, fresh=not any(self.present))
        add, self.present[position] = self.present[position], True
        self.sums[position] = None
        return memory.view(self.dtype, slot.start, slot.stop), add

    def viewed(self) -> bool:
        """Somebody outside holds a view of the gradients, while none is on its way."""
        return self.block.memory is not None and not self.block.pins and self.block.memory.exported()

    def end(self, position: int, total: float) -> None:
        """The gradient begun is in place; `total` is the sum of squares of what is there now."""
        if self.group.runtime.ranks.size == 1:
            self.group.runtime.store.release(self.block, dirty=True)
            self.sums[position] = total

    def undo(self, position: int, had: bool) -> None:
        """The gradient begun does not come; `had`: there was one before."""
        if self.group.runtime.ranks.size > 1:
            self._arrived[position] = had
            return
        self.group.runtime.store.release(self.block, dirty=True)
        self.present[position] = had

    def drain(self) -> None:
        """Wait for the gradients on their way, and add them."""
        self._departures.drain()

    # --- several ranks ---

    @property
    def arrived(self) -> list[bool]:
        """Which parameters have a gradient of this backward."""
        return self._arrived

    def reduce(self, arrived: list[bool]) -> None:
        """Average this backward's gradients over the ranks into the shard. `arrived`: those any rank has."""
        store = self.group.runtime.store
        memory = self._whole_memory()
        shard = self._reduced(memory)
        with store.pinned(self.block, fresh=not any(self.present), dirty=True) as home:
            self._take_in(home.view(self.dtype), shard, arrived)
        self._arrived = [False] * len(self._arrived)
        self._whole = None
        del shard
        store.unstage(memory)

    def _reduced(self, memory: Memory) -> torch.Tensor:
        """The mean over ranks of this rank's slice of a whole gradient, in host memory; uses `memory` up."""
        runtime = self.group.runtime
        flat = memory.view(self.dtype)
        if runtime.device.in_place:
            return runtime.ranks.reduce_scatter(flat)
        with runtime.loan(memory.nbytes, "a gradient that is reduced") as buffer:
            there = buffer.view(self.dtype)
            runtime.device.order(runtime.device.copy_in(there, flat))
            shard = runtime.ranks.reduce_scatter(there)
            here = flat[: shard.numel()]
            runtime.device.copy_out(here, shard).wait()
        return here

    def _take_in(self, target: torch.Tensor, shard: torch.Tensor, arrived: list[bool]) -> None:
        for position, slot in enumerate(self.group.spec.slots):
            if arrived[position]:
                part = slice(*self.group.spec.owned_shard(slot, self.group.runtime.ranks.rank))
                add = self.present[position]
                self.sums[position] = self._kernels.accumulate(target[part], shard[part].contiguous(), add)
                self.present[position] = True

    # --- the user's view ---

    def view(self, position: int) -> torch.Tensor | None:
        """The accumulated gradient of one parameter, as a view of the truth, or None."""
        if not self.present[position]:
            return None
        if self.group.runtime.ranks.size > 1:
            raise UsageError("reading p.grad with several ranks is not supported: gradients are sharded")
        slot = self.group.spec.slots[position]
        with self.group.runtime.store.pinned(self.block, dirty=True) as memory:
            self.sums[position] = None
            return memory.view(self.dtype, slot.start, slot.stop).view(slot.shape)

    def replace(self, position: int, grad: torch.Tensor | None) -> None:
        """Set one parameter's gradient, or drop it."""
        self.drain()
        self.present[position] = False
        self.sums[position] = None
        if grad is None:
            self._unarrive(position)
        if grad is not None:
            flat = self.group.runtime.device.to_host(grad.detach()).reshape(-1)
            self.add(position, flat.to(self.dtype) if flat.element_size() > self.dtype.itemsize else flat)
        elif not any(self.present) and "grad" in self.group.blocks:
            self.group.runtime.store.discard(self.block)

    def zero(self, position: int) -> None:
        """Set one parameter's gradient to zero, if it has one."""
        self.drain()
        if self.present[position]:
            start, stop = self.group.spec.owned_shard(self.group.spec.slots[position], self.group.runtime.ranks.rank)
            with self.group.runtime.store.pinned(self.block, dirty=True) as memory:
                memory.view(self.dtype, start, stop).zero_()
            self.sums[position] = None

    def sum_of_squares(self, position: int) -> float:
        """Of one parameter's gradient (this rank's part), measured again only where a view was handed out."""
        known = self.sums[position]
        viewed = self.block.memory is not None and self.block.memory.exported()  # and may have been edited since
        if known is None or viewed:
            start, stop = self.group.spec.owned_shard(self.group.spec.slots[position], self.group.runtime.ranks.rank)
            with self.group.runtime.store.pinned(self.block) as memory:
                known = self._kernels.sum_of_squares(memory.view(self.dtype, start, stop))
            self.sums[position] = None if viewed else known
        return known

    # --- inside ---

    def _unarrive(self, position: int) -> None:
        """Forget what a backward that was not finished has left."""
        if self._whole is not None and self._arrived[position]:
            slot = self.group.spec.slots[position]
            self._whole.view(self.dtype, slot.start, slot.stop).zero_()  # other ranks may have one to add to it
        self._arrived[position] = False
        if self._whole is not None and not any(self._arrived):
            memory, self._whole = self._whole, None
            self.group.runtime.store.unstage(memory)

    def _whole_memory(self) -> Memory:
        if self._whole is None:
            nbytes = self.group.spec.numel * self.dtype.itemsize
            what = f"the gradients of group '{self.group.name}'"
            self._whole = self.group.runtime.store.staging(nbytes, what, zeros=True)
        return self._whole
