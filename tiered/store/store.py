"""TieredStore: every block's bytes, on the host or on a drive, within the host budget.

    create / remove      a block gets its home (host memory, or a preallocated extent), or gives it up
    acquire / release    whole block in host memory, pinned; a block whose home is a drive is cached while room allows
    read / write         a byte range between a block and the caller's own memory, asynchronously; piece-aligned
    load / patch         any byte range from or to a tensor, at once
    staging / unstage    host memory for bytes on their way, charged like everything else
    discard              the contents are no longer wanted: no byte of them is moved again

Invariants:
1. The host budget covers homes, cached blocks and staging, and is charged before memory is committed.
2. Clean bytes are never written; dirty ones are written before their memory goes.
3. A failed transfer makes its block FAILED: that call and every later one on it raise the first cause.
4. After `close` every page, thread, descriptor and swap file is back.
Not thread-safe: one thread (the one inside forward, backward or step) calls at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Finished, Ticket, settled
from tiered.errors import UsageError
from tiered.io.swapfile import Extent, SwapSpace
from tiered.stats import Meter
from tiered.store.block import Block, BlockKey, BlockState
from tiered.store.policy import Candidate, victims
from tiered.store.tier import Budget, Tier

WINDOW_BYTES = 4 << 20  # of `load` and `patch`: a multiple of every drive's piece


class TieredStore:
    """See the file's contract."""

    def __init__(self, host: Budget, space: SwapSpace | None, meter: Meter) -> None:
        self.host = host
        self.staged = 0
        self._space = space
        self._meter = meter
        self._blocks: dict[BlockKey, Block] = {}
        self._failing = threading.Lock()
        self.on_pressure: Callable[[], None] | None = None  # asked to give back staging that only carries hints

    # --- blocks ---

    def create(self, key: BlockKey, nbytes: int, home: Tier, *, memory: Memory | None = None) -> Block:
        """A new block of zeros. `memory`: committed memory, charged by the caller, that is to be the block's home.

        Raises BudgetError or SwapFullError, with nothing kept, where its home has no room.
        """
        if home is Tier.NVME:
            if self._space is None:
                raise UsageError(f"{key} has its home on a drive, but no swap directory is set")
            block = Block(key, nbytes, home, self._space.allocate(nbytes, str(key)))
        else:
            block = Block(key, nbytes, home, None)
            if memory is None:
                memory = self._take(nbytes, str(key))
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

    def blocks(self) -> Iterable[Block]:
        """Every block there is."""
        return self._blocks.values()

    # --- whole blocks in host memory ---

    def acquire(self, block: Block, *, fresh: bool = False) -> Memory:
        """The whole block in host memory, pinned until `release`; `fresh`: what it held is not wanted, so not read.

        Raises BudgetError where the host budget has no room for it even after evicting all that may go.
        """
        block.check()
        if block.state is BlockState.NVME:
            with uninterrupted():
                self._fetch(block, fresh)
        self._settle(block)
        block.pins += 1
        return _memory(block)

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
        return block.state in (BlockState.HOST, BlockState.FLUSHING)

    def discard(self, block: Block) -> None:
        """Forget the contents: nothing of them is moved again, and the block reads as undefined until written.

        Memory that somebody outside still views is left to them, and the block gets other memory.
        """
        block.check()
        if block.state is BlockState.NVME:
            return
        self._settle(block)
        block.dirty = False
        exported = _memory(block).exported()
        if block.home is Tier.HOST:
            if exported:
                block.memory = Memory(block.nbytes, committed=True)
        elif not block.pins:
            self._drop(block)

    # --- byte ranges ---

    def read(self, block: Block, memory: Memory, *, at: int = 0, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Copy `nbytes` (default: all from `offset`) of the block to `memory` from byte `at` on."""
        nbytes = _span(block, memory, at, offset, nbytes)
        if not nbytes:
            return Finished()
        if self.resident(block):
            ctypes.memmove(memory.address + at, _memory(block).address + offset, nbytes)
            return Finished()
        self._settle(block)
        self._meter.count("nvme", read=nbytes)
        with uninterrupted():  # a transfer that has begun is always registered
            return self._watched(
                block, memory, self._drives().read(_extent(block), memory.address + at, nbytes, offset)
            )

    def write(self, block: Block, memory: Memory, *, at: int = 0, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Copy `nbytes` (default: to the block's end) of `memory` from byte `at` on into the block at `offset`."""
        nbytes = _span(block, memory, at, offset, nbytes)
        if not nbytes:
            return Finished()
        if self.resident(block):
            self._settle(block)
            ctypes.memmove(_memory(block).address + offset, memory.address + at, nbytes)
            block.dirty |= block.extent is not None
            return Finished()
        self._settle(block)
        self._meter.count("nvme", written=nbytes)
        with uninterrupted():
            return self._watched(
                block, memory, self._drives().write(_extent(block), memory.address + at, nbytes, offset)
            )

    def load(self, block: Block, out: torch.Tensor, offset: int) -> None:
        """Fill `out` (1-D uint8, any size) with the block's bytes from `offset` on, through bounded staging."""
        block.check()
        if self.resident(block):
            out.copy_(_memory(block).bytes[offset : offset + out.numel()])
            return
        with self._window(block) as memory:
            for start, stop in _windows(block, offset, out.numel()):
                self.read(block, memory, offset=start, nbytes=stop - start).wait()
                low, high = max(start, offset), min(stop, offset + out.numel())
                out[low - offset : high - offset].copy_(memory.bytes[low - start : high - start])

    def patch(self, block: Block, data: torch.Tensor, offset: int) -> None:
        """Replace the block's bytes from `offset` on by `data` (1-D uint8, any size), through bounded staging."""
        block.check()
        if self.resident(block):
            self._settle(block)
            _memory(block).bytes[offset : offset + data.numel()].copy_(data)
            block.dirty |= block.extent is not None
            return
        with self._window(block) as memory:
            for start, stop in _windows(block, offset, data.numel()):
                low, high = max(start, offset), min(stop, offset + data.numel())
                if (low, high) != (start, stop):
                    self.read(block, memory, offset=start, nbytes=stop - start).wait()
                memory.bytes[low - start : high - start].copy_(data[low - offset : high - offset])
                self.write(block, memory, offset=start, nbytes=stop - start).wait()

    @contextlib.contextmanager
    def _window(self, block: Block) -> Iterator[Memory]:
        """Staging for one window on the block."""
        memory = self.staging(min(WINDOW_BYTES, block.nbytes), f"a window on {block.key}")
        try:
            yield memory
        finally:
            self.unstage(memory)

    # --- staging ---

    def staging(self, nbytes: int, what: str) -> Memory:
        """Committed host memory for bytes on their way; give it back with `unstage`."""
        memory = self._take(nbytes, what)
        self.staged += 1
        return memory

    def unstage(self, memory: Memory) -> None:
        """Give back staging memory; no transfer may still use it. A view held elsewhere (a collective's worker lets
        go a moment late) keeps the pages until it goes."""
        if not memory.exported():
            memory.decommit()
        self.host.refund(page_ceil(memory.nbytes))
        self.staged -= 1

    def room(self) -> int:
        """Bytes that staging could take now: what is free plus what may be evicted."""
        return self.host.free + sum(page_ceil(b.nbytes) for b in self._evictable())

    def close(self) -> None:
        """Wait for what is in flight, give back all memory, files and threads; idempotent."""
        for block in self._blocks.values():
            if block.memory is not None:
                if block.ticket is not None:
                    _quietly(block.ticket)
                if not block.memory.exported():
                    block.memory.decommit()
                block.memory = None
        self._blocks.clear()
        if self._space is not None:
            self._space.close()

    # --- inside ---

    def _take(self, nbytes: int, what: str) -> Memory:
        """Charged and committed memory; where the system has none, nothing stays charged."""
        self._reserve(page_ceil(nbytes), what)
        try:
            return Memory(nbytes, committed=True)
        except BaseException:
            self.host.refund(page_ceil(nbytes))
            raise

    def _fetch(self, block: Block, fresh: bool) -> None:
        extent = _extent(block)
        block.memory = self._take(block.nbytes, str(block.key))
        if fresh or extent.blank:
            block.move(BlockState.HOST)
            return
        block.move(BlockState.FETCHING)
        self._meter.count("nvme", read=block.nbytes)
        block.ticket = self._watched(
            block, block.memory, self._drives().read(extent, block.memory.address, block.nbytes)
        )

    def _flush(self, block: Block) -> None:
        block.move(BlockState.FLUSHING)
        self._meter.count("nvme", written=block.nbytes)
        memory = _memory(block)
        block.ticket = self._watched(block, memory, self._drives().write(_extent(block), memory.address, block.nbytes))

    def _settle(self, block: Block) -> None:
        """Wait until nothing of the block is in flight; raises its first failure."""
        if block.ticket is not None:
            flushing = block.state is BlockState.FLUSHING
            with self._meter.stalled("write-back" if flushing else "fetch"):
                settled(block.ticket)
            ticket, block.ticket = block.ticket, None
            try:
                ticket.wait()
            except BaseException as error:
                self._fail(block, error)  # the ticket's own note may come a moment later
                raise
            block.dirty = block.dirty and not flushing
            block.move(BlockState.HOST)

    def _drop(self, block: Block) -> None:
        memory = _memory(block)
        block.memory = None
        if block.state is not BlockState.FAILED:
            block.move(BlockState.NVME)
        if not memory.exported():
            memory.decommit()
        self.host.refund(page_ceil(block.nbytes))

    def _evictable(self) -> list[Block]:
        return [
            b
            for b in self._blocks.values()
            if b.home is Tier.NVME
            and b.state is not BlockState.FAILED
            and b.memory is not None
            and not b.pins
            and not b.memory.exported()
        ]

    def _reserve(self, nbytes: int, what: str) -> None:
        """Charge `nbytes`, evicting cached blocks of furthest next use where that is needed."""
        if nbytes > self.host.free and self.on_pressure is not None:
            self.on_pressure()
        if nbytes > self.host.free:
            cached = {b.key: b for b in self._evictable()}
            candidates = [Candidate(b.key, page_ceil(b.nbytes), b.next_use) for b in cached.values()]
            chosen = victims(candidates, nbytes - self.host.free)
            evicted = [cached[key] for key in chosen or () if isinstance(key, BlockKey)]
            for block in evicted:
                if block.dirty and block.state is BlockState.HOST:
                    with uninterrupted():
                        self._flush(block)
            for block in evicted:
                self._settle(block)
                self._drop(block)
        self.host.charge(nbytes, what)

    def _drives(self) -> SwapSpace:
        if self._space is None:
            raise UsageError("no swap directory is set")
        return self._space

    def _watched(self, block: Block, memory: Memory, ticket: Ticket) -> Ticket:
        """`ticket`, whose failure fails the block, and which keeps `memory` mapped and committed until it is done."""
        owner: Memory | None = memory
        store = weakref.ref(self)  # the thread that completes transfers may hold the last `note` for long

        def note() -> None:
            nonlocal owner
            owner = None
            try:
                ticket.wait(0)
            except BaseException as error:
                if (alive := store()) is not None:
                    alive._fail(block, error)

        ticket.add_done_callback(note)
        return memory.busy(ticket)

    def _fail(self, block: Block, error: BaseException) -> None:
        with self._failing:  # the thread that waits and the one that completes may both come
            if block.state is not BlockState.FAILED:
                block.cause = error
                block.move(BlockState.FAILED)


def _memory(block: Block) -> Memory:
    if block.memory is None:
        raise RuntimeError(f"{block.key} has no memory in state {block.state.name}")
    return block.memory


def _extent(block: Block) -> Extent:
    if block.extent is None:
        raise RuntimeError(f"{block.key} has no extent")
    return block.extent


def _windows(block: Block, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Piece-aligned windows [start, stop) of the block that cover a range."""
    if nbytes:
        for start in range(offset // WINDOW_BYTES * WINDOW_BYTES, offset + nbytes, WINDOW_BYTES):
            yield start, min(start + WINDOW_BYTES, block.nbytes)


def _span(block: Block, memory: Memory, at: int, offset: int, nbytes: int | None) -> int:
    """The bytes of a transfer with a block that is whole: `nbytes`, or all from `offset`.

    A range past either end would be memory of somebody else: a fault of this program, never let through.
    """
    block.check()
    nbytes = block.nbytes - offset if nbytes is None else nbytes
    if not (0 <= at <= at + nbytes <= memory.nbytes and 0 <= offset <= offset + nbytes <= block.nbytes):
        raise RuntimeError(
            f"{block.key}: bytes {offset}+{nbytes} of {block.nbytes} do not fit memory at {at} of {memory.nbytes}"
        )
    return nbytes


def _quietly(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except Exception:
        return
