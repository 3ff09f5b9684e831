"""The step's pipeline: chunks of optimizer state through read, compute and write, each side several chunks deep.

A chunk is a range of elements of one group's shard. What of it is in host memory is used where it lies; the rest is
read into a slot of staging, updated there and written back. Reads are issued as many chunks ahead as there are slots,
and a slot is free again when its writes are done: with PIPELINE_SLOTS or more, read, compute and write overlap.

Invariants:
1. Chunks are computed in order, and every element once, whatever the number of slots or the chunk's size.
2. When a run is over, by `finish`, `close` or an error, nothing of it is in flight, and every slot is back.
3. Where a chunk's bytes are is asked when they are read ahead, and once more when it is computed: blocks and pages may
   have moved meanwhile.
Leaves to whom: what an update is, is the caller's function; which bytes live where, the store's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Ticket
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

    def away(self, kind: str) -> bool:
        """A kind has to be moved to be computed on: it is not in host memory now."""
        return not self.group.lies_in_memory(kind)

    @property
    def last(self) -> bool:
        """Of its group."""
        return self.stop == self.group.spec.shard_numel


@dataclasses.dataclass(slots=True)
class _Filled:
    """A chunk on its way in, and the slot that holds what is staged of it."""

    chunk: Chunk
    slot: Memory | None  # of every chunk of which something may be away
    places: dict[str, int]  # byte offset in the slot of each staged kind
    end: int  # of what the slot holds
    reads: list[Ticket]


Update = Callable[[Chunk, dict[str, torch.Tensor]], None]
Updated = Callable[[ParamGroup], None]


class Run:
    """Updates every chunk of every group, as far as it is asked to, in the order given; see the file's contract."""

    def __init__(
        self,
        store: TieredStore,
        meter: Meter,
        groups: Iterable[tuple[ParamGroup, Sequence[Array]]],
        update: Update,
        updated: Updated | None = None,
    ) -> None:
        """update(chunk, kind -> 1-D tensor of the chunk's elements): in place.
        updated: told of each group once its last chunk is computed and on its way back. What of it lies in memory is
        final then; what was staged may still be being written, and staging is scarce until the run is over.
        Raises BudgetError where staging has no room."""
        work = list(groups)
        self._update = update
        self._updated = updated
        self._scope = contextlib.ExitStack()
        self._slots = self._scope.enter_context(_Slots(store, meter, work))
        self._coming = _chunks(work, self._slots.chunk)
        self._next = next(self._coming, None)
        self._ahead: collections.deque[_Filled] = collections.deque()

    def advance(self) -> ParamGroup | None:
        """Compute the next chunk; gives its group if that was its last, and None after the very last.

        Raises what a read, a write, `update` or `updated` raised, after waiting for what is in flight: it is over then.
        """
        with self._ending_by_error():
            self.read_ahead()
            if not self._ahead:
                return None
            filled = self._ahead.popleft()
            self._update(filled.chunk, self._slots.tensors(filled))
            self._slots.write_back(filled)
            if self._updated is not None and filled.chunk.last:
                self._updated(filled.chunk.group)
            return filled.chunk.group

    @property
    def over(self) -> bool:
        """Every chunk is computed."""
        return self._next is None and not self._ahead

    def read_ahead(self) -> None:
        """Begin to read what comes next, as far as slots are free."""
        while self._next is not None and (not _moving(self._next) or self._slots.available(wait=not self._ahead)):
            self._ahead.append(self._slots.fill(self._next))
            self._next = next(self._coming, None)
            if len(self._ahead) > _MOST_SLOTS:
                break

    def written(self, block: Block) -> None:
        """Wait until nothing of a block is on its way back. Raises as `advance`."""
        with self._ending_by_error():
            self._slots.written(block)

    def finish(self) -> None:
        """Compute all that is left, and wait for every write. Raises as `advance`."""
        while not self.over:
            self.advance()
        with self._ending_by_error():
            self._slots.finish()
        self.close()

    def close(self) -> None:
        """Wait for what is in flight, and give back what was taken; what is not computed stays so. Idempotent."""
        self._next = None
        self._ahead.clear()
        self._scope.close()

    @contextlib.contextmanager
    def _ending_by_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _chunks(work: Sequence[tuple[ParamGroup, Sequence[Array]]], size: int) -> Iterator[Chunk]:
    for group, arrays in work:
        numel = group.spec.shard_numel
        whole = Chunk(group, arrays, 0, numel)
        step = size if _moving(whole) else max(numel, 1)
        for start in range(0, numel, step):
            yield Chunk(group, arrays, start, min(start + step, numel))


def _moving(chunk: Chunk) -> list[Array]:
    """The arrays that may be away: their home is a drive, and nobody keeps them in memory for the step."""
    group = chunk.group
    return [a for a in chunk.arrays if group.blocks[a.kind].home is Tier.NVME and not group.whole(a.kind)]


class _Slots:
    """The staging of one run: acquires it from the store, hands it out, and waits for everything at the end."""

    def __init__(self, store: TieredStore, meter: Meter, work: Sequence[tuple[ParamGroup, Sequence[Array]]]) -> None:
        self._store = store
        self._meter = meter
        self._free: list[Memory] = []
        self._all: list[Memory] = []
        self._writing: collections.deque[tuple[Memory, list[Ticket]]] = collections.deque()
        self._tickets: list[Ticket] = []
        self._writes: dict[BlockKey, list[Ticket]] = {}  # those of them that may still go on, and more
        self._work = work
        self.chunk = _LARGEST_CHUNK

    def __enter__(self) -> _Slots:
        room = self._store.room()  # more than the fewest slots are not worth evicting anything
        while (need := self._slot_bytes(self.chunk)) * PIPELINE_SLOTS > room and self.chunk > CHUNK_ALIGN:
            self.chunk //= 2
        count = min(_MOST_SLOTS, max(PIPELINE_SLOTS, room // need)) if need else 0
        try:
            for _ in range(count):
                self._all.append(self._store.staging(need, "staging of an optimizer step"))
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

    def available(self, *, wait: bool) -> bool:
        """Whether a slot is free; `wait`: make one free by waiting for the oldest writes."""
        while self._writing and (all(t.done() for t in self._writing[0][1]) or (wait and not self._free)):
            memory, tickets = self._writing.popleft()
            self._wait(tickets, "write-back")
            self._free.append(memory)
        return bool(self._free)

    def fill(self, chunk: Chunk) -> _Filled:
        """Start reading what of `chunk` has to be staged."""
        filled = _Filled(chunk, self._free.pop() if _moving(chunk) else None, {}, 0, [])
        self._stage(filled)
        return filled

    def tensors(self, filled: _Filled) -> dict[str, torch.Tensor]:
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

    def _stage(self, filled: _Filled) -> None:
        """Start reading what of a chunk is away and not staged yet."""
        chunk = filled.chunk
        for array in chunk.arrays:
            if array.kind in filled.places or not chunk.away(array.kind):
                continue
            low, high = chunk.start * array.dtype.itemsize, chunk.stop * array.dtype.itemsize
            block, slot = chunk.group.blocks[array.kind], _present(filled.slot)
            read = self._store.read(block, slot, at=filled.end, offset=low, nbytes=high - low)
            filled.places[array.kind] = filled.end
            filled.end += page_ceil(high - low)
            filled.reads.append(read)
            self._tickets.append(read)

    def write_back(self, filled: _Filled) -> None:
        """Start writing what changed; the slot is free when that is done."""
        chunk = filled.chunk
        tickets = []
        for array in chunk.arrays:
            block = chunk.group.blocks[array.kind]
            low, high = chunk.start * array.dtype.itemsize, chunk.stop * array.dtype.itemsize
            if not array.write:
                continue
            if array.kind in filled.places:
                source, place = _present(filled.slot), filled.places[array.kind]
            elif block.home is Tier.NVME and not chunk.group.whole(array.kind):
                source, place = chunk.group.memory_of(array.kind), low
                if source is block.memory:
                    continue
            else:  # it lies where it is computed on; of what a drive has, a group that is present on the device
                continue
            tickets.append(self._store.write(block, source, at=place, offset=low, nbytes=high - low))
            writes = self._writes.setdefault(block.key, [])
            writes[:] = [write for write in writes if not write.done()] + tickets[-1:]
        self._tickets += tickets
        if filled.slot is not None:
            self._writing.append((filled.slot, tickets))
        self._raise_finished()

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

    def _slot_bytes(self, chunk: int) -> int:
        """Bytes of a slot that takes any chunk even after every cached block has gone: taking slots may evict them."""
        most = 0
        for group, arrays in self._work:
            part = min(chunk, group.spec.shard_numel)
            moving = _moving(Chunk(group, arrays, 0, part))
            most = max(most, sum(page_ceil(part * a.dtype.itemsize) for a in moving))
        return most


def _present(memory: Memory | None) -> Memory:
    if memory is None:
        raise RuntimeError("a staged chunk has no slot")
    return memory
