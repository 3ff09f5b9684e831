"""A gate that holds every copy of one direction, every read or every write of a drive, until it is opened.

What must wait is called while the gate is closed, and a timer opens it: code that waits sees the work done, code that
does not goes wrong whatever the time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tiered.device.ticket import Completion, Ticket, settled

LIMIT_S = 60
HELD_S = 0.2


class Moving(Completion):
    """A drive's transfer that a test finishes."""

    def stranded(self) -> bool:
        return False


class Gate:
    """Holds the threads of the links named until it is open; at first it is."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._held: tuple[str, ...] = ()
        self._open.set()

    def close(self, *held: str) -> None:
        self._held = held
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @contextlib.contextmanager
    def opening_soon(self) -> Iterator[None]:
        """Inside, the gate opens while whatever runs waits for it, or has gone past."""
        timer = threading.Timer(HELD_S, self.open)
        timer.start()
        yield
        timer.join()

    def pass_through(self, nbytes: int) -> None:
        self.hold(threading.current_thread().name)

    def lets(self, name: str) -> bool:
        return name not in self._held or self._open.is_set()

    def hold(self, name: str) -> None:
        if name in self._held:
            assert self._open.wait(LIMIT_S)

    def holding(self, name: str, transfer: Callable[..., Ticket]) -> Callable[..., Ticket]:
        """`transfer`, which begins once the gate lets `name` pass."""

        def held(*where: Any) -> Ticket:
            if self.lets(name):
                return transfer(*where)
            whole = Moving()

            def later() -> None:
                self.hold(name)
                settled(transfer(*where))
                whole.finish()

            threading.Thread(target=later).start()
            return whole

        return held
