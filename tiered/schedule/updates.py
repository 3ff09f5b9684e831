"""Updates: a simulated run of updates: chunks of states through slots, read, computed and written on virtual time.

It takes what `optim.pipeline` and `optim.slots` decide about real chunks for simulated ones: reads go ahead as far as
slots are free, a slot is free again once its writes are over, and what lies in memory is not read.

Invariants:
1. Chunks are computed in the order in which their groups were added.
2. After `finish` nothing is on its way.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from tiered.schedule.clock import Moving

if TYPE_CHECKING:
    from tiered.schedule.simulate import SimulatedPage, Simulation

_MOST_AHEAD = 8  # chunks, of which some may need no slot


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """A part of one group's states. beside: computed in backward, so copied wholly and written beside what holds."""

    page: SimulatedPage
    elements: int
    last: bool
    beside: bool
    reads: list[Moving] = dataclasses.field(default_factory=list)
    param_read: bool = False

    def part(self, nbytes: int) -> int:
        """The chunk's part of so many bytes of its group."""
        return nbytes * self.elements // self.page.group.elements

    @property
    def takes_slot(self) -> bool:
        """Something of it may be away."""
        return self.page.group.moved > 0


class Updates:
    """See the file's contract."""

    def __init__(self, run: Simulation) -> None:
        self._run = run
        self._free = run.shape.slots
        self._coming: collections.deque[Chunk] = collections.deque()
        self._ahead: collections.deque[Chunk] = collections.deque()
        self._writing: collections.deque[tuple[Chunk, list[Moving]]] = collections.deque()
        self._whole: set[int] = set()

    @property
    def over(self) -> bool:
        """Every chunk is computed."""
        return not self._coming and not self._ahead

    def add(self, page: SimulatedPage, *, beside: bool = False) -> None:
        """A group to be updated after the others."""
        left = page.group.elements
        size = self._run.shape.chunk_elements if page.group.moved else max(left, 1)
        while left:
            part = min(size, left)
            left -= part
            self._coming.append(Chunk(page, part, not left, beside))

    def read_ahead(self, *, wait: bool = True) -> None:
        """Begin to read what comes next, as far as slots are free; for the very next chunk, with `wait`, one is waited
        for."""
        while self._coming:
            chunk = self._coming[0]
            if chunk.takes_slot:
                if not self._available(wait=wait and not self._ahead):
                    break
                self._free -= 1
            self._ahead.append(self._coming.popleft())
            self._fill(chunk)
            if len(self._ahead) > _MOST_AHEAD:
                break

    def advance(self) -> SimulatedPage | None:
        """Compute the next chunk, and begin to write it; gives its group if that was its last."""
        self.read_ahead()
        chunk = self._ahead.popleft()
        if not chunk.param_read and not chunk.page.present and not chunk.beside:  # evicted since
            self._read(chunk, chunk.page.nbytes)
        for read in chunk.reads:
            self._run.clock.wait(read)
        self._run.computed(chunk)
        written = self._run.clock.move(chunk.part(chunk.page.group.moved))
        self._leave(chunk, [written])
        if chunk.last:
            self._whole.add(chunk.page.index)
            chunk.page.stale = False
            return chunk.page
        return None

    def pump(self) -> None:
        """Go on, as far as nothing has to be waited for."""
        self.read_ahead(wait=False)
        while self._ahead and all(read.over for read in self._ahead[0].reads):
            self.advance()

    def finish(self) -> None:
        """Compute all that is left, and wait for every write."""
        while not self.over:
            self.advance()
        while self._writing:
            self._retire()

    def hand_over(self) -> set[int]:
        """Leave what is not computed. Returns the index of each group that is."""
        self._coming.clear()
        while self._ahead:
            chunk = self._ahead.popleft()
            self._leave(chunk, chunk.reads)
        return self._whole

    def settle(self, page: SimulatedPage) -> None:
        """Wait for what is on its way of one group."""
        for chunk, moving in self._writing:
            if chunk.page is page:
                for each in moving:
                    self._run.clock.wait(each)

    def _fill(self, chunk: Chunk) -> None:
        if chunk.page.nbytes and not chunk.page.present:
            chunk.param_read = True
            self._read(chunk, chunk.page.nbytes)
        elif chunk.beside:
            self._run.copied(chunk)
        self._read(chunk, chunk.page.group.state_bytes)

    def _read(self, chunk: Chunk, nbytes: int) -> None:
        chunk.reads.append(self._run.clock.move(chunk.part(nbytes)))

    def _leave(self, chunk: Chunk, moving: list[Moving]) -> None:
        if chunk.takes_slot:
            self._writing.append((chunk, moving))

    def _available(self, *, wait: bool) -> bool:
        """Whether a slot is free; `wait`: make one free by waiting for the oldest writes."""
        while self._writing:
            if not all(each.over for each in self._writing[0][1]) and not (wait and not self._free):
                break
            self._retire()
        return self._free > 0

    def _retire(self) -> None:
        _, moving = self._writing.popleft()
        for each in moving:
            self._run.clock.wait(each)
        self._free += 1
