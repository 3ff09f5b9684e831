"""Weights: small integers that say which share of the pieces each drive has. Pure functions of what they are given.

    speeds 3.1, 0.98 --rounded--> 3, 1 --cut, where the first drive lacks room--> 13, 51

Invariants:
1. `rounded` gives drives of like speed like weights, so that noise of a measurement changes nothing, and else the
   smallest weights that lose little. A drive of less than 1/LEAST of the fastest has weight 0: it is left out, as a
   transfer would wait for its one piece longer than for all the others.
2. `cut` changes weights only as far as room demands; a drive that is left out helps last.
3. `checked` lets through only what a layout can be made of.
Leaves to extent.py what weights mean for a piece, and to room.py when there is too little room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tiered.errors import ConfigError

Weights = tuple[int, ...]

MOST = 1024  # of all weights together: the length of a pattern
LEAST = 16
_ALIKE = 1.15  # speeds that differ by no more are the same
_CLOSE = 0.95  # of the sum of the speeds: what weights are good enough that reach it
_STEPS = 64  # of a cut


def equal(drives: int) -> Weights:
    """What is dealt in turn."""
    return (1,) * drives


def checked(given: Any, drives: int) -> Weights:
    """Raises ConfigError unless `given` has a weight for each drive, each 0 or more, one above 0, and MOST together."""
    weights = tuple(given) if isinstance(given, (list, tuple)) else ()
    sound = len(weights) == drives and all(type(weight) is int and 0 <= weight <= MOST for weight in weights)
    if not sound or not 1 <= sum(weights) <= MOST:
        what = f"a list of whole numbers from 0 on for the {drives} drives, one at least above 0 and {MOST} in all"
        raise ConfigError(f"weights: expected {what}, got {given!r:.200}")
    return weights


def rounded(speeds: Sequence[float]) -> Weights:
    """Weights for drives of these speeds, all above 0."""
    fastest = max(speeds)
    used = [speed if speed * LEAST >= fastest else 0.0 for speed in speeds]
    if min(speed for speed in used if speed) * _ALIKE >= fastest:
        return tuple(int(speed > 0) for speed in used)
    best, share = equal(len(speeds)), 0.0
    for largest in range(1, max(1, min(LEAST, MOST // len(speeds))) + 1):
        weights = tuple(max(1, round(speed / fastest * largest)) if speed else 0 for speed in used)
        if (found := reached(weights, used)) > share:
            best, share = weights, found
        if share >= _CLOSE:
            break
    return best


def reached(weights: Sequence[int], speeds: Sequence[float]) -> float:
    """Which share of the sum of the speeds a large transfer has, as its slowest part ends last."""
    last = min(speed / weight for speed, weight in zip(speeds, weights, strict=True) if weight)
    return last * sum(weights) / sum(speeds)


def cut(weights: Sequence[int], rooms: Sequence[int], nbytes: int) -> Weights | None:
    """The weights by which `nbytes` > 0 bytes fit into the room that each drive has; None where there are none."""
    shares, full = _filled(weights, rooms, nbytes)
    if shares is None:
        return None
    steps = max(_STEPS, sum(weights))
    made = [math.floor(share / nbytes * steps) for share in shares]
    rest = [drive for drive in range(len(shares)) if drive not in full and shares[drive]]
    if not rest:  # not a byte to spare
        return None
    whole = sum(shares[drive] for drive in rest)
    left = steps - sum(made[drive] for drive in full)  # what the full ones are rounded down by goes to the others
    exact = {drive: shares[drive] / whole * left for drive in rest}
    made = [made[drive] if drive in full else math.floor(exact.get(drive, 0)) for drive in range(len(shares))]
    for drive in sorted(rest, key=lambda drive: made[drive] - exact[drive])[: steps - sum(made)]:
        made[drive] += 1
    common = math.gcd(*made)
    return tuple(weight // common for weight in made)


def _filled(weights: Sequence[int], rooms: Sequence[int], nbytes: int) -> tuple[list[float] | None, set[int]]:
    """Bytes for each drive, None where the room is too small; and the drives that are filled by them."""
    shares, full, left = [0.0] * len(weights), set[int](), float(nbytes)
    for order in (weights, [int(not weight) for weight in weights]):
        open_ = [drive for drive, weight in enumerate(order) if weight]
        while open_ and left > 0:
            whole = sum(order[drive] for drive in open_)
            over = [drive for drive in open_ if left * order[drive] / whole > rooms[drive]]
            if not over:
                for drive in open_:
                    shares[drive] = left * order[drive] / whole
                return shares, full
            for drive in over:
                shares[drive] = float(rooms[drive])
                left -= rooms[drive]
            full.update(over)
            open_ = [drive for drive in open_ if drive not in full]
    return (None if left > 0 else shares), full
