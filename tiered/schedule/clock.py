"""Clock: virtual time of one loop and one drive, each with a cost; nothing here waits for anything real.

    move(bytes)   a transfer behind those that the drive has already; returned while it is under way
    work(s)       the loop computes, and the drive goes on beside it
    wait(moving)  the loop waits until a transfer is over

While the loop computes, the drive has `Costs.beside` of its rate, and each byte that it moves takes c seconds of
computing away: d seconds beside a drive at rate r take d / (1 - c r), as long as the drive has something to do.

Invariants:
1. The drive does one transfer at a time, in the order in which they came, and is idle only without any.
2. Time goes on in `work` and `wait` alone, and never back.
"""

from __future__ import annotations

import collections
import dataclasses

from tiered.schedule.cost import Costs


@dataclasses.dataclass(slots=True, eq=False)
class Moving:
    """A transfer: the bytes that are left of it, its rate while the loop waits, and the seconds of computing that each
    byte takes away."""

    left: float
    rate: float
    cpu: float

    @property
    def over(self) -> bool:
        """Nothing is left of it."""
        return self.left <= 0


class Clock:
    """See the file's contract."""

    def __init__(self, costs: Costs) -> None:
        self.now = 0.0
        self.waited = 0.0  # seconds in `wait`
        self.moved = 0.0  # bytes of every transfer that has been given
        self._costs = costs
        self._queue: collections.deque[Moving] = collections.deque()

    def move(self, nbytes: float, *, into_page: bool = False) -> Moving:
        """Give the drive `nbytes` to read or write; `into_page`: at the rate of a fetch."""
        costs = self._costs
        if into_page:
            moving = Moving(nbytes, costs.fetch_bytes_per_s, costs.fetch_cpu_s_per_byte)
        else:
            moving = Moving(nbytes, costs.drive_bytes_per_s, costs.io_cpu_s_per_byte)
        if nbytes:
            self._queue.append(moving)
            self.moved += nbytes
        return moving

    def work(self, seconds: float) -> None:
        """Compute for so long, were the drive idle."""
        left = seconds
        while left > 0 and self._queue:
            rate = self._queue[0].rate * self._costs.beside
            pace = 1.0 - self._queue[0].cpu * rate
            took = min(left / pace, self._queue[0].left / rate)
            left -= took * pace
            self._go_on(took, took * rate, ended=left > 0)
        self.now += max(left, 0.0)

    def wait(self, moving: Moving) -> None:
        """Wait until it is over."""
        while not moving.over:
            head = self._queue[0]
            took = head.left / head.rate
            self.waited += took
            self._go_on(took, head.left, ended=True)

    def _go_on(self, seconds: float, nbytes: float, *, ended: bool) -> None:
        """The drive has moved so much of its first transfer; `ended`: all that was left."""
        self.now += seconds
        head = self._queue[0]
        head.left = 0.0 if ended else head.left - nbytes
        if head.over:
            self._queue.popleft()

    @property
    def backlog(self) -> tuple[Moving, ...]:
        """What the drive has to do, first to be done first."""
        return tuple(self._queue)
