"""How fast drives are beside each other: a quarter of a second of writes and reads, on all of them at once, as they
will be used.

    each drive, on a thread of its own:    write 1, read 1, write 2, read 2, 4, 8, 16, 16, ... for PASS_SECONDS
    all alike --> equal weights            not alike --> once more, and each drive's better pass counts

Invariants:
1. It writes only to space that it has taken, and gives it back; it is not for a file that holds what a run may go on
   from.
2. It ends in time on any drive that moves a piece in a part of the pass, and on others after a few pieces.
3. What cannot be measured is no error: weights are equal, and whoever uses the drive is told what is wrong with it.

The unit is a round: so many pieces, waited for together. A pass's rate is that of the longest rounds, the median of
them, so that neither a moment in which this process did not run nor one in which the drive did something else makes
drives differ.
"""

from __future__ import annotations

import logging
import mmap
import os
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from tiered.errors import SwapFullError, TieredError
from tiered.io.drive import Drive
from tiered.io.engine import RECORD, Engine, Piece
from tiered.io.weights import Weights, equal, rounded

PASS_SECONDS = 0.12
_DEPTH = 2  # pieces of a round for each I/O thread, at most
_LOGGER = logging.getLogger("tiered")
_stranded: list[mmap.mmap] = []  # memory that a read which was given up may yet fill


def measured(drives: Sequence[Drive], engines: Sequence[Engine], *, threads: int, piece_bytes: int) -> Weights:
    """Weights of drives by their speed; equal ones where it cannot be told: past the page cache alone it shows."""
    if not all(drive.direct for drive in drives):
        return equal(len(drives))
    most = _DEPTH * threads
    taken: list[tuple[Drive, int]] = []
    speeds: list[float] = []
    try:
        for drive in drives:
            taken.append((drive, drive.take(most * piece_bytes)))
        noise = os.urandom(piece_bytes)  # a drive may compress
        probes = [
            _Probe(engine, start, threads, piece_bytes, noise)
            for engine, (_, start) in zip(engines, taken, strict=True)
        ]
        speeds = _speeds(probes)
        if speeds and rounded(speeds) != equal(len(drives)) and (again := _speeds(probes)):
            speeds = [max(pair) for pair in zip(speeds, again, strict=True)]
    except (SwapFullError, OSError, RuntimeError) as error:  # RuntimeError: the system has no thread
        _LOGGER.info("the speed of the swap drives was not measured: %s", error)
        return equal(len(drives))
    finally:
        for drive, start in taken:  # the file of a drive that does not answer could not be shortened in any time
            (drive.undo_take if speeds else drive.give_back)(start, most * piece_bytes)
    if not speeds:
        return equal(len(drives))
    weights = rounded(speeds)
    for drive, speed, weight in zip(drives, speeds, weights, strict=True):
        level = logging.INFO if weight else logging.WARNING
        left_out = "" if weight else ": far slower than the others, so it is used only where those are full"
        what = "%s: %.3g GB/s beside the others, weight %d of %d%s"
        _LOGGER.log(level, what, drive.path, speed / 1e9, weight, sum(weights), left_out)
    return weights


class _Probe:
    """Of one drive."""

    def __init__(self, engine: Engine, start: int, threads: int, piece_bytes: int, noise: bytes) -> None:
        self._engine = engine
        self._memory = mmap.mmap(-1, threads * piece_bytes)
        self._memory[:] = noise * threads
        base = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._pieces = [  # all have the same bytes, so it is no matter where they arrive
            Piece(base + number % threads * piece_bytes, start + number * piece_bytes, piece_bytes, number)
            for number in range(_DEPTH * threads)
        ]
        self._records = np.zeros(len(self._pieces), RECORD)

    def speed(self) -> float | None:
        """Bytes a second of one pass, half of them written and half read; None where the drive fails."""
        depth, until = 1, time.perf_counter() + PASS_SECONDS
        taken: dict[int, list[tuple[float, float]]] = {}  # seconds of a write and a read, by depth
        while True:
            written = self._round(True, depth)
            read = self._round(False, depth) if written else None
            if not written or not read:
                return None
            taken.setdefault(depth, []).append((written, read))
            if time.perf_counter() + 2 * (written + read) > until:
                nbytes = depth * self._pieces[0].nbytes
                return 2 * nbytes / sum(float(statistics.median(way)) for way in zip(*taken[depth], strict=True))
            depth = min(2 * depth, len(self._pieces))

    def _round(self, write: bool, depth: int) -> float | None:
        """Seconds of a round; None where it fails."""
        begun = time.perf_counter()
        submission = self._engine.submit(write, self._pieces[:depth], self._records)
        submission.wait()
        took = time.perf_counter() - begun
        if submission.stranded():
            _stranded.append(self._memory)
        return None if submission.failure() is not None else took


def _speeds(probes: Sequence[_Probe]) -> list[float]:
    """Of each drive while all are busy; empty where one fails."""
    found = [0.0] * len(probes)

    def measure(index: int, probe: _Probe) -> None:
        try:
            found[index] = probe.speed() or 0.0
        except TieredError as error:  # the space is being closed
            _LOGGER.info("the speed of a swap drive was not measured: %s", error)

    running = [
        threading.Thread(target=measure, args=each, name="tiered-io-probe", daemon=True) for each in enumerate(probes)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return found if all(found) else []
