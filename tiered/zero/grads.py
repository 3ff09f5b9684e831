"""GroupGrads: one group's gradients, accumulated on the host as they leave backward.

Each gradient that backward finishes is added to the group's `grad` block and its own memory given back: at once where
the device's memory is the host's, else by `zero.departures`, which uses `begin` and `end`. Which parameters have a
gradient at all (None or not, as torch means it) and each one's sum of squares are kept beside it, so that a step knows
the global norm without reading the gradients again.

Invariants:
1. A first gradient replaces, later ones add: whether a parameter has one is a flag of this class and of nothing else.
2. `sums[i]` is the sum of squares of what the block holds for parameter i, or None where it has to be measured again.
3. A gradient never leaves the device in a wider dtype than it is accumulated in: it is rounded first, wherever it is.
With several ranks, `zero.shared` has what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tiered.errors import UsageError
from tiered.store.block import Block
from tiered.zero.group import ParamGroup

if TYPE_CHECKING:
    from tiered.zero.departures import Departures


class Follower(Protocol):
    """Who computes from gradients before their step."""

    def touched(self, group: ParamGroup) -> None:
        """The group's gradients change, or may: somebody has a view."""

    def arrived(self, group: ParamGroup) -> None:
        """One more of the group's gradients is complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """The arithmetic on gradients in host memory; 1-D tensors of equal sizes.

    accumulate(dst, src, add): dst = src or dst += src; returns the sum of squares of the result.
    average(dst, sources, divisor, add): dst = or += the sum of `sources` over `divisor`; returns the same.
    """

    accumulate: Callable[[torch.Tensor, torch.Tensor, bool], float]
    sum_of_squares: Callable[[torch.Tensor], float]
    average: Callable[[torch.Tensor, Sequence[torch.Tensor], int, bool], float]


class GroupGrads:
    """See the file's contract."""

    def __init__(self, group: ParamGroup, dtype: torch.dtype, kernels: Kernels, departures: Departures) -> None:
        self.group = group
        self.dtype = dtype
        self.present = [False] * len(group.params)
        self.sums: list[float | None] = [None] * len(group.params)
        self.follower: Follower | None = None
        self._kernels = kernels
        self._departures = departures

    @property
    def block(self) -> Block:
        """The block that holds the gradients, or this rank's shard of them."""
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
        self._touch()
        slot, store = self.group.spec.slots[position], self.group.runtime.store
        memory = store.acquire(self.block, fresh=not any(self.present))
        add, self.present[position] = self.present[position], True
        self.sums[position] = None
        return memory.view(self.dtype, slot.start, slot.stop), add

    def viewed(self) -> bool:
        """Somebody outside holds a view of the gradients, while none is on its way."""
        return self.block.memory is not None and not self.block.pins and self.block.memory.exported()

    def end(self, position: int, total: float) -> None:
        """The gradient begun is in place; `total` is the sum of squares of what is there now."""
        self.group.runtime.store.release(self.block, dirty=True)
        self.sums[position] = total
        if self.follower is not None:
            self.follower.arrived(self.group)

    def undo(self, position: int, had: bool) -> None:
        """The gradient begun does not come; `had`: there was one before."""
        self.group.runtime.store.release(self.block, dirty=True)
        self.present[position] = had

    def drain(self) -> None:
        """Wait for the gradients on their way, and add them."""
        self._departures.drain()

    def abandon(self) -> None:
        """The model is closed: nothing of the gradients is wanted any more."""
        return None

    # --- the user's view ---

    def view(self, position: int) -> torch.Tensor | None:
        """The accumulated gradient of one parameter, as a view of the truth, or None."""
        if not self.present[position]:
            return None
        self._touch()
        slot = self.group.spec.slots[position]
        with self.group.runtime.store.pinned(self.block, dirty=True) as memory:
            self.sums[position] = None
            return memory.view(self.dtype, slot.start, slot.stop).view(slot.shape)

    def replace(self, position: int, grad: torch.Tensor | None) -> None:
        """Set one parameter's gradient, or drop it."""
        self.drain()
        self._touch()
        self.present[position] = False
        self.sums[position] = None
        if grad is not None:
            flat = self.group.runtime.device.to_host(grad.detach()).reshape(-1)
            self.add(position, flat.to(self.dtype) if flat.element_size() > self.dtype.itemsize else flat)
        elif not any(self.present) and "grad" in self.group.blocks:
            self.group.runtime.store.discard(self.block)

    def zero(self, position: int) -> None:
        """Set one parameter's gradient to zero, if it has one."""
        self.drain()
        self._touch()
        if self.present[position]:
            with self.group.runtime.store.pinned(self.block, dirty=True) as memory:
                memory.view(self.dtype, *self._held(position)).zero_()
            self.sums[position] = None

    def sum_of_squares(self, position: int) -> float:
        """Of one parameter's gradient (this rank's part), measured again only where a view was handed out."""
        known = self.sums[position]
        viewed = self.block.memory is not None and self.block.memory.exported()  # and may have been edited since
        if known is None or viewed:
            with self.group.runtime.store.pinned(self.block) as memory:
                known = self._kernels.sum_of_squares(memory.view(self.dtype, *self._held(position)))
            self.sums[position] = None if viewed else known
        return known

    def _touch(self) -> None:
        if self.follower is not None:
            self.follower.touched(self.group)

    def _held(self, position: int) -> tuple[int, int]:
        """Elements of the block that are one parameter's gradient, of this rank's shard."""
        group = self.group
        start, stop = group.spec.owned_shard(group.spec.slots[position], group.runtime.ranks.rank)
        return start + group.base("grad"), stop + group.base("grad")
