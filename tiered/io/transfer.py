"""Tickets of the swap space: one read or write, in as many parts as it touches drives.

Invariants:
1. `wait` raises only once every part is done; TimeoutError alone comes earlier. The memory is then the caller's again,
   unless the transfer is `stranded`, as a drive that does not answer leaves a read (patience.py).
2. A failure is raised by every `wait`, each time as a fresh exception, with errno, the file and the byte offset in it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tiered.errors import CorruptDataError, StorageError
from tiered.io.engine import Failure, Piece, Submission


class Ticket(Protocol):
    """One asynchronous operation."""

    def done(self) -> bool:
        """Whether it has ended, well or badly."""

    def wait(self, timeout: float | None = None) -> None:
        """Waits up to `timeout` seconds (None: no limit).

        Raises TimeoutError, StorageError with errno and filename where the system failed, CorruptDataError where
        the bytes are not those written.
        """

    def stranded(self) -> bool:
        """Once done: whether a read that was given up may still fill the memory, which has to stay for that."""

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Runs `fn` once when done, also after a failure: at once if done already, else on an I/O thread.

        It may wait for other tickets; it must not close the space. What it raises is logged.
        """


class TransferPart:
    """One drive's share of a transfer."""

    def __init__(self, submission: Submission, path: str, pieces: Sequence[Piece]) -> None:
        self.submission = submission
        self._path = path
        self._pieces = pieces

    def error(self, write: bool, label: str) -> StorageError | None:
        """The failure as an exception, None after success."""
        failure = self.submission.failure()
        if failure is None:
            return None
        piece = self._pieces[failure.piece]
        where = f"{'write' if write else 'read'} of {piece.nbytes} bytes at byte {piece.offset} ({label})"
        return _exception(failure, where, self._path)


def _exception(failure: Failure, where: str, path: str) -> StorageError:
    if failure.fault == "system":
        reason = os.strerror(failure.errno)
        return StorageError(failure.errno, f"{where} failed: {reason}; the drive or its quota needs a look", path)
    if failure.fault == "stalled":
        what = (
            f"has not come back for {failure.seconds:.0f} s (drive_timeout_s); the drive, its cable or its server does "
            "not answer: see dmesg and smartctl, and go on from the last checkpoint"
        )
        return StorageError(failure.errno, f"{where} {what}", path)
    if failure.fault == "refused":
        what = "was not begun, as this drive has not come back from an earlier transfer that was given up"
        return StorageError(failure.errno, f"{where} {what}; see dmesg and smartctl", path)
    if failure.fault == "short_end":
        return StorageError(errno.EIO, f"{where} failed: the file ends before; was it cut by another program?", path)
    if failure.fault == "checksum":
        what = "the bytes differ from those written (checksum); the drive, or another writer of this file, changed them"
    else:
        what = "the last write there failed, so there is nothing right to read; write it again first"
    return CorruptDataError(errno.EIO, f"{where} failed: {what}", path)


class Transfer:
    """The ticket of one read or write: done when all its parts are."""

    def __init__(self, parts: Sequence[TransferPart], write: bool, label: str) -> None:
        self._parts = parts
        self._write = write
        self._label = label

    def done(self) -> bool:
        return all(part.submission.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        # All parts before any error: the caller may reuse the memory once this raised.
        for part in self._parts:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not part.submission.wait(left):
                verb = "write" if self._write else "read"
                raise TimeoutError(
                    f"the {verb} of {self._label} did not finish within {timeout} s; it is still running"
                )
        for part in self._parts:
            error = part.error(self._write, self._label)
            if error is not None:
                raise error

    def stranded(self) -> bool:
        return any(part.submission.stranded() for part in self._parts)

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        countdown = _Countdown(max(1, len(self._parts)), fn)
        for part in self._parts:
            part.submission.add_done_callback(countdown)
        if not self._parts:
            countdown()


class _Countdown:
    """Runs `fn` on the last of `count` calls."""

    def __init__(self, count: int, fn: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._fn = fn

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._fn()
