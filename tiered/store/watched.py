"""Watched: a transfer whose failure is told to its owner before anybody who waits for it can know.

A drive's thread calls back a moment after the transfer is over; a caller that waits may be faster, and must not then
use the block again as if nothing had happened. Invariant: where `wait` raises what the transfer raised, `fail` has been
called.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

from tiered.device.memory import Memory
from tiered.device.ticket import Ticket
from tiered.store.block import Block


def failing(
    fail: weakref.WeakMethod[Callable[[Block, BaseException], None]], block: Block
) -> Callable[[BaseException], None]:
    """`fail` of a block, while its owner is there: who completes transfers may hold the last callback for long."""

    def failed(error: BaseException) -> None:
        if (owner := fail()) is not None:
            owner(block, error)

    return failed


class Watched:
    """See the file's contract, and `device.ticket.Ticket`."""

    __slots__ = ("_fail", "_ticket")

    def __init__(self, ticket: Ticket, fail: Callable[[BaseException], None]) -> None:
        """`fail` may be called more than once, on any thread that waits."""
        self._ticket = ticket
        self._fail = fail

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._ticket.wait(timeout)
        except Exception as error:
            if self._ticket.done():  # else it was the caller's patience that ended
                self._fail(error)
            raise

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._ticket.add_done_callback(fn)

    def beside(self, memory: Memory) -> Watched:
        """Keep `memory` mapped and committed until the transfer is over, whoever waits for it."""
        owner: Memory | None = memory

        def note() -> None:
            nonlocal owner
            owner = None
            with contextlib.suppress(Exception):
                self.wait(0)

        self.add_done_callback(note)
        memory.busy(self._ticket)
        return self
