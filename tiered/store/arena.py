"""Arena: where all host memory of the store comes from, and where it goes back to.

    take --> in use --give--> idle --take | trim-->          idle memory only where the device page-locks
                   |-retire--> retiring --event--> given
                   `-give, stranded--> kept for good         what a read that was given up may still fill

Page-locking costs about 0.3 s a GiB, so memory that is locked is kept, locked, for the next taker of the same size.
Without locking there is nothing to keep: memory goes back to the system when it is given.

Invariants:
1. budget.used = memory in use + idle + retiring + stranded, in whole pages, charged before memory is committed.
2. Idle memory serves before new memory is taken, and goes before a charge is refused: it never costs anybody room.
3. Memory that a tensor outside still views is not handed out again; where it has to go, its pages stay with the viewer.
4. Memory is unregistered before its pages go, and only after the transfers registered with `busy` are done.
5. What is handed out again holds what it held, unless zeros are asked for.
Not thread-safe: it is called where the store is. Leaves to whom: what may be evicted to make room is the store's.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable

from tiered.device.memory import Memory, page_ceil
from tiered.device.ticket import Event, settled
from tiered.store.tier import Budget

Lock = Callable[[Memory], None]
"""Page-locks a committed memory, or undoes that; `device.base.Device.pin` and `unpin`."""


class Arena:
    """See the file's contract."""

    def __init__(self, budget: Budget, pin: Lock | None, unpin: Lock | None) -> None:
        """`pin`, `unpin`: of a device that gains by page-locked memory; None of any other."""
        self._budget = budget
        self._pin: Lock = pin or _leave_as_it_is
        self._unpin: Lock = unpin or _leave_as_it_is
        self._keeps = pin is not None
        self._idle: collections.deque[Memory] = collections.deque()  # oldest first, and so is what retires
        self._retiring: collections.deque[tuple[Memory, Event]] = collections.deque()

    # --- the account ---

    @property
    def idle(self) -> int:
        """Bytes that are kept for a next taker."""
        return sum(page_ceil(memory.nbytes) for memory in self._idle if not memory.stranded)

    @property
    def retiring(self) -> int:
        """Bytes that have been retired and not been given yet."""
        return sum(page_ceil(memory.nbytes) for memory, _ in self._retiring)

    @property
    def in_transit(self) -> int:
        """How many retired memories a copy still uses."""
        return sum(not _over(event) for _, event in self._retiring)

    # --- memory ---

    def take(self, nbytes: int, what: str, *, zeros: bool = False) -> Memory:
        """Committed memory for `what`, charged, and page-locked where the device locks. Its contents are undefined
        without `zeros`. Raises BudgetError, or MemoryError where the system has none, with nothing kept."""
        self.reclaim(nbytes)
        while (kept := self._fitting(nbytes)) is not None:
            kept.quiet()
            self._idle.remove(kept)
            if kept.stranded:
                self.reclaim(nbytes)
                continue
            if zeros:
                ctypes.memset(kept.address, 0, nbytes)
            return kept
        self._budget.charge(page_ceil(nbytes), what)
        try:
            return self._fresh(nbytes)
        except BaseException:
            self._budget.refund(page_ceil(nbytes))
            raise

    def give(self, memory: Memory) -> None:
        """Take memory back from whoever took it; no transfer may use it but those registered with `busy`."""
        self._put(memory)
        self.poll()

    def retire(self, memory: Memory, event: Event) -> None:
        """`give` once `event` is done, failed or not, without waiting for it now."""
        self._retiring.append((memory, event))
        self.poll()

    def exchange(self, memory: Memory) -> Memory:
        """Other memory of the same size, zeros, for memory that somebody views and keeps; the charge passes over."""
        memory.quiet()
        other = self._fresh(memory.nbytes)
        self._unpin(memory)
        return other

    # --- giving back ---

    def poll(self) -> None:
        """Take back what retired and is over."""
        over = [each for each in self._retiring if _over(each[1])]
        for each in over:
            self._put(each[0])  # first, as it may wait: an interrupt loses nothing
            self._retiring.remove(each)

    def trim(self, need: int) -> None:
        """Give idle memory back to the system, oldest first, until the budget has `need` bytes free or none is idle."""
        while self._idle and self._budget.free < need:
            self._drop_oldest()

    def reclaim(self, nbytes: int) -> bool:
        """Whether `nbytes` can be taken; where they cannot, idle memory is given back and then retired memory waited
        for, as far as that takes, oldest first."""
        self.poll()
        while self._budget.free < page_ceil(nbytes) and self._fitting(nbytes) is None:
            if self._idle:
                self._drop_oldest()
            elif self._retiring:
                self._await_oldest()
            else:
                return False
        return True

    def close(self) -> None:
        """Wait for what retires and give back all that is not in use; what is given later goes at once. Idempotent."""
        self._keeps = False
        while self._retiring:
            self._await_oldest()
        while self._idle:
            self._drop_oldest()

    # --- inside ---

    def _fresh(self, nbytes: int) -> Memory:
        memory = Memory(nbytes, committed=True)
        try:
            if nbytes:
                self._pin(memory)
        except BaseException:
            self._unpin(memory)
            memory.decommit()
            raise
        return memory

    def _fitting(self, nbytes: int) -> Memory | None:
        """The oldest idle memory of that size that nobody views: the one whose last transfers are most likely over."""
        return next((m for m in self._idle if m.nbytes == nbytes and not m.stranded and not m.exported()), None)

    def _put(self, memory: Memory) -> None:
        if self._keeps and memory.nbytes:
            self._idle.append(memory)  # also what is viewed: a collective's worker lets go a moment late
        else:
            self._drop(memory)

    def _await_oldest(self) -> None:
        memory, event = self._retiring[0]
        settled(event)
        self._put(memory)
        self._retiring.popleft()

    def _drop_oldest(self) -> None:
        self._idle[0].quiet()  # before it leaves the queue: an interrupt while waiting loses nothing
        self._drop(self._idle.popleft())

    def _drop(self, memory: Memory) -> None:
        memory.quiet()
        if memory.stranded:
            return
        self._unpin(memory)
        if not memory.exported():
            memory.decommit()
        self._budget.refund(page_ceil(memory.nbytes))


def _over(event: Event) -> bool:
    try:
        return event.done()
    except Exception:  # a device that has failed for good answers nothing, and copies nothing
        return True


def _leave_as_it_is(memory: Memory) -> None:
    return None
