"""Slots: the staging of a run of updates, and what moves through it: chunks of optimizer state, in and back.

A chunk is a range of elements of one group's shard. What of it is in host memory is used where it lies; the rest is
read into a slot, updated there and written back. A chunk that is only a candidate is copied into its slot wholly, and
written beside what the drives hold.

Invariants:
1. A slot is free again when its writes are done; on exit nothing is in flight, and every slot is back.
2. Where a chunk's bytes are is asked when they are read ahead, and once more when it is computed: blocks and pages may
   have moved meanwhile.
3. Of a candidate nothing is changed but slots, and on drives what nobody reads.
Leaves to whom: the order of chunks is the pipeline's; which bytes live where, the store's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Ticket
from tiered.errors import BudgetError
from tiered.stats import Meter
from tiered.store.block import Block, BlockKey
from tiered.store.store import TieredStore
from tiered.store.tier import Tier
from tiered.zero.group import ParamGroup
from tiered.zero.placing import CHUNK_ALIGN, PIPELINE_SLOTS

_LARGEST_CHUNK = 4 * CHUNK_ALIGN  # elements: 8 MiB of an fp32 kind
_MOST_SLOTS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One kind of a group's state as the pipeline sees it. Its block may hold more than this rank's shard, which starts
    at element `base`: then it is in memory."""

    kind: str
    dtype: torch.dtype
    write: bool
    base: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a group's shard, and its arrays."""

    group: ParamGroup
    arrays: Sequence[Array]
    start: int
    stop: int
    beside: bool = False
    """What is computed is a candidate: it is written beside what the drives hold, and nothing else is changed."""

    def away(self, kind: str) -> bool:
        """A kind has to be moved to be computed on: it is not in host memory now."""
        return not self.group.lies_in_memory(kind)

    @property
    def last(self) -> bool:
        """Of its group."""
        return self.stop == self.group.spec.shard_numel

    def staged(self, array: Array) -> bool:
        """A kind is computed on in a slot."""
        return (self.beside and array.write) or self.away(array.kind)


@dataclasses.dataclass(slots=True)
class Filled:
    """A chunk on its way in, and the slot that holds what is staged of it."""

    chunk: Chunk
    slot: Memory | None  # of every chunk of which something may be away
    places: dict[str, int]  # byte offset in the slot of each staged kind
    end: int  # of what the slot holds
    reads: list[Ticket]


Work = tuple[ParamGroup, Sequence[Array]]


def moving(chunk: Chunk) -> list[Array]:
    """The arrays that may be away: their home is a drive, and nobody keeps them in memory for the step."""
    group = chunk.group
    return [a for a in chunk.arrays if group.blocks[a.kind].home is Tier.NVME and not group.whole(a.kind)]


class Slots:
    """See the file's contract."""

    def __init__(self, store: TieredStore, meter: Meter, work: Sequence[Work], *, hint: bool = False) -> None:
        """hint: for the sake of which nothing is evicted and nobody waits."""
        self._store = store
        self._meter = meter
        self._free: list[Memory] = []
        self._all: list[Memory] = []
        self._writing: collections.deque[tuple[Memory, list[Ticket]]] = collections.deque()
        self._tickets: list[Ticket] = []
        self._writes: dict[BlockKey, list[Ticket]] = {}  # those of them that may still go on, and more
        self._work = work
        self._hint = hint
        self.chunk = _LARGEST_CHUNK

    def __enter__(self) -> Slots:
        """Take the slots, unless they were taken by a run that has handed over. Raises BudgetError without room."""
        if self._all:
            return self
        room = self._store.room()  # more than the fewest slots are not worth evicting anything
        while (need := _slot_bytes(self._work, self.chunk)) * PIPELINE_SLOTS > room and self.chunk > CHUNK_ALIGN:
            self.chunk //= 2
        if self._hint and need * PIPELINE_SLOTS > room:
            raise BudgetError(f"{room} bytes are too few for what only hints")
        count = min(_MOST_SLOTS, max(PIPELINE_SLOTS, room // need)) if need else 0
        try:
            for _ in range(count):
                self._all.append(self._store.staging(need, "staging of an optimizer step", hint=self._hint))
        except BaseException:
            self.__exit__()
            raise
        self._free = list(self._all)
        return self

    def __exit__(self, *_: object) -> None:
        for ticket in self._tickets:
            try:
                ticket.wait()
            except Exception:  # after `finish` there is none; before it, an earlier failure is on its way out
                continue
        for memory in self._all:
            self._store.unstage(memory)
        self._all = []

    def serves(self, work: Sequence[Work]) -> bool:
        """The slots that were taken are large enough for `work`, too."""
        held = min((memory.nbytes for memory in self._all), default=0)
        return _slot_bytes(work, self.chunk) <= held

    def available(self, *, wait: bool) -> bool:
        """Whether a slot is free; `wait`: make one free by waiting for the oldest writes."""
        while self._writing and (all(t.done() for t in self._writing[0][1]) or (wait and not self._free)):
            memory, tickets = self._writing.popleft()
            self._wait(tickets, "write-back")
            self._free.append(memory)
        return bool(self._free)

    def fill(self, chunk: Chunk) -> Filled:
        """Start reading what of `chunk` has to be staged."""
        filled = Filled(chunk, self._free.pop() if moving(chunk) else None, {}, 0, [])
        self._stage(filled)
        return filled

    def leave(self, filled: Filled) -> None:
        """A chunk is not to be computed."""
        if filled.slot is not None:
            self._writing.append((filled.slot, filled.reads))

    def tensors(self, filled: Filled) -> dict[str, torch.Tensor]:
        """What the chunk is computed on, once it has arrived: 1-D, by kind."""
        self._stage(filled)  # what has been evicted since
        self._wait(filled.reads, "optimizer read")
        found = {}
        for array in filled.chunk.arrays:
            start, stop = array.base + filled.chunk.start, array.base + filled.chunk.stop
            if (place := filled.places.get(array.kind)) is None:
                found[array.kind] = filled.chunk.group.memory_of(array.kind).view(array.dtype, start, stop)
            else:
                nbytes = (stop - start) * array.dtype.itemsize
                found[array.kind] = _present(filled.slot).bytes[place : place + nbytes].view(array.dtype)
        return found

    def _stage(self, filled: Filled) -> None:
        """Start reading what of a chunk is away and not staged yet."""
        chunk = filled.chunk
        for array in chunk.arrays:
            if array.kind in filled.places or not chunk.staged(array):
                continue
            low, high = chunk.start * array.dtype.itemsize, chunk.stop * array.dtype.itemsize
            slot, at = _present(filled.slot), filled.end
            filled.places[array.kind] = at
            filled.end += page_ceil(high - low)
            if chunk.away(array.kind):
                block = chunk.group.blocks[array.kind]
                read = self._store.read(block, slot, at=at, offset=low, nbytes=high - low)
                filled.reads.append(read)
                self._tickets.append(read)
            else:
                slot.bytes[at : at + high - low].copy_(chunk.group.memory_of(array.kind).bytes[low:high])

    def write_back(self, filled: Filled) -> None:
        """Start writing what changed; the slot is free when that is done."""
        chunk, tickets = filled.chunk, []
        for array in chunk.arrays:
            if array.write and (write := self._write(filled, array)) is not None:
                tickets.append(write)
                writes = self._writes.setdefault(BlockKey(chunk.group.index, array.kind), [])
                writes[:] = [each for each in writes if not each.done()] + [write]
        self._tickets += tickets
        if filled.slot is not None:
            self._writing.append((filled.slot, tickets))
        self._raise_finished()

    def _write(self, filled: Filled, array: Array) -> Ticket | None:
        """Start to write one kind of a chunk; None where it lies where it was computed on."""
        chunk, place = filled.chunk, filled.places.get(array.kind)
        block = chunk.group.blocks[array.kind]
        low, high = chunk.start * array.dtype.itemsize, chunk.stop * array.dtype.itemsize
        if chunk.beside:
            slot, at = _present(filled.slot), filled.places[array.kind]
            return self._store.write_beside(block, slot, at=at, offset=low, nbytes=high - low)
        if place is not None:
            return self._store.write(block, _present(filled.slot), at=place, offset=low, nbytes=high - low)
        if block.home is not Tier.NVME or chunk.group.whole(array.kind):
            return None
        source = chunk.group.memory_of(array.kind)  # of what a drive has, a group that is present on the device
        if source is block.memory:
            return None
        return self._store.write(block, source, at=low, offset=low, nbytes=high - low)

    def written(self, block: Block) -> None:
        """Wait for the writes of one block; raises what one of them raised."""
        self._wait(self._writes.pop(block.key, ()), "write-back")

    def finish(self) -> None:
        """Wait for every write; raises what one of them raised."""
        self._wait(self._tickets, "write-back")

    def _wait(self, tickets: Sequence[Ticket], cause: str) -> None:
        waiting = any(not ticket.done() for ticket in tickets)
        with self._meter.stalled(cause) if waiting else contextlib.nullcontext():
            for ticket in tickets:
                ticket.wait()

    def _raise_finished(self) -> None:
        """Forget what is over; raises what any of it raised, so that no failure goes unseen."""
        finished = [t for t in self._tickets if t.done()]
        for ticket in finished:
            ticket.wait()
        self._tickets = [t for t in self._tickets if t not in finished]


def _slot_bytes(work: Sequence[Work], chunk: int) -> int:
    """Bytes of a slot that takes any chunk even after every cached block has gone: taking slots may evict them."""
    most = 0
    for group, arrays in work:
        part = min(chunk, group.spec.shard_numel)
        staged = moving(Chunk(group, arrays, 0, part))
        most = max(most, sum(page_ceil(part * a.dtype.itemsize) for a in staged))
    return most


def _present(memory: Memory | None) -> Memory:
    if memory is None:
        raise RuntimeError("a staged chunk has no slot")
    return memory
