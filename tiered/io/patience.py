"""Patience: how long a drive may take, and what happens then.

A read or write that the system does not finish cannot be called off: whoever asked for it waits in the kernel, which
may fill or read the memory at any later moment. So memory that a read was to fill stays, untouched, for a call that was
given up (`stranded`, device/memory.py), and a late call can be given up in safety:

    under way --limit_s--> late: said once by name; its thread is replaced; a read is made again, into other memory
                             |--it comes back--> the bytes, its own or else those of the second read
                             `--limit_s--> given up: waiting for it raises StorageError (ETIMEDOUT);
                                           what is queued there, and all that comes, raises at once until it is back

1. A read is made again once. Its bytes count once the first is back, which until then may fill the caller's memory: a
   drive that loses a command has the system end it with an error, within a minute. A write is not made again: two
   writes of a piece could land in either order.
2. What was given up is counted and waited for by nobody. While it is out its drive begins nothing, so that what it may
   still do to the file is done before any other write, to a piece that is unreadable until it is written again.
3. Every stall, and every read that failed and was made again, is one warning with the file in it, and is counted.
4. The clock of a piece starts when its call does: a drive that is slow under a long queue is not late. Giving up needs
   the limit twice and a look in between, so a process that was stopped for long gives up nothing.
5. The thread holds engines, never a space; it is a daemon and ends with `stop`.

With `limit_s=None` nothing is late.
Leaves to the engines what late, replaced and given up mean for their threads.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from tiered.io.engine import Engine, Late

_LOGGER = logging.getLogger("tiered")
_LOOK_SECONDS = 1.0  # between two looks, at most


class Patience:
    """Watches the engines of one space; see the file's contract."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._watched: list[tuple[Engine, str, dict[int, float]]] = []  # with the file, and when what was called late
        self._owner = os.getpid()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, engine: Engine, path: str) -> None:
        """Adds an engine, before `start`; `path` is that of its file."""
        self._watched.append((engine, path, {}))

    def start(self) -> None:
        """Starts looking."""
        self._thread = threading.Thread(target=self._run, name="tiered-io-patience", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is the thread that looks."""
        return self._thread is threading.current_thread()

    def stop(self) -> None:
        """Ends the thread, after the engines are closed, and says what is still unsaid. Idempotent."""
        if os.getpid() != self._owner:
            return  # the thread is the parent's
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.report()

    def report(self) -> None:
        """Says which reads failed and were made again since the last time."""
        for engine, path, _ in self._watched:
            for trouble in engine.troubles():
                what = "other bytes than were written" if trouble.fault == "checksum" else os.strerror(trouble.errno)
                _LOGGER.warning(
                    "%s: the read of %d bytes at byte %d failed (%s) and was made once more; the drive needs a look",
                    *(path, trouble.nbytes, trouble.offset, what),
                )

    def _run(self) -> None:
        period = _LOOK_SECONDS if self.limit_s is None else min(_LOOK_SECONDS, self.limit_s / 4)
        while not self._over.wait(period):
            try:
                self.report()
                self._look()
            except Exception:
                _LOGGER.exception("the drives could not be looked at")

    def _look(self) -> None:
        if self.limit_s is None:
            return
        for engine, path, called_late in self._watched:
            now, late = time.monotonic(), engine.late(self.limit_s)
            for each in late:
                if each.id not in called_late:
                    called_late[each.id] = now
                    self._call_late(engine, path, each)
                elif now - called_late[each.id] >= self.limit_s:
                    engine.give_up(each.id)
            for id in called_late.keys() - {each.id for each in late}:
                del called_late[id]

    def _call_late(self, engine: Engine, path: str, late: Late) -> None:
        substituted = engine.replace(late.id)
        if late.write:
            further = "and is waited for"
        else:
            further = "and is made once more" if substituted else "and the system has no thread to make it once more"
        _LOGGER.warning(
            "%s: the %s of %d bytes at byte %d has taken %.0f s %s; if it has not come back in as long again, it is an "
            "error (drive_timeout_s=%g); see dmesg and smartctl",
            *(path, "write" if late.write else "read", late.nbytes, late.offset, late.seconds, further, self.limit_s),
        )
