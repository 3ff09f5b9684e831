"""Plans fit the budget and never give up what is used sooner; random cases against the rules spelt out."""

import itertools
import random
from collections.abc import Sequence

import pytest

from tiered.schedule import plan


def first_uses(upcoming: Sequence[int]) -> dict[int, int]:
    return {page: position for position, page in enumerate(upcoming)}


def test_the_window_is_the_distinct_pages_next_that_fit_together() -> None:
    sizes = {0: 10, 1: 10, 2: 10, 3: 10}
    assert plan.window([0, 0, 1, 0, 2, 3], sizes, 30)[0] == [0, 1, 2]
    assert plan.window([0, 1], sizes, 1000)[0] == [0, 1]
    assert plan.window([], sizes, 1000)[0] == []
    assert plan.window([0], sizes, 9)[0] == []


def test_the_window_of_an_endless_cycle_ends() -> None:
    assert plan.window(itertools.cycle([0, 1, 2]), {0: 1, 1: 1, 2: 1, 3: 1}, 1000)[0] == [0, 1, 2]


def test_a_page_is_fetched_ahead_into_free_room_without_any_eviction() -> None:
    assert plan.ahead([1, 2], {0: 10, 1: 10, 2: 10}, {0}, [0], 20) == plan.Plan((), (1, 2))


def test_the_page_used_furthest_in_the_future_goes_and_one_never_used_goes_first() -> None:
    sizes = dict.fromkeys(range(5), 10)
    assert plan.ahead([1, 0, 2, 3], sizes, {0, 3, 4}, [0, 3, 4], 0) == plan.Plan((4, 3), (1, 2))
    assert plan.room(10, [1, 0, 2], sizes, [0, 2], 0) == plan.Plan((2,))


def test_nothing_is_fetched_past_a_page_that_does_not_fit() -> None:
    """What is used first comes first: a small page further on must not take its room."""
    sizes = {0: 10, 1: 50, 2: 5}
    assert plan.ahead([1, 2], sizes, {0}, [], 10).fetch == ()


def test_a_cycle_one_page_too_long_keeps_all_but_two_pages_still() -> None:
    """Least recently used would evict every page just before its use; the furthest next use does not."""
    sizes = dict.fromkeys(range(4), 1)
    present, moved = {0, 1, 2}, 0
    for now in itertools.islice(itertools.cycle(range(4)), 3, 43):
        upcoming = [(now + k) % 4 for k in range(4)]
        if now not in present:
            (gone,) = plan.room(1, upcoming, sizes, sorted(present), 0).evict
            present = present - {gone} | {now}
            moved += 1
    assert moved <= 14, "furthest next use moves every third page at most"


@pytest.mark.parametrize("seed", range(5))
def test_random_plans_ahead_fit_and_never_evict_what_is_used_before_the_page_fetched(seed: int) -> None:
    draw = random.Random(seed)
    fetched = evicted = 0
    for _ in range(300):
        count = draw.randint(1, 9)
        sizes = {page: draw.randint(1, 9) for page in range(count)}
        present = {page for page in sizes if draw.random() < 0.6}
        pinned = {page for page in present if draw.random() < 0.3}
        evictable = draw.sample(sorted(present - pinned), len(present - pinned))
        upcoming = draw.sample(range(count), draw.randint(0, count))
        free = draw.randint(0, 12)
        actions = plan.ahead(upcoming, sizes, present, evictable, free)
        order = first_uses(upcoming)
        assert len(set(actions.evict)) == len(actions.evict)
        assert set(actions.evict) <= set(evictable)
        assert set(actions.fetch) <= set(upcoming) - present
        assert list(actions.fetch) == sorted(actions.fetch, key=order.__getitem__), "out of order of use"
        left, going, came = free, list(actions.evict), []
        for page in (page for page in upcoming if page not in present):
            while left < sizes[page] and going:
                gone = going.pop(0)
                assert order.get(gone, len(order)) > order[page], "what is used sooner was given up"
                left += sizes[gone]
            if left < sizes[page]:
                break
            left -= sizes[page]
            came.append(page)
        assert (came, going) == (list(actions.fetch), []), "more fetched than fits, or more evicted than is needed"
        fetched += len(actions.fetch)
        evicted += len(actions.evict)
    assert fetched > 50 < evicted


@pytest.mark.parametrize("seed", range(5))
def test_random_room_is_made_by_the_fewest_of_the_furthest(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        sizes = {page: draw.randint(1, 9) for page in range(8)}
        upcoming = draw.sample(range(8), draw.randint(0, 8))
        evictable = draw.sample(range(8), draw.randint(0, 8))
        need, free = draw.randint(1, 30), draw.randint(0, 20)
        actions = plan.room(need, upcoming, sizes, evictable, free)
        order = first_uses(upcoming)
        assert actions.fetch == ()
        assert len(set(actions.evict)) == len(actions.evict)
        assert set(actions.evict) <= set(evictable)
        if sum(sizes[page] for page in evictable) + free >= need:
            assert free + sum(sizes[page] for page in actions.evict) >= need
            assert not actions.evict or free + sum(sizes[page] for page in actions.evict[:-1]) < need
        else:
            assert set(actions.evict) == set(evictable), "all that may go goes, before the error"
        kept = set(evictable) - set(actions.evict)
        for gone, stays in itertools.product(actions.evict, kept):
            assert order.get(gone, len(order)) >= order.get(stays, len(order))


def fewest_fetches(order: tuple[int, ...], capacity: int, present: frozenset[int] = frozenset()) -> int:
    """The least number of fetches that any choice of evictions needs for pages of size 1: all of them are tried."""
    if not order:
        return 0
    now, rest = order[0], order[1:]
    if now in present:
        return fewest_fetches(rest, capacity, present)
    if len(present) < capacity:
        return 1 + fewest_fetches(rest, capacity, present | {now})
    return 1 + min(fewest_fetches(rest, capacity, present - {gone} | {now}) for gone in present)


@pytest.mark.parametrize("seed", range(30))
def test_with_the_future_known_no_choice_of_evictions_needs_fewer_fetches(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(1, 3)
    order = tuple(draw.randrange(5) for _ in range(11))
    present: frozenset[int] = frozenset()
    fetches = 0
    for position, now in enumerate(order):
        if now in present:
            continue
        upcoming = list(dict.fromkeys(order[position:]))
        actions = plan.room(1, upcoming, dict.fromkeys(range(5), 1), sorted(present), capacity - len(present))
        present = present - set(actions.evict) | {now}
        fetches += 1
    assert fetches == fewest_fetches(order, capacity)
