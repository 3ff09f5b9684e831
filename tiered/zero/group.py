"""ParamGroup: the parameters that are gathered and released together, and the page they form on the device.

    SHARDED --begin_fetch--> GATHERING --wait--> UNSHARDED --drop--> SHARDED

The group's parameters view one flat buffer of fixed address; its contents come and go. The truth is in the store: the
`param` block (this rank's shard, compute dtype) and, where the compute dtype is not fp32, the fp32 `master` block.

Invariants:
1. Inside `opened` and `computing` the values are present and pinned. Only inside `computing` are the parameters plain.
2. Values edited by the user (in place, or through a view that outlived its operation) are absorbed into the truth
   before they are dropped, before a step, and before they are read from the truth.
3. Where host memory can compute (`in_place`) and the shard's home is not a drive, the buffer is the block: the group
   never moves, and `nbytes` is 0.
Leaves to whom: when to fetch and drop is the executor's; gradients are `zero.grads`'.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Finished, Ticket, chain, settled
from tiered.errors import UsageError
from tiered.schedule.trace import Phase
from tiered.store.block import Block, BlockKey
from tiered.store.tier import Tier
from tiered.zero import graph
from tiered.zero.guard import guard, home_of, present
from tiered.zero.partition import ShardSpec, Slot
from tiered.zero.runtime import Runtime

if TYPE_CHECKING:
    from tiered.schedule.execute import Executor


class GroupState(enum.Enum):
    """Where the group's values are; see the diagram in the file's contract."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_LEGAL = {
    (GroupState.SHARDED, GroupState.GATHERING),
    (GroupState.GATHERING, GroupState.UNSHARDED),
    (GroupState.GATHERING, GroupState.SHARDED),  # the fetch failed
    (GroupState.UNSHARDED, GroupState.SHARDED),
}


class ParamGroup:
    """One group of parameters; see the file's contract."""

    def __init__(self, index: int, name: str, params: list[nn.Parameter], spec: ShardSpec, runtime: Runtime) -> None:
        self.index = index
        self.name = name
        self.params = params
        self.spec = spec
        self.runtime = runtime
        self.executor: Executor | None = None
        self.blocks: dict[str, Block] = {}
        self.dtype = torch.float32
        self.nbytes = 0
        self.edited = False
        self._state = GroupState.SHARDED
        self._pins = 0
        self._held = False
        self._computing = 0
        self._versions: list[int] = []
        self._ticket: tuple[Ticket, Memory | None] | None = None
        self._buffer: Memory | None = None
        self._disowned = False

    # --- construction ---

    def settle_in(self, dtype: torch.dtype, home: Tier, *, sticky: bool) -> None:
        """Make the buffer and the `param` block. `sticky`: the group stays on the device for good.

        Raises BudgetError or SwapFullError where its home has no room.
        """
        runtime = self.runtime
        self.dtype = dtype
        size = self.spec.numel * dtype.itemsize
        shard = self.spec.shard_numel * dtype.itemsize
        self._buffer = runtime.device.allocate(size)
        stays = runtime.in_place and home is not Tier.NVME
        if stays:
            budget = runtime.budget if sticky else runtime.store.host
            budget.charge(page_ceil(size), f"group '{self.name}'")
            self._buffer.commit()
            self._move(GroupState.GATHERING)
            self._move(GroupState.UNSHARDED)
        self.nbytes = 0 if stays else page_ceil(size)
        key = BlockKey(self.index, "param")
        self.blocks["param"] = runtime.store.create(key, shard, home, memory=self._buffer if stays else None)
        if sticky and not stays:
            self._pins = 1

    def adopt(self) -> None:
        """Make the parameters views of the buffer, away unless the group never moves."""
        buffer = self.buffer
        for param, slot in zip(self.params, self.spec.slots, strict=True):
            param.data = buffer.view(self.dtype, slot.start, slot.stop).view(slot.shape)
            guard(param)
        buffer.seal()
        graph.register(buffer.bytes.untyped_storage(), self)

    def disown(self) -> None:
        """Release the buffer for good; the parameters have been given other storage."""
        self._disowned = True
        graph.unregister(self.buffer.bytes.untyped_storage())
        if self._ticket is not None:
            with contextlib.suppress(Exception):
                self.wait()

    # --- the page, as the executor sees it ---

    @property
    def present(self) -> bool:
        return self._state is not GroupState.SHARDED

    @property
    def evictable(self) -> bool:
        free = self.nbytes > 0 and self.present and not self._pins
        # with several ranks all must agree, so a view decides only whether the memory goes, not whether the group does
        return free and (self.runtime.ranks.size > 1 or not self.buffer.exported())

    def begin_fetch(self) -> None:
        """Charge the device budget and start gathering into the buffer."""
        with uninterrupted():
            self.runtime.budget.charge(self.nbytes, f"group '{self.name}'")
            try:
                self.buffer.commit()
                self._ticket = self._start()
            except BaseException:
                self._give_back()
                raise
            self._move(GroupState.GATHERING)

    def wait(self) -> None:
        """Return when the group is gathered; raises what gathering raised, and the group is sharded again."""
        if self._ticket is None:
            return
        ticket, staging = self._ticket
        if not ticket.done():
            with self.runtime.meter.stalled("fetch"):
                settled(ticket)
        with uninterrupted():
            self._ticket = None
            if staging is not None:
                self.runtime.store.unstage(staging)
            try:
                ticket.wait()
            except BaseException:
                self._away()
                raise
            self._move(GroupState.UNSHARDED)

    def poll(self) -> bool:
        """Complete gathering if all has arrived; True once nothing is in flight. A failure shows at the next use."""
        if self._ticket is not None and self._ticket[0].done():
            with contextlib.suppress(Exception):
                self.wait()
        return self._ticket is None

    def drop(self) -> None:
        """Absorb edits, and let the values go."""
        self.wait()
        self.absorb()
        self._away()

    # --- scopes in which the values are present ---

    @contextlib.contextmanager
    def opened(self, phase: Phase) -> Iterator[None]:
        """Present and pinned inside; the parameters stay guarded. Raises UsageError while another thread is inside."""
        with self._entered():
            try:
                self._pins += 1
                self._use(phase)
                yield
            finally:
                self._pins -= 1
                self.edited |= self._copied and self.buffer.exported()

    @contextlib.contextmanager
    def computing(self, phase: Phase) -> Iterator[None]:
        """Present and pinned inside, and the parameters compute as plain Parameters. Scopes may overlap: the first to
        enter makes them present, the last to leave guards them."""
        with self.opened(phase):
            try:
                self._computing += 1
                if self._computing == 1:
                    self._versions = [p._version for p in self.params]
                    for param in self.params:
                        present(param)
                yield
            finally:
                self._computing -= 1
                if not self._computing:
                    self.edited |= self._versions != [p._version for p in self.params]
                    for param in self.params:
                        guard(param)
                        home_of(param).trainable()

    @property
    def in_use(self) -> bool:
        """A forward or a `gather` has its parameters now."""
        return self._computing > 0

    def hold(self) -> None:
        """Keep the present group until `let_go`: what ranks use differently in backward must not be gathered there."""
        if not self._held:
            self._held = True
            self._pins += 1

    def let_go(self) -> None:
        """Undo `hold`."""
        if self._held:
            self._held = False
            self._pins -= 1

    def storage_for_backward(self) -> torch.UntypedStorage:
        """The buffer's storage, its values present: what a saved parameter is a note of."""
        if self._disowned:
            raise UsageError(f"backward through group '{self.name}' after tiered.close(model): its weights are gone")
        if self.nbytes and self.executor is not None:
            self.executor.touch(self, Phase.BACKWARD)
        return self.buffer.bytes.untyped_storage()

    def version_at(self, offset: int) -> int:
        """The version counter of the parameter at element `offset` of the buffer."""
        position = bisect.bisect_right(self.spec.slots, offset, key=lambda slot: slot.start) - 1
        with torch._C.DisableTorchFunctionSubclass():
            return self.params[position]._version

    # --- the truth ---

    def absorb(self) -> None:
        """Bring what the user edited in the buffer into the store: `param`, and `master` where the two differ."""
        if not self.edited or not self.present:
            return
        self.wait()
        self.edited = self.buffer.exported()  # a view that is still out may edit again
        store, block = self.runtime.store, self.blocks["param"]
        flat = self.buffer.view(self.dtype).detach()
        if not self.runtime.device.in_place:
            host = torch.empty_like(flat)
            self.runtime.device.copy_out(host, flat).wait()
            flat = host
        shard = flat.chunk(self.spec.ranks)[self.runtime.ranks.rank]
        if self.nbytes:
            store.patch(block, shard.view(torch.uint8), 0)
        if "master" in self.blocks:
            self._absorb_master(shard)

    def refresh(self) -> None:
        """The truth has changed, so a copy of it on the device is stale: let it go, or gather it anew where it must
        stay (sticky, or viewed from outside). Where the buffer is the truth's own memory there is nothing to do."""
        if self.runtime.in_place or not self.present:
            return
        self.wait()
        stays = bool(self._pins) or (self.runtime.ranks.size == 1 and self.buffer.exported())
        self._away()
        if stays:
            self.begin_fetch()
            self.wait()

    def values(self, slot: Slot, kind: str) -> torch.Tensor:
        """A copy of one parameter's elements of a block: `slot.shape`, the block's dtype; gathered from every rank."""
        dtype = self.dtype if kind == "param" else torch.float32
        full = torch.zeros(slot.numel, dtype=dtype)
        start, stop = self.spec.owned(slot, self.runtime.ranks.rank)
        if start < stop:
            offset = (start - self.runtime.ranks.rank * self.spec.shard_numel) * dtype.itemsize
            part = full[start - slot.start : stop - slot.start]
            self.runtime.store.load(self.blocks[kind], part.view(torch.uint8), offset)
        self.runtime.ranks.fill(full)
        return full.view(slot.shape)

    def set_values(self, slot: Slot, kind: str, value: torch.Tensor) -> None:
        """Replace one parameter's elements of a block (this rank's part of them)."""
        dtype = self.dtype if kind == "param" else torch.float32
        start, stop = self.spec.owned(slot, self.runtime.ranks.rank)
        if start < stop:
            part = value.detach().to("cpu", dtype).reshape(-1)[start - slot.start : stop - slot.start].contiguous()
            offset = (start - self.runtime.ranks.rank * self.spec.shard_numel) * dtype.itemsize
            self.runtime.store.patch(self.blocks[kind], part.view(torch.uint8), offset)

    def lies_in_memory(self, kind: str) -> bool:
        """One kind's shard can be computed on where it is: its block is in host memory, or it is the present buffer."""
        here = kind == "param" and self.runtime.in_place and self.present
        return here or self.runtime.store.resident(self.blocks[kind])

    def memory_of(self, kind: str) -> Memory:
        """The host memory of a kind that `lies_in_memory`; stays valid while the caller keeps the block from moving."""
        if kind == "param" and self.runtime.in_place and self.present:
            self.wait()
            return self.buffer
        memory = self.runtime.store.acquire(self.blocks[kind])
        self.runtime.store.release(self.blocks[kind])
        return memory

    @property
    def buffer(self) -> Memory:
        """The device buffer that the parameters view."""
        if self._buffer is None:
            raise RuntimeError(f"group '{self.name}' has no buffer yet")
        return self._buffer

    # --- inside ---

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        if self.executor is None:
            yield
        else:
            with self.executor.entered():
                yield

    @property
    def _copied(self) -> bool:
        """The truth is elsewhere than in the buffer, at least in part."""
        return self.nbytes > 0 or "master" in self.blocks

    def _use(self, phase: Phase) -> None:
        if self.nbytes and self.executor is not None:
            self.executor.use(self, phase)

    def _start(self) -> tuple[Ticket, Memory | None]:
        """Start filling the buffer from the truth; the staging memory goes back when the ticket is done."""
        runtime, block = self.runtime, self.blocks["param"]
        store = runtime.store
        if runtime.in_place:
            return store.read(block, self.buffer), None
        if store.resident(block) and runtime.ranks.size == 1:
            source = store.acquire(block)
            store.release(block)
            return self._copy_in(source), None
        staging = store.staging(block.nbytes, f"group '{self.name}' on its way to the device")
        try:
            arrival = store.read(block, staging)
            if runtime.ranks.size > 1:
                arrival.wait()
                runtime.ranks.all_gather(self.buffer.view(self.dtype), staging.view(self.dtype))
                return Finished(), staging
        except BaseException:
            store.unstage(staging)
            raise
        return chain(arrival, lambda: self._copy_in(staging)), staging

    def _copy_in(self, source: Memory) -> Ticket:
        self.runtime.meter.count("device", written=source.nbytes)
        return self.buffer.busy(source.busy(self.runtime.device.copy_in(self.buffer.bytes, source.bytes)))

    def _absorb_master(self, shard: torch.Tensor) -> None:
        """master := param wherever the master's rounded value is not what the parameter is now."""
        store, block = self.runtime.store, self.blocks["master"]
        window = 1 << 20
        for start in range(0, shard.numel(), window):
            part = shard[start : start + window]
            master = torch.empty(part.numel(), dtype=torch.float32)
            store.load(block, master.view(torch.uint8), start * 4)
            same = (master.to(self.dtype) == part) | (part.isnan() & master.isnan())
            store.patch(block, torch.where(same, master, part.float()).view(torch.uint8), start * 4)

    def _away(self) -> None:
        with uninterrupted():
            self._move(GroupState.SHARDED)
            self._give_back()

    def _give_back(self) -> None:
        if not self.buffer.exported():
            self.runtime.device.release(self.buffer)
        self.runtime.budget.refund(self.nbytes)

    def _move(self, state: GroupState) -> None:
        if (self._state, state) not in _LEGAL:
            raise RuntimeError(f"group '{self.name}': illegal change of state {self._state.name} -> {state.name}")
        self._state = state
