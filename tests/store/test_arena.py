"""The arena: every byte of host memory is charged while it is there, locked memory is kept, and room is never lost."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from tiered.device.memory import Memory, page_ceil
from tiered.errors import BudgetError
from tiered.store.arena import Arena
from tiered.store.tier import Budget, Tier

PAGE = 4096


class Copy:
    """An event that is done when it is waited for, or said to be; it may fail, then or when it is asked."""

    def __init__(self, error: Exception | None = None, *, mute: bool = False) -> None:
        self.reached = False
        self.waited = False
        self.error = error
        self.mute = mute

    def done(self) -> bool:
        if self.mute:
            raise RuntimeError("the device has failed")
        return self.reached

    def wait(self, timeout: float | None = None) -> None:
        self.waited = self.reached = True
        if self.error is not None:
            raise self.error


class Locks:
    """What a device has locked, in the order of the calls; complains about calls that a driver would refuse."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.calls: list[tuple[str, int]] = []

    def pin(self, memory: Memory) -> None:
        assert memory.committed
        assert memory.address not in self.locked
        self.locked.add(memory.address)
        self.calls.append(("pin", memory.address))

    def unpin(self, memory: Memory) -> None:
        assert memory.committed
        self.locked.discard(memory.address)
        self.calls.append(("unpin", memory.address))


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Bytes with pages, by address, of every memory that this test commits."""
    pages: dict[int, int] = {}
    commit, decommit = Memory.commit, Memory.decommit

    def counted_commit(self: Memory) -> None:
        commit(self)
        pages[self.address] = page_ceil(self.nbytes)

    def counted_decommit(self: Memory) -> None:
        decommit(self)
        pages.pop(self.address, None)

    monkeypatch.setattr(Memory, "commit", counted_commit)
    monkeypatch.setattr(Memory, "decommit", counted_decommit)
    yield pages
    pages.clear()


def plain(limit: int) -> tuple[Arena, Budget]:
    """An arena without page-locking."""
    budget = Budget(Tier.HOST, limit)
    return Arena(budget, None, None), budget


def keeping(limit: int, locks: Locks) -> tuple[Arena, Budget]:
    """An arena that locks what it takes."""
    budget = Budget(Tier.HOST, limit)
    return Arena(budget, locks.pin, locks.unpin), budget


# --- without page-locking ---


def test_without_locking_memory_goes_back_at_once_and_serves_nobody_again() -> None:
    arena, budget = plain(8 * PAGE)
    memory = arena.take(PAGE + 1, "a test")
    assert (budget.used, memory.committed) == (2 * PAGE, True)
    arena.give(memory)
    assert (budget.used, memory.committed, arena.idle) == (0, False, 0)
    assert arena.take(PAGE + 1, "a test") is not memory


def test_without_locking_pages_that_are_viewed_stay_with_the_viewer_uncharged() -> None:
    arena, budget = plain(8 * PAGE)
    memory = arena.take(PAGE, "a test")
    view = memory.view(torch.uint8)
    view.fill_(3)
    arena.give(memory)
    assert (budget.used, arena.idle) == (0, 0)
    assert view.eq(3).all()


# --- taking ---


@pytest.mark.parametrize("nbytes", [8 * PAGE + 1, 1 << 50])
def test_what_does_not_fit_is_refused_before_anything_is_mapped(
    locks: Locks, mapped: dict[int, int], nbytes: int
) -> None:
    arena, budget = keeping(8 * PAGE, locks)
    with pytest.raises(BudgetError, match="a test needs"):
        arena.take(nbytes, "a test")
    assert (mapped, locks.calls, budget.used) == ({}, [], 0)


@pytest.mark.parametrize("error", [MemoryError("no pages"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", ["commit", "pin"])
def test_memory_that_cannot_be_committed_or_locked_is_not_kept(
    locks: Locks, mapped: dict[int, int], monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    budget = Budget(Tier.HOST, 8 * PAGE)
    taken: list[Memory] = []

    def fail(memory: Memory) -> None:
        taken.append(memory)
        raise error

    arena = Arena(budget, fail if stage == "pin" else locks.pin, locks.unpin)
    if stage == "commit":
        monkeypatch.setattr(Memory, "commit", fail)
    with pytest.raises(type(error)):
        arena.take(PAGE, "a test")
    assert (mapped, locks.locked, budget.used, arena.idle) == ({}, set(), 0, 0)
    assert not taken[0].committed


def test_memory_without_bytes_is_neither_locked_nor_charged_nor_kept(locks: Locks) -> None:
    arena, budget = keeping(PAGE, locks)
    memory = arena.take(0, "nothing")
    assert (locks.locked, budget.used, memory.nbytes) == (set(), 0, 0)
    arena.give(memory)
    assert (arena.idle, memory.committed) == (0, False)


# --- idle memory ---


def test_locked_memory_is_kept_charged_and_serves_the_next_taker_of_its_size_without_locking_again(
    locks: Locks,
) -> None:
    arena, budget = keeping(8 * PAGE, locks)
    memory = arena.take(2 * PAGE, "a test")
    memory.bytes.fill_(7)
    arena.give(memory)
    assert (budget.used, arena.idle, memory.committed) == (2 * PAGE, 2 * PAGE, True)
    again = arena.take(2 * PAGE, "a test")
    assert again is memory
    assert (budget.used, arena.idle, locks.calls) == (2 * PAGE, 0, [("pin", memory.address)])
    assert again.bytes.eq(7).all()


def test_zeros_are_zeros_also_in_memory_that_was_used(locks: Locks) -> None:
    arena, _ = keeping(8 * PAGE, locks)
    for _ in range(3):
        memory = arena.take(PAGE + 100, "a test", zeros=True)
        assert not memory.bytes.any()
        memory.bytes.fill_(7)
        arena.give(memory)
    assert len(locks.calls) == 1


def test_idle_memory_of_another_size_is_left_idle_while_there_is_room(locks: Locks) -> None:
    arena, budget = keeping(8 * PAGE, locks)
    memory = arena.take(PAGE, "a test")
    arena.give(memory)
    other = arena.take(3 * PAGE, "a test")
    assert other is not memory
    assert (budget.used, arena.idle) == (4 * PAGE, PAGE)


def test_idle_memory_goes_before_a_charge_is_refused_the_oldest_first_and_no_more_than_needed(
    locks: Locks, mapped: dict[int, int]
) -> None:
    arena, budget = keeping(6 * PAGE, locks)
    memories = [arena.take(nbytes, "a test") for nbytes in (PAGE, 2 * PAGE, 3 * PAGE)]
    for memory in memories:
        arena.give(memory)
    taken = arena.take(3 * PAGE - 1, "a test")  # another size, so none of them serves
    assert [memory.committed for memory in memories] == [False, False, True]
    assert locks.locked == {memories[2].address, taken.address} == set(mapped)
    assert (budget.used, budget.peak) == (6 * PAGE, 6 * PAGE)


def test_trim_frees_what_is_needed_and_stops_where_nothing_is_idle(locks: Locks) -> None:
    arena, budget = keeping(4 * PAGE, locks)
    memories = [arena.take(PAGE, "a test") for _ in range(4)]
    for memory in memories[:3]:
        arena.give(memory)
    arena.trim(2 * PAGE)
    assert ([m.committed for m in memories], budget.free) == ([False, False, True, True], 2 * PAGE)
    arena.trim(4 * PAGE)
    assert (arena.idle, budget.free, memories[3].committed) == (0, 3 * PAGE, True)


def test_memory_that_is_viewed_waits_until_the_view_is_gone_before_it_serves_again(locks: Locks) -> None:
    arena, _ = keeping(8 * PAGE, locks)
    memory = arena.take(PAGE, "a test")
    view = memory.view(torch.uint8)
    arena.give(memory)
    other = arena.take(PAGE, "a test")
    assert other is not memory
    del view
    assert arena.take(PAGE, "a test") is memory


def test_viewed_memory_that_has_to_go_is_unlocked_and_its_pages_stay_with_the_viewer(locks: Locks) -> None:
    arena, budget = keeping(2 * PAGE, locks)
    memory = arena.take(2 * PAGE, "a test")
    view = memory.view(torch.uint8)
    view.fill_(9)
    arena.give(memory)
    other = arena.take(PAGE, "a test")
    assert (locks.locked, budget.used) == ({other.address}, PAGE)
    assert view.eq(9).all()


def test_what_is_exchanged_leaves_the_viewer_its_pages_and_moves_lock_and_charge(locks: Locks) -> None:
    arena, budget = keeping(PAGE, locks)
    memory = arena.take(PAGE, "a test")
    copy = Copy()
    memory.busy(copy)
    view = memory.view(torch.uint8)
    view.fill_(9)
    other = arena.exchange(memory)
    assert (locks.locked, budget.used, copy.waited) == ({other.address}, PAGE, True)
    assert view.eq(9).all()
    assert not other.bytes.any()


@pytest.mark.parametrize(
    "use",
    [
        lambda arena: arena.take(PAGE, "again"),
        lambda arena: arena.take(4 * PAGE, "something larger"),
        lambda arena: arena.trim(4 * PAGE),
        lambda arena: arena.close(),
    ],
    ids=["taken again", "making room", "trimmed", "closed"],
)
def test_memory_that_a_copy_still_uses_is_waited_for_before_it_serves_again_or_is_unlocked(
    locks: Locks, use: Callable[[Arena], object]
) -> None:
    budget = Budget(Tier.HOST, 4 * PAGE)
    copy = Copy()
    waited_at_unlock: list[bool] = []

    def unpin(memory: Memory) -> None:
        waited_at_unlock.append(copy.waited)
        locks.unpin(memory)

    arena = Arena(budget, locks.pin, unpin)
    memory = arena.take(PAGE, "a test")
    memory.busy(copy)
    arena.give(memory)
    assert not copy.waited, "giving waits for nothing"
    use(arena)
    assert copy.waited
    assert all(waited_at_unlock)


# --- retiring memory ---


def test_memory_given_after_the_end_is_unlocked_when_its_copies_are_over_and_not_before(locks: Locks) -> None:
    arena, _ = keeping(8 * PAGE, locks)
    memory, copy = arena.take(PAGE, "a home"), Copy()
    memory.busy(copy)
    arena.close()
    unpin = locks.unpin

    def unpin_unused(given: Memory) -> None:
        assert copy.reached, "unlocked while a copy uses it"
        unpin(given)

    arena._unpin = unpin_unused
    arena.give(memory)
    assert not locks.locked


@pytest.mark.parametrize("copy", [Copy(), Copy(OSError("the copy failed"))], ids=["done", "failed"])
@pytest.mark.parametrize("locked", [False, True])
def test_retired_memory_is_given_once_its_copy_is_over_and_not_before(locks: Locks, copy: Copy, locked: bool) -> None:
    copy.reached = copy.waited = False
    arena, budget = keeping(4 * PAGE, locks) if locked else plain(4 * PAGE)
    memory = arena.take(PAGE, "a test")
    arena.retire(memory, copy)
    arena.poll()
    assert (arena.retiring, arena.in_transit, budget.used, memory.committed) == (PAGE, 1, PAGE, True)
    copy.reached = True
    assert arena.in_transit == 0
    arena.poll()
    assert (arena.retiring, arena.idle, memory.committed) == (0, PAGE * locked, locked)
    assert budget.used == PAGE * locked
    assert not copy.waited


def test_what_is_over_leaves_the_queue_though_older_copies_are_not(locks: Locks) -> None:
    arena, _ = keeping(8 * PAGE, locks)
    copies = [Copy() for _ in range(3)]
    memories = [arena.take(PAGE, "a test") for _ in copies]
    for memory, copy in zip(memories, copies, strict=True):
        arena.retire(memory, copy)
    copies[1].reached = True
    arena.give(arena.take(2 * PAGE, "any call looks"))
    assert (arena.retiring, arena.in_transit) == (2 * PAGE, 2)
    assert arena.take(PAGE, "a test") is memories[1]


def test_a_copy_whose_device_no_longer_answers_gives_its_memory_back() -> None:
    arena, budget = plain(4 * PAGE)
    arena.retire(arena.take(PAGE, "a test"), Copy(mute=True))
    assert (arena.retiring, arena.in_transit, budget.used) == (0, 0, 0)


def test_when_room_is_short_idle_memory_goes_first_and_then_the_oldest_copies_are_waited_for(locks: Locks) -> None:
    arena, budget = keeping(6 * PAGE, locks)
    copies = [Copy(OSError("failed")), Copy(), Copy()]
    for copy in copies:
        arena.retire(arena.take(PAGE, "a test"), copy)
    arena.give(arena.take(3 * PAGE, "a test"))
    arena.take(2 * PAGE, "idle memory is enough")
    assert [copy.waited for copy in copies] == [False, False, False]
    arena.take(3 * PAGE, "two copies are waited for")
    assert [copy.waited for copy in copies] == [True, True, False]
    assert (budget.used, budget.peak) == (6 * PAGE, 6 * PAGE)
    with pytest.raises(BudgetError):
        arena.take(2 * PAGE, "more than there is")
    assert budget.used == 5 * PAGE


def test_retired_memory_of_the_size_that_is_needed_serves_without_being_unlocked(locks: Locks) -> None:
    arena, _ = keeping(2 * PAGE, locks)
    memory = arena.take(2 * PAGE, "a test")
    arena.retire(memory, Copy())
    assert arena.take(2 * PAGE, "again") is memory
    assert len(locks.calls) == 1


def test_reclaim_says_whether_memory_can_be_taken(locks: Locks) -> None:
    arena, _ = keeping(4 * PAGE, locks)
    held = arena.take(2 * PAGE, "a test")
    arena.retire(arena.take(PAGE, "a test"), Copy())
    assert not arena.reclaim(3 * PAGE)
    assert arena.reclaim(2 * PAGE)
    arena.give(held)
    assert arena.reclaim(4 * PAGE)


@pytest.mark.parametrize("retired", [False, True])
def test_an_interrupt_while_a_copy_is_waited_for_loses_no_memory(locks: Locks, retired: bool) -> None:
    arena, budget = keeping(2 * PAGE, locks)

    class Interrupted(Copy):
        def wait(self, timeout: float | None = None) -> None:
            if not self.waited:
                self.waited = True
                raise KeyboardInterrupt
            self.reached = True

    memory, copy = arena.take(PAGE, "a test"), Interrupted()
    if retired:
        arena.retire(memory, copy)
    else:
        memory.busy(copy)
        arena.give(memory)
    with pytest.raises(KeyboardInterrupt):
        arena.take(2 * PAGE, "more than is free")
    assert (arena.idle + arena.retiring, budget.used) == (PAGE, PAGE)
    arena.take(2 * PAGE, "the same again")
    assert (arena.idle + arena.retiring, budget.used, memory.committed) == (0, 2 * PAGE, False)


# --- the end ---


def test_close_waits_gives_all_back_and_keeps_nothing_that_comes_later(locks: Locks, mapped: dict[int, int]) -> None:
    arena, budget = keeping(8 * PAGE, locks)
    late, idle, retired = (arena.take(PAGE, "a test") for _ in range(3))
    arena.give(idle)
    copy = Copy(OSError("failed"))
    arena.retire(retired, copy)
    for _ in range(2):
        arena.close()
        assert (set(mapped), budget.used, locks.locked) == ({late.address}, PAGE, {late.address})
    assert copy.waited
    arena.give(late)
    assert (mapped, budget.used, locks.locked) == ({}, 0, set())


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_taken_given_and_retired_the_account_is_what_is_mapped_and_within_the_budget(
    locks: Locks, mapped: dict[int, int], seed: int, locked: bool
) -> None:
    draw = random.Random(seed)
    limit = draw.randint(10, 40) * PAGE
    arena, budget = keeping(limit, locks) if locked else plain(limit)
    sizes = [draw.randint(1, 9 * PAGE) for _ in range(4)]
    held: list[tuple[Memory, int]] = []
    copies: list[Copy] = []
    for step in range(400):
        verb = draw.choice(["take", "take", "give", "retire", "end", "trim", "poll"])
        if verb == "take":
            nbytes = draw.choice(sizes)
            in_use = sum(page_ceil(memory.nbytes) for memory, _ in held)
            fits = in_use + page_ceil(nbytes) <= limit
            try:
                memory = arena.take(nbytes, "a test", zeros=True)
            except BudgetError:
                assert not fits
            else:
                assert fits, "more than the budget"
                assert memory.nbytes == nbytes
                assert not memory.bytes.any()
                held.append((memory, step % 251 + 1))
                memory.bytes.fill_(held[-1][1])
        elif verb in ("give", "retire") and held:
            memory, value = held.pop(draw.randrange(len(held)))
            assert memory.bytes.eq(value).all(), "handed to two takers"
            if verb == "give":
                arena.give(memory)
            else:
                copies.append(Copy(draw.choice([None, OSError("failed")])))
                arena.retire(memory, copies[-1])
        elif verb == "end" and copies:
            copies.pop(draw.randrange(len(copies))).reached = True
        elif verb == "trim":
            arena.trim(draw.randint(0, limit))
        elif verb == "poll":
            arena.poll()
        in_use = sum(page_ceil(memory.nbytes) for memory, _ in held)
        assert budget.used == in_use + arena.idle + arena.retiring == sum(mapped.values()) <= limit
        assert locks.locked == (set(mapped) if locked else set())
    arena.close()
    assert budget.used == sum(mapped.values()) == sum(page_ceil(memory.nbytes) for memory, _ in held)


@pytest.mark.parametrize("locked", [False, True])
def test_memory_that_a_call_was_given_up_for_serves_nobody_again_and_stays_charged(
    locks: Locks, locked: bool, mapped: dict[int, int]
) -> None:
    arena, budget = keeping(4 * PAGE, locks) if locked else plain(4 * PAGE)
    lost, whole = arena.take(PAGE, "a"), arena.take(PAGE, "b")
    read = Copy(OSError("given up"))
    lost.busy(read, lambda: True)
    arena.give(lost)  # with the read not yet over where memory is kept
    arena.give(whole)
    taken = [arena.take(PAGE, "c") for _ in range(3)]
    assert read.waited
    assert lost.address not in {memory.address for memory in taken}
    assert budget.used == 4 * PAGE
    with pytest.raises(BudgetError):
        arena.take(PAGE, "d")
    for memory in taken:
        arena.give(memory)
    arena.close()
    assert (budget.used, lost.committed, lost.address in locks.locked) == (PAGE, True, locked)


def test_idle_memory_gives_way_where_that_of_the_size_turns_out_to_be_stranded(locks: Locks) -> None:
    arena, budget = keeping(4 * PAGE, locks)
    lost, other = arena.take(PAGE, "a"), arena.take(2 * PAGE, "b")
    lost.busy(Copy(OSError("given up")), lambda: True)
    arena.give(lost)
    arena.give(other)
    taken = [arena.take(PAGE, "c") for _ in range(3)]
    assert (budget.used, arena.idle) == (4 * PAGE, 0)
    assert lost.address not in {memory.address for memory in taken}
