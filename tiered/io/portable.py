"""The I/O engine without the extension: aiofiles on an event loop in a thread of its own.

Same interface, same invariants (tiered/io/engine.py), same results; slower, as every piece passes through Python.

1. One open file for each piece that may be in flight: a file has one position, so it serves one piece at a time.
2. The event loop only hands out work. Reads, writes and checksums run on `threads` executor threads.
3. Always buffered I/O. Checksums are zlib's CRC-32.
4. Whatever goes wrong with a piece, it is counted as finished: a wait never hangs.
5. The executor is our own, as the standard one refuses work once the interpreter is ending, before close() could run.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

import aiofiles
import numpy as np

from tiered.errors import UsageError
from tiered.io.drive import Drive
from tiered.io.engine import (
    CompletionThread,
    Counters,
    Failure,
    Mode,
    Piece,
    PieceState,
    Records,
    run_callback,
    usable,
)

_LOGGER = logging.getLogger("tiered")
_notice_given = threading.Event()

Callback = Callable[[], None]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _File(Protocol):
    """What is used of an unbuffered aiofiles file."""

    async def seek(self, offset: int) -> int: ...
    async def write(self, data: memoryview) -> int: ...
    async def readinto(self, buffer: memoryview) -> int: ...


class _Workers(Executor):
    """Daemon threads that run what they are given, in order, until `shutdown`."""

    def __init__(self, count: int) -> None:
        self._work: queue.SimpleQueue[Callback | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(count):
                thread = threading.Thread(target=self._run, name="tiered-io-portable", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads after what was submitted."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (run := self._work.get()) is not None:
            run()


class _PortableSubmission:
    """One request: its pieces, and how many are still to finish."""

    def __init__(self, engine: PortableEngine, pieces: Sequence[Piece], records: Records) -> None:
        self.pieces = list(pieces)
        self.records = records
        self._engine = engine
        self._lock = threading.Lock()  # guards what follows
        self._remaining = len(self.pieces)
        self._failure: Failure | None = None
        self._callbacks: list[Callback] = []
        self._finished = threading.Event()
        if not self.pieces:
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.done():
            usable(self._engine.owner, closed=False)
        return self._finished.wait(timeout)

    def failure(self) -> Failure | None:
        if not self.done():
            return None
        with self._lock:
            return self._failure

    def add_done_callback(self, fn: Callback) -> None:
        if not self.done():
            usable(self._engine.owner, closed=False)
        self._engine.completion.start()
        with self._lock:
            if not self.done():
                self._callbacks.append(fn)
                return
        run_callback(fn)

    def finish(self, failure: Failure | None) -> list[Callback]:
        """Counts one piece as finished; gives the callbacks to run after the last."""
        with self._lock:
            if failure is not None and (self._failure is None or failure.piece < self._failure.piece):
                self._failure = failure
            self._remaining -= 1
            if self._remaining:
                return []
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        return callbacks


class PortableEngine:
    """An event loop with `threads` files open on one drive."""

    mode: Mode = "portable"

    def __init__(self, drive: Drive, *, threads: int, piece_bytes: int) -> None:
        if threads < 1 or piece_bytes < 1:
            raise UsageError(f"threads and piece_bytes must be positive, got {threads} and {piece_bytes}")
        _give_notice()
        self.owner = os.getpid()
        self._completed: queue.SimpleQueue[Callback | None] = queue.SimpleQueue()
        self.completion = CompletionThread(self._completed.get)
        self._lock = threading.Lock()  # guards _closed and _tally
        self._closed = False
        self._tally = _Tally()
        self._descriptors: list[int] = []
        self._files: asyncio.Queue[_File] = asyncio.Queue()  # idle ones; this and the tasks belong to the loop's thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._executor = _Workers(threads)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tiered-io-portable-loop", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open_files(drive, threads), self._loop).result()
        except BaseException:
            self.close()
            raise

    def submit(self, write: bool, pieces: Sequence[Piece], records: Records) -> _PortableSubmission:
        usable(self.owner, closed=False)  # before the lock, which a fork may have left locked
        submission = _PortableSubmission(self, pieces, records)
        with self._lock:
            usable(self.owner, self._closed)
            for index in range(len(submission.pieces)):
                self._loop.call_soon_threadsafe(self._start, write, submission, index)
        return submission

    def counters(self) -> Counters:
        if os.getpid() != self.owner:
            return Counters(0, 0, 0.0)
        with self._lock:
            return Counters(self._tally.read, self._tally.written, self._tally.busy_seconds)

    def in_callback(self) -> bool:
        return self.completion.is_current()

    def close(self) -> None:
        if os.getpid() != self.owner:
            return  # the loop and its thread are the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._executor.shutdown()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._completed.put(None)
        self.completion.join()

    # --- on the loop's thread ---------------------------------------------------------------------------------------

    async def _open_files(self, drive: Drive, count: int) -> None:
        for _ in range(count):
            # Ours to close: once the interpreter is going the executor refuses, and aiofiles could close nothing.
            descriptor = drive.reopen()
            self._descriptors.append(descriptor)
            file = await aiofiles.open(descriptor, "r+b", buffering=0, closefd=False, executor=self._executor)
            self._files.put_nowait(file)

    def _start(self, write: bool, submission: _PortableSubmission, index: int) -> None:
        task = self._loop.create_task(self._move(write, submission, index))
        self._tasks.add(task)  # the loop itself keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        # Pieces were handed to the loop before this coroutine, so each of them is a task by now.
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _move(self, write: bool, submission: _PortableSubmission, index: int) -> None:
        piece = submission.pieces[index]
        record = submission.records[piece.record]
        file = await self._files.get()
        with self._lock:
            self._tally.begin()
        blank = record["state"] == PieceState.BLANK  # read as zeros, without I/O
        failure: Failure | None = Failure("system", errno.EIO, index)  # should anything but OSError come up
        try:
            fault = await (self._write if write else self._read)(file, piece, record)
            failure = None if fault is None else Failure(fault, 0, index)
        except OSError as error:
            failure = Failure("system", error.errno or errno.EIO, index)
        finally:
            if write:
                record["state"] = PieceState.INVALID if failure else PieceState.VALID
            self._files.put_nowait(file)
            with self._lock:
                self._tally.end(write, 0 if failure or blank else piece.nbytes)
            for fn in submission.finish(failure):
                self._completed.put(fn)

    async def _write(self, file: _File, piece: Piece, record: np.void) -> str | None:
        view = _view(piece)
        record["checksum"] = await self._loop.run_in_executor(self._executor, zlib.crc32, view)
        await file.seek(piece.offset)
        while len(view):
            view = view[await file.write(view) :]
        return None

    async def _read(self, file: _File, piece: Piece, record: np.void) -> str | None:
        if record["state"] == PieceState.BLANK:
            ctypes.memset(piece.address, 0, piece.nbytes)
            return None
        if record["state"] != PieceState.VALID:
            return "invalid"
        view = rest = _view(piece)
        await file.seek(piece.offset)
        while len(rest):
            got = await file.readinto(rest)
            if got == 0:
                return "short_end"
            rest = rest[got:]
        checksum = await self._loop.run_in_executor(self._executor, zlib.crc32, view)
        return None if checksum == record["checksum"] else "checksum"


class _Tally:
    """Bytes moved and seconds busy, with the same meaning as the native engine's."""

    def __init__(self) -> None:
        self.read = self.written = self._in_flight = 0
        self.busy_seconds = self._busy_since = 0.0

    def begin(self) -> None:
        """Counts a piece as in flight."""
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1

    def end(self, write: bool, nbytes: int) -> None:
        """Counts a piece as finished, `nbytes` of it moved."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self.busy_seconds += time.monotonic() - self._busy_since
        if write:
            self.written += nbytes
        else:
            self.read += nbytes


def _view(piece: Piece) -> memoryview:
    """The piece's memory as writable bytes."""
    return memoryview((ctypes.c_ubyte * piece.nbytes).from_address(piece.address)).cast("B")


def _give_notice() -> None:
    if not _notice_given.is_set():
        _notice_given.set()
        _LOGGER.warning(
            "portable I/O (aiofiles): the compiled extension is missing or TIERED_PORTABLE is set; "
            "results are the same, transfers are slower"
        )
