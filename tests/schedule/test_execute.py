"""The executor on pages that only count: what is used is present, nothing pinned goes, the budget holds."""

import random
from collections.abc import Iterable

import pytest

from tiered.errors import BudgetError
from tiered.schedule.execute import Executor
from tiered.schedule.trace import Phase
from tiered.stats import Meter
from tiered.store.tier import Budget, Tier

F, B, E = Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION


class FakePage:
    """A page of `nbytes` that arrives when it is waited for; remembers what was done to it."""

    def __init__(self, index: int, nbytes: int, budget: Budget) -> None:
        self.index = index
        self.name = f"page {index}"
        self.nbytes = nbytes
        self.pins = 0
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


def test_pages_that_fit_together_are_fetched_once_and_stay() -> None:
    run = Run([10] * 6, 60)
    for _ in range(5):
        run.step()
    assert run.fetches == 6
    assert run.budget.peak == 60


def test_in_a_known_cycle_every_use_is_a_hit() -> None:
    run = Run([10] * 8, 40)
    run.step()
    run.step()
    before = run.meter.uses, run.meter.hits
    for _ in range(5):
        run.step()
    assert run.meter.uses - before[0] == 80
    assert run.meter.hits - before[1] == 80


def test_what_a_step_makes_stale_is_not_fetched_before_it_but_right_after_it() -> None:
    run = Run([10] * 8, 40, stale=True)
    for _ in range(3):
        run.step()
        for page in run.pages:  # as a step does: every copy is stale
            if page.present:
                run.executor.settle()
                page.drop()
        before = run.fetches
        run.executor.stepped()
        ahead = run.fetches - before
    assert ahead == 4, "the room was not filled with what the next forward needs"
    assert run.pages[0].present
    before = run.fetches
    run.step()
    assert run.fetches - before <= 12, "8 in forward and the 4 that had gone in backward, none of the next step"


def test_steps_with_nothing_between_them_are_survived() -> None:
    run = Run([10] * 3, 40)
    for _ in range(4):
        run.executor.stepped()
    run.step()


def test_when_something_else_grows_pages_go_until_both_fit() -> None:
    run = Run([10] * 6, 60)
    for _ in range(3):
        run.step()
    assert run.budget.used == 60
    run.others = 35
    run.use(0)
    assert run.budget.used <= 25
    run.step()
    assert run.budget.used <= 25


def test_a_page_that_is_removed_is_never_asked_for_again() -> None:
    run = Run([10] * 4, 40)
    run.step()
    run.executor.remove(run.pages[2])
    run.pages[2].nbytes = 0
    before = run.pages[2].fetches
    for _ in range(3):
        run.step()
    assert run.pages[2].fetches == before


def test_evaluation_is_predicted_beside_training() -> None:
    run = Run([10] * 8, 40)
    for _ in range(3):
        run.step()
        for index in range(8):
            run.use(index, E)
    before = run.meter.uses - run.meter.hits
    for _ in range(3):
        run.step()
        for index in range(8):
            run.use(index, E)
    assert run.meter.uses - run.meter.hits - before <= 3, "at most the turn from one to the other is a miss"


def test_a_changed_order_is_only_slower_and_learnt_again() -> None:
    run = Run([10] * 8, 30)
    run.step()
    run.step()
    for _ in range(2):
        for index in (0, 2, 4, 6, 1, 3, 5, 7):
            run.use(index)
    before = run.meter.uses - run.meter.hits
    for _ in range(3):
        for index in (0, 2, 4, 6, 1, 3, 5, 7):
            run.use(index)
    assert run.meter.uses - run.meter.hits == before


def test_a_page_too_large_beside_what_is_pinned_is_a_budget_error_that_changes_nothing_pinned() -> None:
    run = Run([10, 10, 15], 30)
    run.pages[0].pins = run.pages[1].pins = 1
    run.use(0)
    run.use(1)
    with pytest.raises(BudgetError, match="page 2"):
        run.use(2)
    assert run.pages[0].present
    assert run.pages[1].present
    run.pages[1].pins = 0
    run.use(2)
    assert not run.pages[1].present


def test_a_page_larger_than_the_whole_budget_is_a_budget_error() -> None:
    run = Run([10, 50], 30)
    with pytest.raises(BudgetError, match="page 1"):
        run.use(1)
    run.use(0)


def test_a_page_that_never_moves_is_left_alone() -> None:
    run = Run([0, 10], 10)
    for _ in range(3):
        run.step(touch=True)
    assert run.pages[0].fetches == 0
    assert run.meter.uses == run.pages[1].fetches + run.meter.hits


def test_touching_the_page_used_last_again_costs_and_counts_nothing() -> None:
    run = Run([10] * 3, 30)
    run.use(1)
    uses = run.meter.uses
    for _ in range(5):
        run.executor.touch(run.pages[1], B)
    assert run.meter.uses == uses
    run.pages[1].drop()
    run.executor.touch(run.pages[1], B)
    assert run.pages[1].arrived


def test_a_page_fetched_ahead_that_fails_raises_when_it_is_used_and_not_before() -> None:
    run = Run([10] * 4, 40)
    run.step()
    run.step()
    for page in run.pages:
        if page.present:
            page.drop()
    run.pages[2].broken = OSError("the drive is gone")
    run.use(0)
    run.use(1)
    with pytest.raises(OSError, match="the drive is gone"):
        run.use(2)
    run.pages[2].broken = None
    run.use(2)


def test_no_room_for_a_hint_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run([10] * 4, 40)
    run.step()
    run.step()
    for page in run.pages:
        if page.present:
            page.drop()

    def full(*, hint: bool = False) -> None:
        raise BudgetError("no staging to spare")

    monkeypatch.setattr(run.pages[1], "begin_fetch", full)
    run.use(0)
    assert run.pages[0].arrived
    with pytest.raises(BudgetError):
        run.use(1)


@pytest.mark.parametrize("seed", range(4))
def test_random_use_keeps_every_promise(seed: int) -> None:
    """Sizes, pins, phases and orders at random; the fake pages and the budget check each act."""
    draw = random.Random(seed)
    capacity = 40
    run = Run(draw.sample([0, 1, 5, 5, 9, 9, 9, 13, 13], 9), capacity)
    order = draw.sample(range(9), 9)
    refused = 0
    for number in range(600):
        index = order[number % 9] if draw.random() < 0.8 else draw.randrange(9)
        page = run.pages[index]
        if draw.random() < 0.1 and page.present:
            page.pins = 1
        pinned = sum(p.nbytes for p in run.pages if p.pins and p is not page)
        try:
            run.use(index, draw.choice([F, F, B, E]))
        except BudgetError:
            assert pinned + page.nbytes > capacity, "there was room enough"
            refused += 1
        assert run.budget.used == sum(p.nbytes for p in run.pages if p.present) <= capacity
        if draw.random() < 0.3:
            draw.choice(run.pages).pins = 0
    assert run.fetches > 30
    assert refused < 300
