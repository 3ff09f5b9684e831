"""The store's verbs on a real swap file: contents, pins, eviction, and budgets that hold before memory is taken."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from store.conftest import OpenStore, content

from tiered.config import Emulation
from tiered.device.buffer import Buffer
from tiered.device.cpu import CpuDevice
from tiered.device.emulated import EmulatedDevice
from tiered.device.memory import Memory
from tiered.errors import BudgetError, CorruptDataError, StorageError, SwapFullError, UsageError
from tiered.io.swapfile import SwapSpace
from tiered.stats import Meter
from tiered.store.block import Block, BlockKey, BlockState
from tiered.store.store import TieredStore
from tiered.store.tier import Budget, Tier
from tiered.store.window import WINDOW_BYTES

PAGE = 4096
MIB = 1 << 20
Fill = Callable[[TieredStore, int, int], Block]


class Locking(CpuDevice):
    """A device that gains by page-locked memory, and knows what it has locked."""

    in_place = False

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def pin(self, memory: Memory) -> None:
        assert self.locked.setdefault(memory.address, memory.nbytes) == memory.nbytes

    def unpin(self, memory: Memory) -> None:
        self.locked.pop(memory.address, None)


class Copy:
    """A copy that is over when it is waited for, or said to be."""

    def __init__(self) -> None:
        self.reached = False

    def done(self) -> bool:
        return self.reached

    def wait(self, timeout: float | None = None) -> None:
        self.reached = True


class OwnMemory(Buffer):
    """Memory of a device, which the host can only read and write through it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, torch.zeros(nbytes, dtype=torch.uint8))
        self.calls: list[str] = []

    @property
    def committed(self) -> bool:
        return "decommit" not in self.calls

    def read(self, out: torch.Tensor, offset: int) -> None:
        self.calls.append("read")
        out.copy_(self.bytes[offset : offset + out.numel()])

    def write(self, data: torch.Tensor, offset: int) -> None:
        self.calls.append("write")
        self.bytes[offset : offset + data.numel()] = data

    def decommit(self) -> None:
        self.calls.append("decommit")


@pytest.fixture
def open_locking(swap: Path) -> Iterator[Callable[[int], TieredStore]]:
    """Opens stores, with a host budget of so many bytes, whose device locks their memory."""
    opened: list[TieredStore] = []

    def open_one(budget: int) -> TieredStore:
        space = SwapSpace([swap], threads=2)
        opened.append(TieredStore(Budget(Tier.HOST, budget), space, Meter(), device=Locking()))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def whole(store: TieredStore, block: Block) -> torch.Tensor:
    """The block's bytes, through `load`."""
    out = torch.empty(block.nbytes, dtype=torch.uint8)
    store.load(block, out, 0)
    return out


def moved(store: TieredStore) -> tuple[int, int]:
    """Bytes read from and written to the drive so far."""
    return store._meter.read["nvme"], store._meter.written["nvme"]


# --- contents ---


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_a_new_block_reads_as_zeros_without_any_transfer(open_store: OpenStore, home: Tier) -> None:
    store = open_store(4 * MIB)
    block = store.create(BlockKey(0, "grad"), 10_000, home)
    assert not store.acquire(block).bytes.any()
    assert moved(store) == (0, 0)


def test_what_was_written_while_acquired_comes_back_after_eviction(open_store: OpenStore) -> None:
    store = open_store(2 * PAGE)
    first, second = (store.create(BlockKey(i, "param"), PAGE + 5, Tier.NVME) for i in range(2))
    store.acquire(first).bytes.copy_(content(1, PAGE + 5))
    store.release(first, dirty=True)
    store.acquire(second).bytes.fill_(7)
    assert first.state is BlockState.NVME
    store.release(second, dirty=True)
    assert torch.equal(store.acquire(first).bytes, content(1, PAGE + 5))
    assert second.state is BlockState.NVME


def test_a_clean_block_is_evicted_without_a_write_and_a_dirty_one_with_one(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(WINDOW_BYTES)
    blocks = [filled(store, group, 2 * MIB) for group in range(3)]
    written = moved(store)[1]
    for group in (0, 1, 2, 0):
        store.acquire(blocks[group])
        store.release(blocks[group])
    assert moved(store)[1] == written
    store.acquire(blocks[1])
    store.release(blocks[1], dirty=True)
    for group in (0, 2):
        store.acquire(blocks[group])
        store.release(blocks[group])
    assert moved(store)[1] == written + 2 * MIB
    assert all(torch.equal(whole(store, block), content(group, 2 * MIB)) for group, block in enumerate(blocks))


def test_a_resident_block_is_read_and_written_in_memory_alone(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(8 * MIB)
    block = filled(store, 5, MIB + 100)
    store.acquire(block)
    before = moved(store)
    staging = store.staging(MIB + 100, "a copy")
    store.read(block, staging).wait()
    assert torch.equal(staging.bytes, content(5, MIB + 100))
    staging.bytes.fill_(9)
    store.write(block, staging, offset=MIB, nbytes=100).wait()
    assert moved(store) == before
    assert block.dirty
    assert whole(store, block)[MIB:].eq(9).all()


def test_fresh_takes_memory_without_reading_what_is_not_wanted(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(8 * MIB)
    block = filled(store, 5, MIB)
    before = moved(store)
    store.acquire(block, fresh=True).bytes.fill_(1)
    store.release(block, dirty=True)
    assert moved(store) == before
    assert whole(store, block).eq(1).all()


RANGES = [
    (0, 1),
    (1, 1),
    (4095, 2),
    (MIB - 1, 2),
    (WINDOW_BYTES - 3, 7),
    (WINDOW_BYTES, 1),
    (0, None),
    (17, None),
    (5, 0),
]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
@pytest.mark.parametrize("resident", [False, True], ids=["away", "resident"])
def test_any_byte_range_is_loaded_and_patched_exactly(
    open_store: OpenStore, filled: Fill, offset: int, nbytes: int | None, resident: bool
) -> None:
    store = open_store(16 * MIB)
    size = 2 * WINDOW_BYTES + MIB + 333
    block = filled(store, 8, size)
    want = content(8, size)
    if resident:
        store.acquire(block)
    nbytes = size - offset if nbytes is None else nbytes
    out = torch.empty(nbytes, dtype=torch.uint8)
    store.load(block, out, offset)
    assert torch.equal(out, want[offset : offset + nbytes])
    new = content(99, nbytes)
    store.patch(block, new, offset)
    want[offset : offset + nbytes] = new
    assert torch.equal(whole(store, block), want)
    assert store.staged == 0


@pytest.mark.parametrize("locking", [False, True])
def test_random_sequences_of_verbs_keep_contents_budget_and_accounts(
    open_store: OpenStore, open_locking: OpenStore, locking: bool
) -> None:
    """Every verb in random order against a plain dictionary of bytes."""
    draw = random.Random(4)
    budget = 40 * PAGE
    store = open_locking(budget) if locking else open_store(budget)
    sizes = [1, 100, PAGE, PAGE + 1, 5 * PAGE, 9 * PAGE + 17]
    blocks = [store.create(BlockKey(i, "param"), size, Tier.NVME) for i, size in enumerate(sizes)]
    blocks.append(store.create(BlockKey(9, "param"), 3000, Tier.HOST))
    want = {block.key: torch.zeros(block.nbytes, dtype=torch.uint8) for block in blocks}
    for step in range(400):
        block = draw.choice(blocks)
        offset = draw.randrange(block.nbytes)
        nbytes = draw.randint(1, block.nbytes - offset)
        verb = draw.choice(["edit", "look", "load", "patch", "discard"])
        if verb == "edit":
            store.acquire(block).bytes[offset : offset + nbytes] = step % 251
            want[block.key][offset : offset + nbytes] = step % 251
            store.release(block, dirty=True)
        elif verb == "look":
            assert torch.equal(store.acquire(block).bytes, want[block.key])
            store.release(block)
        elif verb == "load":
            out = torch.empty(nbytes, dtype=torch.uint8)
            store.load(block, out, offset)
            assert torch.equal(out, want[block.key][offset : offset + nbytes])
        elif verb == "patch":
            store.patch(block, torch.full((nbytes,), step % 251, dtype=torch.uint8), offset)
            want[block.key][offset : offset + nbytes] = step % 251
        else:
            store.discard(block)
            store.patch(block, want[block.key], 0)  # a discarded block is undefined until it is written
        assert store.host.used <= budget
        resident = sum(-(-b.nbytes // PAGE) * PAGE for b in blocks if b.memory is not None)
        assert (store.staged, store.host.used - store._arena.idle) == (0, resident)


# --- pins and eviction ---


def test_a_pinned_block_is_never_evicted_and_the_refusal_takes_nothing(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(WINDOW_BYTES)
    first, second = filled(store, 1, 3 * MIB), filled(store, 2, 3 * MIB)
    store.acquire(first)
    store.acquire(first)
    store.release(first)
    used = store.host.used
    with pytest.raises(BudgetError, match=r"param of group 2 needs 3\.0 MiB of host memory"):
        store.acquire(second)
    assert (store.host.used, second.state, first.state) == (used, BlockState.NVME, BlockState.HOST)
    store.release(first)
    assert torch.equal(store.acquire(second).bytes, content(2, 3 * MIB))
    assert first.state is BlockState.NVME


def test_the_block_used_furthest_in_the_future_is_evicted(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(WINDOW_BYTES)
    blocks = [filled(store, group, MIB) for group in range(5)]
    for block, next_use in zip(blocks[:4], (1, 9, 3, 4), strict=True):
        block.next_use = next_use
        store.acquire(block)
        store.release(block)
    store.acquire(blocks[4])
    assert [block.state is BlockState.HOST for block in blocks] == [True, False, True, True, True]


def test_a_block_that_somebody_views_is_not_evicted(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(WINDOW_BYTES)
    first, second = filled(store, 1, 3 * MIB), filled(store, 2, 3 * MIB)
    view = store.acquire(first).view(torch.uint8, 0, 10)
    store.release(first)
    with pytest.raises(BudgetError):
        store.acquire(second)
    assert torch.equal(view, content(1, 3 * MIB)[:10])
    del view
    store.acquire(second)


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_discarding_moves_no_byte_and_leaves_a_view_its_memory(open_store: OpenStore, home: Tier) -> None:
    store = open_store(MIB)
    block = store.create(BlockKey(0, "grad"), 8 * PAGE, home)
    view = store.acquire(block).view(torch.uint8)
    view.fill_(5)
    store.release(block, dirty=True)
    store.discard(block)
    assert (moved(store), block.dirty) == ((0, 0), False)
    store.acquire(block, fresh=True).bytes.fill_(6)
    assert view.eq(5).all()
    assert store.host.used <= 8 * PAGE


def test_room_with_evicting_is_all_that_staging_can_take(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(WINDOW_BYTES)
    blocks = [filled(store, group, MIB) for group in range(3)]
    for block in blocks:
        store.acquire(block)
    store.release(blocks[0], dirty=True)
    assert (store.room(), store.room(evicting=True)) == (MIB, 2 * MIB)
    memory = store.staging(2 * MIB, "all there is")
    with pytest.raises(BudgetError, match="one page more"):
        store.staging(1, "one page more")
    store.unstage(memory)
    assert torch.equal(whole(store, blocks[1]), content(1, MIB))


# --- budgets, before anything is taken ---


def test_a_block_without_room_is_refused_before_memory_is_taken(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = Memory.commit
    monkeypatch.setattr(Memory, "commit", lambda self: (taken.append(self.nbytes), real(self))[1])
    store = TieredStore(Budget(Tier.HOST, 10 * PAGE), SwapSpace([swap], threads=1), Meter())
    try:
        for attempt in (
            lambda: store.create(BlockKey(0, "param"), 10 * PAGE + 1, Tier.HOST),
            lambda: store.staging(11 * PAGE, "a buffer"),
            lambda: store.acquire(store.create(BlockKey(1, "param"), 11 * PAGE, Tier.NVME)),
        ):
            with pytest.raises(BudgetError):
                attempt()
            assert (taken, store.host.used, store.staged) == ([], 0, 0)
        store.create(BlockKey(2, "param"), 10 * PAGE, Tier.HOST)
        assert taken == [10 * PAGE]
        assert [block.key.group for block in store.blocks()] == [1, 2]
    finally:
        store.close()


def test_memory_that_the_system_refuses_stays_uncharged(
    open_store: OpenStore, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(8 * MIB)
    block = filled(store, 0, MIB)
    refusals = [
        lambda: store.create(BlockKey(1, "param"), MIB, Tier.HOST),
        lambda: store.staging(MIB, "a buffer"),
        lambda: store.acquire(block),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(Memory, "commit", lambda self: (_ for _ in ()).throw(MemoryError("cannot commit")))
        for attempt in refusals:
            with pytest.raises(MemoryError, match="cannot commit"):
                attempt()
            assert (store.host.used, store.staged, block.pins) == (0, 0, 0)
    assert torch.equal(store.acquire(block).bytes, content(0, MIB))


def test_a_block_the_drive_has_no_room_for_is_refused_and_not_kept(open_store: OpenStore, swap: Path) -> None:
    store = open_store(MIB)
    free = os.statvfs(swap).f_bavail * os.statvfs(swap).f_frsize
    with pytest.raises(SwapFullError, match=str(swap)):
        store.create(BlockKey(0, "param"), free + (1 << 40), Tier.NVME)
    assert (list(store.blocks()), store.host.used) == ([], 0)


def test_a_home_on_a_drive_needs_a_drive() -> None:
    store = TieredStore(Budget(Tier.HOST, MIB), None, Meter())
    with pytest.raises(UsageError, match="param of group 0"):
        store.create(BlockKey(0, "param"), 10, Tier.NVME)
    store.close()


def test_staging_is_charged_in_pages_and_counted_until_it_is_given_back(open_store: OpenStore) -> None:
    store = open_store(MIB)
    buffers = [store.staging(nbytes, "a buffer") for nbytes in (1, PAGE, PAGE + 1)]
    assert (store.staged, store.host.used) == (3, 4 * PAGE)
    for buffer in buffers:
        store.unstage(buffer)
    assert (store.staged, store.host.used, store.host.peak) == (0, 0, 4 * PAGE)


def test_removing_a_block_gives_its_memory_and_its_space_back(open_store: OpenStore, filled: Fill) -> None:
    store = open_store(8 * MIB)
    for group in range(20):
        block = filled(store, group, 5 * MIB)
        store.acquire(block)
        store.release(block)
        store.remove(block)
    assert (store.host.used, list(store.blocks())) == (0, [])
    assert store.space is not None
    assert store.space.stats().drives[0].file_bytes == 5 * MIB


# --- page-locked memory ---


def test_memory_is_locked_for_a_device_that_copies_and_serves_again_when_it_is_given_back(
    open_locking: OpenStore,
) -> None:
    store = open_locking(8 * MIB)
    memory = store.staging(MIB, "a copy")
    store.unstage(memory)
    assert (store.staged, store.host.used, store.room()) == (0, MIB, 8 * MIB)
    assert store.staging(MIB, "a copy") is memory
    store.close()


def test_a_device_whose_memory_is_the_hosts_locks_nothing_and_keeps_nothing() -> None:
    store = TieredStore(Budget(Tier.HOST, MIB), None, Meter(), device=CpuDevice())
    memory = store.staging(MIB, "a copy")
    store.unstage(memory)
    assert (store.host.used, memory.committed) == (0, False)
    store.close()


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_a_new_block_reads_as_zeros_in_memory_that_was_used(open_locking: OpenStore, home: Tier) -> None:
    store = open_locking(MIB)
    memory = store.staging(10_000, "a copy")
    memory.bytes.fill_(9)
    store.unstage(memory)
    block = store.create(BlockKey(0, "grad"), 10_000, home)
    assert store.acquire(block) is memory
    assert not memory.bytes.any()


def test_discarding_a_viewed_block_locks_its_other_memory_and_unlocks_what_the_viewer_keeps(swap: Path) -> None:
    device = Locking()
    store = TieredStore(Budget(Tier.HOST, PAGE), None, Meter(), device=device)
    block = store.create(BlockKey(0, "grad"), PAGE, Tier.HOST)
    view = store.acquire(block).view(torch.uint8)
    view.fill_(5)
    store.discard(block)
    assert block.memory is not None
    assert (device.locked, store.host.used) == ({block.memory.address: PAGE}, PAGE)
    assert view.eq(5).all()
    store.close()
    assert (device.locked, store.host.used) == ({}, 0)


CHANGES: dict[str, Callable[[TieredStore, Block], object]] = {
    "write": lambda store, block: store.write(block, Memory(block.nbytes, committed=True)),
    "patch": lambda store, block: store.patch(block, torch.empty(3, dtype=torch.uint8), 1),
    "discard": lambda store, block: store.discard(block),
    "remove": lambda store, block: store.remove(block),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_memory_that_a_copy_still_reads_is_not_changed(
    open_store: OpenStore, change: Callable[[TieredStore, Block], object]
) -> None:
    store = open_store(MIB)
    block = store.create(BlockKey(0, "param"), PAGE, Tier.HOST)
    copy = Copy()
    store.acquire(block).busy(copy)
    store.release(block)
    out = torch.empty(PAGE, dtype=torch.uint8)
    store.load(block, out, 0)
    store.read(block, Memory(PAGE, committed=True)).wait()
    assert not copy.reached, "reading waits for no reader"
    change(store, block)
    assert copy.reached


def test_retired_staging_counts_until_its_copy_is_over(open_store: OpenStore) -> None:
    store = open_store(MIB)
    copy = Copy()
    memory = store.staging(PAGE, "a copy")
    store.retire(memory, copy)
    store._arena.poll()
    assert (store.staged, store.host.used, store.room(), memory.committed) == (1, PAGE, MIB, True)
    copy.reached = True
    assert store.staged == 0
    store._arena.poll()
    assert (store.host.used, memory.committed) == (0, False)


def test_room_is_made_by_what_is_idle_then_retiring_then_a_hint_and_at_last_by_a_cached_block(
    open_locking: OpenStore, filled: Fill
) -> None:
    store = open_locking(WINDOW_BYTES)
    block = filled(store, 0, MIB)
    store.acquire(block)
    store.release(block)
    copy, hint = Copy(), store.staging(MIB, "a hint")
    store.retire(store.staging(MIB, "a copy"), copy)
    store.unstage(store.staging(PAGE, "a little"))
    asked: list[bool] = []

    def give_hint() -> None:
        asked.append(True)
        if len(asked) == 1:
            store.unstage(hint)

    store.on_pressure = give_hint
    held = []

    def made(nbytes: int) -> tuple[int, bool, int, BlockState]:
        held.append(store.staging(nbytes, "more"))
        return store._arena.idle, copy.reached, len(asked), block.state

    assert made(MIB - PAGE) == (PAGE, False, 0, BlockState.HOST)  # there was room
    assert made(2 * PAGE)[1:] == (True, 0, BlockState.HOST)
    assert made(MIB)[2:] == (1, BlockState.HOST)
    assert made(MIB)[2:] == (2, BlockState.NVME)
    with pytest.raises(BudgetError):
        store.staging(WINDOW_BYTES, "more than there is")
    for memory in held:
        store.unstage(memory)
    assert torch.equal(whole(store, block), content(0, MIB))


def test_memory_that_is_short_is_waited_for_again_and_again_but_not_by_a_hint(open_store: OpenStore) -> None:
    store = open_store(4 * MIB)
    held = [store.staging(MIB, "held") for _ in range(4)]

    def give_one() -> bool:
        if held:
            store.unstage(held.pop())
            return True
        return False

    store.on_shortage = give_one
    with pytest.raises(BudgetError):
        store.staging(2 * MIB, "a hint", hint=True)
    assert len(held) == 4
    store.unstage(store.staging(2 * MIB, "needed"))
    assert len(held) == 2, "as many as it takes, and no more"
    with pytest.raises(BudgetError):
        store.staging(5 * MIB, "more than there is")
    assert not held


# --- memory of a device ---


@pytest.fixture
def emulated() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(Emulation(max_delay_s=0.0))
    yield device
    device.close()


@pytest.fixture(params=["own kind", "emulated"])
def lent(request: pytest.FixtureRequest, emulated: EmulatedDevice) -> tuple[TieredStore, Block, Buffer]:
    """A store and a block of 1000 zeros that lies in a device's own memory."""
    store = TieredStore(Budget(Tier.HOST, PAGE), None, Meter(), device=emulated)
    buffer: Buffer = OwnMemory(1000)
    if request.param == "emulated":
        buffer = emulated.allocate(1000)
        emulated.commit(buffer)
        buffer.bytes.zero_()
    return store, store.create(BlockKey(0, "param"), 1000, Tier.DEVICE, memory=buffer), buffer


def test_a_block_in_a_devices_memory_is_loaded_and_patched_through_it_and_costs_the_host_nothing(
    lent: tuple[TieredStore, Block, Buffer],
) -> None:
    store, block, buffer = lent
    store.patch(block, content(1, 300), 200)
    out = torch.empty(500, dtype=torch.uint8)
    store.load(block, out, 100)
    assert torch.equal(out[100:400], content(1, 300))
    assert block.memory is buffer
    assert (store.host.peak, block.dirty) == (0, False)
    if isinstance(buffer, OwnMemory):
        assert buffer.calls == ["write", "read"]


@pytest.mark.parametrize("verb", ["acquire", "fresh", "read", "write"])
def test_what_needs_host_memory_is_refused_on_a_block_in_a_devices_memory(
    lent: tuple[TieredStore, Block, Buffer], verb: str
) -> None:
    store, block, _ = lent
    with pytest.raises(RuntimeError, match=r"param of group 0 li(es in|ves on) the device"):
        VERBS[verb](store, block)
    assert not store.resident(block)
    assert (block.pins, moved(store)) == (0, (0, 0))


@pytest.mark.parametrize("end", [CHANGES["discard"], CHANGES["remove"], lambda store, block: store.close()])
def test_a_devices_memory_is_left_to_its_owner(
    lent: tuple[TieredStore, Block, Buffer], end: Callable[[TieredStore, Block], object]
) -> None:
    store, block, buffer = lent
    with pytest.raises(BudgetError):
        store.staging(2 * PAGE, "more than there is")  # evicts what can go
    end(store, block)
    assert buffer.committed
    assert not buffer.bytes.any()
    assert store.host.used == 0
    store.close()


def test_host_memory_lent_as_a_device_computes_in_place_and_the_host_is_refunded_nothing() -> None:
    store = TieredStore(Budget(Tier.HOST, PAGE), None, Meter(), device=CpuDevice())
    for end in (store.remove, lambda block: store.close()):
        memory = Memory(PAGE, committed=True)
        block = store.create(BlockKey(0, "param"), PAGE, Tier.DEVICE, memory=memory)
        assert store.acquire(block) is memory
        store.release(block)
        end(block)
        assert (store.host.used, memory.committed) == (0, False)


# --- failures ---


def damage(swap: Path, block: Block) -> None:
    """Changes the block's first byte on the drive."""
    assert block.extent is not None
    (file,) = swap.glob("tiered-*/swap")
    with file.open("r+b", buffering=0) as swap_file:
        swap_file.seek(block.extent.starts[0][0])
        (value,) = swap_file.read(1)
        swap_file.seek(block.extent.starts[0][0])
        swap_file.write(bytes([value ^ 0x10]))
        os.fsync(swap_file.fileno())


@pytest.fixture
def broken(open_store: OpenStore, filled: Fill, swap: Path) -> tuple[TieredStore, Block, CorruptDataError]:
    """A store, a block whose fetch has failed, and the error that the fetch raised."""
    store = open_store(WINDOW_BYTES)
    block = filled(store, 3, 2 * MIB)
    damage(swap, block)
    with pytest.raises(CorruptDataError, match="param of group 3") as caught:
        store.acquire(block)
    return store, block, caught.value


VERBS: dict[str, Callable[[TieredStore, Block], object]] = {
    "acquire": lambda store, block: store.acquire(block),
    "fresh": lambda store, block: store.acquire(block, fresh=True),
    "resident": lambda store, block: store.resident(block),
    "read": lambda store, block: store.read(block, Memory(block.nbytes, committed=True)).wait(),
    "write": lambda store, block: store.write(block, Memory(block.nbytes, committed=True)).wait(),
    "load": lambda store, block: store.load(block, torch.empty(3, dtype=torch.uint8), 1),
    "patch": lambda store, block: store.patch(block, torch.empty(3, dtype=torch.uint8), 1),
    "discard": lambda store, block: store.discard(block),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_after_a_failed_fetch_every_call_raises_the_first_cause(
    broken: tuple[TieredStore, Block, CorruptDataError], verb: Callable[[TieredStore, Block], object]
) -> None:
    store, block, first = broken
    for _ in range(2):
        assert block.state is BlockState.FAILED
        with pytest.raises(StorageError, match="param of group 3 was lost") as caught:
            verb(store, block)
        assert first.strerror in str(caught.value)


@pytest.mark.parametrize("verb", ["read", "load", "patch"])
def test_a_transfer_that_fails_fails_its_block(open_store: OpenStore, filled: Fill, swap: Path, verb: str) -> None:
    store = open_store(8 * MIB)
    block = filled(store, 3, 2 * MIB)
    damage(swap, block)
    with pytest.raises(CorruptDataError):
        VERBS[verb](store, block)
    assert (store.staged, store.host.used) == (0, 0)
    with pytest.raises(StorageError, match="param of group 3"):  # at once: the drive thread may not have noted it yet
        store.acquire(block)
    with pytest.raises(StorageError, match="param of group 3 was lost"):
        store.acquire(block)


def test_a_failed_block_does_not_disturb_the_others(
    broken: tuple[TieredStore, Block, CorruptDataError], filled: Fill
) -> None:
    """The memory of the failed block may be lost to the budget, but what fits beside it must still move."""
    store, _, _ = broken
    small = filled(store, 6, 3 * PAGE)
    for _ in range(3):
        assert torch.equal(store.acquire(small).bytes, content(6, 3 * PAGE))
        store.release(small, dirty=True)
        with pytest.raises(BudgetError):
            store.staging(2 * WINDOW_BYTES, "more than there is")
        store.unstage(store.staging(MIB, "what fits"))


def test_a_dirty_block_that_cannot_be_written_is_an_error_and_keeps_failing(
    open_store: OpenStore, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(WINDOW_BYTES)
    lost, other = filled(store, 1, 3 * MIB), filled(store, 2, 3 * MIB)
    store.acquire(lost)
    store.release(lost, dirty=True)

    class Failed:
        """The ticket of a write that the drive refused."""

        def done(self) -> bool:
            return True

        def wait(self, timeout: float | None = None) -> None:
            raise StorageError(errno.EIO, "write failed: input/output error", "/drive/swap")

        def stranded(self) -> bool:
            return False

        def add_done_callback(self, fn: Callable[[], None]) -> None:
            fn()

    monkeypatch.setattr(SwapSpace, "write", lambda *args, **kwargs: Failed())
    with pytest.raises(StorageError, match="input/output error"):
        store.acquire(other)
    monkeypatch.undo()
    assert lost.state is BlockState.FAILED
    for _ in range(2):
        with pytest.raises((StorageError, BudgetError)):
            store.acquire(other)
        with pytest.raises(StorageError, match="param of group 1 was lost"):
            store.acquire(lost)


# --- the end ---


def test_close_is_idempotent_and_gives_memory_threads_and_files_back(
    open_store: OpenStore, filled: Fill, swap: Path
) -> None:
    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    store = open_store(16 * MIB)
    block = filled(store, 0, MIB)
    memory = store.acquire(block)
    host = store.create(BlockKey(1, "param"), MIB, Tier.HOST)
    assert host.memory is not None
    kept = host.memory
    assert len(list(swap.iterdir())) == 1
    for _ in range(2):
        store.close()
        assert not memory.committed
        assert not kept.committed
        assert (list(swap.iterdir()), list(store.blocks())) == ([], [])
    assert len(os.listdir("/proc/self/task")) <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_close_leaves_memory_that_somebody_views(open_store: OpenStore) -> None:
    store = open_store(MIB)
    view = store.acquire(store.create(BlockKey(0, "grad"), PAGE, Tier.HOST)).view(torch.float32)
    view.fill_(2.5)
    store.close()
    assert view.eq(2.5).all()


def test_close_after_failures_still_gives_everything_back(
    broken: tuple[TieredStore, Block, CorruptDataError], swap: Path
) -> None:
    store, block, _ = broken
    memory = block.memory
    store.close()
    store.close()
    assert list(swap.iterdir()) == []
    assert memory is None or not memory.committed
