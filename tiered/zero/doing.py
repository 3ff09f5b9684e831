"""Doing: what the user's thread of one rank is doing, in words and seconds, as the other ranks are told.

Written by that thread and read by the one that talks to other ranks. Invariant: every change is a sign of life.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Doing:
    """See the file's contract."""

    def __init__(self) -> None:
        self._doing = "shard()"
        self._computing = False
        self._since = time.monotonic()  # the last sign of life
        self._waiting: float | None = None

    @contextlib.contextmanager
    def within(self, doing: str, computing: bool) -> Iterator[None]:
        before = self._doing, self._computing
        self._doing, self._computing, self._since = doing, computing or before[1], time.monotonic()
        try:
            yield
        finally:
            self._computing, self._since = before[1], time.monotonic()
            if before[1]:  # else what was done last is what others are told
                self._doing = before[0]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting = time.monotonic()
        try:
            yield
        finally:
            self._waiting = None
            self._since = time.monotonic()

    def computing(self, doing: str) -> None:
        self._doing, self._computing, self._since = doing, True, time.monotonic()

    def idle(self, doing: str) -> None:
        self._doing, self._computing, self._since = doing, False, time.monotonic()

    def seen(self) -> tuple[str, bool, float, float]:
        """In words, whether it computes, and the seconds it has waited and been quiet."""
        now, waiting = time.monotonic(), self._waiting
        return self._doing, self._computing, now - waiting if waiting is not None else 0.0, now - self._since
