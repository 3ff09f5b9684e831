"""Timeline: what happens when in a run, as a file that chrome://tracing and Perfetto (ui.perfetto.dev) open.

    at(what)      the user's loop is there now: one row, each part ends where the next begins
    span(what)    inside of it, on the thread that is there: an update, a commit, a wait and its cause
    flight(what)  what goes on beside: a read, a write, a fetch; in the first free row of its kind
    occupied(...) bytes charged to each tier from now on: a counter, written where it changed
    limit(...)    what a step took, and its bound, before the next one begins
    about(...)    what the rest is of: a row without events

One JSON object a line, in an array that is not closed before the end, which those viewers take: what a run that is
killed has written, up to its last step, opens. (Trace Event Format, Google, 2016: complete events "X", counters "C",
names of rows "M"; microseconds.) `tiered report` makes a page of it.

Invariants:
1. Thread-safe. What cannot be written is said once, and then nothing more is: a timeline fails no run.
2. A row holds one event at a time, or events inside of each other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

_LOGGER = logging.getLogger("tiered")
_LOOP = 1  # the row of the user's loop
_LANES = 1000  # rows of what goes on beside start here, so many apart for each kind


class Ending(Protocol):
    """What goes on beside."""

    def done(self) -> bool:
        """It is over."""

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call `fn` when it is over."""


class Timeline:
    """See the file's contract."""

    def __init__(self, path: Path, rank: int) -> None:
        """Begin the file. Raises OSError."""
        self._path = path
        self._pid = rank
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._out: IO[str] | None = path.open("w", encoding="utf-8")
        self._out.write("[\n")
        self._here: tuple[str, str, float] | None = None  # what the loop does, its kind, since when
        self._occupied: dict[str, int] = {}  # as it was written last
        self._threads: dict[int, int] = {}  # row of each
        self._kinds: dict[str, int] = {}  # first row of each
        self._lanes: dict[str, list[bool]] = {}  # which are taken
        with self._lock:
            self._name("process_name", 0, f"rank {rank}")
            self._name("thread_name", _LOOP, "loop")

    def about(self, name: str, args: Mapping[str, object]) -> None:
        """Something that holds for the whole run, as `args`."""
        with self._lock:
            self._put({"name": name, "ph": "M", "pid": self._pid, "tid": _LOOP, "args": dict(args)})

    def at(self, what: str, kind: str) -> bool:
        """The user's loop is at `what` now; False where it has been already."""
        with self._lock:
            now = time.perf_counter()
            if self._here is not None and self._here[:2] == (what, kind):
                return False
            self._end_here(now)
            self._here = (what, kind, now)
            if kind == "step":
                self._put(None)
            return True

    def limit(self, args: Mapping[str, object]) -> None:
        """What the step that ends here took, and its bound."""
        with self._lock:
            times = {"s": "t", "ts": self._us(), "args": dict(args)}
            self._put({"name": "limit", "cat": "limit", "ph": "i", "pid": self._pid, "tid": _LOOP, **times})

    def occupied(self, nbytes: Mapping[str, int]) -> None:
        """So many bytes are charged to each tier now."""
        with self._lock:
            if nbytes != self._occupied:
                self._occupied = dict(nbytes)
                times = {"ts": self._us(), "args": self._occupied}
                self._put({"name": "occupancy", "ph": "C", "pid": self._pid, "tid": _LOOP, **times})

    @contextlib.contextmanager
    def span(self, what: str, kind: str) -> Iterator[None]:
        """`what` goes on inside, on this thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self._event(what, kind, self._row_of_thread(), start, end)

    def flight(self, what: str, kind: str) -> Callable[[], None]:
        """`what` goes on beside, until what this returns is called, on any thread."""
        with self._lock:
            start = time.perf_counter()  # not before the row was found free
            lanes = self._lanes.setdefault(kind, [])
            first = self._kinds.setdefault(kind, _LANES * (1 + len(self._kinds)))
            lane = lanes.index(False) if False in lanes else len(lanes)
            if lane == len(lanes):
                lanes.append(True)
                self._name("thread_name", first + lane, f"{kind} {lane + 1}")
            lanes[lane] = True

        def over() -> None:
            end = time.perf_counter()
            with self._lock:
                if lanes[lane]:
                    lanes[lane] = False
                    self._event(what, kind, first + lane, start, end)

        return over

    def close(self) -> None:
        """End the file. Idempotent."""
        with self._lock:
            self._end_here(time.perf_counter())
            if self._out is not None:
                end = {"name": "end", "ph": "i", "s": "g", "pid": self._pid, "tid": _LOOP, "ts": self._us()}
                self._put(end, last=True)
            with contextlib.suppress(OSError):
                if self._out is not None:
                    self._out.close()
            self._out = None

    # --- inside, with the lock held ---

    def _end_here(self, now: float) -> None:
        if self._here is not None:
            what, kind, since = self._here
            self._here = None
            self._event(what, kind, _LOOP, since, now)

    def _row_of_thread(self) -> int:
        me = threading.get_ident()
        if me not in self._threads:
            self._threads[me] = _LOOP + 1 + len(self._threads)
            self._name("thread_name", self._threads[me], threading.current_thread().name)
        return self._threads[me]

    def _name(self, what: str, row: int, name: str) -> None:
        self._put({"name": what, "ph": "M", "pid": self._pid, "tid": row, "args": {"name": name}})

    def _event(self, what: str, kind: str, row: int, start: float, end: float) -> None:
        times = {"ts": self._us(start), "dur": round((end - start) * 1e6, 1)}
        self._put({"name": what, "cat": kind, "ph": "X", "pid": self._pid, "tid": row, **times})

    def _us(self, at: float | None = None) -> float:
        return round(((time.perf_counter() if at is None else at) - self._start) * 1e6, 1)

    def _put(self, event: dict[str, object] | None, *, last: bool = False) -> None:
        """Write an event; None: see what was written to the file."""
        if self._out is None:
            return
        try:
            if event is None:
                self._out.flush()
            else:
                self._out.write(json.dumps(event) + ("\n]\n" if last else ",\n"))
        except (OSError, ValueError) as error:
            out, self._out = self._out, None
            with contextlib.suppress(OSError, ValueError):
                out.close()
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
            _LOGGER.warning("%s: the timeline ends here: %s", self._path, reason)
