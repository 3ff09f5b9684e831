"""A read that was given up comes back late: it finds the memory it was to fill, and nobody else in it."""

import errno
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bad_drives import BadDrives, bad_drives
from store.conftest import content

from tiered.device.cpu import CpuDevice
from tiered.errors import BudgetError, StorageError
from tiered.io.swapfile import SwapSpace
from tiered.stats import Meter
from tiered.store.block import Block, BlockKey
from tiered.store.snapshot import Snapshot
from tiered.store.store import TieredStore
from tiered.store.tier import Budget, Tier

MIB = 1 << 20
Read = Callable[[TieredStore, Block], object]


def window(store: TieredStore, block: Block) -> None:
    store.load(block, torch.empty(1, dtype=torch.uint8), 0)


def staged(store: TieredStore, block: Block) -> None:
    memory = store.staging(block.nbytes, "a slot")
    try:
        store.read(block, memory).wait()
    finally:
        store.unstage(memory)


def snapped(store: TieredStore, block: Block) -> None:
    snapshot = Snapshot(store, CpuDevice(), Meter(), [block])
    next(iter(snapshot.read(block, 0, 1)))  # nobody closes it: it is collected


READS: dict[str, Read] = {
    "whole": lambda store, block: store.acquire(block),
    "a window": window,
    "staging": staged,
    "a snapshot": snapped,
}


@pytest.fixture
def drives() -> Iterator[BadDrives]:
    with bad_drives() as made:
        yield made


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("what", READS)
def test_what_a_late_read_fills_is_memory_that_nobody_has_been_given_since(
    drives: BadDrives, swap: Path, monkeypatch: pytest.MonkeyPatch, what: str, portable: bool
) -> None:
    monkeypatch.setenv("TIERED_PORTABLE", "1" if portable else "0")
    budget = Budget(Tier.HOST, 4 * MIB)
    store = TieredStore(budget, SwapSpace([swap], threads=1, timeout_s=0.1), Meter())
    block = store.create(BlockKey(0, "param"), MIB, Tier.NVME)
    store.patch(block, content(0, MIB), 0)
    addresses = list[int]()
    stall = drives.stall()
    drives.rule = lambda call: None if call.write else stall
    read = store._drives().read

    def noted(extent: object, address: int, *arguments: object) -> object:
        addresses.append(address)
        return read(extent, address, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store._drives(), "read", noted)
    with pytest.raises(StorageError) as caught:
        READS[what](store, block)
    assert caught.value.errno == errno.ETIMEDOUT
    del caught
    gc.collect()
    later = list[torch.Tensor]()
    with pytest.raises(BudgetError):
        while True:
            later.append(store.staging(MIB // 2, "later").bytes.fill_(9))
    assert len(later) >= 6, "only what may be written to is lost"
    (address,) = addresses
    assert not any(address < each.data_ptr() + MIB // 2 and each.data_ptr() < address + MIB for each in later)
    drives.release()
    store.close()
    gc.collect()
    assert all(bool((each == 9).all()) for each in later)


def test_memory_that_may_yet_be_filled_is_not_asked_to_hold_anything(drives: BadDrives, swap: Path) -> None:
    store = TieredStore(Budget(Tier.HOST, 4 * MIB), SwapSpace([swap], threads=2, timeout_s=0.1), Meter())
    lost, other = (store.create(BlockKey(group, "param"), MIB, Tier.NVME) for group in range(2))
    for block in (lost, other):
        store.patch(block, content(block.key.group, MIB), 0)
    stall = drives.stall()
    drives.rule = lambda call: None if call.write else stall
    memory = store.staging(MIB, "a slot")
    with pytest.raises(StorageError):
        store.read(lost, memory).wait()
    drives.release()
    for call in (store.read, store.write):
        with pytest.raises(StorageError, match="may still fill the memory"):
            call(other, memory)
    store.unstage(memory)
    store.close()


def test_a_snapshot_reads_nothing_more_once_its_window_may_be_filled(drives: BadDrives, swap: Path) -> None:
    store = TieredStore(Budget(Tier.HOST, 4 * MIB), SwapSpace([swap], threads=2, timeout_s=0.1), Meter())
    away, here = store.create(BlockKey(0, "param"), MIB, Tier.NVME), store.create(BlockKey(1, "param"), MIB, Tier.HOST)
    store.patch(away, content(0, MIB), 0)
    snapshot = Snapshot(store, CpuDevice(), Meter(), [away, here])
    stall = drives.stall()
    drives.rule = lambda call: None if call.write else stall
    for block in (away, here):
        with pytest.raises(StorageError):
            next(iter(snapshot.read(block, 0, 1)))
    snapshot.close()
    drives.release()
    store.close()
