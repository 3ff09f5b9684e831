"""Choice and Balance: what makes steps faster and changes no result is found out by doing it.

Choice: both ways are tried; from then on the faster one is taken, and the other once more now and then, since machines
change. Times are compared by medians of the last few steps of each, so that a step that an evaluation or a save has
come into does not decide. Balance: work that can be done in forward or in backward goes where less is waited for.

Invariant: what is chosen depends on times alone; nothing else may depend on what is chosen.
"""

from __future__ import annotations

import collections
import statistics

_RECENT = 3  # steps of each way that count
_ENOUGH = 2  # steps of a way before it is judged
_AGAIN = 32  # steps after which the other way is looked at
_SHIFT = 0.05  # of the work, after a step
_NOTHING = 0.01  # of a step's time: a wait that is none
_GAIN = 0.98  # of the time: below it a change pays


class Choice:
    """See the file's contract."""

    def __init__(self, always: bool | None = None) -> None:
        """always: what is chosen, without trying."""
        self._always = always
        self._took = {way: collections.deque[float](maxlen=_RECENT) for way in (False, True)}
        self._since = 0  # steps since the other way was looked at
        self._way = False

    @property
    def on(self) -> bool:
        """Whether to do it in the step that comes."""
        if self._always is not None:
            return self._always
        for way in (False, True):
            if len(self._took[way]) < _ENOUGH:
                return way
        return self._way != (self._since >= _AGAIN)

    def took(self, seconds: float, on: bool) -> None:
        """A step took so long, one way or the other."""
        self._took[on].append(seconds)
        self._since = 0 if on != self._way else self._since + 1
        if all(len(times) >= _ENOUGH for times in self._took.values()):
            without, with_it = (statistics.median(self._took[way]) for way in (False, True))
            if self._way:
                self._way = with_it < without
            else:
                self._way = with_it < _GAIN * without


class Balance:
    """The share of the work for backward."""

    def __init__(self) -> None:
        self.share = 0.5

    def took(self, seconds: float, forward: float, backward: float) -> None:
        """A step took so long, of which it waited so long in forward and in backward."""
        if max(forward, backward) < _NOTHING * seconds:
            return
        self.share = min(1.0, max(0.0, self.share + (_SHIFT if forward > backward else -_SHIFT)))
