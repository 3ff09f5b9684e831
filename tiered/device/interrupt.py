"""Ctrl-C waits where stopping half way would tear something: a step, or a transfer between its start and its record.

Nests: an inner block hands a held signal to the outer one.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back the first SIGINT until the end of the block; a second one passes at once (a drive may hang).

    Only the main thread gets signals in Python; in any other the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    usual = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: FrameType | None) -> None:
        if waiting and callable(usual):
            usual(number, frame)
        waiting.append((number, frame))

    if not callable(usual):  # ignored, or left to the system: nothing to hold back
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if waiting:
        usual(*waiting[0])
