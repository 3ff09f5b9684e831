"""ParamGroup: the parameters that are gathered and released together, and the page they form on the device.

    SHARDED --begin_fetch--> GATHERING --wait--> UNSHARDED --drop--> SHARDED
            `---------- lazy update --------------^

The group's parameters view one flat buffer of one storage for life; its contents come and go. The truth is in the
store: the `param` block (compute dtype) and, where the compute dtype is not fp32, the fp32 `master` block. Each holds
this rank's shard of the group, or the whole of it where the stage does not partition that kind (`span`).

Invariants:
1. Inside `opened` and `computing` the values are present and pinned. Only inside `computing` are the parameters plain.
2. Values edited by the user (in place, or through a view that outlived its operation) are absorbed into the truth
   before they are dropped, before a step, and before they are read from the truth. With several ranks an edit in place
   is a call that all of them make, and is absorbed when its scope ends.
3. Where the shard's home can compute (host memory `in_place`; the device itself) the buffer is the block: the group
   never moves, and `nbytes` is 0.
4. `wait` makes the compute stream wait for a copy, and the caller only for what a stream cannot wait for: a drive. The
   memory that carried a copy goes back when the copy is over, without anybody waiting.
Leaves to whom: when to fetch and drop is the executor's; gradients are `zero.grads`'.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiered.device.buffer import Buffer
from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory, page_ceil
from tiered.errors import UsageError
from tiered.schedule.trace import Phase
from tiered.store.block import Block, BlockKey
from tiered.store.tier import Tier
from tiered.store.window import WINDOW_BYTES
from tiered.zero import graph, truth
from tiered.zero.agreement import Call
from tiered.zero.groupstate import LEGAL, GroupState, LazyUpdate
from tiered.zero.guard import guard, home_of, present
from tiered.zero.partition import ShardSpec
from tiered.zero.passage import Passage, host_memory
from tiered.zero.runtime import Runtime
from tiered.zero.traffic import Gathering

if TYPE_CHECKING:
    from tiered.schedule.execute import Executor


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
        self._scopes = 0  # those in which values are present
        self._written = False  # in a scope that has not ended yet
        self._computing = 0
        self._versions: list[int] = []
        self._passage: Passage | None = None
        self._gathering: Gathering | None = None  # with several ranks, beside the passage
        self.lazy: LazyUpdate | None = None  # what its parameters wait for to be up to date
        self._buffer: Buffer | None = None
        self._disowned = False

    # --- construction ---

    def settle_in(self, dtype: torch.dtype, home: Tier, *, sticky: bool) -> None:
        """Make the buffer and the `param` block. `sticky`: the group stays on the device for good.

        Raises BudgetError or SwapFullError where its home has no room.
        """
        runtime = self.runtime
        self.dtype = dtype
        size = self.spec.numel * dtype.itemsize
        start, stop = self.span("param")
        self._buffer = buffer = runtime.device.allocate(size)
        stays = home is Tier.DEVICE or (runtime.in_place and home is Tier.HOST)
        if stays:
            budget = runtime.budget if sticky or home is Tier.DEVICE else runtime.store.host
            budget.charge(page_ceil(size), f"group '{self.name}'")
            runtime.device.commit(buffer)
            self._move(GroupState.UNSHARDED)
        self.nbytes = 0 if stays else page_ceil(size)
        self.blocks["param"] = runtime.store.create(
            BlockKey(self.index, "param"), (stop - start) * dtype.itemsize, home, memory=buffer if stays else None
        )
        if sticky and not stays:
            self._pins = 1

    def adopt(self) -> None:
        """Make the parameters views of the buffer, away unless the group never moves."""
        buffer, runtime = self.buffer, self.runtime
        with contextlib.ExitStack() as scope:
            if not buffer.committed:  # torch lets nothing view what has no memory, though views may outlive it
                runtime.budget.charge(self.nbytes, f"group '{self.name}'")
                scope.callback(runtime.budget.refund, self.nbytes)
                runtime.device.commit(buffer)
                scope.callback(runtime.device.release, buffer)
            for param, slot in zip(self.params, self.spec.slots, strict=True):
                param.data = buffer.view(self.dtype, slot.start, slot.stop).view(slot.shape)
                guard(param)
            buffer.seal()
        graph.register(buffer.bytes.untyped_storage(), self)

    def disown(self) -> None:
        """Let the values go and end what is on its way; the parameters have been given other storage."""
        self._disowned = True
        graph.unregister(self.buffer.bytes.untyped_storage())
        if self._passage is not None:
            with contextlib.suppress(Exception):
                self.wait()

    # --- the page, as the executor sees it ---

    @property
    def present(self) -> bool:
        return self._state is not GroupState.SHARDED

    @property
    def promised(self) -> bool:
        return self.lazy is not None and self.runtime.in_place

    @property
    def evictable(self) -> bool:
        free = self.nbytes > 0 and self.present and not self._pins
        return free and (self._passage is not None or not self.buffer.exported())  # on its way: only what carries it

    def begin_fetch(self, *, hint: bool = False) -> None:
        """Charge the device budget and start gathering into the buffer; a `hint` waits for no memory."""
        if self.lazy is not None and (hint or self.runtime.in_place):
            self._receive(self.lazy, hint)
            return
        with uninterrupted():
            self.runtime.budget.charge(self.nbytes, f"group '{self.name}'")
            try:
                self.runtime.device.commit(self.buffer)
                self._passage = passage = Passage(self.runtime, self.blocks["param"], self.buffer, hint=hint)
            except BaseException:
                self._give_back()
                raise
            self._move(GroupState.GATHERING)
            if self.runtime.traffic is not None and self.runtime.partitions("param"):
                try:
                    self._gathering = self.runtime.traffic.want(self, passage)
                except BaseException:
                    self.wait()
                    self._away()
                    raise

    def _receive(self, lazy: LazyUpdate, hint: bool) -> None:
        """Get the values from the update that makes them, but not ahead of use."""
        if hint:
            raise MemoryError(f"group '{self.name}' is updated when it is used")
        with uninterrupted():
            self.runtime.budget.charge(self.nbytes, f"group '{self.name}'")
            try:
                self.runtime.device.commit(self.buffer)
                lazy.compute(self, self.buffer)
            except BaseException:
                self._give_back()
                raise
            self._move(GroupState.UNSHARDED)

    def wait(self) -> None:
        """Compute given from now on finds the group there. Raises what gathering raised; then it is sharded again."""
        passage = self._passage
        if passage is None:
            return
        passage.settle()
        if self._gathering is not None:
            self._gathering.settle()
        with uninterrupted():
            gathering, self._gathering = self._gathering, None
            self._passage = None
            try:
                passage.arrive()
                if gathering is not None:
                    gathering.arrive()
            except BaseException:
                self._away()
                raise
            self._move(GroupState.UNSHARDED)

    def poll(self) -> bool:
        """Complete gathering if all has arrived; True once nothing is in flight. A failure shows at the next use."""
        gathered = self._gathering is None or self._gathering.over()
        if self._passage is not None and gathered and self._passage.over():
            with contextlib.suppress(Exception):
                self.wait()
        return self._passage is None

    def drop(self) -> None:
        """Absorb edits, and let the values go."""
        self.wait()
        self.absorb()
        self._away()

    # --- scopes in which the values are present ---

    @contextlib.contextmanager
    def opened(self, phase: Phase) -> Iterator[None]:
        """Present and pinned inside; the parameters stay guarded. Raises UsageError while another thread is inside,
        RankError where other ranks have not edited what was edited here."""
        with self._entered():
            try:
                self._pins += 1
                self._scopes += 1
                self._use(phase)
                yield
            finally:
                self._pins -= 1
                self._scopes -= 1
                self.edited |= self._copied and self.buffer.exported()
            if self._written and not self._scopes:
                self._share_edit()

    def before_write(self) -> None:
        """Values may be changed in place: where the buffer is the truth, who reads that is waited for."""
        if not self.nbytes:
            self.runtime.store.before_change()

    def note_write(self) -> None:
        """Values have been changed in place."""
        self.edited = True
        self._written = self.runtime.several

    def excuse_writes(self) -> None:
        """What has been written inside the present scope is seen to by the caller."""
        self._written = False
        self._versions = [p._version for p in self.params]

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
                    if self._versions != [p._version for p in self.params]:
                        self.note_write()
                    for param in self.params:
                        guard(param)
                        home_of(param).trainable()

    @property
    def in_use(self) -> bool:
        """A forward or a `gather` has its parameters now."""
        return self._computing > 0

    def storage_for_backward(self) -> torch.UntypedStorage:
        """The buffer's storage, its values present: what a saved parameter is a note of."""
        if self._disowned:
            raise UsageError(f"backward through group '{self.name}' after tiered.close(model): its weights are gone")
        self._use(Phase.BACKWARD, again=True)
        return self.buffer.bytes.untyped_storage()

    def version_at(self, offset: int) -> int:
        """The version counter of the parameter at element `offset` of the buffer."""
        position = bisect.bisect_right(self.spec.slots, offset, key=lambda slot: slot.start) - 1
        with torch._C.DisableTorchFunctionSubclass():
            return self.params[position]._version

    # --- the truth ---

    def span(self, kind: str) -> tuple[int, int]:
        """Elements [start, stop) of the group that this rank's block of a kind holds."""
        return self.spec.shard(self.runtime.ranks.rank) if self.runtime.partitions(kind) else (0, self.spec.numel)

    def base(self, kind: str) -> int:
        """Where this rank's shard starts in its block of a kind, in elements."""
        return self.spec.shard(self.runtime.ranks.rank)[0] - self.span(kind)[0]

    def whole(self, kind: str) -> bool:
        """This rank's block of a kind holds other ranks' shards too."""
        return self.runtime.several and not self.runtime.partitions(kind)

    def absorb(self) -> None:
        """Bring what the user edited in the buffer into the store: `param`, and `master` where the two differ."""
        if not self.edited or self._state is not GroupState.UNSHARDED:  # what is on its way cannot have been edited
            return
        self.edited = self.buffer.exported()  # a view that is still out may edit again
        for kind in ("param", "master") if self.nbytes else ("master",):
            if kind in self.blocks:
                base, end = self.span(kind)
                step = WINDOW_BYTES // self.dtype.itemsize
                for start in range(base, end, step):
                    part = torch.empty(min(step, end - start), dtype=self.dtype, device="cpu")
                    self.buffer.read(part.view(torch.uint8), start * self.dtype.itemsize)
                    truth.absorb(self, kind, part, start - base)

    def refresh(self) -> None:
        """The truth has changed, so a copy of it on the device is stale: gather it anew, which is a hint unless it must
        stay (sticky, or viewed from outside). Where the buffer is the truth's own memory there is nothing to do."""
        if self.runtime.in_place or not self.nbytes or not self.present:
            return
        self.wait()
        viewed = self.buffer.exported()
        self._away()
        if self.lazy is not None and not viewed and not self._pins:
            return
        # no memory, of a budget or of the device: it comes when it is used; but a view must not show old values
        with contextlib.suppress(*(() if viewed else (MemoryError,))):
            self.begin_fetch()
            if self.executor is not None:
                self.executor.expect(self)
        if viewed:
            self.wait()

    def lies_in_memory(self, kind: str) -> bool:
        """One kind's shard can be computed on where it is: its block is in host memory, or it is the present buffer."""
        here = kind == "param" and self.runtime.in_place and self.present
        return here or self.runtime.store.resident(self.blocks[kind])

    def memory_of(self, kind: str) -> Memory:
        """The host memory of a kind that `lies_in_memory`, to be changed: no copy from it is in flight, be it for a
        forward given long ago. Valid while the caller keeps the block from moving."""
        if kind == "param" and self.runtime.in_place and self.present:
            self.wait()
            return host_memory(self.buffer)
        memory = self.runtime.store.acquire(self.blocks[kind])
        self.runtime.store.release(self.blocks[kind])
        memory.quiet()
        return memory

    def stay(self) -> None:
        """The present group does not move any more: its buffer is the truth."""
        if self.executor is not None:
            self.executor.remove(self)
        self.nbytes = 0

    @property
    def resident(self) -> bool:
        """The group lives wholly on a device of its own memory, optimizer states included."""
        return not self.runtime.in_place and self.blocks["param"].home is Tier.DEVICE

    @property
    def states_apart(self) -> bool:
        """Its optimizer states live on a device of its own memory, its parameters and gradients elsewhere."""
        return not self.resident and "exp_avg" in self.blocks and self.blocks["exp_avg"].home is Tier.DEVICE

    def on_device(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """One kind that lives on a device of its own memory: 1-D tensor of the shard's elements there."""
        memory = self.blocks[kind].memory
        if memory is None:
            raise RuntimeError(f"{kind} of group '{self.name}' has no memory")
        return memory.view(dtype)

    @property
    def buffer(self) -> Buffer:
        """The device buffer that the parameters view."""
        if self._buffer is None:
            raise RuntimeError(f"group '{self.name}' has no buffer yet")
        return self._buffer

    # --- inside ---

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        elsewhere = self.runtime.device.torch_device.type != "cpu"  # autograd has a thread of its own for such a device
        if self.executor is None or (elsewhere and torch._C._current_graph_task_id() != -1):
            yield
        else:
            with self.executor.entered():
                yield

    @property
    def _copied(self) -> bool:
        """The truth is elsewhere than in the buffer, at least in part."""
        return self.nbytes > 0 or "master" in self.blocks

    def _use(self, phase: Phase, *, again: bool = False) -> None:
        if self.executor is not None:
            (self.executor.touch if again else self.executor.use)(self, phase)
        if self.lazy is not None:
            self.lazy.compute(self)

    def _share_edit(self) -> None:
        """Every rank has edited the group in the same way: each keeps what is its own of it."""
        self._written = False
        self.runtime.store.before_change()  # here: what all ranks do waits for nobody
        self.runtime.device.fence().wait()  # another thread reads the buffer
        doing = f"an edit of parameters of group '{self.name}' in place"
        self.runtime.together(Call.EDIT, doing, self.absorb, detail=self.index)

    def _away(self) -> None:
        with uninterrupted():
            self._move(GroupState.SHARDED)
            self._give_back()

    def _give_back(self) -> None:
        if not self.buffer.exported():
            self.runtime.device.release(self.buffer)
        self.runtime.budget.refund(0 if self.buffer.stranded else self.nbytes)

    def _move(self, state: GroupState) -> None:
        if (self._state, state) not in LEGAL:
            raise RuntimeError(f"group '{self.name}': illegal change of state {self._state.name} -> {state.name}")
        self._state = state
