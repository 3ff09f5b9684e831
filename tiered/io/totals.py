"""Totals: what a swap space has moved on each drive, and how its drives did.

Invariant: what moved before the space was in use (probe.py) does not count, but for what went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered.io.drive import Drive
from tiered.io.engine import Counters, Engine, Mode


@dataclass(frozen=True, slots=True)
class DriveStats:
    """One directory's totals: its swap file, whether I/O is direct, bytes moved, seconds with I/O in flight."""

    path: str
    direct: bool
    bytes_read: int
    bytes_written: int
    busy_seconds: float
    file_bytes: int  # preallocated, in use or free
    retries: int  # reads made once more, after a failure or as they were late: of a healthy drive 0
    stalls: int  # transfers that were late
    weight: int = 1  # its share of what is swapped, beside the other drives' weights


@dataclass(frozen=True, slots=True)
class SwapStats:
    """A snapshot of a swap space; totals are sums over `drives`, in the order the directories were given."""

    mode: Mode
    bytes_read: int
    bytes_written: int
    retries: int
    stalls: int
    drives: tuple[DriveStats, ...]


def totals(
    drives: Sequence[Drive], engines: Sequence[Engine], weights: Sequence[int], before: Sequence[Counters]
) -> SwapStats:
    """Since each engine's counters were as `before`."""
    made = tuple(
        DriveStats(
            path=drive.path,
            direct=drive.direct,
            bytes_read=now.bytes_read - then.bytes_read,
            bytes_written=now.bytes_written - then.bytes_written,
            busy_seconds=now.busy_seconds - then.busy_seconds,
            file_bytes=drive.nbytes,
            retries=now.retries,
            stalls=now.stalls,
            weight=weight,
        )
        for drive, now, then, weight in zip(
            drives, [engine.counters() for engine in engines], before, weights, strict=True
        )
    )
    return SwapStats(
        engines[0].mode,
        sum(drive.bytes_read for drive in made),
        sum(drive.bytes_written for drive in made),
        sum(drive.retries for drive in made),
        sum(drive.stalls for drive in made),
        made,
    )
