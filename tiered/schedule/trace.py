"""The order in which pages are used, learnt as it happens and repaired where it changes.

A trace is kept as successors: after the last two uses, which use came next the last time. One pass through the model
teaches it; a branch taken differently rewrites only the successors around the branch; the uses of evaluation and of
training are different uses, so that neither disturbs the other.

Invariant: `predict` is a guess and only ever steers hints.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple


class Phase(enum.IntEnum):  # integers, since uses are hashed in the innermost loop of prediction
    """What a page is used for."""

    FORWARD = 0
    BACKWARD = 1
    EVALUATION = 2  # forward without gradients
    STEP = 3  # the optimizer's, of every page at once


class Use(NamedTuple):
    """One use of a page (-1: of all)."""

    page: int
    phase: Phase


class Trace:
    """Learns the order of uses and predicts what follows."""

    def __init__(self) -> None:
        self._last: tuple[Use | None, Use | None] = (None, None)
        self._after_two: dict[tuple[Use | None, Use | None], Use] = {}
        self._after_one: dict[Use | None, Use] = {}

    def observe(self, use: Use) -> None:
        """Record that `use` happens now."""
        before, last = self._last
        self._after_two[before, last] = use
        self._after_one[last] = use
        self._last = (last, use)

    def predict(self) -> Iterator[Use]:
        """The uses expected next, in order, without end where the order is a cycle; stops where nothing is known."""
        before, last = self._last
        while True:
            following = self._after_two.get((before, last))
            if following is None:
                following = self._after_one.get(last)
            if following is None:
                return
            yield following
            before, last = last, following
