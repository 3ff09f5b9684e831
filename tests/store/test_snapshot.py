"""A snapshot reads any bytes of any block, wherever they are at home, whatever is cached or evicted meanwhile."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store.conftest import OpenStore, content

from tiered.config import Emulation
from tiered.device.cpu import CpuDevice
from tiered.device.emulated import EmulatedDevice
from tiered.device.ticket import Completion, Event, Finished
from tiered.errors import CorruptDataError
from tiered.stats import Meter
from tiered.store.block import Block, BlockKey
from tiered.store.snapshot import Snapshot
from tiered.store.store import TieredStore
from tiered.store.tier import Budget, Tier
from tiered.store.window import WINDOW_BYTES

NBYTES = 2 * WINDOW_BYTES + 12345


@pytest.fixture(params=["host", "drive", "device"])
def placed(request: pytest.FixtureRequest, open_store: OpenStore) -> Iterator[tuple[TieredStore, Block, Snapshot]]:
    device = EmulatedDevice(Emulation(max_delay_s=1e-4)) if request.param == "device" else CpuDevice()
    store, memory = open_store(64 << 20), None
    if request.param == "device":
        store = TieredStore(Budget(Tier.HOST, 64 << 20), None, Meter(), device=device)
        memory = device.allocate(NBYTES)
        device.commit(memory)
    home = {"host": Tier.HOST, "drive": Tier.NVME, "device": Tier.DEVICE}[request.param]
    block = store.create(BlockKey(0, "param"), NBYTES, home, memory=memory)
    store.patch(block, content(0, NBYTES), 0)
    snapshot = Snapshot(store, device, Meter(), [block])
    yield store, block, snapshot
    snapshot.close()
    store.close()
    device.close()


def taken(snapshot: Snapshot, block: Block, start: int, stop: int) -> torch.Tensor:
    """What it reads, as uint8."""
    data = bytearray(b"".join(bytes(piece) for piece in snapshot.read(block, start, stop)))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def test_any_range_reads_as_what_was_written(placed: tuple[TieredStore, Block, Snapshot]) -> None:
    _, block, snapshot = placed
    whole, draw = content(0, NBYTES), random.Random(0)
    ranges = [sorted(draw.choices(range(NBYTES + 1), k=2)) for _ in range(20)]
    for start, stop in [(0, NBYTES), (0, 0), (NBYTES, NBYTES), (WINDOW_BYTES, WINDOW_BYTES + 1), *ranges]:
        assert torch.equal(taken(snapshot, block, start, stop), whole[start:stop])
    assert block.home is not Tier.DEVICE or (block.memory is not None and not block.memory.exported())


class Fenced(EmulatedDevice):
    """Its compute stream, as the thread that takes a snapshot sees it, comes to rest late."""

    def __init__(self) -> None:
        super().__init__(Emulation())
        self.reached = Completion()

    def fence(self) -> Event:
        return self.reached

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        assert self.reached.done(), "a copy on another thread asks another stream"
        destination.copy_(source)
        return Finished()


def test_a_copy_is_given_when_what_was_given_before_is_done() -> None:
    device = Fenced()
    store = TieredStore(Budget(Tier.HOST, 64 << 20), None, Meter(), device=device)
    memory = device.allocate(8192)
    device.commit(memory)
    block = store.create(BlockKey(0, "param"), 8192, Tier.DEVICE, memory=memory)
    snapshot = Snapshot(store, device, Meter(), [block])
    threading.Timer(0.05, device.reached.finish).start()
    assert len(taken(snapshot, block, 0, 8192)) == 8192
    snapshot.close()
    store.close()
    device.close()


def test_what_was_only_cached_is_on_the_drive_when_it_is_taken_and_evictions_change_nothing(
    open_store: OpenStore,
) -> None:
    store = open_store(2 * WINDOW_BYTES)
    block, other = (store.create(BlockKey(n, "param"), WINDOW_BYTES + 5, Tier.NVME) for n in range(2))
    store.patch(block, torch.zeros(block.nbytes, dtype=torch.uint8), 0)
    with store.pinned(block, dirty=True) as memory:
        memory.bytes.copy_(content(1, block.nbytes))
    snapshot = Snapshot(store, CpuDevice(), Meter(), [block, other])
    assert not block.dirty
    read = snapshot.read(block, 0, block.nbytes)
    first = bytes(next(read))
    with store.pinned(other):
        assert block.memory is None, "evicted"
        rest = b"".join(bytes(piece) for piece in read)
    assert first + rest == content(1, block.nbytes).numpy().tobytes()
    snapshot.close()
    assert store.staged == 0


def test_bytes_that_follow_are_read_once(open_store: OpenStore) -> None:
    store, meter = open_store(4 * WINDOW_BYTES), Meter()
    block = store.create(BlockKey(0, "param"), NBYTES, Tier.NVME)
    store.patch(block, content(0, NBYTES), 0)
    snapshot = Snapshot(store, CpuDevice(), meter, [block])
    for start in range(0, NBYTES, 54321):
        taken(snapshot, block, start, min(start + 54321, NBYTES))
    assert meter.read["nvme"] == NBYTES
    snapshot.close()


def test_a_changed_byte_on_the_drive_is_the_readers_error_alone(open_store: OpenStore, swap: Path) -> None:
    store = open_store(4 * WINDOW_BYTES)
    block = store.create(BlockKey(0, "param"), 8192, Tier.NVME)
    store.patch(block, content(0, 8192), 0)
    snapshot = Snapshot(store, CpuDevice(), Meter(), [block])
    (file,) = [path for path in swap.rglob("*") if path.is_file() and path.stat().st_size >= 8192]
    with open(file, "r+b") as out:
        out.write(b"\0" * 64)
    with pytest.raises(CorruptDataError):
        taken(snapshot, block, 0, 8192)
    assert store.resident(block) is False, "the block has not failed: whoever uses it finds out"
    snapshot.close()
