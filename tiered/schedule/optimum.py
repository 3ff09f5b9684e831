"""Optimum: how fast a chain of uses can be at best, over every order of fetching and evicting; for small chains.

    gap(shape, costs, steps) -> (executed, best)    seconds of steady forwards and backwards, from the same pages on

At each use any pages but that one may be evicted, and any fetched, in any order, behind what the drive has to do
already.

What is not tried cannot be better: a fetch that would not have begun when the use is over may be decided at the next
use as well; a page need not go before its room is wanted, and what has just been fetched is not let go unused; what is
used now comes before what is used later.

Invariant: whatever the executor does is among what is tried or no better than that, so `best` is never slower, but by
what rounding makes of equal times.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from tiered.errors import ConfigError
from tiered.schedule.clock import Clock
from tiered.schedule.cost import Costs, Shape
from tiered.schedule.simulate import Simulation

_MOST = 6  # pages that move: beyond, the search is too large
_WARM = 6  # steps until the executor knows the order
Coming = tuple[tuple[int, float], ...]
"""Pages on their way, in order, each with the bytes that are left of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """Seconds that are computed, and the page that is used for it, if any."""

    page: int | None
    seconds: float


def gap(shape: Shape, costs: Costs, *, steps: int = 1) -> tuple[float, float]:
    """Seconds of `steps` steady forwards and backwards, as the executor runs them, and at best. Without updates: groups
    have no gradients. Raises ConfigError for a shape of too many pages or with updates."""
    if sum(group.page_bytes > 0 for group in shape.groups) > _MOST:
        raise ConfigError(f"groups: got {len(shape.groups)}, expected {_MOST} or fewer that move")
    if any(group.gradients for group in shape.groups):
        raise ConfigError("gradients: the optimum is that of forward and backward alone: expected 0 of each group")
    run = Simulation(shape, costs)
    for _ in range(_WARM):
        run.step()
    there = frozenset(page.index for page in run.pages if page.nbytes and page.present and not page.left)
    coming = tuple((page.index, page.left) for page in run.coming())
    begun = run.clock.now
    for _ in range(steps):
        run.step()
    executed = run.clock.now - begun
    search = Search(shape, costs, uses(shape, costs) * steps)
    return executed, search.best(0, there, coming)


def uses(shape: Shape, costs: Costs) -> tuple[Use, ...]:
    """Of a forward and a backward, and the step behind them."""
    order = []
    for index, group in enumerate(shape.groups):
        order.append(Use(index, group.forward_s + (costs.use_s if group.page_bytes else 0.0)))
    for index, group in reversed(list(enumerate(shape.groups))):
        page = index if group.in_backward else None
        moves = group.in_backward and group.page_bytes
        order.append(Use(page, group.backward_s + (costs.use_s if moves else 0.0)))
    return (*order, Use(None, costs.step_s))


class Search:
    """The fewest seconds from each state on that can be reached."""

    def __init__(self, shape: Shape, costs: Costs, order: Sequence[Use]) -> None:
        self._sizes = [group.page_bytes for group in shape.groups]
        self._window = shape.window_bytes
        self._costs = costs
        self._order = order
        self._known: dict[tuple[int, frozenset[int], Coming], float] = {}

    def best(self, position: int, there: frozenset[int], coming: Coming) -> float:
        """Seconds from the use at `position` to the end, with these pages present and on their way."""
        if position == len(self._order):
            return 0.0
        key = (position, there, tuple((page, round(left)) for page, left in coming))
        if key not in self._known:
            self._known[key] = self._best(position, there, coming)
        return self._known[key]

    def _best(self, position: int, there: frozenset[int], coming: Coming) -> float:
        page = self._order[position].page
        here = there | {each for each, _ in coming}
        if page is None or page in here or not self._sizes[page]:
            return self._further(position, there, coming, frozenset(), ())
        need = self._sizes[page] - self._window + sum(self._sizes[each] for each in here)
        ways = list(self._evictions(there, need)) or list(self._evictions(here, need))  # those on their way come first
        return min(self._further(position, there, coming, gone, (page,)) for gone in ways)

    def _further(
        self, position: int, there: frozenset[int], coming: Coming, gone: frozenset[int], fetched: tuple[int, ...]
    ) -> float:
        """Seconds to the end, with at least that evicted and fetched at the use; infinite where the last of it may as
        well be decided later."""
        use, clock = self._order[position], Clock(self._costs)
        moving = {page: clock.move(left, into_page=True) for page, left in coming}
        moving |= {page: clock.move(self._sizes[page], into_page=True) for page in fetched}
        if use.page in moving:
            clock.wait(moving[use.page])
        clock.work(use.seconds)
        if fetched and moving[fetched[-1]].left >= self._sizes[fetched[-1]]:
            return math.inf
        arrived = {page for page, each in moving.items() if each.over}
        left = tuple((page, each.left) for page, each in moving.items() if not each.over)
        found = clock.now + self.best(position + 1, (there | arrived) - gone, left)
        here = there | moving.keys()
        free = self._window - sum(self._sizes[page] for page in here - gone)
        for page, size in enumerate(self._sizes):
            if size and page not in here:
                for more in self._evictions(there - gone - {use.page}, size - free):
                    found = min(found, self._further(position, there, coming, gone | more, (*fetched, page)))
        return found

    def _evictions(self, pages: Iterable[int | None], need: int) -> Iterator[frozenset[int]]:
        """Sets of pages that free `need` bytes, none of them in vain."""
        those = sorted(page for page in pages if page is not None)
        for count in range(len(those) + 1):
            for some in itertools.combinations(those, count):
                total = sum(self._sizes[page] for page in some)
                if total >= need and all(total - self._sizes[page] < need for page in some):
                    yield frozenset(some)
