"""Reading bytes against what was written, a window at a time.

Invariants: 1. At most WINDOW_BYTES are in memory. 2. A failed read is the piece's finding, never an end of the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from tiered.inspection.report import Finding

WINDOW_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Given the bytes done and of all, after each window; what it raises ends the inspection."""
Tell = Callable[[int], None]


class Work(NamedTuple):
    """What is left to verify of one thing: its bytes, and how; returns what is wrong."""

    nbytes: int
    run: Callable[[Tell], tuple[Finding, ...]]


def digest(
    descriptor: int, offset: int, nbytes: int, step: Callable[[memoryview, int], int], window: bytearray, tell: Tell
) -> tuple[int, int]:
    """Checksum of a range of a file as `step` goes on with it, and the bytes there were. Raises OSError."""
    done = crc = 0
    view = memoryview(window)
    while done < nbytes:
        got = os.preadv(descriptor, [view[: min(len(view), nbytes - done)]], offset + done)
        if not got:
            break
        crc, done = step(view[:got], crc), done + got
        tell(got)
    return crc, done
