"""Room: which drives a new extent lies on, from where on, and how much there is still.

    weights --has every drive room for its share?--yes--> ranges on each drive
       ^                                            `--no--> cut to the room there is (weights.py), for this extent
       `-- of all that is allocated

Invariants:
1. What `take` gives, or keeps after an error, is all of an extent's ranges, or none.
2. An extent begins where in the pattern the drive is that is furthest behind its share, so small extents have their
   shares together as large ones have alone.
3. Weights are cut only where a drive refuses its share, one warning for each such drive says so, and what other extents
   have stays where it is: with the fast drive filled up, a pass over all of them ends no later than if each had been
   cut.

Not thread-safe: SwapSpace calls it under its lock. Leaves to extent.py the arithmetic of a piece, and to drive.py that
of a file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from tiered.errors import SwapFullError
from tiered.io.drive import Drive
from tiered.io.extent import Stripes
from tiered.io.weights import Weights, cut

_LOGGER = logging.getLogger("tiered")
_SURE = 15 / 16  # of the room of uneven drives: cuts are in steps, and pieces are whole


class Room:
    """See the file's contract."""

    def __init__(self, drives: Sequence[Drive], weights: Weights, piece_bytes: int) -> None:
        self.weights = weights
        self._drives = drives
        self._piece_bytes = piece_bytes
        self._refused: set[int] = set()  # drives that had too little room for their share

    def take(self, nbytes: int, slots: int) -> tuple[Stripes, tuple[tuple[int, ...], ...]]:
        """The layout of an extent of `nbytes`, and where its ranges start, for each of `slots`.

        Raises SwapFullError with the drive whose share did not fit, where no shares do.
        """
        try:
            return self._take(self._stripes(nbytes, self.weights), slots)
        except SwapFullError as error:
            index = self._index(error)
            if (taken := self._take_cut(nbytes, slots, index)) is None:
                raise
            self._tell(index)
            return taken

    def _take_cut(self, nbytes: int, slots: int, index: int) -> tuple[Stripes, tuple[tuple[int, ...], ...]] | None:
        """`take` by weights that fit the room; None where none do. index: of the drive that refused its share."""
        rooms = [max(0, drive.room() // slots - 2 * self._piece_bytes) for drive in self._drives]
        share = self._stripes(nbytes, self.weights).span(index)
        rooms[index] = max(0, min(rooms[index], share - self._piece_bytes))
        for _ in self._drives[1:]:
            weights = cut(self.weights, rooms, nbytes)
            if weights is None:
                break
            try:
                return self._take(self._stripes(nbytes, weights), slots)
            except SwapFullError as error:  # the room it says is not there: a quota, or ranges that lie apart
                rooms[self._index(error)] = 0
        return None

    def give_back(self, stripes: Stripes, starts: Sequence[Sequence[int]]) -> None:
        """Undo `take`."""
        for slot in starts:
            for index, drive in enumerate(self._drives):
                if span := stripes.span(index):
                    drive.give_back(slot[index], span)

    def free_bytes(self) -> int:
        """Bytes that can be taken, in extents that are small beside them: by weight, or else in what shares the room
        allows."""
        rooms = [drive.room() for drive in self._drives]
        shared = min(room / weight for room, weight in zip(rooms, self.weights, strict=True) if weight)
        return max(int(shared * sum(self.weights)), int(sum(rooms) * _SURE) if len(rooms) > 1 else 0)

    def _take(self, stripes: Stripes, slots: int) -> tuple[Stripes, tuple[tuple[int, ...], ...]]:
        with contextlib.ExitStack() as undo:
            starts = tuple(self._take_slot(stripes, undo) for _ in range(slots))
            undo.pop_all()
        return stripes, starts

    def _take_slot(self, stripes: Stripes, undo: contextlib.ExitStack) -> tuple[int, ...]:
        starts = []
        for index, drive in enumerate(self._drives):
            span = stripes.span(index)
            starts.append(drive.take(span) if span else 0)
            if span:
                undo.callback(drive.undo_take, starts[-1], span)
        return tuple(starts)

    def _stripes(self, nbytes: int, weights: Weights) -> Stripes:
        """From the place in the pattern after which the drives are nearest to their shares (invariant 2)."""
        taken = [drive.taken_bytes for drive in self._drives]
        used = [index for index, weight in enumerate(weights) if weight]
        behind = min(used, key=lambda index: taken[index] / weights[index])
        laid = [Stripes(nbytes, self._piece_bytes, weights, phase) for phase in range(sum(weights))]
        fitting = [stripes for stripes in laid if stripes.place(0)[0] == behind]
        return min(
            fitting, key=lambda stripes: max((taken[index] + stripes.span(index)) / weights[index] for index in used)
        )

    def _index(self, error: SwapFullError) -> int:
        return next(index for index, drive in enumerate(self._drives) if drive.path == error.filename)

    def _tell(self, index: int) -> None:
        if index not in self._refused:
            self._refused.add(index)
            _LOGGER.warning(
                "%s: the drive has no room for its share of what is swapped (weight %d of %d); the others take the "
                "rest, and transfers are slower",
                *(self._drives[index].path, self.weights[index], sum(self.weights)),
            )
