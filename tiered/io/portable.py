"""The I/O engine without the extension: aiofiles on an event loop in a thread of its own.

Same interface, same invariants (tiered/io/engine.py), same results; slower, as every piece passes through Python.

1. One open file for each piece that may be in flight: a file has one position, so it serves one piece at a time.
2. The event loop only hands out work. Reads, writes, checksums and copies run on `threads` executor threads, and one
   more, with a file, for each call that is late.
3. Always buffered I/O. Checksums are zlib's CRC-32.
4. Whatever goes wrong with a piece, it is settled, and once: by whoever claims it under the lock. A wait never hangs.
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
import zlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

import aiofiles

from tiered.errors import UsageError
from tiered.io.attempts import Attempt, Attempts, Callback, Submitted
from tiered.io.drive import Drive
from tiered.io.engine import CompletionThread, Counters, Failure, Late, Mode, Piece, Records, Trouble, usable

_LOGGER = logging.getLogger("tiered")
_CLOSE_SECONDS = 10.0  # how long close() waits for late calls
_notice_given = threading.Event()

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
                self.add()
        except BaseException:
            self.shutdown()
            raise

    def add(self) -> None:
        """One thread more."""
        thread = threading.Thread(target=self._run, name="tiered-io-portable", daemon=True)
        thread.start()
        self._threads.append(thread)

    def remove(self) -> None:
        """One thread less, when one has nothing to do."""
        self._work.put(None)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads after what was submitted; `wait=False` leaves those that are in a call."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(None if wait else 0.1)

    def _run(self) -> None:
        while (run := self._work.get()) is not None:
            run()


class PortableEngine:
    """An event loop with `threads` files open on one drive."""

    mode: Mode = "portable"

    def __init__(self, drive: Drive, *, threads: int, piece_bytes: int) -> None:
        if threads < 1 or piece_bytes < 1:
            raise UsageError(f"threads and piece_bytes must be positive, got {threads} and {piece_bytes}")
        _give_notice()
        self._owner = os.getpid()
        self._drive = drive
        self._completed: queue.SimpleQueue[Callback | None] = queue.SimpleQueue()
        self._completion = CompletionThread(self._completed.get)
        self._attempts = Attempts(self._completed.put)
        self._descriptors: list[int] = []
        self._idle: list[_File] = []  # this and the tasks belong to the loop's thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._executor = _Workers(threads)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tiered-io-portable-loop", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open_files(threads), self._loop).result()
        except BaseException:
            self.close()
            raise

    def submit(self, write: bool, pieces: Sequence[Piece], records: Records) -> Submitted:
        usable(self._owner, closed=False)  # before a lock, which a fork may have left locked
        submitted = Submitted(self._completion, write, pieces, records)
        self._attempts.add(submitted)
        if submitted.pieces:
            self._loop.call_soon_threadsafe(self._dispatch)
        return submitted

    def counters(self) -> Counters:
        return self._attempts.counters() if os.getpid() == self._owner else Counters(0, 0, 0.0, 0, 0)

    def late(self, seconds: float) -> list[Late]:
        return self._attempts.late(seconds)

    def replace(self, id: int) -> bool:
        if (late := self._attempts.find(id)) is None or late.replaced:
            return False
        try:
            self._executor.add()
            late.replaced = True
            self._loop.call_soon_threadsafe(self._run, self._substitute(late))
        except RuntimeError:  # no thread, or it has come back and the loop is closed
            return False
        return True

    def give_up(self, id: int) -> bool:
        return self._attempts.give_up(id)

    def troubles(self) -> list[Trouble]:
        return self._attempts.troubles() if os.getpid() == self._owner else []

    def in_callback(self) -> bool:
        return self._completion.is_current()

    def close(self) -> int:
        if os.getpid() != self._owner or not self._attempts.close():
            return 0  # the loop and its thread are the parent's
        behind = self._attempts.drain(_CLOSE_SECONDS)
        asyncio.run_coroutine_threadsafe(self._end(leaving=behind > 0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._executor.shutdown(wait=behind == 0)
        if not behind:
            for descriptor in self._descriptors:
                os.close(descriptor)
        self._completed.put(None)
        self._completion.join()
        return behind

    # --- on the loop's thread ---------------------------------------------------------------------------------------

    async def _open_files(self, count: int) -> None:
        for _ in range(count):
            self._idle.append(await self._open_file())

    async def _open_file(self) -> _File:
        # Ours to close: once the interpreter is going the executor refuses, and aiofiles could close nothing.
        descriptor = self._drive.reopen()
        self._descriptors.append(descriptor)
        file: _File = await aiofiles.open(descriptor, "r+b", buffering=0, closefd=False, executor=self._executor)
        return file

    def _dispatch(self) -> None:
        while self._idle and (attempt := self._attempts.take()) is not None:
            self._run(self._attempt(attempt, self._idle.pop()))

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def _end(self, *, leaving: bool) -> None:
        tasks = list(self._tasks)
        for task in tasks if leaving else ():
            task.cancel()  # its thread stays in the call, and finds nobody to tell
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _substitute(self, late: Attempt) -> None:
        try:
            file = await self._open_file()
        except OSError:
            late.replaced = False  # and keeps its file
            self._executor.remove()
            return
        if late.of.write:
            self._give_back(file)
        else:
            await self._attempt(Attempt.at(late.of, late.index, first=False), file)

    def _give_back(self, file: _File) -> None:
        self._idle.append(file)
        self._dispatch()

    async def _attempt(self, attempt: Attempt, file: _File) -> None:
        begun = False
        try:
            if attempt.of.write:
                attempt.record["checksum"] = await self._in_thread(zlib.crc32, _view(attempt.piece))
            if begun := self._attempts.begin(attempt):
                await (self._write if attempt.of.write else self._read)(file, attempt)
        except OSError as error:
            attempt.failure = Failure("system", error.errno or errno.EIO, attempt.index)
        finally:
            if self._attempts.back(attempt) if begun else self._attempts.claim(attempt):
                await self._deliver(attempt)
            if attempt.replaced:
                self._executor.remove()
            else:
                self._give_back(file)

    async def _deliver(self, attempt: Attempt) -> None:
        """Ends a claimed piece, with its bytes in the caller's memory."""
        piece = attempt.piece
        try:
            if attempt.blank:
                await self._in_thread(ctypes.memset, piece.address, 0, piece.nbytes)
            elif attempt.data is not None and attempt.failure is None:
                await self._in_thread(_copy, attempt.data, _view(piece))
        except BaseException:
            attempt.failure = Failure("system", errno.EIO, attempt.index)
            raise
        finally:
            self._attempts.settle(attempt)

    async def _write(self, file: _File, attempt: Attempt) -> None:
        view = _view(attempt.piece)
        await file.seek(attempt.piece.offset)
        while len(view):
            moved = await file.write(view)
            if moved == 0:
                attempt.failure = Failure("short_end", 0, attempt.index)
                return
            view = view[moved:]
        attempt.failure = None

    async def _read(self, file: _File, attempt: Attempt) -> None:
        """Reads the piece, and once more where that may help; a second attempt reads to memory of its own."""
        checksum = int(attempt.record["checksum"])
        attempt.data = None if attempt.first else memoryview(bytearray(attempt.piece.nbytes))
        view = _view(attempt.piece) if attempt.data is None else attempt.data
        attempt.failure = await self._read_once(file, attempt, view, checksum)
        if attempt.failure is not None and attempt.failure.transient and self._attempts.worth_another(attempt):
            attempt.trouble = attempt.failure
            attempt.failure = await self._read_once(file, attempt, view, checksum)

    async def _read_once(self, file: _File, attempt: Attempt, view: memoryview, checksum: int) -> Failure | None:
        rest = view
        try:
            await file.seek(attempt.piece.offset)
            while len(rest):
                got = await file.readinto(rest)
                if got == 0:
                    return Failure("short_end", 0, attempt.index)
                rest = rest[got:]
        except OSError as error:
            return Failure("system", error.errno or errno.EIO, attempt.index)
        right = await self._in_thread(zlib.crc32, view) == checksum
        return None if right else Failure("checksum", 0, attempt.index)

    def _in_thread(self, fn: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
        return self._loop.run_in_executor(self._executor, fn, *arguments)


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


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
