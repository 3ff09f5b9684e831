"""Drives of given speeds, emulated below either I/O engine.

    with bad_drives() as drives:
        drives.rule = throttle = Throttle({"a": 40e6, "b": 10e6})     # bytes a second, by the name of the directory

Each drive has one timeline, as a drive has one bus: a call takes nbytes / speed of it, from when it is made or the call
before ends, whichever is later, and comes back at that instant. So a thread that wakes late does not slow down its
drive, and `busy` is the time that drives of these speeds take, whatever the machine that emulates them does meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from bad_drives import Call


class Throttle:
    """See the file's contract."""

    def __init__(self, speeds: Mapping[str, float]) -> None:
        self.speeds = speeds
        self.busy = dict.fromkeys(speeds, 0.0)
        self._free_at = dict.fromkeys(speeds, 0.0)
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        name = next(name for name in self.speeds if f"/{name}/" in call.path)
        takes = call.nbytes / self.speeds[name]
        with self._lock:
            self.busy[name] += takes
            until = self._free_at[name] = max(self._free_at[name], time.monotonic()) + takes
        time.sleep(max(0.0, until - time.monotonic()))
