"""The plan: which pages to evict and which to fetch, given what is expected next. Pure data, pure functions.

Method: furthest next use is evicted (Belady, IBM Systems Journal 5(2), 1966); a page is fetched ahead only if it fits
without evicting something that is used before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Pages to evict, then pages to fetch, each in order."""

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


def window(future: Iterable[int], sizes: Mapping[int, int], capacity: int) -> tuple[list[int], list[int]]:
    """The distinct pages used next, in order of first use, as many as `capacity` holds; and the next one, if seen."""
    seen: dict[int, None] = {}
    total = repeats = 0
    for page in future:
        if page in seen:
            repeats += 1
            if repeats > 2 * len(sizes):  # a cycle that holds every page there is to see
                break
            continue
        total += sizes[page]
        if total > capacity:
            return list(seen), [page]
        seen[page] = None
    return list(seen), []


def ahead(
    upcoming: Sequence[int],
    sizes: Mapping[int, int],
    present: Collection[int],
    evictable: Sequence[int],
    free: int,
    soon: int | None = None,
    later: Sequence[int] = (),
) -> Plan:
    """Fetches for the pages of `upcoming` that are away, and the evictions that make room for them.

    present: pages in memory or on their way. evictable: those that may go, least recently used first. free: bytes free.
    soon: how many bytes of `upcoming` something may be evicted for (None: all of it). The later that happens, the more
    is kept: in an order that is a cycle all but so much stays, where room made for the whole window would have every
    page go and come. later: what is used after `upcoming`, as far as it is known.
    """
    rank = {page: position for position, page in enumerate((*upcoming, *later))}
    going = sorted(evictable, key=lambda page: rank.get(page, len(rank)))  # stable: the oldest of the unknown ...
    unknown = [page for page in going if page not in rank]
    going = [page for page in going if page in rank] + unknown[::-1]  # ... is popped first
    evict: list[int] = []
    fetch: list[int] = []
    before = 0  # bytes of `upcoming` up to the page
    for page in upcoming:
        near = soon is None or before <= soon
        before += sizes[page]
        if page in present:
            continue
        while near and free < sizes[page] and going and rank.get(going[-1], len(rank)) > rank[page]:
            victim = going.pop()
            evict.append(victim)
            free += sizes[victim]
        if free < sizes[page]:
            break
        free -= sizes[page]
        fetch.append(page)
    return Plan(tuple(evict), tuple(fetch))


def room(need: int, upcoming: Sequence[int], sizes: Mapping[int, int], evictable: Sequence[int], free: int) -> Plan:
    """The evictions that free `need` bytes for a page wanted now; all that may go where even that is too little."""
    rank = {page: position for position, page in enumerate(upcoming)}
    order = sorted(evictable, key=lambda page: -rank.get(page, len(rank)))
    evict: list[int] = []
    for page in order:
        if free >= need:
            break
        evict.append(page)
        free += sizes[page]
    return Plan(tuple(evict))
