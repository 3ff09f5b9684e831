"""What planning looks at does not grow with the number of pages, whatever is used in which order."""

import random
from collections.abc import Callable

import pytest
from schedule.pages import Run

from tiered.schedule.outlook import RATE, Outlook
from tiered.schedule.trace import Phase, Use

F, B, STEP = Phase.FORWARD, Phase.BACKWARD, Use(-1, Phase.STEP)
PAGES = 600
DRAW = random.Random(3)
ORDERS: dict[str, Callable[[], list[int]]] = {
    "stable": lambda: list(range(PAGES)),
    "some left out": lambda: [page for page in range(PAGES) if DRAW.random() < 0.8],
    "at random": lambda: DRAW.sample(range(PAGES), PAGES),
    "one of two": lambda: list(range(PAGES))[:: DRAW.choice([1, -1])],
}


def outlook_of(run: Run) -> Outlook:
    return run.executor._outlook


@pytest.mark.parametrize("fitting", [3, PAGES // 2, PAGES])
@pytest.mark.parametrize("order", ORDERS)
def test_a_use_looks_at_a_bounded_number_of_uses(order: str, fitting: int) -> None:
    run = Run([1] * PAGES, fitting)
    for number in range(5):
        pages = ORDERS[order]()
        for index in pages:
            run.use(index)
        for index in reversed(pages):
            run.use(index, B)
        run.executor.stepped()
        if number == 1:
            before = run.meter.uses, outlook_of(run).looked
    uses, looked = run.meter.uses - before[0], outlook_of(run).looked - before[1]
    assert looked < 2.5 * RATE * uses


def test_where_no_hint_finds_memory_misses_do_not_look_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run([1] * PAGES, PAGES // 2)
    fetch = type(run.pages[0]).begin_fetch

    def none_to_spare(page: object, *, hint: bool = False) -> None:
        if hint:
            raise MemoryError
        fetch(page, hint=hint)  # type: ignore[arg-type]

    monkeypatch.setattr(type(run.pages[0]), "begin_fetch", none_to_spare)
    for _ in range(3):
        run.step()
    before = run.meter.uses, run.meter.hits, outlook_of(run).looked
    run.step()
    uses = run.meter.uses - before[0]
    assert outlook_of(run).looked - before[2] < 2 * RATE * uses
    assert run.meter.hits - before[1] >= 0.45 * uses, "those used furthest in the future have to go, not the next ones"


def test_a_look_is_due_at_every_use_where_few_pages_fit() -> None:
    outlook = Outlook(dict.fromkeys(range(40), 10), stale=False)
    uses = [*(Use(page, F) for page in range(40)), *(Use(page, B) for page in reversed(range(40))), STEP]
    for use in uses * 2:
        outlook.observe(use)
    for use in uses[:-1]:
        outlook.observe(use)
        assert outlook.due
        outlook.look(30)


def test_a_look_is_due_after_a_step_and_at_what_was_not_expected() -> None:
    outlook = Outlook(dict.fromkeys(range(PAGES), 1), stale=False)
    uses = [*(Use(page, F) for page in range(PAGES)), *(Use(page, B) for page in reversed(range(PAGES))), STEP]
    for use in uses * 3:
        outlook.observe(use)
    assert outlook.due
    outlook.look(PAGES // 2)
    outlook.observe(uses[0])
    assert not outlook.due
    outlook.observe(uses[7])
    assert outlook.due
    assert outlook.look(3) == [8, 9, 10]


def test_pages_behind_a_step_that_makes_them_stale_are_not_seen() -> None:
    for stale, seen in ((True, [1]), (False, [1, 0])):
        outlook = Outlook({0: 1, 1: 1, 2: 1}, stale=stale)
        for use in [Use(0, F), Use(1, F), STEP] * 3 + [Use(0, F)]:
            outlook.observe(use)
        assert outlook.look(10) == seen


def test_steps_with_nothing_between_them_and_what_was_forgotten_show_nothing() -> None:
    outlook = Outlook({0: 1}, stale=False)
    for _ in range(5):
        outlook.observe(STEP)
    assert outlook.look(10) == []
    for _ in range(5):
        outlook.observe(Use(0, F))
    assert outlook.look(10) == [0]
    outlook.forget()
    assert outlook.look(10) == []
