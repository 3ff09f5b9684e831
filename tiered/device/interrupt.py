"""Ctrl-C waits where stopping half way would tear something: a step, or a transfer between its start and its record.

Nests: an inner block hands a held signal to the outer one. Invariant: a held signal is never lost: it comes at the end
of the outermost block, whether that returns or raises, or where a wait inside of it may be interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_Signals = list[tuple[int, FrameType | None]]
_holding: list[tuple[_Signals, Any]] = []  # of the main thread, outermost first: what is held, and the handler before


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back the first SIGINT until the end of the block; a second one passes at once (a drive may hang).

    Only the main thread gets signals in Python; in any other the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: _Signals = []
    usual = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: FrameType | None) -> None:
        if waiting and callable(usual):
            usual(number, frame)
        waiting.append((number, frame))

    if not callable(usual):  # ignored, or left to the system: nothing to hold back
        yield
        return
    _holding.append((waiting, usual))
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        _holding.pop()
        if waiting:
            usual(*waiting[0])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside of `uninterrupted`: a wait that may be long, and may raise. Signals held so far, or that come, pass."""
    if threading.current_thread() is not threading.main_thread() or not _holding:
        yield
        return
    usual, inner = _holding[0][1], signal.getsignal(signal.SIGINT)
    held = [each for waiting, _ in _holding for each in waiting]
    for waiting, _ in _holding:
        waiting.clear()
    if held:
        usual(*held[0])
    signal.signal(signal.SIGINT, usual)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, inner)
