"""Errand: a call to the system that may never come back, run so that whoever asked can go on without it.

    run --comes back in time--> its result, or what it raised
         `--twice limit_s--> given up: StorageError (ETIMEDOUT); `check` raises until it is back and has been undone

Invariants:
1. A call that was given up and comes back after all is undone by the thread that made it, before `check` is quiet.
2. One errand is out at a time. With `limit_s=None` the caller makes the call itself, and waits for ever.
Leaves to the caller what a call changes, and that `undo` takes all of that back.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable

from tiered.errors import StorageError

_LOGGER = logging.getLogger("tiered")


class Errand:
    """See the file's contract."""

    def __init__(self, limit_s: float | None, path: str, what: str) -> None:
        """path: of the file that the calls are about; what: they are, for messages."""
        self._limit_s = limit_s
        self._path = path
        self._what = what
        self._lock = threading.Lock()  # guards what a call is when it comes back: in time, or given up
        self._back = threading.Event()
        self._back.set()

    @property
    def out(self) -> bool:
        """A call was given up, and is not back."""
        return not self._back.is_set()

    def check(self) -> None:
        """Raise StorageError while a call is out."""
        if self.out:
            raise StorageError(errno.ETIMEDOUT, f"{self._what} was given up and has not come back", self._path)

    def run(self, call: Callable[[], None], undo: Callable[[], None]) -> None:
        """Make a call. Raises what it raises, and StorageError where it was given up."""
        self.check()
        if self._limit_s is None:
            call()
            return
        raised: list[BaseException] = []
        given_up = False
        self._back.clear()

        def make() -> None:
            try:
                call()
            except BaseException as error:
                raised.append(error)
            with self._lock:
                late = given_up
                if not late:
                    self._back.set()
            if late:
                with contextlib.suppress(OSError):
                    undo()
                self._back.set()

        thread = threading.Thread(target=make, name="tiered-io-errand", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            self._back.set()
            call()
            return
        try:
            in_time = self._await()
        finally:
            with self._lock:  # also where an interrupt ended the wait
                given_up = not self._back.is_set()
        if given_up and not in_time:
            raise StorageError(
                errno.ETIMEDOUT,
                f"{self._what} has not come back in {2 * self._limit_s:g} s (drive_timeout_s={self._limit_s:g}); see "
                "dmesg and smartctl",
                self._path,
            )
        thread.join()
        if raised:
            raise raised[0]

    def _await(self) -> bool:
        """Whether the call comes back in twice the limit; says so after the first."""
        if self._back.wait(self._limit_s):
            return True
        _LOGGER.warning("%s: %s has taken %g s; it is waited for as long again", self._path, self._what, self._limit_s)
        return self._back.wait(self._limit_s)
