"""The swap space of one run and rank: extents over one or more drives, read and written asynchronously.

Invariants:
1. Bytes read are the bytes last written, or zeros where nothing was ever written, or an error: every piece has a
   checksum, and a piece whose write failed is unreadable until it is written again.
2. A transfer starts at a multiple of piece_bytes and ends at one or at the extent's end: pieces move whole.
3. A piece being written takes no second transfer: that raises UsageError. Reads may overlap each other. Whoever writes
   a piece that is still being read has not waited, and the read may fail as corrupt.
4. Space is preallocated by `allocate` and reused after `free`; an allocation that fails keeps nothing.
5. `close()` waits for I/O, then removes every file and directory this space made, also after failures. It runs by
   itself when the space is collected or the interpreter ends; in a forked child it does nothing. What a drive that
   does not answer still holds is left, by name: its threads, descriptors and directory.
6. No wait is for ever: a transfer a drive does not finish within the limit is tried again if it is a read, and ends as
   a StorageError within twice the limit (patience.py).

Thread-safe. Leaves to the caller: keeping memory alive until a ticket is done, and what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiered.errors import ConfigError, StorageError, TieredError, UsageError
from tiered.io.directory import ClaimedDirectory, check, claim
from tiered.io.drive import BLOCK, Drive
from tiered.io.engine import RECORD, Engine, Mode, Piece, PieceState, chosen_mode, open_engine, usable
from tiered.io.extent import Extent, Stripes
from tiered.io.patience import Patience
from tiered.io.transfer import Ticket, Transfer, TransferPart

__all__ = ["DriveStats", "Extent", "SwapSpace", "SwapStats", "Ticket"]
_LOGGER = logging.getLogger("tiered")


@dataclass(frozen=True, slots=True)
class DriveStats:
    """One directory's totals: its swap file, whether I/O is direct, bytes moved, seconds with I/O in flight."""

    path: str
    direct: bool
    bytes_read: int
    bytes_written: int
    busy_seconds: float
    file_bytes: int  # preallocated, in use or free
    retries: int  # reads made once more, after a failure or as they were late: of a healthy drive 0
    stalls: int  # transfers that were late


@dataclass(frozen=True, slots=True)
class SwapStats:
    """A snapshot of a swap space; totals are sums over `drives`, in the order the directories were given."""

    mode: Mode
    bytes_read: int
    bytes_written: int
    retries: int
    stalls: int
    drives: tuple[DriveStats, ...]


class _Resources:
    """What a swap space holds of the system, apart from the space, so that it can be released after it is collected."""

    def __init__(self, timeout_s: float | None) -> None:
        self.patience = Patience(timeout_s)
        self.claims: list[ClaimedDirectory] = []
        self.drives: list[Drive] = []
        self.engines: list[Engine] = []

    def open(self, path: str | os.PathLike[str], rank: int, threads: int, piece_bytes: int) -> None:
        """Claims a directory and opens a drive and an engine in it."""
        self.claims.append(claim(path, rank))
        try:
            self.drives.append(Drive(self.claims[-1], direct=chosen_mode() == "native"))
            in_place = self.patience.limit_s is None
            engine = open_engine(self.drives[-1], threads=threads, piece_bytes=piece_bytes, in_place=in_place)
            self.engines.append(engine)
            self.patience.watch(engine, self.drives[-1].path)
        except TieredError:
            raise
        except (OSError, RuntimeError) as error:
            number = getattr(error, "errno", None) or errno.EAGAIN
            what = f"{threads} I/O threads with their files cannot be had: {error}; give fewer, or raise the limits"
            raise StorageError(number, what, self.claims[-1].path) from error

    def in_callback(self) -> bool:
        """Whether the caller is a completion callback, or the thread that watches."""
        return self.patience.is_current() or any(engine.in_callback() for engine in self.engines)

    def release(self) -> None:
        """Waits for I/O, closes the files, removes the directories; each step also when another one failed."""
        with contextlib.ExitStack() as stack:  # the last that is pushed comes first
            answering = [contextlib.ExitStack() for _ in self.claims]
            for each, claimed in zip(answering, self.claims, strict=True):
                stack.callback(each.close)
                each.callback(claimed.release)
            for each, drive in zip(answering, self.drives, strict=False):
                each.callback(drive.close)
            stack.callback(self.patience.stop)
            for each, drive, engine in zip(answering, self.drives, self.engines, strict=False):
                stack.callback(_end, engine, drive, each)

    def release_collected(self) -> None:
        """`release` for a space nobody closed, which the last callback of a ticket may have held."""
        if self.in_callback():
            threading.Thread(target=self.release, name="tiered-io-release").start()
        else:
            self.release()


def _end(engine: Engine, drive: Drive, held: contextlib.ExitStack) -> None:
    """Closes an engine; what its drive holds of the system is not given back where calls on it are still out."""
    if behind := engine.close():
        held.pop_all()  # closing or removing a file there could wait for ever, and a late call may use the descriptor
        _LOGGER.warning(
            "%s: %d transfers have not come back from the drive; their threads and descriptors are left to the system, "
            "and the directory to the next run there, which removes it",
            drive.path,
            behind,
        )


class SwapSpace:
    """Extents in a swap file on each of `directories`, for one rank of one run.

    Args:
        directories: one for each drive; each must exist, be writable and be no link.
        rank: of this process, part of the names on disk.
        threads: I/O threads for each drive, and so the pieces in flight on it.
        piece_bytes: what is moved and checked at once; a positive multiple of 4096.
        timeout_s: how long a drive may take over a piece before it is late; None: for ever.

    Raises ConfigError for impossible sizes, SwapDirectoryError naming the directory, SwapFullError where a drive is
    full, StorageError where the system gives no threads or descriptors. Nothing is left behind after an error.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        rank: int = 0,
        threads: int = 8,
        piece_bytes: int = 1 << 20,
        timeout_s: float | None = 30.0,
    ) -> None:
        _check_settings(directories, rank, threads, piece_bytes)
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s: expected seconds above 0, or None, got {timeout_s}")
        for path in directories:
            check(path)
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()  # guards the drives' ranges, the extents' records of what is in flight, and:
        self._live: set[Extent] = set()
        self._closed = False
        self._closing = threading.Lock()  # held while releasing, so that every close() returns to a closed space
        self._owner = os.getpid()
        self._resources = _Resources(timeout_s)
        try:
            for path in directories:
                self._resources.open(path, rank, threads, piece_bytes)
            self._resources.patience.start()
        except BaseException:
            self._resources.release()
            raise
        self._finalizer = weakref.finalize(self, self._resources.release_collected)

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

    def allocate(self, nbytes: int, label: str) -> Extent:
        """Preallocates space for `nbytes` >= 0 bytes; `label` names it in messages.

        Raises SwapFullError with the file, the bytes needed and the bytes free; then nothing was kept.
        """
        if nbytes < 0:
            raise UsageError(f"an extent has at least 0 bytes, got {nbytes} for {label}")
        drives = self._resources.drives
        usable(self._owner, closed=False)  # before the lock, which a fork may have left locked
        with self._lock:
            usable(self._owner, self._closed)
            first = min(range(len(drives)), key=lambda index: drives[index].taken_bytes)
            stripes = Stripes(nbytes, self._piece_bytes, len(drives), first)
            with contextlib.ExitStack() as undo:
                starts = []
                for index, drive in enumerate(drives):
                    span = stripes.span(index)
                    starts.append(drive.take(span) if span else 0)
                    if span:
                        undo.callback(drive.undo_take, starts[-1], span)
                records = np.zeros(stripes.pieces, dtype=RECORD)  # all BLANK
                undo.pop_all()
            extent = Extent(nbytes, label, stripes, tuple(starts), records)
            self._live.add(extent)
        return extent

    def free(self, extent: Extent) -> None:
        """Gives the extent's space to later allocations, after waiting for its transfers. Idempotent."""
        usable(self._owner, closed=False)
        with self._lock:
            if extent not in self._live:
                return
            self._live.remove(extent)  # no new transfers from here on
            in_flight = extent.in_flight
        for submission in in_flight:
            submission.wait()
        with self._lock:
            if self._closed:
                return
            for index, drive in enumerate(self._resources.drives):
                span = extent.stripes.span(index)
                if span:
                    drive.give_back(extent.starts[index], span)

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

    def _transfer(self, write: bool, extent: Extent, address: int, nbytes: int, offset: int) -> Ticket:
        pieces = self._piece_range(extent, nbytes, offset)
        by_drive = self._by_drive(extent, address - offset, pieces)
        states = extent.records["state"][pieces.start : pieces.stop]
        usable(self._owner, closed=False)
        with self._lock:
            usable(self._owner, self._closed)
            if extent not in self._live:
                raise UsageError(f"{extent.label} was freed, or belongs to another swap space; allocate it here first")
            if (states == PieceState.WRITING).any():
                raise UsageError(f"{extent.label} is being written there; wait for that ticket first")
            extent.in_flight = [submission for submission in extent.in_flight if not submission.done()]
            if write:
                states[:] = PieceState.WRITING
            parts = []
            for index, drive_pieces in by_drive.items():
                submission = self._resources.engines[index].submit(write, drive_pieces, extent.records)
                extent.in_flight.append(submission)
                parts.append(TransferPart(submission, self._resources.drives[index].path, drive_pieces))
        return Transfer(parts, write, extent.label)

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

    def _by_drive(self, extent: Extent, base: int, pieces: range) -> dict[int, list[Piece]]:
        """The pieces each drive moves; `base` is the memory address that the extent's byte 0 has or would have."""
        by_drive: dict[int, list[Piece]] = {}
        for index in pieces:
            drive, offset = extent.stripes.place(index)
            address = base + index * self._piece_bytes
            piece = Piece(address, extent.starts[drive] + offset, extent.stripes.size(index), index)
            by_drive.setdefault(drive, []).append(piece)
        return by_drive

    # --- the whole ----------------------------------------------------------------------------------------------------

    def stats(self) -> SwapStats:
        """What was moved so far, and what drives needed another try for; also after `close`."""
        resources = self._resources
        resources.patience.report()
        counters = [engine.counters() for engine in resources.engines]
        drives = tuple(
            DriveStats(
                path=drive.path,
                direct=drive.direct,
                bytes_read=count.bytes_read,
                bytes_written=count.bytes_written,
                busy_seconds=count.busy_seconds,
                file_bytes=drive.nbytes,
                retries=count.retries,
                stalls=count.stalls,
            )
            for drive, count in zip(resources.drives, counters, strict=True)
        )
        return SwapStats(
            self.mode,
            sum(count.bytes_read for count in counters),
            sum(count.bytes_written for count in counters),
            sum(count.retries for count in counters),
            sum(count.stalls for count in counters),
            drives,
        )

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
