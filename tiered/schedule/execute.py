"""The executor: brings pages in when they are used, ahead of use where the trace allows, and evicts within the budget.

    use(page)   present on return, pinned until `unuse`: this alone is enough for correct results
    touch(page) present on return, not pinned: for a use that is over at once

Invariants:
1. Fetching ahead and keeping are hints; whatever they do, `use` makes the page present or raises.
2. The budget of pages is charged before a fetch begins and refunded when the page has gone.
3. A pinned or exported page is never evicted.
4. What a step makes stale is not fetched before that step, where the trace knows that one comes.
Leaves to whom: what fetching means is the page's own business.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tiered.errors import UsageError
from tiered.schedule import plan
from tiered.schedule.trace import Phase, Trace, Use
from tiered.stats import Meter


class Page(Protocol):
    """Something that is in memory or away."""

    index: int
    name: str
    nbytes: int
    """What it takes of the budget while present; 0 for a page that never moves."""

    @property
    def present(self) -> bool:
        """In memory, or on its way."""

    @property
    def evictable(self) -> bool:
        """Present, not pinned, and nobody outside holds a view of it."""

    def begin_fetch(self, *, hint: bool = False) -> None:
        """Charge the budget and start bringing it in; a `hint` waits for no memory. Raises MemoryError (a BudgetError
        is one), nothing started."""

    def wait(self) -> None:
        """Return when it is in memory; raises what the fetch raised."""

    def poll(self) -> bool:
        """Complete the fetch if all has arrived; True once nothing is in flight. A failure shows when it is used."""

    def drop(self) -> None:
        """Let it go, and refund the budget."""


class Room(Protocol):
    """The bytes that pages may take; they may change from use to use."""

    def capacity(self) -> int:
        """For pages in all."""

    def free(self) -> int:
        """Those free now; less than none: something must go."""

    def observe(self) -> None:
        """Look, before a use changes anything."""


class Executor:
    """Runs the plan for one model's pages."""

    def __init__(self, pages: Sequence[Page], room: Room, meter: Meter, *, stale: bool, ahead: bool = True) -> None:
        """`stale`: a step changes what pages are copies of. `ahead`: fetch ahead of use."""
        self._ahead = ahead
        self._pages = {page.index: page for page in pages if page.nbytes}
        self._sizes = {index: page.nbytes for index, page in self._pages.items()}
        self._room = room
        self._meter = meter
        self._stale = stale
        self._trace = Trace()
        self._recent: dict[int, None] = {}  # present pages, least recently used first
        self._coming: set[int] = set()  # pages on their way
        self._current = -1
        self._thread = 0
        self._inside = 0

    def use(self, page: Page, phase: Phase) -> None:
        """Make `page` present and fetch ahead. Raises BudgetError where it cannot fit beside what is pinned."""
        self._meter.at(phase.name.lower(), page.name)
        if not page.nbytes:
            return
        self._room.observe()
        self.poll()
        self._observe(page, phase)
        if not page.present:
            self._make_room(page)
            try:
                page.begin_fetch()
            except MemoryError:  # the device has less than its budget says, or staging is scarce: what only hints goes
                self.clear()
                page.begin_fetch()
        self._recent.pop(page.index, None)
        self._recent[page.index] = None  # before the wait: interrupted there, it can still be evicted
        page.wait()
        self._fetch_ahead(page)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """One thread at a time is inside. Raises UsageError in any other."""
        me = threading.get_ident()
        if self._inside and self._thread != me:
            raise UsageError(
                "a sharded model is used by two threads at once: its parameters come and go, so let one thread at a "
                "time run forward, backward or gather (with a lock around them)"
            )
        self._thread = me
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def touch(self, page: Page, phase: Phase) -> None:
        """As `use`, cheap when the page is the one that was used last."""
        self._meter.at(phase.name.lower(), page.name)
        there = page.present and page.index not in self._coming
        if page.nbytes and (page.index != self._current or not there):
            self.use(page, phase)

    def poll(self) -> None:
        """Complete the fetches that have arrived, so that what carried them is given back."""
        self._coming -= {index for index in self._coming if self._pages[index].poll()}

    def stepped(self) -> None:
        """A step has been taken: fetch ahead for what follows it."""
        self.poll()
        self._current = -1
        self._trace.observe(Use(-1, Phase.STEP))
        self._fetch_ahead()

    def expect(self, page: Page) -> None:
        """`page` is on its way without having been asked for."""
        self._recent.pop(page.index, None)
        self._recent[page.index] = None
        self._coming.add(page.index)

    def remove(self, page: Page) -> None:
        """`page` does not move any more."""
        self._recent.pop(page.index, None)
        self._pages.pop(page.index, None)
        self._sizes.pop(page.index, None)
        self._coming.discard(page.index)
        self._trace = Trace()  # what it knows names the page

    def evict(self, page: Page) -> None:
        """Let `page` go if it may."""
        self._evict([page.index])

    def clear(self) -> None:
        """Evict every page that may go."""
        self._evict(list(self._recent))

    def settle(self) -> None:
        """Wait for what is fetched ahead, so that what carries it is given back; failures show when it is used."""
        for index in self._coming:
            with contextlib.suppress(Exception):
                self._pages[index].wait()
        self._coming.clear()

    # --- inside ---

    def _observe(self, page: Page, phase: Phase) -> None:
        self._meter.uses += 1
        self._meter.hits += page.present
        self._current = page.index
        self._trace.observe(Use(page.index, phase))

    def _upcoming(self) -> list[int]:
        return plan.window(self._expected(), self._sizes, self._room.capacity())

    def _expected(self) -> Iterator[int]:
        """The pages expected next, up to where they become others."""
        steps = 0
        for use in self._trace.predict():
            if use.phase is not Phase.STEP:
                yield use.page
            elif self._stale or (steps := steps + 1) > 2:  # steps and nothing between them: no page ever comes
                return

    def _evictable(self) -> list[int]:
        return [i for i in self._recent if self._pages[i].evictable]

    def _make_room(self, page: Page) -> None:
        free = self._room.free()
        if free < page.nbytes:
            self._run(plan.room(page.nbytes, self._upcoming(), self._sizes, self._evictable(), free))

    def _fetch_ahead(self, page: Page | None = None) -> None:
        if not self._ahead:
            return
        upcoming = self._upcoming()
        present = {i for i in upcoming if self._pages[i].present}
        free = self._room.free()
        if len(present) == len(upcoming) and free >= 0:
            return
        evictable = [i for i in self._evictable() if page is None or i != page.index]
        if free < 0:  # what else is there has grown
            self._run(plan.room(0, upcoming, self._sizes, evictable, free))
        else:
            self._run(plan.ahead(upcoming, self._sizes, present, evictable, free))

    def _run(self, actions: plan.Plan) -> None:
        self._evict(actions.evict)
        for index in actions.fetch:
            try:
                self._pages[index].begin_fetch(hint=True)
            except MemoryError:  # of a budget or of the device itself: fetching ahead is a hint, so leave it
                return
            self._recent[index] = None
            self._coming.add(index)

    def _evict(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._pages[index].evictable:
                self._drop(index)

    def _drop(self, index: int) -> None:
        self._pages[index].drop()
        self._recent.pop(index, None)
