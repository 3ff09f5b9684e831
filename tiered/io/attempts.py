"""What is queued, under way and counted of the portable engine: its books, without a byte of I/O.

    queued --take--> Attempt --begin--> under way --back--> claim --settle--> its submission goes on
                                          |- late -- the second attempt at a read: what it brings is a spare
                                          `- late -- give_up --> settled, and refused whatever is queued

Invariants (csrc/io_engine.h has the same for the native engine):
1. One lock guards all of it, and every record whose piece is not settled. Callbacks run outside.
2. A piece is settled once, by whoever claims it; until then, and not after, its record and memory are there.
3. While an attempt that was given up is under way, `begin` lets none begin and `add` refuses at once.

Leaves to portable.py how bytes move, and on which threads.
"""

from __future__ import annotations

import collections
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiered.io.engine import (
    CompletionThread,
    Counters,
    Failure,
    Late,
    Piece,
    PieceState,
    Records,
    Trouble,
    run_callback,
    usable,
)

Callback = Callable[[], None]


class Submitted:
    """One request: its pieces, and how many are still to finish."""

    def __init__(self, completion: CompletionThread, write: bool, pieces: Sequence[Piece], records: Records) -> None:
        self.write = write
        self.pieces = list(pieces)
        self.records = records
        self.claimed = [False] * len(self.pieces)  # guarded by the lock of Attempts, and so is
        self.gave_up_read = False
        self._completion = completion
        self._owner = os.getpid()
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
            usable(self._owner, closed=False)
        return self._finished.wait(timeout)

    def failure(self) -> Failure | None:
        if not self.done():
            return None
        with self._lock:
            return self._failure

    def stranded(self) -> bool:
        return self.gave_up_read

    def add_done_callback(self, fn: Callback) -> None:
        if not self.done():
            usable(self._owner, closed=False)
        self._completion.start()
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


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at one piece, and what became of it."""

    of: Submitted
    index: int
    first: bool  # of the two that a late read gets
    failure: Failure | None  # until it is known to have gone well, that of something nobody thought of
    id: int = -1
    begun: float = 0.0
    given_up: bool = False
    replaced: bool = False  # its thread; set by portable.py
    blank: bool = False
    trouble: Failure | None = None  # that of the first read, where it was made once more
    data: memoryview | None = None  # what was read, where that was not in place
    spare: memoryview | None = None  # what the second attempt has read

    @classmethod
    def at(cls, of: Submitted, index: int, *, first: bool) -> Attempt:
        """A try at piece `index`."""
        return cls(of, index, first, Failure("system", errno.EIO, index))

    @property
    def piece(self) -> Piece:
        return self.of.pieces[self.index]

    @property
    def record(self) -> np.void:
        record: np.void = self.of.records[self.piece.record]
        return record


class Attempts:
    """See the file's contract."""

    def __init__(self, completed: Callable[[Callback], None]) -> None:
        """`completed` takes each callback of what is done."""
        self._completed = completed
        self._lock = threading.Lock()  # guards what follows
        self._changed = threading.Condition(self._lock)
        self._queue: collections.deque[Attempt] = collections.deque()
        self._under_way: dict[int, Attempt] = {}
        self._ids = itertools.count()
        self._unsettled = self._absent = 0  # pieces; attempts given up that have not come back
        self._closed = False
        self._read = self._written = self._retries = self._stalls = 0
        self._busy_seconds = self._busy_since = 0.0
        self._troubles: list[Trouble] = []

    # --- one attempt ---

    def add(self, submitted: Submitted) -> None:
        """Queues the pieces of a request; raises UsageError once closed."""
        with self._lock:
            usable(os.getpid(), self._closed)
            self._unsettled += len(submitted.pieces)
            self._queue.extend(Attempt.at(submitted, index, first=True) for index in range(len(submitted.pieces)))
            if self._absent:
                self._refuse_queued()

    def take(self) -> Attempt | None:
        """The next piece, first in first out."""
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def begin(self, attempt: Attempt) -> bool:
        """Whether there is something to do for it, which from here on may be late."""
        with self._lock:
            state = attempt.record["state"] if not attempt.of.claimed[attempt.index] else PieceState.BLANK
            if not attempt.of.write and state != PieceState.VALID:
                attempt.blank = state == PieceState.BLANK
                attempt.failure = None if attempt.blank else Failure("invalid", 0, attempt.index)
                return False
            if self._absent:
                attempt.failure = Failure("refused", errno.ETIMEDOUT, attempt.index)
                return False
            attempt.id, attempt.begun = next(self._ids), time.monotonic()
            if not self._under_way:
                self._busy_since = attempt.begun
            self._under_way[attempt.id] = attempt
        return True

    def back(self, attempt: Attempt) -> bool:
        """Its calls have come back. True where its piece is the caller's to settle: never that of a second attempt."""
        with self._lock:
            del self._under_way[attempt.id]
            of_piece = (a for a in self._under_way.values() if (a.of, a.index) == (attempt.of, attempt.index))
            other = next(of_piece, None)
            if other is not None and attempt.first:  # whoever is out is replaced
                attempt.replaced, other.replaced = other.replaced, attempt.replaced
            if other is not None and not attempt.first and attempt.failure is None:
                other.spare = attempt.data
            if attempt.failure is not None and attempt.spare is not None:
                attempt.data, attempt.failure = attempt.spare, None
            self._absent -= attempt.given_up
            if not self._under_way:
                self._busy_seconds += time.monotonic() - self._busy_since
            if attempt.trouble is not None:
                self._retries += 1
                trouble, piece = attempt.trouble, attempt.piece
                self._troubles.append(Trouble(trouble.fault, trouble.errno, piece.offset, piece.nbytes))
            self._changed.notify_all()
            return attempt.first and self._claim(attempt)

    def worth_another(self, attempt: Attempt) -> bool:
        """Whether a read that failed on its way is to be made once more by its attempt."""
        with self._lock:
            return not attempt.given_up and attempt.spare is None

    def claim(self, attempt: Attempt) -> bool:
        """True for the first who asks for a piece, unless by a second attempt: it is theirs to settle."""
        with self._lock:
            return attempt.first and self._claim(attempt)

    def settle(self, attempt: Attempt) -> None:
        """Ends a claimed piece."""
        with self._lock:
            self._settle(attempt)

    # --- late ones ---

    def late(self, seconds: float) -> list[Late]:
        """First attempts that have been under way for more than `seconds`."""
        now = time.monotonic()
        with self._lock:
            return [
                Late(a.id, a.of.write, a.piece.offset, a.piece.nbytes, now - a.begun)
                for a in self._open()
                if now - a.begun > seconds
            ]

    def find(self, id: int) -> Attempt | None:
        """The attempt, unless its piece is settled; counted as a stall, and as a retry if it is a read."""
        with self._lock:
            attempt = next((a for a in self._open() if a.id == id), None)
            if attempt is not None:
                self._stalls += 1
                self._retries += not attempt.of.write
            return attempt

    def give_up(self, id: int) -> bool:
        """Settles a piece as stalled, and what is queued as refused."""
        with self._lock:
            attempt = next((a for a in self._open() if a.id == id), None)
            if attempt is None or not self._claim(attempt):
                return False
            for each in self._under_way.values():
                if (each.of, each.index) == (attempt.of, attempt.index):
                    each.given_up = True
                    self._absent += 1
            attempt.of.gave_up_read |= not attempt.of.write
            seconds = time.monotonic() - attempt.begun
            self._settle(Attempt(attempt.of, attempt.index, True, _stalled(attempt, seconds)))
            self._refuse_queued()
        return True

    def troubles(self) -> list[Trouble]:
        """Reads made once more after a failure, since the last call."""
        with self._lock:
            troubles, self._troubles = self._troubles, []
        return troubles

    # --- the whole ---

    def counters(self) -> Counters:
        with self._lock:
            return Counters(self._read, self._written, self._busy_seconds, self._retries, self._stalls)

    def close(self) -> bool:
        """Takes no more; False where that was so before."""
        with self._lock:
            closed, self._closed = self._closed, True
        return not closed

    def drain(self, seconds: float) -> int:
        """Waits until every piece is settled, then up to `seconds` for late attempts; how many are still under way."""
        with self._lock:
            self._changed.wait_for(lambda: not self._unsettled)
            self._changed.wait_for(lambda: not self._under_way, seconds)
            return len(self._under_way)

    # --- under the lock ---

    def _open(self) -> Iterator[Attempt]:
        return (a for a in self._under_way.values() if a.first and not a.of.claimed[a.index])

    def _claim(self, attempt: Attempt) -> bool:
        claimed = attempt.of.claimed[attempt.index]
        attempt.of.claimed[attempt.index] = True
        return not claimed

    def _settle(self, attempt: Attempt) -> None:
        if attempt.of.write:
            attempt.record["state"] = PieceState.INVALID if attempt.failure else PieceState.VALID
        moved = 0 if attempt.failure or attempt.blank else attempt.piece.nbytes
        if attempt.of.write:
            self._written += moved
        else:
            self._read += moved
        self._unsettled -= 1
        for fn in attempt.of.finish(attempt.failure):
            self._completed(fn)
        self._changed.notify_all()

    def _refuse_queued(self) -> None:
        while self._queue:
            attempt = self._queue.popleft()
            attempt.failure = Failure("refused", errno.ETIMEDOUT, attempt.index)
            self._claim(attempt)
            self._settle(attempt)


def _stalled(attempt: Attempt, seconds: float) -> Failure:
    return Failure("stalled", errno.ETIMEDOUT, attempt.index, seconds)
