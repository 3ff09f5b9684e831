"""SIGINT and SIGTERM as a request to stop at the next safe point.

Owns the two handlers while the `with` block runs and puts back the previous ones. The loop asks `requested` between
micro-batches; what is half done by then is dropped, which is safe as only a finished step commits.

    none --first signal--> requested (the loop stops itself)   --second SIGINT--> KeyboardInterrupt, wherever it is
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Remembers the first stop signal. Changes nothing outside the main thread, where Python allows no handler."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    @property
    def requested(self) -> bool:
        """Whether a stop signal came."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number as shells do, or 0."""
        return 0 if self.received is None else 128 + int(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
