"""The swap space of one run and rank: extents over one or more drives, read and written asynchronously.

Invariants:
1. Bytes read are the bytes last written, or zeros where nothing was ever written, or an error: every piece has a
   checksum, and a piece whose write failed is unreadable until it is written again.
2. A transfer starts at a multiple of piece_bytes and ends at one or at the extent's end: pieces move whole.
3. A piece being written takes no second transfer, and one beside it no second write: that raises UsageError. Reads may
   overlap each other. Whoever writes a piece that is still being read has not waited, and the read may fail as corrupt.
4. Space is preallocated by `allocate` and reused after `free`; an allocation that fails keeps nothing.
5. Bytes of the last commit are not overwritten before the next one, and are there after the process has died.
6. `close()` waits for I/O, then removes every file and directory this space made, also after failures. It runs by
   itself when the space is collected or the interpreter ends; in a forked child it does nothing. What is committed
   stays on the drives where the program ends by an error, or `generations.left` says so. What a drive that does not
   answer still holds is left, by name: its threads, descriptors and directory.
7. No transfer takes for ever: one that a drive does not finish within the limit is tried again if it is a read, and
   ends as a StorageError within twice the limit (patience.py).
8. What a space goes on from keeps the layout it was committed with, however fast the drives are by now.

Thread-safe. Leaves to the caller: keeping memory alive until a ticket is done, and what the bytes mean.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from tiered.errors import ConfigError, UsageError
from tiered.io.checksum import checksum
from tiered.io.commit import Identity
from tiered.io.directory import check
from tiered.io.drive import BLOCK
from tiered.io.engine import RECORD, Counters, Mode, Piece, PieceState, chosen_mode, usable
from tiered.io.extent import Extent
from tiered.io.generations import Durability, Generations
from tiered.io.probe import measured
from tiered.io.resources import Resources
from tiered.io.room import Room
from tiered.io.share import share
from tiered.io.totals import DriveStats, SwapStats, totals
from tiered.io.transfer import Ticket, Transfer, TransferPart
from tiered.io.weights import Weights, checked, equal

__all__ = ["DriveStats", "Extent", "SwapSpace", "SwapStats", "Ticket"]
_LOGGER = logging.getLogger("tiered")


class SwapSpace:
    """Extents in a swap file on each of `directories`, for one rank of one run.

    Args:
        directories: one for each drive; each must exist, be writable and be no link.
        rank: of this process, part of the names on disk.
        threads: I/O threads for each drive, and so the pieces in flight on it.
        piece_bytes: what is moved and checked at once; a positive multiple of 4096.
        timeout_s: how long a drive may take over a piece before it is late; None: for ever.
        identity: whose generations are committed; None: nothing is. durability: see `generations`.
        weights: of the drives, in proportion to their speeds: small whole numbers, 0 for one that only helps out where
            the others are full. None: those of what a dead run has left, or else measured, in about 0.3 s (probe.py).

    Raises ConfigError for impossible sizes and weights, SwapDirectoryError naming the directory, SwapFullError where a
    drive is full, StorageError where the system gives no threads or descriptors. Nothing is left behind after an error.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        rank: int = 0,
        threads: int = 8,
        piece_bytes: int = 1 << 20,
        timeout_s: float | None = 30.0,
        identity: Identity | None = None,
        durability: Durability = "process",
        weights: Sequence[int] | None = None,
    ) -> None:
        _check_settings(directories, rank, threads, piece_bytes)
        if weights is not None:
            checked(weights, len(directories))
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s: expected seconds above 0, or None, got {timeout_s}")
        for path in directories:
            check(path)
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()  # guards the drives' ranges, the extents' records of what is in flight, and:
        self._live: dict[Extent, bool] = {}  # whether it is part of what is committed
        self._closed = False
        self._closing = threading.Lock()  # held while releasing, so that every close() returns to a closed space
        self._owner = os.getpid()
        if identity is not None:  # what another engine has written, or cut otherwise, could not be checked
            layout = f"{identity.layout} {chosen_mode()} {piece_bytes}"
            identity = dataclasses.replace(identity, layout=layout)
        self.generations = None if identity is None else Generations(identity, durability, timeout_s)
        self._resources = Resources(self.generations, timeout_s)
        try:
            self._resources.claim(directories, rank)
            for claimed in self._resources.claims:
                self._resources.open(claimed, threads, piece_bytes)
            if self.generations is not None:
                self.generations.attach(self._resources.drives)
            self._resources.patience.start()
            self._room = Room(self._resources.drives, self._weigh(weights, threads), piece_bytes)
        except BaseException:
            self._resources.release()
            raise
        self._finalizer = weakref.finalize(self, self._resources.release_collected)

    def _weigh(self, given: Sequence[int] | None, threads: int) -> Weights:
        """The weights of what is allocated from now on, and what was moved to find them."""
        drives, engines, found = self._resources.drives, self._resources.engines, self.generations
        if given is not None:
            weights = tuple(given)
        elif len(drives) == 1:
            weights = equal(1)
        elif found is not None and found.untouched:  # nothing may be written there
            weights = found.weights or equal(len(drives))
        else:
            weights = measured(drives, engines, threads=threads, piece_bytes=self._piece_bytes)
        if found is not None:
            found.weights = weights
        self._before: list[Counters] = [engine.counters() for engine in engines]
        return weights

    def __enter__(self) -> SwapSpace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def piece_bytes(self) -> int:
        """The granularity of offsets and of checksums, in bytes."""
        return self._piece_bytes

    @property
    def mode(self) -> Mode:
        """ "native", or "portable" where the extension is missing or TIERED_PORTABLE is set."""
        return self._resources.engines[0].mode

    # --- space --------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, label: str, *, kept: bool = False) -> Extent:
        """Preallocates space for `nbytes` >= 0 bytes; `label` names it in messages. `kept`: it is part of what is
        committed, and has space for that twice; its label is its name there.

        Raises SwapFullError with the file, the bytes needed and the bytes free; then nothing was kept.
        """
        if nbytes < 0:
            raise UsageError(f"an extent has at least 0 bytes, got {nbytes} for {label}")
        usable(self._owner, closed=False)  # before the lock, which a fork may have left locked
        with self._lock:
            usable(self._owner, self._closed)
            kept = kept and self.generations is not None
            extent = self.generations.bind(label, nbytes, self._piece_bytes) if kept and self.generations else None
            if extent is None:
                pieces, slots = -(-nbytes // self._piece_bytes), 2 if kept else 1
                records, where = np.zeros(pieces * slots, dtype=RECORD), np.zeros(pieces, np.uint8)  # all BLANK
                extent = Extent(nbytes, label, *self._room.take(nbytes, slots), records, where)
            self._live[extent] = kept
        return extent

    def free(self, extent: Extent) -> None:
        """Gives the extent's space to later allocations, after waiting for its transfers. Idempotent."""
        usable(self._owner, closed=False)
        with self._lock:
            if extent not in self._live:
                return
            del self._live[extent]  # no new transfers from here on
            in_flight = extent.in_flight
        for submission in in_flight:
            submission.wait()
        with self._lock:
            if self._closed or extent.committed is not None:  # what is committed keeps its space to the end
                return
            self._room.give_back(extent.stripes, extent.starts)

    # --- transfers ----------------------------------------------------------------------------------------------------

    def read(self, extent: Extent, address: int, nbytes: int, offset: int = 0) -> Ticket:
        """Starts filling `nbytes` bytes at `address` from the extent's byte `offset`.

        Bytes never written are zeros. Raises UsageError as for `write`; what goes wrong later is raised by the ticket.
        """
        return self._transfer(False, extent, address, nbytes, offset)

    def write(self, extent: Extent, address: int, nbytes: int, offset: int = 0) -> Ticket:
        """Starts writing `nbytes` bytes at `address` to the extent's byte `offset`.

        The memory stays valid and unchanged until the ticket is done. Raises UsageError for a range that is not made
        of whole pieces of this extent, a freed extent, a closed space, or a piece that is being written.
        """
        return self._transfer(True, extent, address, nbytes, offset)

    def write_beside(self, extent: Extent, address: int, nbytes: int, offset: int = 0) -> Ticket:
        """As `write`, but the extent holds what it held, until `take` of the same range makes this its contents.

        Raises UsageError as well where the extent is not `settled`: nothing may be beside what is not committed.
        """
        return self._transfer(True, extent, address, nbytes, offset, beside=True)

    def take(self, extent: Extent, nbytes: int, offset: int = 0) -> None:
        """What was written beside a range is its contents, arrived or not. Raises UsageError where that is old."""
        pieces = self._piece_range(extent, nbytes, offset)
        with self._lock:
            usable(self._owner, self._closed)
            self._check_live(extent)
            extent.take(pieces)
            self._count(extent, pieces)

    def _transfer(
        self, write: bool, extent: Extent, address: int, nbytes: int, offset: int, *, beside: bool = False
    ) -> Ticket:
        pieces = self._piece_range(extent, nbytes, offset)
        usable(self._owner, closed=False)
        with self._lock:
            usable(self._owner, self._closed)
            self._check_live(extent)
            self._check_idle(extent, pieces, write)
            extent.in_flight = [submission for submission in extent.in_flight if not submission.done()]
            if write:
                self._begin_write(extent, pieces, beside)
            by_drive = self._by_drive(extent, address - offset, pieces, beside=beside)
            parts = []
            for index, drive_pieces in by_drive.items():
                submission = self._resources.engines[index].submit(write, drive_pieces, extent.records)
                extent.in_flight.append(submission)
                parts.append(TransferPart(submission, self._resources.drives[index].path, drive_pieces))
        return Transfer(parts, write, extent.label)

    def _check_idle(self, extent: Extent, pieces: range, write: bool) -> None:
        numbers = np.arange(pieces.start, pieces.stop)
        for beside in (False, True) if write and len(extent.starts) > 1 else (False,):
            if (extent.records["state"][extent.record(numbers, beside=beside)] == PieceState.WRITING).any():
                raise UsageError(f"{extent.label} is being written there; wait for that ticket first")

    def _begin_write(self, extent: Extent, pieces: range, beside: bool) -> None:
        if self.generations is not None:
            self.generations.check()
        if not beside:
            extent.turn(pieces)
        elif not extent.settled:
            raise UsageError(f"{extent.label} holds what is not committed: nothing may be written beside it")
        extent.beside[pieces.start : pieces.stop] = beside
        at = extent.record(np.arange(pieces.start, pieces.stop), beside=beside)
        extent.records["state"][at] = PieceState.WRITING
        if not beside:
            self._count(extent, pieces)

    def _count(self, extent: Extent, pieces: range) -> None:
        """What was written, or is, becomes what `pieces` hold."""
        at = extent.record(np.arange(pieces.start, pieces.stop))
        if self.generations is not None:
            self.generations.written(bool(extent.fresh[at].any()))
        extent.fresh[at] = False

    def link(self, extent: Extent, descriptor: int, offset: int) -> list[int] | None:
        """Lets the file `descriptor` have the extent's bytes from `offset` on (a multiple of BLOCK) without moving
        them, and zeros from their end to the end of the last block.

        Gives the checksum of each piece, that of the last with these zeros. None, with that range of the file
        undefined, where a piece has no bytes of its own or the file system does not share blocks between the two.
        Nothing of the extent may be written or freed meanwhile. Raises OSError where the file system fails.
        """
        with self._lock:
            usable(self._owner, self._closed)
            self._check_live(extent)
            contents = extent.contents
            if (contents["state"] != PieceState.VALID).any():
                return None
            extent.fresh[extent.record(np.arange(extent.pieces))] = True
            by_drive = self._by_drive(extent, 0, range(extent.pieces))
        for index, pieces in by_drive.items():
            if not share(self._resources.drives[index].buffered_fd, pieces, descriptor, offset):
                return None
        sums: list[int] = contents["checksum"].tolist()
        if rest := bytes(-extent.nbytes % BLOCK):
            os.pwrite(descriptor, rest, offset + extent.nbytes)
            sums[-1] = checksum(self.mode)(memoryview(rest), sums[-1])
        return sums

    def _check_live(self, extent: Extent) -> None:
        if extent not in self._live:
            raise UsageError(f"{extent.label} was freed, or belongs to another swap space; allocate it here first")

    def _piece_range(self, extent: Extent, nbytes: int, offset: int) -> range:
        stop = offset + nbytes
        if not 0 <= offset <= stop <= extent.nbytes:
            raise UsageError(f"bytes {offset} to {stop} are outside {extent.label}, which has {extent.nbytes}")
        size = self._piece_bytes
        if offset % size or (stop % size and stop != extent.nbytes):
            raise UsageError(
                f"bytes {offset} to {stop} of {extent.label} are not whole pieces: start at a multiple of {size} "
                f"and stop at one or at the end, {extent.nbytes}"
            )
        return range(offset // size, -(-stop // size))

    def _by_drive(self, extent: Extent, base: int, pieces: range, *, beside: bool = False) -> dict[int, list[Piece]]:
        """The pieces each drive moves; `base` is the memory address that the extent's byte 0 has or would have."""
        by_drive: dict[int, list[Piece]] = {}
        for index in pieces:
            drive, offset = extent.stripes.place(index)
            address = base + index * self._piece_bytes
            slot = int(extent.slots[index]) ^ beside
            record = index * len(extent.starts) + slot
            piece = Piece(address, extent.starts[slot][drive] + offset, extent.stripes.size(index), record)
            by_drive.setdefault(drive, []).append(piece)
        return by_drive

    # --- generations -----------------------------------------------------------------------------------------------

    def commit(self, payload: bytes) -> None:
        """Make what all extents that are `kept` hold now, and `payload`, the generation that survives the process.

        Nothing may be on its way to them. Raises StorageError; then the commit before is the last one still.
        """
        with self._lock:
            usable(self._owner, self._closed)
            self._committing().commit([extent for extent, kept in self._live.items() if kept], payload)

    def revert(self) -> None:
        """Bring back the last commit, or what of a dead run is protected: all that was written since is gone."""
        with self._lock:
            usable(self._owner, self._closed)
            self._committing().revert([extent for extent, kept in self._live.items() if kept])

    def free_bytes(self) -> int:
        """Bytes that can still be allocated, as far as the drives say."""
        with self._lock:
            return self._room.free_bytes()

    def _committing(self) -> Generations:
        if self.generations is None:
            raise UsageError("this swap space commits nothing: it was opened without an identity")
        return self.generations

    # --- the whole ----------------------------------------------------------------------------------------------------

    @property
    def file_bytes(self) -> int:
        """Bytes of the swap files."""
        return sum(drive.nbytes for drive in self._resources.drives)

    def stats(self) -> SwapStats:
        """What was moved so far, measuring apart, and what drives needed another try for; also after `close`."""
        self._resources.patience.report()
        return totals(self._resources.drives, self._resources.engines, self._room.weights, self._before)

    def close(self) -> None:
        """Waits for I/O, removes the files and directories and gives up the locks. Idempotent.

        Raises UsageError from a completion callback, which could only wait for itself. Nothing in a forked child.
        """
        if os.getpid() != self._owner:
            return
        if self._resources.in_callback():
            raise UsageError("close() was called by a completion callback; call it from another thread")
        with self._closing:
            with self._lock:
                self._closed = True
            if self._finalizer.detach() is not None:
                self._resources.release()


def _check_settings(directories: object, rank: int, threads: int, piece_bytes: int) -> None:
    if not isinstance(directories, Sequence) or isinstance(directories, (str, bytes)) or not directories:
        raise ConfigError(f"directories: expected a list with one path for each drive, got {directories!r}")
    if rank < 0:
        raise ConfigError(f"rank: expected 0 or more, got {rank}")
    if threads < 1:
        raise ConfigError(f"threads: expected 1 or more for each drive, got {threads}")
    if piece_bytes < BLOCK or piece_bytes % BLOCK:
        raise ConfigError(f"piece_bytes: expected a positive multiple of {BLOCK}, got {piece_bytes}")
