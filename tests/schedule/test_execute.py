"""The executor on pages that only count: what is used is present, nothing pinned goes, the budget holds."""

import random

import pytest
from schedule.pages import Run

from tiered.errors import BudgetError
from tiered.schedule.trace import Phase

F, B, E = Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION


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


def test_a_page_that_an_update_under_way_hands_over_counts_as_foreseen() -> None:
    run = Run([10] * 3, 10)
    run.pages[1].promised = True
    run.use(0)
    run.use(1)
    assert (run.meter.uses, run.meter.hits) == (2, 1)


def test_a_hint_that_finds_no_memory_is_tried_again_at_the_next_use(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run([10] * 400, 2000)
    for _ in range(3):
        run.step()
    run.executor.clear()
    fetch, tried = type(run.pages[0]).begin_fetch, 0

    def scarce(page: object, *, hint: bool = False) -> None:
        nonlocal tried
        tried += hint
        if hint and tried % 4:
            raise MemoryError
        fetch(page, hint=hint)  # type: ignore[arg-type]

    monkeypatch.setattr(type(run.pages[0]), "begin_fetch", scarce)
    run.executor.stepped()
    for index in range(100):
        run.use(index)
    assert tried >= 100


def test_a_page_used_last_stays_where_something_else_has_grown() -> None:
    run = Run([10] * 4, 40)
    run.step()
    run.others = 35
    run.executor.touch(run.pages[3], B)
    assert run.pages[3].present
    assert run.budget.used == 10


@pytest.mark.parametrize("delivered", [0, 7, 100])
def test_fetches_that_have_arrived_are_completed_whichever_came_first(delivered: int) -> None:
    run = Run([10] * 6, 60)
    for _ in range(2):
        run.step()
        run.executor.clear()
        run.executor.stepped()
    assert run.executor._coming.keys() == set(range(6))
    for page in run.pages:
        page.arrived = page.index != delivered
    run.executor.poll()
    assert run.executor._coming.keys() == {delivered} & set(range(6))


@pytest.mark.parametrize(("pages", "fit", "most"), [(12, 10, 0.26), (12, 6, 0.76), (8, 6, 0.63)])
def test_in_an_order_that_is_a_cycle_what_fits_stays_and_only_the_rest_moves(pages: int, fit: int, most: float) -> None:
    """Least recently used would have every page go just before it comes again."""
    run = Run([10] * pages, fit * 10)
    for _ in range(4):
        for index in range(pages):
            run.use(index)
    fetches, uses, hits = run.fetches, run.meter.uses, run.meter.hits
    for _ in range(5):
        for index in range(pages):
            run.use(index)
    assert run.meter.hits - hits == run.meter.uses - uses
    assert (run.fetches - fetches) / (run.meter.uses - uses) <= most
