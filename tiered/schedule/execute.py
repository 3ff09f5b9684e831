"""The executor: brings pages in when they are used, ahead of use where the trace allows, and evicts within the budget.

    use(page)   present on return, pinned until `unuse`: this alone is enough for correct results
    touch(page) present on return, not pinned: for a use that is over at once

Invariants:
1. Fetching ahead and keeping are hints; whatever they do, `use` makes the page present or raises.
2. The budget of pages is charged before a fetch begins and refunded when the page has gone.
3. A pinned or exported page is never evicted.
4. What a step makes stale is not fetched before that step, where the trace knows that one comes.
5. What a use costs does not grow with the number of pages, taken over many uses: a plan is made when the outlook says
   that one is paid for (`schedule.outlook`), and carried on with until then.
Leaves to whom: what fetching means is the page's own business; what is expected is the outlook's.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tiered.errors import UsageError
from tiered.schedule import plan
from tiered.schedule.outlook import Outlook
from tiered.schedule.trace import Phase, Use
from tiered.stats import Meter

UNARRIVED = 8
"""Fetches on their way that a use asks whether they have arrived: they come about in the order in which they left."""


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
    def promised(self) -> bool:
        """What hands it over when it is used is under way already."""

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
        self._outlook = Outlook(self._sizes, stale=stale)
        self._recent: dict[int, int] = {}  # present pages, least recently used first, with the number of that use
        self._coming: dict[int, None] = {}  # pages on their way, in the order in which they left
        self._wanted: collections.deque[int] = collections.deque()  # pages to fetch ahead as soon as there is room
        self._going: collections.deque[int] | None = None  # pages to evict where room is needed, first to go first
        self._ordered = 0  # number of the use at which they were put in order
        self._current = -1
        self._thread = 0
        self._inside = 0

    def use(self, page: Page, phase: Phase) -> None:
        """Make `page` present and fetch ahead. Raises BudgetError where it cannot fit beside what is pinned."""
        self._meter.at(phase.name.lower(), page.name)
        if not page.nbytes:
            return
        self._room.observe()
        self._poll(UNARRIVED)
        self._observe(page, phase)
        if not page.present:
            self._make_room(page.nbytes)
            try:
                page.begin_fetch()
            except MemoryError:  # the device has less than its budget says, or staging is scarce: what only hints goes
                self.clear()
                page.begin_fetch()
        self._note(page.index)  # before the wait: interrupted there, it can still be evicted
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
        self._poll(len(self._coming))

    def stepped(self) -> None:
        """A step has been taken: fetch ahead for what follows it."""
        self.poll()
        self._current = -1
        self._going = None
        self._outlook.observe(Use(-1, Phase.STEP))
        self._fetch_ahead()

    def expect(self, page: Page) -> None:
        """`page` is on its way without having been asked for."""
        self._note(page.index)
        self._coming[page.index] = None

    def remove(self, page: Page) -> None:
        """`page` does not move any more."""
        self._recent.pop(page.index, None)
        self._pages.pop(page.index, None)
        self._sizes.pop(page.index, None)
        self._coming.pop(page.index, None)
        self._wanted.clear()
        self._going = None
        self._outlook.forget()

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
        self._meter.hits += page.present or page.promised
        self._current = page.index
        self._outlook.observe(Use(page.index, phase))

    def _note(self, index: int) -> None:
        """The page is the one used, or fetched, last."""
        self._recent.pop(index, None)
        self._recent[index] = self._meter.uses

    def _poll(self, unarrived: int) -> None:
        """Complete fetches that have arrived, in the order in which they left, past at most so many that have not."""
        done = []
        for index in self._coming:
            if self._pages[index].poll():
                done.append(index)
            elif (unarrived := unarrived - 1) < 1:
                break
        for index in done:
            del self._coming[index]

    def _evictable(self) -> list[int]:
        return [i for i in self._recent if self._pages[i].evictable]

    def _make_room(self, need: int) -> None:
        """Evict until `need` bytes are free, or nothing more may go."""
        if self._room.free() >= need:
            return
        if self._going is not None and not self._outlook.due and self._evict_until(need):
            return
        upcoming = self._outlook.look(self._room.capacity())
        evictable = self._evictable()
        everything = sum(self._sizes[index] for index in evictable) + need
        self._going = collections.deque(
            plan.room(
                everything, [*upcoming, *self._outlook.later], self._sizes, evictable, min(self._room.free(), 0)
            ).evict
        )
        self._ordered = self._meter.uses
        self._evict_until(need)

    def _evict_until(self, need: int) -> bool:
        """Evict in the order made before, but not what has been used since; whether `need` bytes are free."""
        going = self._going
        while going and self._room.free() < need:
            index = going.popleft()
            if index != self._current and self._recent.get(index, 0) <= self._ordered:
                self._evict((index,))
        return self._room.free() >= need

    def _fetch_ahead(self, page: Page | None = None) -> None:
        """Fetch what is expected next, and evict for it what is used later; `page` stays."""
        if self._room.free() < 0:  # what else is there has grown
            if self._going is None or self._outlook.due:
                self._make_room(0)
            self._evict_until(0)
            return
        if not self._ahead:
            return
        if not self._outlook.due:
            self._fetch_wanted()
            return
        upcoming = self._outlook.look(self._room.capacity())
        if self._ordered != self._meter.uses:
            self._going = None
        self._wanted.clear()
        present = {i for i in upcoming if self._pages[i].present}
        if len(present) < len(upcoming):
            evictable = [i for i in self._evictable() if page is None or i != page.index]
            soon = max(self._room.capacity() // 4, 2 * max(self._sizes.values())) if self._outlook.constant else None
            free, later = self._room.free(), self._outlook.later
            actions = plan.ahead(upcoming, self._sizes, present, evictable, free, soon, later)
            self._evict(actions.evict)
            self._wanted.extend(actions.fetch)
            self._fetch_wanted()

    def _fetch_wanted(self) -> None:
        while self._wanted:
            index = self._wanted[0]
            page = self._pages[index]
            if not page.present:
                try:
                    page.begin_fetch(hint=True)
                except MemoryError:  # of a budget or of the device itself: fetching ahead is a hint, so leave it
                    return
                self._note(index)
                self._coming[index] = None
            self._wanted.popleft()

    def _evict(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._pages[index].evictable:
                self._pages[index].drop()
                self._recent.pop(index, None)
