"""TieredStore: every block's bytes, on the host or on a drive, within the host budget.

    create / remove      a block gets its home (host memory, or a preallocated extent), or gives it up
    acquire / release    whole block in host memory, pinned; a block whose home is a drive is cached while room allows
    read / write         a byte range between a block and the caller's own memory, asynchronously; piece-aligned
    load / patch         any byte range from or to a tensor, at once
    staging / unstage    host memory for bytes on their way, charged like everything else; `retire` when a copy is over
    flush                the drive that is a block's home gets what it lacks
    discard              the contents are no longer wanted: no byte of them is moved again
    write_beside / take  a candidate for a byte range, on the drive beside it, becomes the contents, or is forgotten
    commit / revert      what blocks on drives hold, gradients aside, becomes the generation that survives the process;
                         the last such generation is what they hold again

A block whose home is a device's own memory is lent that memory: of all these, `load` and `patch` work on it.

Invariants:
1. The host budget covers homes, cached blocks, staging and what the arena keeps; charged before memory is committed.
2. Clean bytes are never written; dirty ones are written before their memory goes.
3. A failed transfer makes its block FAILED: that call and every later one on it raise the first cause.
4. After `close` every page, thread, descriptor and swap file is back.
5. A verb that changes a block's memory waits first for the copies that still read it.
Not thread-safe: one thread (the one inside forward, backward or step) calls at a time.
`store.snapshot` reads beside it, and `before_change` is called before any block but of gradients is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from tiered.device.base import Device
from tiered.device.buffer import Buffer
from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Event, Finished, Ticket, settled
from tiered.errors import StorageError, UsageError
from tiered.io.generations import Generations
from tiered.io.swapfile import SwapSpace
from tiered.stats import Meter
from tiered.store import window
from tiered.store.arena import Arena
from tiered.store.block import Block, BlockKey, BlockState
from tiered.store.policy import Candidate, victims
from tiered.store.tier import Budget, Tier
from tiered.store.watched import Transfer, watched


class TieredStore:
    """See the file's contract."""

    def __init__(self, host: Budget, space: SwapSpace | None, meter: Meter, *, device: Device | None = None) -> None:
        """`device`: the one that copies from and to the store's memory, which is page-locked for it."""
        self.host = host
        self._in_place = device is None or device.in_place
        self._arena = Arena(host, *((None, None) if device is None or device.in_place else (device.pin, device.unpin)))
        self._staged = 0
        self.space = space
        self._meter = meter
        self._blocks: dict[BlockKey, Block] = {}
        self._lent: set[BlockKey] = set()  # blocks whose memory is the caller's charge
        self._failing = threading.Lock()
        self.before_change: Callable[[], object] = bool  # waits for who reads blocks as they are
        self.on_pressure: Callable[[], object] = bool  # asked to give back staging that only carries hints
        self.on_shortage: Callable[[], bool] = bool  # asked again and again to wait for memory; False: none will come

    # --- blocks ---

    def create(self, key: BlockKey, nbytes: int, home: Tier, *, memory: Buffer | None = None) -> Block:
        """A new block of zeros, or of what `memory` holds: committed, charged by the caller (a Tier.HOST charge becomes
        the store's), and its home. Raises BudgetError or SwapFullError, with nothing kept, without room."""
        if home is Tier.NVME:
            if self.space is None:
                raise UsageError(f"{key} has its home on a drive, but no swap directory is set")
            block = Block(key, nbytes, home, self.space.allocate(nbytes, str(key), kept=key.lasts))
        else:
            block = Block(key, nbytes, home, None)
            if memory is None:
                memory = self._take(nbytes, str(key), zeros=True)
            elif home is Tier.DEVICE:
                self._lent.add(key)
            block.memory = memory
            block.move(BlockState.HOST)
        self._blocks[key] = block
        return block

    def remove(self, block: Block) -> None:
        """Give up a block and its space; nothing of it may be in flight outside."""
        if block.state is not BlockState.FAILED:
            self._settle(block)
        if block.memory is not None:
            self._drop(block)
        if block.extent is not None:
            self._drives().free(block.extent)
        del self._blocks[block.key]

    def lend(self, block: Block, memory: Buffer) -> None:
        """Other memory of the same size for a block on a device: somebody keeps what it had. Its contents are new."""
        block.memory = memory

    def blocks(self) -> Iterable[Block]:
        return self._blocks.values()

    # --- whole blocks in host memory ---

    def acquire(self, block: Block, *, fresh: bool = False) -> Memory:
        """The whole block in host memory, pinned until `release`; `fresh`: what it held is not wanted, so not read.
        Raises BudgetError where the host budget has no room for it even after evicting all that may go."""
        block.check()
        if block.state is BlockState.NVME:
            with uninterrupted():
                self._fetch(block, fresh)
        self._settle(block)
        memory = self._memory(block)
        block.pins += 1
        return memory

    def release(self, block: Block, *, dirty: bool = False) -> None:
        """Undo one `acquire`; `dirty` says the contents were changed."""
        block.pins -= 1
        block.dirty |= dirty and block.extent is not None

    @contextlib.contextmanager
    def pinned(self, block: Block, *, fresh: bool = False, dirty: bool = False) -> Iterator[Memory]:
        """`acquire`, and `release` at the end of the block; `dirty`: the contents are changed inside."""
        memory = self.acquire(block, fresh=fresh)
        try:
            yield memory
        finally:
            self.release(block, dirty=dirty)

    def resident(self, block: Block) -> bool:
        """True where the block's current contents are in host memory."""
        block.check()
        return block.state in (BlockState.HOST, BlockState.FLUSHING) and not self._beyond(block)

    def discard(self, block: Block) -> None:
        """Forget the contents: nothing of them is moved again, and the block reads as undefined until written. Memory
        that somebody outside still views is left to them, and the block gets other memory."""
        if block.update is not None:
            block.unwanted = True
            return
        block.check()
        if block.state is BlockState.NVME or self._beyond(block):
            return
        self._settle(block)
        block.dirty = False
        memory = self._memory(block)
        memory.quiet()
        if block.extent is not None:
            if not block.pins:
                self._drop(block)
        elif memory.exported():
            block.memory = self._arena.exchange(memory)

    def updated(self, block: Block) -> None:
        """The contents are up to date again, and those that nobody wants go."""
        block.update, unwanted, block.unwanted = None, block.unwanted, False
        if unwanted:
            self.discard(block)

    def flush(self, block: Block) -> None:
        """Wait until the drive holds what is current of a block whose home it is."""
        block.check()
        if block.dirty and block.state is BlockState.HOST:
            self._flush(block)
        self._settle(block)

    # --- generations ---

    def commit(self, payload: bytes) -> None:
        """Nothing is on its way to a block. Raises StorageError; the commit before is the last one then."""
        for block in self._blocks.values():
            if block.lasts:
                self.flush(block)
        self._drives().commit(payload)

    def revert(self) -> None:
        """Nothing is on its way from or to a block, and nobody views one. What is in memory of them is forgotten."""
        self.before_change()
        for block in self._blocks.values():
            if block.lasts:
                self.discard(block)
        self._drives().revert()

    @property
    def generations(self) -> Generations | None:
        """What is committed, and what a run that has died has left; None where nothing is kept."""
        return None if self.space is None else self.space.generations

    # --- byte ranges ---

    def read(self, block: Block, memory: Memory, *, at: int = 0, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Copy `nbytes` (default: all from `offset`) of the block to `memory` from byte `at` on."""
        nbytes = self._span(block, memory, at, offset, nbytes)
        if not nbytes:
            return Finished()
        if self.resident(block):
            ctypes.memmove(memory.address + at, self._memory(block).address + offset, nbytes)
            return Finished()
        self._settle(block)
        extent = block.place
        with uninterrupted():  # a transfer that has begun is always registered
            ticket = self._drives().read(extent, memory.address + at, nbytes, offset)
            return self._watched(block, memory, ticket, read=nbytes)

    def write(self, block: Block, memory: Memory, *, at: int = 0, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Copy `nbytes` (default: to the block's end) of `memory` from byte `at` on into the block at `offset`."""
        nbytes = self._span(block, memory, at, offset, nbytes)
        self.before_change()
        if not nbytes:
            return Finished()
        if self.resident(block):
            self._settle(block)
            own = self._memory(block)
            own.quiet()
            ctypes.memmove(own.address + offset, memory.address + at, nbytes)
            block.dirty |= block.extent is not None
            return Finished()
        self._settle(block)
        extent = block.place
        with uninterrupted():
            ticket = self._drives().write(extent, memory.address + at, nbytes, offset)
            return self._watched(block, memory, ticket, written=nbytes)

    def load(self, block: Block, out: torch.Tensor, offset: int) -> None:
        """Fill `out` (1-D uint8, any size) with the block's bytes from `offset` on, through bounded staging."""
        block.check()
        if (buffer := self._filled(block)) is not None:
            buffer.read(out, offset)
            return
        window.load(self, block, out, offset)

    def patch(self, block: Block, data: torch.Tensor, offset: int) -> None:
        """Replace the block's bytes from `offset` on by `data` (1-D uint8, any size), through bounded staging."""
        block.check()
        self.before_change()
        if (buffer := self._filled(block)) is not None:
            self._settle(block)
            buffer.write(data, offset)
            block.dirty |= block.extent is not None
            return
        window.patch(self, block, data, offset)

    # --- candidates ---

    def settled(self, block: Block) -> bool:
        """A candidate may be written beside the block: it is on a drive, as it was committed."""
        return block.update is None and block.state is BlockState.NVME and block.place.settled

    def write_beside(self, block: Block, memory: Memory, *, at: int, offset: int, nbytes: int) -> Ticket:
        """As `write`, of a `settled` block, which holds what it held until `take`."""
        nbytes = self._span(block, memory, at, offset, nbytes)
        with uninterrupted():
            ticket = self._drives().write_beside(block.place, memory.address + at, nbytes, offset)
            return self._watched(block, memory, ticket, written=nbytes)

    def take(self, block: Block, offset: int, nbytes: int) -> None:
        """The candidate beside a range, which may be on its way, is its contents from now on."""
        self._drives().take(block.place, nbytes, offset)

    # --- staging ---

    @property
    def staged(self) -> int:
        """Staging buffers that are out: not given back, or retired while their copy is not over."""
        return self._staged + self._arena.in_transit

    def staging(self, nbytes: int, what: str, *, zeros: bool = False, hint: bool = False) -> Memory:
        """Committed host memory for bytes on their way, its contents undefined without `zeros`; `unstage` or `retire`
        gives it back. Raises BudgetError where there is no room for it; a `hint` waits for nobody to give some back."""
        memory = self._take(nbytes, what, zeros=zeros, patient=not hint)
        self._staged += 1
        return memory

    def unstage(self, memory: Memory) -> None:
        """Give back staging memory that no transfer uses. A view held elsewhere keeps the pages until it goes."""
        self._arena.give(memory)
        self._staged -= 1

    def retire(self, memory: Memory, event: Event) -> None:
        """`unstage` that happens once `event` is done, failed or not, without waiting for it here."""
        self._staged -= 1
        self._arena.retire(memory, event)

    def room(self, *, evicting: bool = False) -> int:
        """Bytes that could be taken now: free, idle or retiring, and with `evicting` those that may be evicted."""
        cached = sum(page_ceil(b.nbytes) for b in self._evictable()) if evicting else 0
        return self.host.free + self._arena.idle + self._arena.retiring + cached

    def close(self) -> None:
        """Wait for what is in flight; give back memory (a device's is its owner's), files and threads. Idempotent."""
        for block in self._blocks.values():
            if block.memory is not None:
                self._give_up(block)  # which waits for the transfers that use it
        self._blocks.clear()
        self._arena.close()
        if self.space is not None:
            self.space.close()

    # --- inside ---

    def _take(self, nbytes: int, what: str, *, zeros: bool = False, patient: bool = True) -> Memory:
        """Charged and committed memory, after making room for it."""
        if not self._arena.reclaim(nbytes):
            self.on_pressure()
        while not self._arena.reclaim(nbytes):
            if not self._evict(page_ceil(nbytes) - self.host.free) and not (patient and self.on_shortage()):
                break
        return self._arena.take(nbytes, what, zeros=zeros)

    def _fetch(self, block: Block, fresh: bool) -> None:
        extent = block.place
        block.memory = memory = self._take(block.nbytes, str(block.key), zeros=extent.blank and not fresh)
        if fresh or extent.blank:
            block.move(BlockState.HOST)
            return
        block.move(BlockState.FETCHING)
        ticket = self._drives().read(extent, memory.address, block.nbytes)
        block.ticket = self._watched(block, memory, ticket, read=block.nbytes)

    def _flush(self, block: Block) -> None:
        block.move(BlockState.FLUSHING)
        memory = self._memory(block)
        ticket = self._drives().write(block.place, memory.address, block.nbytes)
        block.ticket = self._watched(block, memory, ticket, written=block.nbytes)

    def _settle(self, block: Block) -> None:
        """Wait until nothing of the block is in flight; raises its first failure."""
        if block.ticket is not None:
            flushing = block.state is BlockState.FLUSHING
            with self._meter.stalled("write-back" if flushing else "fetch"):
                settled(block.ticket)
            ticket, block.ticket = block.ticket, None
            ticket.wait()
            block.dirty = block.dirty and not flushing
            block.move(BlockState.HOST)

    def _drop(self, block: Block) -> None:
        self._give_up(block)
        if block.state is not BlockState.FAILED:
            block.move(BlockState.NVME)

    def _give_up(self, block: Block) -> None:
        """Take the block's memory from it, and give it back unless it is lent."""
        if block.key not in self._lent:
            self._arena.give(self._memory(block))
        elif not self._beyond(block) and not self._memory(block).exported():
            self._memory(block).decommit()
        block.memory = None
        self._lent.discard(block.key)

    def _evictable(self) -> list[Block]:
        return [block for block in self._blocks.values() if block.evictable]

    def _evict(self, nbytes: int) -> bool:
        """Evict cached blocks of furthest next use that take `nbytes`; none, and False, where all are too little."""
        cached = {b.key: b for b in self._evictable()}
        candidates = [Candidate(b.key, page_ceil(b.nbytes), b.next_use) for b in cached.values()]
        evicted = [cached[key] for key in victims(candidates, nbytes) or () if isinstance(key, BlockKey)]
        with uninterrupted():
            for block in evicted:
                if block.dirty and block.state is BlockState.HOST:
                    self._flush(block)
        for block in evicted:
            self._settle(block)
            self._drop(block)
        return bool(evicted)

    def _beyond(self, block: Block) -> bool:
        """The block lies in a device's own memory, where the host can neither compute nor do I/O."""
        return block.key in self._lent and not (self._in_place and isinstance(block.memory, Memory))

    def _span(self, block: Block, memory: Memory, at: int, offset: int, nbytes: int | None) -> int:
        """The bytes of a transfer with a block that is whole: `nbytes`, or all from `offset`. A range past either end
        would be memory of somebody else, and stranded memory is: a fault of this program, never let through."""
        block.check()
        if memory.stranded:
            raise StorageError(f"{block.key}: a read that was given up may still fill the memory of this transfer")
        nbytes = block.nbytes - offset if nbytes is None else nbytes
        if not (0 <= at <= at + nbytes <= memory.nbytes and 0 <= offset <= offset + nbytes <= block.nbytes):
            raise RuntimeError(
                f"{block.key}: {offset}+{nbytes} of {block.nbytes} bytes, {at} of {memory.nbytes} of memory"
            )
        return nbytes

    def _filled(self, block: Block) -> Buffer | None:
        """The memory that holds the block's current contents, the host's or a device's; None where a drive does."""
        return block.memory if block.state in (BlockState.HOST, BlockState.FLUSHING) else None

    def _memory(self, block: Block) -> Memory:
        if self._beyond(block):
            raise RuntimeError(f"{block.key} lies in the device's own memory: only load and patch reach it")
        if not isinstance(block.memory, Memory):
            raise RuntimeError(f"{block.key} has no memory in state {block.state.name}")
        return block.memory

    def _drives(self) -> SwapSpace:
        if self.space is None:
            raise UsageError("no swap directory is set")
        return self.space

    def _watched(self, block: Block, memory: Memory, ticket: Transfer, *, read: int = 0, written: int = 0) -> Ticket:
        """A transfer that is counted, whose failure fails the block, and which keeps `memory` until it is done."""
        self._meter.count("nvme", read=read, written=written)
        self._meter.flight(f"{'read' if read else 'write'} {block.key}", "drive", ticket)
        return watched(ticket, memory, block, weakref.WeakMethod(self._fail))

    def _fail(self, block: Block, error: BaseException) -> None:
        with self._failing:  # the thread that waits and the one that completes may both come
            if block.state is not BlockState.FAILED:
                block.cause = error
                block.move(BlockState.FAILED)
