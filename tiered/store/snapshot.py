"""Snapshot: blocks as they are now, read on a thread of the reader's while the store's own goes on; no copy of them.

    taken (a drive gets what it lacks) -> read or linked, in any order -> closed

Each byte is read where it lies for good: in the memory that is its block's home, or on the drive that is. Whether a
drive's block is cached meanwhile, fetched again or evicted makes no difference there. So the one thing that may not
happen before the snapshot is closed is a change of its blocks: see `TieredStore.before_change`.

Invariants:
1. It has one window of memory, of WINDOW_BYTES at most, beside the host budget, and reads what follows only once.
2. It changes nothing of the store; a read that fails is the reader's alone.
3. A link has the same bytes as a copy of what `read` gives, and has moved none of them.
Leaves to whom: taking and closing it are calls on the store's thread; that nothing changes is its owner's care.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tiered.device.base import Device
from tiered.device.interrupt import uninterrupted
from tiered.device.memory import Memory
from tiered.errors import StorageError
from tiered.io.checksum import NAMES
from tiered.io.drive import BLOCK
from tiered.stats import Meter
from tiered.store.block import Block
from tiered.store.checks import digits
from tiered.store.store import TieredStore
from tiered.store.tier import Tier
from tiered.store.watched import beside
from tiered.store.window import WINDOW_BYTES, windows

ALIGN = BLOCK
"""A link begins at a multiple of so many bytes, and is of whole ones; the last has zeros after the block's end."""


class Linked(NamedTuple):
    """How to check what a link has given a file: the checksum of each `piece_bytes` of it."""

    check: str  # a key of `checks.CHECKS`
    piece_bytes: int
    sums: str  # in hexadecimal, one after the other


class Snapshot:
    """See the file's contract."""

    def __init__(self, store: TieredStore, device: Device, meter: Meter, blocks: Iterable[Block]) -> None:
        """Raises StorageError where a drive cannot take what it lacks."""
        blocks = list(blocks)
        for block in blocks:
            store.flush(block)
        self._store = store
        self._device = device
        self._meter = meter
        self._beyond = {id(block) for block in blocks if block.home is Tier.DEVICE and not store.resident(block)}
        self._ready = device.fence()  # what is given to the device so far may still change what lies there
        self._window = Memory(min(WINDOW_BYTES, max((b.nbytes for b in blocks), default=0)), committed=True)
        self._holds: tuple[int, int] | None = None  # a block by its id, and where the window on it starts
        if self._beyond:
            device.pin(self._window)

    def read(self, block: Block, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop) of a block, in order, in pieces that are each good until the next."""
        data = memoryview((ctypes.c_char * self._window.nbytes).from_address(self._window.address)).cast("B")
        for low, high in windows(block, start, stop - start):
            if self._holds != (id(block), low):
                self._holds = None
                self._fill(block, low, high)
                self._holds = id(block), low
            yield data[max(low, start) - low : min(high, stop) - low]

    def link(self, block: Block, descriptor: int, offset: int) -> Linked | None:
        """Let a file have a whole block from `offset` on, see ALIGN. None, with that range of the file undefined, where
        only a copy can: the block's home is no drive, or not of a file system that shares blocks with the file. Raises
        OSError where that fails."""
        if block.home is not Tier.NVME:
            return None
        space = self._store._drives()
        sums = space.link(block.place, descriptor, offset)
        return None if sums is None else Linked(NAMES[space.mode], space.piece_bytes, "".join(map(digits, sums)))

    def close(self) -> None:
        """Give the window back. Idempotent."""
        self._device.unpin(self._window)
        with contextlib.suppress(RuntimeError):  # a copy that failed may view it a moment longer
            self._window.decommit()

    def _fill(self, block: Block, low: int, high: int) -> None:
        if self._window.stranded:
            raise StorageError("a read that was given up may still fill the window of this snapshot")
        if block.home is Tier.NVME:
            self._meter.count("nvme", read=high - low)
            with uninterrupted():  # a read that has begun is always registered
                ticket = self._store._drives().read(block.place, self._window.address, high - low, low)
                beside(ticket, self._window)
            ticket.wait()
        elif block.memory is None:
            raise RuntimeError(f"{block.key} has no memory")
        elif id(block) in self._beyond:
            self._meter.count("device", read=high - low)
            self._ready.wait()
            self._device.copy_out(self._window.bytes[: high - low], block.memory.bytes[low:high]).wait()
        elif isinstance(block.memory, Memory):
            ctypes.memmove(self._window.address, block.memory.address + low, high - low)
