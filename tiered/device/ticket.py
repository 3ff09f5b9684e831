"""Events and tickets: one asynchronous operation each, to ask, to wait for, or (tickets) to continue from.

Invariants: 1. `wait` raises what the operation raised, every time it is called. 2. A done-callback runs exactly once,
on failure too, perhaps on the thread that finished the work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point that asynchronous work reaches."""

    def done(self) -> bool:
        """True once the operation has succeeded or failed."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is done; raises its error, or TimeoutError after `timeout` seconds."""


class Ticket(Event, Protocol):
    """One asynchronous operation that can be continued from."""

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Run `fn` once when done, at once if it already is."""


class Completion:
    """A ticket that somebody else completes with `finish`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> None:
        if not self._event.wait(timeout):
            raise TimeoutError(f"the operation did not finish within {timeout} s")
        if self._error is not None:
            raise self._error

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(fn)
                return
        fn()

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the operation, with its error if it failed; called once."""
        with self._lock:
            self._error = error
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn()


class Finished:
    """A ticket of work that was over before it was asked for."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        fn()


def first(*tickets: Ticket) -> Event:
    """An event that is done as soon as one of `tickets` is, whether it succeeded or failed; it never fails."""
    reached = Completion()
    for ticket in tickets:
        ticket.add_done_callback(lambda: None if reached.done() else reached.finish())
    return reached


def settled(event: Event) -> None:
    """Wait until `event` is done, whether it succeeded or failed. An interrupt (Ctrl-C) passes, and it is not done."""
    with contextlib.suppress(Exception):
        event.wait()


def after(first: Ticket, then: Callable[[], None]) -> Ticket:
    """A ticket for `first` followed by `then`, which runs on the thread that finishes `first`, if that succeeded."""
    whole = Completion()

    def continued() -> None:
        try:
            first.wait(0)
            then()
        except BaseException as error:
            whole.finish(error)
        else:
            whole.finish()

    first.add_done_callback(continued)
    return whole
