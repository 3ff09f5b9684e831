"""SharedGrads: one group's gradients with several ranks, from backward to the mean that this rank keeps.

    arrive, arrive, ... --all that are expected--> offer --every rank has offered--> reduced --> land
                        <------- more comes -------recall

What arrives is this rank's own gradient of whole parameters. Where the stage partitions gradients it is added up in
memory that lives until it is reduced, and the block holds the shard of the mean. Where it does not, the block holds
the whole gradient, added up over all backwards of a step; reduced, its own slice is the mean.

Invariants:
1. Which parameters a reduction is about is the same on every rank: those `expected`, which all ranks agreed on, or
   those that all ranks have just found out any of them has.
2. Between `offer` and `land` nobody here touches the memory of a reduction.
3. A mean that was reduced and kept (no `zero_grad`) counts once in the next one, whatever the number of ranks.
4. What is reduced before it is known that nothing more comes shows in no bit: where more does come, it is undone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING

import torch

from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory
from tiered.device.ticket import Completion
from tiered.errors import BudgetError, UsageError
from tiered.zero.grads import GroupGrads, Kernels
from tiered.zero.group import ParamGroup
from tiered.zero.parted import PartedGrad
from tiered.zero.traffic import Reduction, Traffic

if TYPE_CHECKING:
    from tiered.zero.departures import Departures
    from tiered.zero.reducer import Reducer


class SharedGrads(GroupGrads):
    """What both kinds have in common; see the file's contract."""

    def __init__(
        self, group: ParamGroup, dtype: torch.dtype, kernels: Kernels, departures: Departures, reducer: Reducer
    ) -> None:
        super().__init__(group, dtype, kernels, departures)
        self.expected = [param.requires_grad for param in group.params]
        self.arrived = [False] * len(group.params)  # this rank has something that is not reduced
        self.reduction: Reduction | None = None
        self._offered: list[bool] = []  # `arrived`, of what is being reduced
        self._now = [False] * len(group.params)  # of this backward
        self._begun = 0
        self._reducer = reducer

    def begin_backward(self) -> None:
        """Another backward begins."""
        self._now = [False] * len(self._now)

    def begin(self, position: int) -> tuple[torch.Tensor, bool]:
        self.recall()  # more comes than was expected
        target, add = self._place(position)
        self._begun += 1
        return target, add

    def end(self, position: int, total: float) -> None:
        self._leave()
        self._begun -= 1
        self._now[position] = True
        complete = not self._begun and self._now == self.expected == self.arrived
        if complete and self._reducer.reduces(self.group.index):
            self._offer_early()

    def undo(self, position: int, had: bool) -> None:
        self._leave()
        self._begun -= 1
        self.arrived[position] = had

    def viewed(self) -> bool:
        return False

    def offer(self, flags: list[bool]) -> None:
        """Begin to reduce the parameters of `flags`: every rank does. Raises BudgetError, with nothing begun."""
        with uninterrupted():
            reduction = self._prepare(flags)
            self._offered, self.arrived = self.arrived, [False] * len(self.arrived)
            self.reduction = reduction
            try:
                self._traffic.offer(reduction)
            except BaseException:  # of ranks that are lost: nothing was given
                self.withdraw()
                raise

    @property
    def done(self) -> Completion | None:
        """What a reduction that was offered, and has not landed, is waited for by."""
        return None if self.reduction is None else self.reduction.done

    @property
    def early(self) -> list[bool]:
        """Which parameters are reduced, or being reduced, in a way that `recall` undoes wholly."""
        return [False] * len(self.group.params)

    def recall(self) -> None:
        """What was offered is this rank's own again, as far as that can be; else it is reduced."""
        if self.reduction is not None:
            if self._traffic.retract(self.reduction):
                self.withdraw()
            else:
                self.land()

    def confirm(self) -> None:
        """All ranks have found out that nothing more comes: what is reduced stays so."""

    def land(self) -> None:
        """Wait for the reduction, if there is one, and account for it. Raises what reducing raised."""
        reduction = self.reduction
        if reduction is None or reduction.done is None:
            return
        self._traffic.exchange.wait(reduction.done, "reduce")
        with uninterrupted():
            self.reduction, self._offered = None, []
            self._landed(reduction)
            for position, reduced in enumerate(reduction.flags):
                if reduced:
                    self.present[position] = True
                    self.sums[position] = reduction.totals[position]

    def abandon(self) -> None:
        """The model is closed, and the ranks are left: forget what is being reduced."""
        if self.reduction is not None and not self._traffic.retract(self.reduction):
            with contextlib.suppress(Exception):
                self.land()
        self.withdraw()
        self.confirm()
        self.arrived, self.present = [False] * len(self.arrived), [False] * len(self.present)
        with contextlib.suppress(Exception):  # of a block whose drive has failed
            self._dropped()

    def withdraw(self) -> None:
        """The reduction was not carried out, and will not be: what was offered has only arrived."""
        with uninterrupted():
            reduction, self.reduction = self.reduction, None
            if reduction is not None:
                self.arrived, self._offered = self._offered, []
                self._withdrawn(reduction)

    @property
    def left(self) -> list[bool]:
        """Which parameters this rank has something of that no reduction has taken in, one offered included."""
        return self._offered if self.reduction is not None else self.arrived

    # --- the user's view ---

    def view(self, position: int) -> torch.Tensor | None:
        if not (self.present[position] or self.left[position]):
            return None
        shape, device = self.group.spec.slots[position].shape, self.group.runtime.device.torch_device
        return PartedGrad(
            self.group.name, shape, self.dtype, device, functools.partial(_zero, weakref.ref(self), position)
        )

    def replace(self, position: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            raise UsageError(f"setting a gradient of group '{self.group.name}' with several ranks is not supported")
        self.drain()
        self.recall()
        self.arrived[position] = False
        self.present[position] = False
        self.sums[position] = None
        self._dropped()

    # --- inside ---

    def _offer_early(self) -> None:
        """All that is expected has arrived."""
        with contextlib.suppress(BudgetError):  # then it waits for the end of backward, or for the step
            self.offer(self.expected)
            self._reducer.offered()

    @property
    def _traffic(self) -> Traffic:
        if self.group.runtime.traffic is None:
            raise RuntimeError("one rank reduces nothing")
        return self.group.runtime.traffic

    def _place(self, position: int) -> tuple[torch.Tensor, bool]:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError

    def _prepare(self, flags: list[bool]) -> Reduction:
        raise NotImplementedError

    def _landed(self, reduction: Reduction) -> None:
        raise NotImplementedError

    def _withdrawn(self, reduction: Reduction) -> None:
        raise NotImplementedError

    def _dropped(self) -> None:
        raise NotImplementedError


def _zero(grads: weakref.ref[SharedGrads], position: int) -> None:
    if (alive := grads()) is not None:
        alive.zero(position)


class PartitionedGrads(SharedGrads):
    """Of stages 2 and 3: the block is this rank's shard."""

    def __init__(
        self, group: ParamGroup, dtype: torch.dtype, kernels: Kernels, departures: Departures, reducer: Reducer
    ) -> None:
        super().__init__(group, dtype, kernels, departures, reducer)
        self._whole: Memory | None = None

    def zero(self, position: int) -> None:
        self.drain()
        self.recall()
        super().zero(position)
        if self.arrived[position]:
            slot = self.group.spec.slots[position]
            self._memory().view(self.dtype, slot.start, slot.stop).zero_()

    def _place(self, position: int) -> tuple[torch.Tensor, bool]:
        slot = self.group.spec.slots[position]
        target = self._memory().view(self.dtype, slot.start, slot.stop)
        add, self.arrived[position] = self.arrived[position], True
        return target, add

    def _leave(self) -> None:
        return None

    def _prepare(self, flags: list[bool]) -> Reduction:
        block = self.group.runtime.store.acquire(self.block, fresh=not any(self.present))
        whole, self._whole = self._whole, None
        for position, slot in enumerate(self.group.spec.slots):
            if whole is not None and flags[position] and not self.arrived[position]:
                whole.view(self.dtype, slot.start, slot.stop).zero_()
        target = block.view(self.dtype)
        return Reduction(self.group, list(flags), whole, target, list(self.present), [0.0] * len(flags))

    def _landed(self, reduction: Reduction) -> None:
        self._withdrawn(reduction)
        self._give_back()

    def _withdrawn(self, reduction: Reduction) -> None:
        reduction.target = reduction.target[:0].clone()  # nobody views the block any more
        self.group.runtime.store.release(self.block, dirty=True)
        self._whole = reduction.whole

    def _dropped(self) -> None:
        if not any(self.arrived):
            self._give_back()
        if not any(self.present) and "grad" in self.group.blocks:
            self.group.runtime.store.discard(self.block)

    def _give_back(self) -> None:
        memory, self._whole = self._whole, None
        if memory is not None:
            self._reducer.give_back(memory)

    def _memory(self) -> Memory:
        """What this rank's whole gradient is added up in."""
        if self._whole is None:
            what = (
                f"the gradients of group '{self.group.name}' before they are reduced (where ranks use groups in "
                f"different orders, or different groups, those of several wait for the other ranks at once)"
            )
            nbytes = self.group.spec.numel * self.dtype.itemsize
            self._whole = self._reducer.whole(nbytes, what)
        return self._whole


class WholeGrads(SharedGrads):
    """Of stage 1: the block is the whole gradient."""

    def __init__(
        self, group: ParamGroup, dtype: torch.dtype, kernels: Kernels, departures: Departures, reducer: Reducer
    ) -> None:
        super().__init__(group, dtype, kernels, departures, reducer)
        self._reduced = [False] * len(group.params)  # the own slice is the mean, the others mean nothing
        self._kept: Memory | None = None  # this rank's slice of means that were kept, and more is to be added to, of
        self._adding = [False] * len(group.params)
        self._own: Memory | None = None  # the own slice as it was before an early reduction, of
        self._early = [False] * len(group.params)

    @property
    def early(self) -> list[bool]:
        return list(self._early)

    def recall(self) -> None:
        super().recall()
        if self._own is None:
            return
        with self.group.runtime.store.pinned(self.block, dirty=True) as memory:
            self._slice(memory).copy_(self._own.view(self.dtype))
        for position, early in enumerate(self._early):
            if early and self.present[position]:
                self.arrived[position], self._reduced[position] = True, False
        self.confirm()

    def confirm(self) -> None:
        own, self._own = self._own, None
        self._early = [False] * len(self._early)
        if own is not None:
            self.group.runtime.store.unstage(own)

    def zero(self, position: int) -> None:
        self.drain()
        self.recall()
        if self.present[position]:
            self._clear(position)
            self._adding[position] = False
            self.sums[position] = None

    def _clear(self, position: int) -> None:
        slot = self.group.spec.slots[position]
        with self.group.runtime.store.pinned(self.block, dirty=True) as memory:
            memory.view(self.dtype, slot.start, slot.stop).zero_()

    def _place(self, position: int) -> tuple[torch.Tensor, bool]:
        slot = self.group.spec.slots[position]
        memory = self.group.runtime.store.acquire(self.block, fresh=not any(self.present))
        try:
            add = self._open(memory, position)
        except BaseException:
            self.group.runtime.store.release(self.block, dirty=True)
            raise
        self.present[position] = self.arrived[position] = True
        return memory.view(self.dtype, slot.start, slot.stop), add

    def undo(self, position: int, had: bool) -> None:
        super().undo(position, had)
        if not had and self._adding[position]:
            self._clear(position)
        else:
            self.present[position] = had

    def _leave(self) -> None:
        self.group.runtime.store.release(self.block, dirty=True)

    def _prepare(self, flags: list[bool]) -> Reduction:
        memory = self.group.runtime.store.acquire(self.block, fresh=not any(self.present))
        try:
            for position, slot in enumerate(self.group.spec.slots):
                if flags[position] and not self._open(memory, position):
                    memory.view(self.dtype, slot.start, slot.stop).zero_()
        except BaseException:
            self.group.runtime.store.release(self.block, dirty=True)
            raise
        target, add = self._slice(memory), [False] * len(flags)
        if self._kept is not None:  # the mean goes on top of what was kept
            target, add = self._kept.view(self.dtype), list(self._adding)
        return Reduction(self.group, list(flags), memory, target, add, [0.0] * len(flags))

    def _offer_early(self) -> None:
        store, nbytes = self.group.runtime.store, self.group.spec.shard_numel * self.dtype.itemsize
        if self._kept is not None or not self._reducer.spare(nbytes):
            return
        own = store.staging(nbytes, f"a slice of the gradients of group '{self.group.name}', to be able to undo")
        with store.pinned(self.block) as memory:
            own.view(self.dtype).copy_(self._slice(memory))
        self._own, self._early = own, list(self.expected)
        super()._offer_early()
        if self.reduction is None:
            self.confirm()

    def _landed(self, reduction: Reduction) -> None:
        if self._kept is not None:
            kept, own = self._kept.view(self.dtype), self._slice(reduction.whole) if reduction.whole else None
            for position, reduced in enumerate(reduction.flags):
                if reduced and own is not None:
                    start, stop = (edge - self.group.base("grad") for edge in self._held(position))
                    own[start:stop].copy_(kept[start:stop])
        self._withdrawn(reduction)
        for position, reduced in enumerate(reduction.flags):
            self._reduced[position] |= reduced
            self._adding[position] &= not reduced
        self._free_kept()

    def _withdrawn(self, reduction: Reduction) -> None:
        reduction.target = reduction.target[:0].clone()
        self.group.runtime.store.release(self.block, dirty=True)

    def _dropped(self) -> None:
        self._reduced = [old and there for old, there in zip(self._reduced, self.present, strict=True)]
        self._adding = [old and there for old, there in zip(self._adding, self.present, strict=True)]
        self._free_kept()
        if not any(self.present) and "grad" in self.group.blocks:
            self.group.runtime.store.discard(self.block)

    def _free_kept(self) -> None:
        if self._kept is not None and not any(self._adding):
            kept, self._kept = self._kept, None
            self.group.runtime.store.unstage(kept)

    def _slice(self, memory: Memory) -> torch.Tensor:
        """This rank's own of the whole gradient."""
        base = self.group.base("grad")
        return memory.view(self.dtype, base, base + self.group.spec.shard_numel)

    def _open(self, memory: Memory, position: int) -> bool:
        """Make one parameter's gradient something that is added to, before it is reduced: True where there is one. A
        mean that was kept goes aside: what comes replaces it here, and the next mean is added to it there."""
        if not self.present[position]:
            return False
        if not self._reduced[position]:
            return True
        if self._kept is None:
            nbytes = self.group.spec.shard_numel * self.dtype.itemsize
            self._kept = self.group.runtime.store.staging(nbytes, f"the gradients of group '{self.group.name}' so far")
        start, stop = (edge - self.group.base("grad") for edge in self._held(position))
        self._kept.view(self.dtype, start, stop).copy_(self._slice(memory)[start:stop])
        self._reduced[position], self._adding[position] = False, True
        return False
