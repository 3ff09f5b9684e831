"""GroupGrads: one group's gradients, accumulated on the host as they leave backward.

Each gradient that backward finishes is added to the group's `grad` block at once and its memory given back. Which
parameters have a gradient at all (None or not, as torch means it) and each one's sum of squares are kept beside it, so
that a step knows the global norm without reading the gradients again.

Invariants:
1. A first gradient replaces, later ones add: whether a parameter has one is a flag of this class and of nothing else.
2. `sums[i]` is the sum of squares of what the block holds for parameter i, or None where a view was handed out.
3. With several ranks, what `arrive` collects is this rank's full gradient; `reduce` turns it into the shard's.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch

from tiered.device.memory import Memory
from tiered.device.ticket import Ticket, settled
from tiered.errors import UsageError
from tiered.store.block import Block
from tiered.zero.group import ParamGroup
from tiered.zero.runtime import Runtime

Accumulate = Callable[[torch.Tensor, torch.Tensor, bool], float]
"""(dst, src, add): dst = src or dst += src; returns the sum of squares of the result. 1-D, equal sizes."""
Measure = Callable[[torch.Tensor], float]
"""The sum of squares of a 1-D tensor."""

_MOST_DEPARTING = 2  # gradients on their way from a device at once


@dataclasses.dataclass(slots=True)
class _Departure:
    """A gradient on its way from the device: whose it is, its copy, and what must live until that is done."""

    grads: GroupGrads
    position: int
    ticket: Ticket
    staging: Memory
    grad: torch.Tensor


class Departures:
    """The gradients of one model that are on their way from the device, in order; a bounded number."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queue: collections.deque[_Departure] = collections.deque()

    def depart(self, grads: GroupGrads, position: int, flat: torch.Tensor) -> None:
        """Start copying `flat` (1-D, on the device) to the host; it is added when it lands."""
        while len(self._queue) >= _MOST_DEPARTING:
            self._land()
        runtime = self._runtime
        staging = runtime.store.staging(flat.numel() * flat.element_size(), f"a gradient of group '{grads.group.name}'")
        runtime.meter.count("device", read=staging.nbytes)
        ticket = staging.busy(runtime.device.copy_out(staging.view(flat.dtype), flat))
        self._queue.append(_Departure(grads, position, ticket, staging, flat))

    def drain(self) -> None:
        """Wait for every gradient on its way, and add it."""
        while self._queue:
            self._land()

    def abandon(self) -> None:
        """Wait for every gradient on its way, and forget it."""
        while self._queue:
            self._runtime.store.unstage(self._queue.popleft().staging)

    def _land(self) -> None:
        departure = self._queue[0]
        with self._runtime.meter.stalled("gradient"):
            settled(departure.ticket)
        self._queue.popleft()
        try:
            departure.ticket.wait()
            departure.grads.add(departure.position, departure.staging.view(departure.grad.dtype))
        finally:
            self._runtime.store.unstage(departure.staging)


class GroupGrads:
    """See the file's contract."""

    def __init__(self, group: ParamGroup, dtype: torch.dtype, accumulate: Accumulate, departures: Departures) -> None:
        self.group = group
        self.dtype = dtype
        self.present = [False] * len(group.params)
        self.sums: list[float | None] = [None] * len(group.params)
        self._accumulate = accumulate
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
        if self.group.runtime.device.in_place or not flat.numel():
            self.add(position, flat)
        else:
            self._departures.depart(self, position, flat)

    def add(self, position: int, flat: torch.Tensor) -> None:
        """Add a gradient that is in host memory (1-D)."""
        slot, store = self.group.spec.slots[position], self.group.runtime.store
        if self.group.runtime.ranks.size > 1:
            target = self._whole_memory().view(self.dtype, slot.start, slot.stop)
            self._accumulate(target, flat.contiguous(), self._arrived[position])
            self._arrived[position] = True
            return
        with store.pinned(self.block, fresh=not any(self.present), dirty=True) as memory:
            target = memory.view(self.dtype, slot.start, slot.stop)
            self.sums[position] = self._accumulate(target, flat.contiguous(), self.present[position])
            self.present[position] = True

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
        shard = self.group.runtime.ranks.reduce_scatter(memory.view(self.dtype))
        with store.pinned(self.block, fresh=not any(self.present), dirty=True) as home:
            self._take_in(home.view(self.dtype), shard, arrived)
        self._arrived = [False] * len(self._arrived)
        self._whole = None
        del shard
        store.unstage(memory)

    def _take_in(self, target: torch.Tensor, shard: torch.Tensor, arrived: list[bool]) -> None:
        for position, slot in enumerate(self.group.spec.slots):
            if arrived[position]:
                part = slice(*self.group.spec.owned_shard(slot, self.group.runtime.ranks.rank))
                add = self.present[position]
                self.sums[position] = self._accumulate(target[part], shard[part].contiguous(), add)
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
            self.add(position, grad.detach().to("cpu").reshape(-1))
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

    def sum_of_squares(self, position: int, measure: Measure) -> float:
        """Of one parameter's gradient (this rank's part), measured again only where a view was handed out."""
        known = self.sums[position]
        viewed = self.block.memory is not None and self.block.memory.exported()  # and may have been edited since
        if known is None or viewed:
            start, stop = self.group.spec.owned_shard(self.group.spec.slots[position], self.group.runtime.ranks.rank)
            with self.group.runtime.store.pinned(self.block) as memory:
                known = measure(memory.view(self.dtype, start, stop))
            self.sums[position] = None if viewed else known
        return known

    # --- inside ---

    def _unarrive(self, position: int) -> None:
        """Forget what a backward that was not finished has left."""
        self._arrived[position] = False
        if self._whole is not None and not any(self._arrived):
            memory, self._whole = self._whole, None
            self.group.runtime.store.unstage(memory)

    def _whole_memory(self) -> Memory:
        if self._whole is None:
            nbytes = self.group.spec.numel * self.dtype.itemsize
            self._whole = self.group.runtime.store.staging(nbytes, f"the gradients of group '{self.group.name}'")
        return self._whole
