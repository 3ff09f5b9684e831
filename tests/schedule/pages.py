"""Pages that only count, and an executor over them: the budget and every page check what is done to them."""

from collections.abc import Iterable

from tiered.schedule.execute import Executor
from tiered.schedule.trace import Phase
from tiered.stats import Meter
from tiered.store.tier import Budget, Tier

F, B = Phase.FORWARD, Phase.BACKWARD


class FakePage:
    """A page of `nbytes` that arrives when it is waited for; remembers what was done to it."""

    def __init__(self, index: int, nbytes: int, budget: Budget) -> None:
        self.index = index
        self.name = f"page {index}"
        self.nbytes = nbytes
        self.pins = 0
        self.promised = False
        self.fetches = 0
        self.broken: Exception | None = None
        self._budget = budget
        self.present = False
        self.arrived = False

    @property
    def evictable(self) -> bool:
        return self.present and not self.pins

    def begin_fetch(self, *, hint: bool = False) -> None:
        assert not self.present, f"page {self.index} is fetched twice"
        self._budget.charge(self.nbytes, f"page {self.index}")
        self.present, self.arrived = True, False
        self.fetches += 1

    def wait(self) -> None:
        assert self.present, f"page {self.index} is waited for while it is away"
        if self.broken is not None:
            self._go()
            raise self.broken
        self.arrived = True

    def poll(self) -> bool:
        return self.arrived or not self.present

    def drop(self) -> None:
        assert self.present
        assert not self.pins, f"page {self.index} is dropped while it is pinned"
        self._go()

    def _go(self) -> None:
        self._budget.refund(self.nbytes)
        self.present = self.arrived = False


class Run:
    """An executor over fake pages of the given sizes."""

    def __init__(self, sizes: Iterable[int], capacity: int, *, stale: bool = False) -> None:
        self.budget = Budget(Tier.DEVICE, capacity)
        self.pages = [FakePage(index, size, self.budget) for index, size in enumerate(sizes)]
        self.meter = Meter()
        self.looked = 0
        self.others = 0  # bytes that something else takes of the same memory
        self.executor = Executor(self.pages, self, self.meter, stale=stale)

    def capacity(self) -> int:
        return self.budget.limit - self.others

    def free(self) -> int:
        return self.budget.free - self.others

    def observe(self) -> None:
        self.looked += 1

    def use(self, index: int, phase: Phase = F) -> None:
        """One use as a group makes it: pinned from before until after."""
        page = self.pages[index]
        page.pins += 1
        try:
            self.executor.use(page, phase)
            assert not page.nbytes or (page.present and page.arrived), f"page {index} is not there"
        finally:
            page.pins -= 1

    def step(self, touch: bool = False) -> None:
        for index in range(len(self.pages)):
            self.use(index)
        for index in reversed(range(len(self.pages))):
            self.executor.touch(self.pages[index], B) if touch else self.use(index, B)

    @property
    def fetches(self) -> int:
        return sum(page.fetches for page in self.pages)
