"""The outlook: which pages are expected next, looked at no more often than uses pay for.

To look costs time for every use expected, and there may be thousands. So each use pays for `RATE` of them, and once it
is paid for what the last look has cost another one is `due`: at every use where few pages fit, at every thirtieth or so
where a thousand do, when what was seen last still holds but for its end. What differs from what was expected makes a
look due at once, out of what such looks may cost: `RATE` of them a use, too, saved up for `SAVED` of the pages.

Invariants:
1. Over many uses at most 2 * RATE are looked at for each, besides one look a step and those looks that are asked for
   while none is due.
2. What comes behind a step that makes copies stale is not seen before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from tiered.schedule import plan
from tiered.schedule.trace import Phase, Trace, Use

RATE = 32
SAVED = 8


class Outlook:
    """See the file's contract."""

    def __init__(self, sizes: Mapping[int, int], *, stale: bool) -> None:
        """`sizes`: bytes of each page that moves; it may lose pages (`forget`). `stale`: a step changes what pages are
        copies of."""
        self.looked = 0  # uses looked at so far
        self._sizes = sizes
        self._stale = stale
        self._trace = Trace()
        self._price = 0  # of the last look
        self._paid = 0
        self._saved = 0
        self._seen: list[int] | None = None  # by a look since the last use
        self.later: list[int] = []
        """Pages behind those of the last look, in order of first use, where every use pays for a look."""
        self._capacity = 0  # that it was for

    def observe(self, use: Use) -> None:
        """`use` happens now."""
        expected = self._trace.observe(use)
        self._seen = None
        self._paid += RATE
        self._saved = min(self._saved + RATE, SAVED * len(self._sizes))
        if use.phase is Phase.STEP:
            self._paid = self._price
        elif not expected and self._paid < self._price <= self._saved:
            self._saved -= self._price
            self._paid = self._price

    @property
    def due(self) -> bool:
        """Another look is paid for, or has been made since the last use."""
        return self._seen is not None or self._paid >= self._price

    @property
    def constant(self) -> bool:
        """Every use pays for a look."""
        return self._price <= RATE

    def look(self, capacity: int) -> list[int]:
        """The distinct pages expected next, in order of first use, as many as `capacity` bytes hold."""
        if self._seen is None or self._capacity != capacity:
            before = self.looked
            expected = self._expected()
            self._seen, beyond = plan.window(expected, self._sizes, capacity)
            self._capacity = capacity
            self._price, self._paid = self.looked - before + len(self._seen), 0
            self.later = []
            if self.constant and len(self._seen) < len(self._sizes):
                behind = dict.fromkeys((*beyond, *itertools.islice(expected, RATE)))
                self.later = [page for page in behind if page not in set(self._seen)]
        return self._seen

    def forget(self) -> None:
        """A page does not move any more: start anew, as what is known names it."""
        self._trace = Trace()
        self._seen = None

    def _expected(self) -> Iterator[int]:
        """The pages expected next, up to where they become others."""
        steps = 0
        for use in self._trace.predict():
            self.looked += 1
            if use.phase is not Phase.STEP:
                yield use.page
            elif self._stale or (steps := steps + 1) > 2:  # steps and nothing between them: no page ever comes
                return
