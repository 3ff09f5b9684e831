"""The interface of an I/O engine, the native engine, and the choice between it and the portable one.

An engine serves one drive's file. It takes requests, each a list of pieces that all go one way, runs their pieces in
parallel, and keeps a record of each piece in a table that the caller owns:

    blank --submit write--> WRITING --ok--> VALID --read--> verified bytes
      |                        `--error--> INVALID --read--> failure
      `--read--> zeros

Invariants (both engines; csrc/io_engine.h states them for the native one):
1. A piece is moved whole, or its request fails; a failed request still attempts its other pieces. A read that failed
   on its way (`Failure.transient`) is made once more before it fails.
2. The engine turns WRITING into VALID or INVALID and stores the checksum; the caller sets WRITING before it submits.
3. Callbacks run once, also after a failure, on the engine's completion thread, or at once where the request is done.
4. `close()` waits for everything submitted. After it, and in a forked child, `submit` raises UsageError.
5. What has been out for long is told by `late`, and ended only by `give_up`. A request that is done never touches its
   memory again, unless it is `stranded`: a read that was given up may still fill it. While such a call is out, whatever
   is submitted fails at once: no two writes of a piece race.
6. Nothing of an engine keeps the interpreter from ending: threads are daemons, blocking calls into the extension are
   counted, and `close()`, which SwapSpace runs before the interpreter goes, ends them all.

Checksums are the engine's own affair (native: CRC-32C, portable: zlib's CRC-32): a table never outlives its engine
(but what a commit or a link takes of it does, and says which: checksum.py).
Leaves to swapfile.py where pieces lie and which calls may overlap.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import logging
import os
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tiered.errors import UsageError
from tiered.io.drive import Drive

_LOGGER = logging.getLogger("tiered")
_POLL_SECONDS = 0.1  # how often a wait comes back to Python, so that Ctrl-C is seen
_CLOSE_SECONDS = 10.0  # how long close() waits for a callback, or a late call, that does not return

Mode = Literal["native", "portable"]
Records = npt.NDArray[np.void]
RECORD = np.dtype([("checksum", np.uint32), ("state", np.uint32)])  # the layout of tiered::PieceRecord


class PieceState(enum.IntEnum):
    """What a piece's record says about its bytes in the file; drawn above."""

    BLANK = 0
    WRITING = 1
    VALID = 2
    INVALID = 3


# A transfer went wrong on its way, so that another may go well: EIO, and what the block layer itself says of a medium,
# its protection, a lost command and a link.
TRANSIENT = {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.ETIMEDOUT, errno.ENOLINK, errno.EREMOTEIO}


class Piece(NamedTuple):
    """One contiguous transfer: `nbytes` between memory at `address` and the file at `offset` (a multiple of 4096)."""

    address: int
    offset: int
    nbytes: int
    record: int  # index in the request's table of records


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed, for its lowest failed piece.

    `fault` is "system" (a system call, see `errno`), "short_end" (the file ended), "checksum" (other bytes than were
    written), "invalid" (the last write of the piece failed or has not finished), "stalled" (given up after `seconds`)
    or "refused" (not begun, as another was given up and has not come back).
    """

    fault: str
    errno: int
    piece: int
    seconds: float = 0.0

    @property
    def transient(self) -> bool:
        """Whether reading the piece once more may help."""
        return self.fault == "checksum" or (self.fault == "system" and self.errno in TRANSIENT)


class Late(NamedTuple):
    """A piece whose call has been out for `seconds`."""

    id: int
    write: bool
    offset: int
    nbytes: int
    seconds: float


class Trouble(NamedTuple):
    """A read that failed by `fault` (and `errno`) and was made once more."""

    fault: str
    errno: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of one engine: bytes of pieces that succeeded, seconds with at least one piece in flight, reads made once
    more (after a failure, or as they were late), and calls that were late."""

    bytes_read: int
    bytes_written: int
    busy_seconds: float
    retries: int
    stalls: int


class Submission(Protocol):
    """One request under way."""

    def done(self) -> bool:
        """Whether every piece has succeeded or failed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds (None: no limit) and returns `done()`."""

    def failure(self) -> Failure | None:
        """The failure, once done; None while running and after success."""

    def stranded(self) -> bool:
        """Whether a read of it was given up, so that its memory may still be filled, at any later moment."""

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Runs `fn` once when done (invariant 3)."""


class Engine(Protocol):
    """What moves bytes between memory and one drive's file."""

    @property
    def mode(self) -> Mode:
        """Which engine this is."""

    def submit(self, write: bool, pieces: Sequence[Piece], records: Records) -> Submission:
        """Starts a request. The caller keeps the memory alive until it is done, and for good where it is `stranded`;
        the engine keeps `records`."""

    def counters(self) -> Counters:
        """The totals so far."""

    def in_callback(self) -> bool:
        """Whether the caller is a callback of this engine, which must not close it."""

    def late(self, seconds: float) -> Sequence[Late]:
        """What has been out for more than `seconds`."""

    def replace(self, id: int) -> bool:
        """Gives the thread of a late call a substitute, which for a read begins by making it again. False where it has
        come back, was replaced before, or the system has no thread."""

    def give_up(self, id: int) -> bool:
        """Ends a late piece as "stalled" and what is queued as "refused". False where it has come back."""

    def troubles(self) -> Sequence[Trouble]:
        """The reads made once more after a failure, since the last call."""

    def close(self) -> int:
        """Waits for everything submitted, a while for late calls, and ends the threads. Gives how many calls had to be
        left to the system: the descriptors then stay open. Idempotent; not from a callback."""


class CompletionThread:
    """Runs completion callbacks one after another on a thread of its own, started when the first is wanted.

    So a callback may wait for other I/O, and a slow one delays only other callbacks. An exception in a callback is
    logged, as there is no caller to raise it to.
    """

    def __init__(self, take: Callable[[], Callable[[], None] | None]) -> None:
        """`take` blocks for the next callback and gives None when there will be no more."""
        self._take = take
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread unless it runs already."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tiered-io-completion", daemon=True)
                self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is a callback."""
        return self._thread is threading.current_thread()

    def join(self) -> None:
        """Waits for the thread to end, for a limited time: a callback that never returns must not hold up an exit."""
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (fn := self._take()) is not None:
            run_callback(fn)
            del fn  # what is over holds no model


def run_callback(fn: Callable[[], None]) -> None:
    """Runs a completion callback and logs what it raises."""
    try:
        fn()
    except Exception:
        _LOGGER.exception("a completion callback raised")


def usable(owner: int, closed: bool) -> None:
    """Raises UsageError where an engine opened by process `owner` can take no request."""
    if os.getpid() != owner:
        raise UsageError("this swap space belongs to the parent process; open a new one after the fork")
    if closed:
        raise UsageError("this swap space is closed; open a new one")


class _NativeRequest(Protocol):
    """The extension's `Request` (csrc/io_engine.h)."""

    def done(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def failure(self) -> tuple[str, int, int, float] | None: ...
    def stranded(self) -> bool: ...
    def notify(self, token: int) -> bool: ...


class NativeEngine:
    """The engine of the extension `tiered._native` on one drive."""

    mode: Mode = "native"

    def __init__(self, native: types.ModuleType, drive: Drive, *, threads: int, piece_bytes: int) -> None:
        self._engine = native.IoEngine(drive.buffered_fd, drive.direct_fd, threads, piece_bytes)
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._tokens = itertools.count()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._closed = False
        self._inside = 0  # threads in a blocking call of the extension
        self._completion = CompletionThread(self._next_callback)

    def submit(self, write: bool, pieces: Sequence[Piece], records: Records) -> Submission:
        usable(self._owner, self._closed)
        return _NativeSubmission(self, self._engine.submit(write, pieces, records.ctypes.data), records)

    def counters(self) -> Counters:
        return Counters(*self._engine.counters())

    def late(self, seconds: float) -> Sequence[Late]:
        return [Late(*each) for each in self._engine.late(seconds)]

    def replace(self, id: int) -> bool:
        return bool(self._engine.replace(id))

    def give_up(self, id: int) -> bool:
        return bool(self._engine.give_up(id))

    def troubles(self) -> Sequence[Trouble]:
        return [Trouble(*each) for each in self._engine.troubles()]

    def in_callback(self) -> bool:
        return self._completion.is_current()

    def check_process(self) -> None:
        """Raises UsageError in a forked child, where nothing in flight ever ends."""
        usable(self._owner, closed=False)

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Counts a blocking call of the extension, so that close() can see every thread back in Python."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def notify(self, request: _NativeRequest, fn: Callable[[], None]) -> None:
        """Arranges for `fn` to run when `request` is done."""
        self._completion.start()
        with self._lock:
            token = next(self._tokens)
            self._callbacks[token] = fn
        if not request.notify(token):
            with self._lock:
                del self._callbacks[token]
            run_callback(fn)

    def close(self) -> int:
        if os.getpid() != self._owner:
            return 0  # invariant 4: the threads are the parent's
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
        behind: int = self._engine.close(_CLOSE_SECONDS)
        self._completion.join()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._inside and time.monotonic() < deadline:
            time.sleep(0.001)  # every request is done, so whoever is inside is on the way out
        return behind

    def _next_callback(self) -> Callable[[], None] | None:
        with self.blocking():
            token = self._engine.next_notification()
        if token is None:
            return None
        with self._lock:
            return self._callbacks.pop(token)


class _NativeSubmission:
    """A request of the native engine; keeps its engine and the table of records alive."""

    def __init__(self, engine: NativeEngine, request: _NativeRequest, records: Records) -> None:
        self._engine = engine
        self._request = request
        self._records = records

    def done(self) -> bool:
        return self._request.done()

    def wait(self, timeout: float | None = None) -> bool:
        if self.done():
            return True
        self._engine.check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
            with self._engine.blocking():
                if self._request.wait(max(0.0, min(left, _POLL_SECONDS))):
                    return True
            if deadline is not None and time.monotonic() >= deadline:
                return self.done()

    def failure(self) -> Failure | None:
        found = self._request.failure()
        return None if found is None else Failure(*found)

    def stranded(self) -> bool:
        return self._request.stranded()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        if self.done():
            run_callback(fn)
        else:
            self._engine.check_process()
            self._engine.notify(self._request, fn)


def open_engine(drive: Drive, *, threads: int, piece_bytes: int) -> Engine:
    """The engine that `chosen_mode` names; raises ValueError or UsageError on impossible sizes."""
    native = load_native()
    if native is not None:
        return NativeEngine(native, drive, threads=threads, piece_bytes=piece_bytes)
    from tiered.io.portable import PortableEngine  # it imports this module's interface

    return PortableEngine(drive, threads=threads, piece_bytes=piece_bytes)


def chosen_mode() -> Mode:
    """Native where the extension is there, unless the environment says TIERED_PORTABLE=1."""
    return "portable" if load_native() is None else "native"


def load_native() -> types.ModuleType | None:
    """The extension; None where it is missing, or not wanted."""
    if os.environ.get("TIERED_PORTABLE", "") not in ("", "0"):
        return None
    try:
        import tiered._native as native
    except ImportError:
        return None
    module: types.ModuleType = native
    return module
