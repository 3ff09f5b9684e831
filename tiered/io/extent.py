"""Extents: how many bytes, cut into which pieces, and where each piece lies on the drives.

An extent is a run of bytes cut into pieces of `piece_bytes` (the last may be shorter). Drives have weights, small
integers, and take pieces by a pattern that repeats and in which each comes as often as its weight, spread out evenly;
`phase` is the place of piece 0 in it. So a large transfer keeps every drive busy, and for about as long:

    pattern  0 0 1                     two drives of weights 2 and 1
    pieces   0 1 2 3 4 5 6             phase = 1
    drive 0  0 2 3 5 6                 one contiguous range each
    drive 1  1 4

With equal weights the pattern is 0, 1, ..., and pieces are dealt in turn.

An extent with two slots has room for each piece twice. A write goes to the slot that the last commit does not name, so
that what was committed stays as it is until the next commit:

    committed      A0 A1 A2      write of piece 1: B1       read: A0 B1 A2       commit: the next write of 1 goes to A1

What is only a candidate is written *beside*: to the slot that holds nothing, as the contents are those committed; it
becomes the contents by `take`, or is forgotten, which moves nothing.

    committed      A0 A1 A2      beside, of piece 1: B1     read: A0 A1 A2       take piece 1; read: A0 B1 A2

Invariants: 1. The arithmetic of placement is in Stripes alone; ranges on a drive are whole blocks. 2. A piece of a slot
that a commit names is not written. 3. Of n consecutive pieces a drive has its share, n * weight / sum of weights, to
less than two pieces; from the beginning of the pattern on to less than one. 4. What is taken was written beside what
the extent holds.
Leaves to weights.py where weights come from, to drive.py which range a drive gives, and to swapfile.py every change of
an extent's state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered.errors import UsageError
from tiered.io.drive import BLOCK
from tiered.io.engine import PieceState, Records, Submission


class _Pattern(NamedTuple):
    drives: tuple[int, ...]  # of each place
    before: tuple[tuple[int, ...], ...]  # for each drive: how many places before each are its, the end included


@functools.lru_cache(maxsize=256)
def _pattern(weights: tuple[int, ...]) -> _Pattern:
    """Each place goes to the drive whose next piece is due first, of those that are not ahead of their share.

    Balinski and Young's quota method: no drive is ever a whole piece from its share, counted from the beginning.
    """
    whole, dealt = sum(weights), [0] * len(weights)
    drives, before = [], [[0] for _ in weights]
    for place in range(1, whole + 1):
        behind = [drive for drive, weight in enumerate(weights) if dealt[drive] * whole < weight * place]
        drive = min(behind, key=lambda drive: (dealt[drive] + 1) / weights[drive])
        dealt[drive] += 1
        drives.append(drive)
        for counts, count in zip(before, dealt, strict=True):
            counts.append(count)
    return _Pattern(tuple(drives), tuple(map(tuple, before)))


@dataclass(frozen=True, slots=True)
class Stripes:
    """Where the pieces of an extent lie: the one place that knows the arithmetic."""

    nbytes: int
    piece_bytes: int
    weights: tuple[int, ...]  # of each drive; see weights.py
    phase: int  # place of piece 0 in the pattern, below the sum of the weights
    _dealt: _Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_dealt", _pattern(self.weights))

    @property
    def pieces(self) -> int:
        return -(-self.nbytes // self.piece_bytes)

    def size(self, piece: int) -> int:
        """Bytes of a piece."""
        return min(self.piece_bytes, self.nbytes - piece * self.piece_bytes)

    def place(self, piece: int) -> tuple[int, int]:
        """A piece's drive, and its offset in that drive's range."""
        drive = self._dealt.drives[(self.phase + piece) % len(self._dealt.drives)]
        return drive, self._count(drive, piece) * self.piece_bytes

    def span(self, drive: int) -> int:
        """Bytes of a drive's range, in whole blocks; 0 where no piece lies on it."""
        nbytes = self._count(drive, self.pieces) * self.piece_bytes
        if nbytes and self.place(self.pieces - 1)[0] == drive:
            nbytes += self.size(self.pieces - 1) - self.piece_bytes
        return -(-nbytes // BLOCK) * BLOCK

    def _count(self, drive: int, piece: int) -> int:
        """How many pieces before `piece` lie on a drive."""
        rounds, place = divmod(self.phase + piece, len(self._dealt.drives))
        before = self._dealt.before[drive]
        return rounds * self.weights[drive] + before[place] - before[self.phase]


@dataclass(slots=True, eq=False)
class Extent:
    """Space for `nbytes` bytes in a swap space; made by `allocate`, and of no use after `free`.

    `records` has one (checksum, state) for each piece in each slot, kept up to date by the engines. `fresh` says of
    each that a write there changes what the file system knows of the file, too: where nothing was written yet, and
    where another file shares the blocks.
    """

    nbytes: int
    label: str  # for messages
    stripes: Stripes
    starts: tuple[tuple[int, ...], ...]  # of its range on each drive, for each slot
    records: Records  # (pieces * slots,): piece by piece
    slots: npt.NDArray[np.uint8]  # (pieces,): where the contents of each piece are
    committed: npt.NDArray[np.uint8] | None = None  # likewise, at the last commit; None: there was none
    in_flight: list[Submission] = field(default_factory=list)
    fresh: npt.NDArray[np.bool_] = field(init=False)  # (pieces * slots,)
    beside: npt.NDArray[np.bool_] = field(
        init=False
    )  # (pieces,): the other slot has a candidate for what this one holds

    def __post_init__(self) -> None:
        self.fresh = np.ones(len(self.records), np.bool_)
        self.beside = np.zeros(self.pieces, np.bool_)

    @property
    def pieces(self) -> int:
        """How many pieces it has."""
        return self.stripes.pieces

    @property
    def blank(self) -> bool:
        """True while nothing was ever written to it."""
        return bool((self.contents["state"] == PieceState.BLANK).all())

    @property
    def contents(self) -> Records:
        """A copy of the record of each piece where its contents are: (pieces,)."""
        found: Records = self.records[self.record(np.arange(self.pieces))]
        return found

    @property
    def settled(self) -> bool:
        """What it holds is what was committed, so that each piece has a slot that holds nothing."""
        return self.committed is not None and bool((self.slots == self.committed).all())

    def record(self, pieces: npt.NDArray[np.int64], *, beside: bool = False) -> npt.NDArray[np.int64]:
        """Where in `records` the contents of `pieces`, or what is beside them, have theirs."""
        slots = self.slots[pieces]
        return pieces * len(self.starts) + (1 - slots if beside else slots)

    def turn(self, pieces: range) -> None:
        """`pieces` are to be written: not over what was committed. What is beside them counts no more."""
        self.beside[pieces.start : pieces.stop] = False
        if self.committed is not None:
            self.slots[pieces.start : pieces.stop] = 1 - self.committed[pieces.start : pieces.stop]

    def take(self, pieces: range) -> None:
        """What was written beside `pieces` is what they hold. Raises UsageError where that was for other contents."""
        if not self.beside[pieces.start : pieces.stop].all():
            raise UsageError(f"{self.label}: what is beside it was made for contents that it no longer holds")
        self.beside[pieces.start : pieces.stop] = False
        self.slots[pieces.start : pieces.stop] ^= 1
