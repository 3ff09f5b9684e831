"""SIGINT and SIGTERM as a request to stop at the next safe point.

Owns the two handlers while the `with` block runs and puts back the previous ones. The loop asks between micro-batches;
what is half done by then is dropped, which is safe as only a finished step commits.

    none --first signal--> requested (the loop stops itself)   --second SIGINT--> KeyboardInterrupt, wherever it is

Ranks get a signal at different moments, or only some of them: they stop between the same two micro-batches, for the
same signal, by asking `agreed`.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Remembers the first stop signal. Changes nothing outside the main thread, where Python allows no handler."""

    def __init__(self, *, restore: bool = True) -> None:
        """restore: put the previous handlers back at the end. Without it the signals are ignored from then on: of
        several ranks the launcher ends the others with SIGTERM when one has ended, and their exit codes should stand.
        """
        self.received: signal.Signals | None = None
        self._restore = restore
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if self._restore else signal.SIG_IGN)
        self._previous = {}

    @property
    def requested(self) -> bool:
        """Whether a stop signal came."""
        return self.received is not None

    def agreed(self, mean: Callable[[float], float]) -> bool:
        """Whether a stop signal came to any rank; every rank must ask, and gets the same answer.

        mean: gives the mean over ranks of a number. After True every rank has received the same signal.
        """
        if not mean(float(self.requested)):
            return False
        self.received = signal.SIGTERM if mean(float(self.received == signal.SIGTERM)) else signal.SIGINT
        return True

    @property
    def exit_code(self) -> int:
        """128 + the signal's number as shells do, or 0."""
        return 0 if self.received is None else 128 + int(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
