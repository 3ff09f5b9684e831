"""The step's pipeline: chunks of optimizer state through read, compute and write, each side several chunks deep.

A chunk is a range of elements of one group's shard. What of it is in host memory is used where it lies; the rest is
read into a slot of staging, updated there and written back. Reads are issued as many chunks ahead as there are slots,
and a slot is free again when its writes are done: with PIPELINE_SLOTS or more, read, compute and write overlap.

Invariants:
1. Chunks are computed in order, and every element once, whatever the number of slots or the chunk's size.
2. When `run` returns, or raises, nothing of it is in flight, and every slot is back.
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

    def staged(self) -> list[Array]:
        """The arrays that have to be moved to be computed on: not in host memory now."""
        return [a for a in self.arrays if not self.group.lies_in_memory(a.kind)]


@dataclasses.dataclass(slots=True)
class _Filled:
    """A chunk on its way in, its tensors, and the slot that holds what was staged of it."""

    chunk: Chunk
    slot: Memory | None
    tensors: dict[str, torch.Tensor]
    places: dict[str, int]  # byte offset in the slot of each staged kind
    reads: list[Ticket]


Update = Callable[[Chunk, dict[str, torch.Tensor]], None]
Updated = Callable[[ParamGroup], None]


def run(
    store: TieredStore,
    meter: Meter,
    groups: Iterable[tuple[ParamGroup, Sequence[Array]]],
    update: Update,
    updated: Updated | None = None,
) -> None:
    """Update every chunk of every group: `update(chunk, kind -> 1-D tensor of the chunk's elements)`, in place.

    updated: told of each group once its last chunk is computed and on its way back. What of it lies in memory is final
        then; what was staged may still be being written, and staging is scarce until `run` returns.
    Raises what a read, a write, `update` or `updated` raised, after waiting for what is in flight.
    """
    work = list(groups)
    with _Slots(store, meter, work) as slots:
        ahead: collections.deque[_Filled] = collections.deque()
        coming = _chunks(work, slots.chunk)
        chunk = next(coming, None)
        while chunk is not None or ahead:
            while chunk is not None and (not chunk.staged() or slots.available(wait=not ahead)):
                ahead.append(slots.fill(chunk))
                chunk = next(coming, None)
                if len(ahead) > _MOST_SLOTS:
                    break
            filled = ahead.popleft()
            slots.arrived(filled)
            update(filled.chunk, filled.tensors)
            slots.write_back(filled)
            if updated is not None and filled.chunk.stop == filled.chunk.group.spec.shard_numel:
                updated(filled.chunk.group)
        slots.finish()


def _chunks(work: Sequence[tuple[ParamGroup, Sequence[Array]]], size: int) -> Iterator[Chunk]:
    for group, arrays in work:
        in_memory = all(group.lies_in_memory(a.kind) for a in arrays)
        numel = group.spec.shard_numel
        step = numel if in_memory else size
        for start in range(0, numel, step):
            yield Chunk(group, arrays, start, min(start + step, numel))


class _Slots:
    """The staging of one run: acquires it from the store, hands it out, and waits for everything at the end."""

    def __init__(self, store: TieredStore, meter: Meter, work: Sequence[tuple[ParamGroup, Sequence[Array]]]) -> None:
        self._store = store
        self._meter = meter
        self._free: list[Memory] = []
        self._all: list[Memory] = []
        self._writing: collections.deque[tuple[Memory, list[Ticket]]] = collections.deque()
        self._tickets: list[Ticket] = []
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
        staged = {a.kind for a in chunk.staged()}
        filled = _Filled(chunk, self._free.pop() if staged else None, {}, {}, [])
        end = 0
        for array in chunk.arrays:
            low, high = chunk.start * array.dtype.itemsize, chunk.stop * array.dtype.itemsize
            if array.kind not in staged:
                memory = chunk.group.memory_of(array.kind)
                start, stop = array.base + chunk.start, array.base + chunk.stop
                filled.tensors[array.kind] = memory.view(array.dtype, start, stop)
                continue
            slot = _present(filled.slot)
            filled.places[array.kind] = end
            filled.tensors[array.kind] = slot.bytes[end : end + high - low].view(array.dtype)
            block = chunk.group.blocks[array.kind]
            filled.reads.append(self._store.read(block, slot, at=end, offset=low, nbytes=high - low))
            end += page_ceil(high - low)
        self._tickets += filled.reads
        return filled

    def arrived(self, filled: _Filled) -> None:
        """Wait until the chunk can be computed on."""
        self._wait(filled.reads, "optimizer read")

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
                place = filled.places[array.kind]
                tickets.append(self._store.write(block, _present(filled.slot), at=place, offset=low, nbytes=high - low))
            elif block.home is Tier.NVME and not chunk.group.whole(array.kind):
                memory = chunk.group.memory_of(array.kind)
                if memory is not block.memory:  # a group that is present on the device
                    tickets.append(self._store.write(block, memory, at=low, offset=low, nbytes=high - low))
        self._tickets += tickets
        filled.tensors.clear()
        if filled.slot is not None:
            self._writing.append((filled.slot, tickets))
        self._raise_finished()

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
            staged = [a for a in arrays if group.blocks[a.kind].home is Tier.NVME and not group.whole(a.kind)]
            most = max(most, sum(page_ceil(part * a.dtype.itemsize) for a in staged))
        return most


def _present(memory: Memory | None) -> Memory:
    if memory is None:
        raise RuntimeError("a staged chunk has no slot")
    return memory
