"""Watched: a transfer whose failure is told to its owner before anybody who waits for it can know.

A drive's thread calls back a moment after the transfer is over; a caller that waits may be faster, and must not then
use the block again as if nothing had happened. Invariant: where `wait` raises what the transfer raised, `fail` has been
called.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Protocol

from tiered.device.memory import Memory
from tiered.device.ticket import Ticket
from tiered.store.block import Block


class Transfer(Ticket, Protocol):
    """A read or write of a drive."""

    def stranded(self) -> bool:
        """Once done: whether a read that was given up may still fill the memory."""


def beside(transfer: Transfer, memory: Memory) -> None:
    """Keep `memory` mapped and committed until a transfer that uses it is over, whoever waits for it; and for good
    where it is stranded."""
    owner: Memory | None = memory

    def let_go() -> None:
        nonlocal owner
        _ = owner is not None and owner.stranded  # where it is, it stays from now on
        owner = None

    memory.busy(transfer, transfer.stranded)
    transfer.add_done_callback(let_go)


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

    def look(self) -> None:
        """Once it is done: `fail` is told where nobody waits too."""
        with contextlib.suppress(Exception):
            self.wait(0)


def watched(
    transfer: Transfer,
    memory: Memory,
    block: Block,
    fail: weakref.WeakMethod[Callable[[Block, BaseException], None]],
) -> Watched:
    """A transfer between `memory`, which it keeps, and `block`, told to `fail` also where nobody waits; that is called
    while its owner is there: who completes transfers may hold the last callback for long."""

    def failed(error: BaseException) -> None:
        if (owner := fail()) is not None:
            owner(block, error)

    found = Watched(transfer, failed)
    beside(transfer, memory)
    transfer.add_done_callback(found.look)
    return found
