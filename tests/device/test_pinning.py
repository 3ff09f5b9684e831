"""Page-locking: what is registered with a driver that refuses, where copies are cut, and that nothing stays locked."""

import gc
import itertools
import logging
import random
import resource
import threading
from pathlib import Path

import pytest
import torch

from tiered.device import host, pinning
from tiered.device.memory import Memory
from tiered.device.pinning import Pinning, _Ranges

PAGE = 4096
MIB = 1 << 20


def mapped(address: int) -> bool:
    """Whether the address belongs to a mapping of this process."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


class Driver:
    """A driver that locks ranges up to `most` bytes each and `total` in all, and refuses overlaps as CUDA does."""

    def __init__(self, most: int = 1 << 60, total: int = 1 << 60) -> None:
        self.most = most
        self.total = total
        self.ranges: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []
        self.faults: list[str] = []

    def register(self, address: int, nbytes: int) -> bool:
        self.asked.append((address, nbytes))
        if any(address < start + size and start < address + nbytes for start, size in self.ranges.items()):
            self.faults.append(f"{address:#x} is registered already")
            return False
        if address % PAGE or nbytes % PAGE or nbytes > self.most or nbytes + sum(self.ranges.values()) > self.total:
            return False
        self.ranges[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        if self.ranges.pop(address, None) is None:
            self.faults.append(f"{address:#x} is not registered")
        if not mapped(address):
            self.faults.append(f"{address:#x} is not mapped any more")


def pinning_on(driver: Driver) -> Pinning:
    return Pinning(driver.register, driver.unregister)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of this test, in a process that has not warned yet."""
    monkeypatch.setattr(pinning, "_warned", False)
    caplog.set_level(logging.WARNING, logger="tiered")
    return caplog


@pytest.fixture(autouse=True)
def _roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has free, there is enough for what a driver here only pretends to lock."""
    monkeypatch.setattr(pinning, "available_bytes", lambda: 1 << 50)


# --- registering ---


@pytest.mark.parametrize(("nbytes", "span"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (100 * MIB, 100 * MIB)])
def test_the_whole_pages_of_a_memory_are_registered_at_its_address(nbytes: int, span: int) -> None:
    driver = Driver()
    pinned = pinning_on(driver)
    memory = Memory(nbytes, committed=True)
    pinned.pin(memory)
    assert (driver.ranges, pinned.pinned_bytes) == ({memory.address: span}, span)
    pinned.unpin(memory)
    assert (driver.ranges, pinned.pinned_bytes, driver.faults) == ({}, 0, [])


def test_pinning_and_unpinning_twice_is_the_same_as_once() -> None:
    driver = Driver()
    pinned = pinning_on(driver)
    memory, other = Memory(PAGE, committed=True), Memory(PAGE, committed=True)
    for _ in range(2):
        pinned.pin(memory)
    for _ in range(2):
        pinned.unpin(memory)
        pinned.unpin(other)
    assert (driver.asked, driver.faults) == ([(memory.address, PAGE)], [])


def test_memory_without_bytes_is_not_registered() -> None:
    driver = Driver()
    pinning_on(driver).pin(Memory(0, committed=True))
    assert driver.asked == []


@pytest.mark.parametrize(
    ("size", "most"), [(300 * MIB + PAGE, 100 * MIB), (128 * MIB, 64 * MIB), (129 * MIB, 66 * MIB)]
)
def test_what_is_refused_as_a_whole_is_registered_in_pieces(
    size: int, most: int, log: pytest.LogCaptureFixture
) -> None:
    driver = Driver(most=most)
    pinned = pinning_on(driver)
    memory = Memory(size, committed=True)
    pinned.pin(memory)
    end = memory.address
    for start in sorted(driver.ranges):
        assert start == end
        end += driver.ranges[start]
    assert end == memory.address + size
    assert (pinned.pinned_bytes, log.records) == (size, [])
    pinned.unpin(memory)
    assert (driver.ranges, driver.faults) == ({}, [])


def test_no_piece_below_64_mib_is_tried() -> None:
    driver = Driver(most=0)
    pinned = pinning_on(driver)
    pinned.pin(Memory(200 * MIB, committed=True))
    assert (min(nbytes for _, nbytes in driver.asked), pinned.pinned_bytes) == (100 * MIB, 0)


def test_what_a_driver_can_lock_is_kept_and_its_limit_is_found_in_few_tries(
    log: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(total=700 * MIB)
    pinned = pinning_on(driver)
    memory = Memory(2048 * MIB, committed=True)
    pinned.pin(memory)
    assert pinned.pinned_bytes == sum(driver.ranges.values()) == 640 * MIB  # whole pieces of 64 MiB
    assert len(driver.asked) < 12
    assert len(log.records) == 1


def test_a_refusal_is_named_once_in_a_process_with_its_limits_and_what_to_do(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(str(3 * MIB), encoding="utf-8")
    monkeypatch.setattr(host, "_LIMITS", ((tmp_path / "memory.max", tmp_path / "memory.current"),))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * MIB, 16 * MIB))
    for _ in range(2):
        pinned = pinning_on(Driver(total=64 * MIB))
        memories = [Memory(128 * MIB, committed=True) for _ in range(3)]
        for memory in memories:
            pinned.pin(memory)
        assert pinned.pinned_bytes == 64 * MIB
    (record,) = log.records
    text = record.getMessage()
    assert text.startswith("page-locked only 64.0 MiB of 128.0 MiB")
    for part in ("RLIMIT_MEMLOCK is 8.0 MiB", "control group's memory limit 3.0 MiB", "ulimit -l", "host_budget"):
        assert part in text


@pytest.mark.parametrize("written", ["max", "9223372036854771712"])
def test_a_control_group_without_a_limit_is_not_named(
    written: str, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(written, encoding="utf-8")
    monkeypatch.setattr(host, "_LIMITS", ((tmp_path / "memory.max", tmp_path / "memory.current"),))
    pinning_on(Driver(total=0)).pin(Memory(PAGE, committed=True))
    assert "control group" not in log.records[0].getMessage()


def test_nothing_is_locked_where_the_machine_has_too_little_memory_left(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    pinned = pinning_on(driver)
    monkeypatch.setattr(pinning, "available_bytes", lambda: 10 * PAGE)
    pinned.pin(Memory(11 * PAGE, committed=True))
    assert (driver.asked, pinned.pinned_bytes, len(log.records)) == ([], 0, 1)
    small = Memory(10 * PAGE, committed=True)
    pinned.pin(small)
    assert driver.ranges == {small.address: 10 * PAGE}


def test_a_small_memlock_limit_alone_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, 0))
    driver = Driver()
    memory = Memory(MIB, committed=True)
    pinning_on(driver).pin(memory)
    assert driver.ranges == {memory.address: MIB}


def test_close_unregisters_all_that_is_left_once() -> None:
    driver = Driver(most=64 * MIB)
    pinned = pinning_on(driver)
    memories = [Memory(nbytes, committed=True) for nbytes in (PAGE, 256 * MIB, MIB)]
    for memory in memories:
        pinned.pin(memory)
    for _ in range(2):
        pinned.close()
        assert (driver.ranges, pinned.pinned_bytes, driver.faults) == ({}, 0, [])
    pinned.unpin(memories[0])
    assert driver.faults == []


def test_memory_that_is_collected_is_unregistered_while_it_is_mapped_and_its_address_can_be_pinned_again() -> None:
    driver = Driver()
    pinned = pinning_on(driver)
    addresses = set()
    for _ in range(50):
        memory = Memory(3 * PAGE, committed=True)
        addresses.add(memory.address)
        pinned.pin(memory)
        assert pinned.pinned_bytes == 3 * PAGE
        del memory
        gc.collect(0)
        assert (driver.ranges, driver.faults) == ({}, [])
    assert len(addresses) < 50, "no address came twice, so the test shows nothing"
    assert pinned.pinned_bytes == 0
    pinned.close()
    assert driver.faults == []


# --- cutting copies ---


def test_a_tensor_in_one_registration_or_outside_all_is_one_piece() -> None:
    driver = Driver()
    pinned = pinning_on(driver)
    inside, outside = Memory(8 * PAGE, committed=True), Memory(8 * PAGE, committed=True)
    pinned.pin(inside)
    for tensor in (
        inside.bytes,
        inside.view(torch.float64),
        inside.view(torch.bfloat16, 100, 2000),
        outside.view(torch.float32),
        torch.empty(1000),
    ):
        assert list(pinned.pieces(tensor)) == [(0, tensor.numel())]
    assert list(pinned.pieces(inside.bytes[5:5])) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_over_several_registrations_is_cut_where_they_meet(dtype: torch.dtype) -> None:
    driver = Driver(most=64 * MIB, total=128 * MIB)
    pinned = pinning_on(driver)
    memory = Memory(256 * MIB, committed=True)
    pinned.pin(memory)
    step = 64 * MIB // dtype.itemsize
    assert list(pinned.pieces(memory.view(dtype))) == [(0, step), (step, 2 * step), (2 * step, 4 * step)]
    part = memory.view(dtype, step - 8, step + 8)
    assert list(pinned.pieces(part)) == [(0, 8), (8, 16)]


def test_every_piece_lies_inside_one_range_or_outside_all_and_no_cut_is_needless() -> None:
    draw = random.Random(7)
    memory = Memory(64 * PAGE, committed=True)
    pinned = pinning_on(Driver())
    for _ in range(500):
        ends = sorted(draw.sample(range(65), 2 * draw.randint(0, 8)))
        ranges = [
            (memory.address + a * PAGE, memory.address + b * PAGE) for a, b in zip(ends[::2], ends[1::2], strict=True)
        ]
        touching = [(b, b + PAGE) for _, b in ranges if all(b + PAGE <= a or b >= d for a, d in ranges)]
        ranges = sorted({*ranges, *(each for each in touching if draw.random() < 0.5)})
        pinned._ranges = _Ranges(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
        dtype = draw.choice([torch.uint8, torch.float16, torch.float32, torch.int64])
        start, stop = sorted(draw.sample(range(memory.nbytes // dtype.itemsize + 1), 2))
        tensor = memory.view(dtype, start, stop)
        pieces = list(pinned.pieces(tensor))
        assert [a for a, _ in pieces] == [0, *(b for _, b in pieces[:-1])]
        assert pieces[-1][1] == tensor.numel()
        owners = [owner_of(ranges, tensor.data_ptr(), dtype.itemsize, piece) for piece in pieces]
        assert all(first != second for first, second in itertools.pairwise(owners))


def owner_of(ranges: list[tuple[int, int]], address: int, size: int, piece: tuple[int, int]) -> int:
    """Which range the piece lies in, -1 for none; fails where it touches two, or one in part."""
    low, high = address + piece[0] * size, address + piece[1] * size
    assert low < high
    touched = [index for index, (start, stop) in enumerate(ranges) if low < stop and start < high]
    if not touched:
        return -1
    (index,) = touched
    assert ranges[index][0] <= low
    assert high <= ranges[index][1]
    return index


def test_an_element_across_the_end_of_a_range_is_refused_and_not_torn() -> None:
    memory = Memory(2 * PAGE, committed=True)
    pinned = pinning_on(Driver())
    pinned._ranges = _Ranges((memory.address,), (memory.address + PAGE + 2,))
    with pytest.raises(RuntimeError, match=r"torch\.float32"):
        list(pinned.pieces(memory.view(torch.float32)))


def test_copies_are_cut_right_while_other_threads_pin_and_unpin() -> None:
    driver = Driver()
    pinned = pinning_on(driver)
    steady = Memory(4 * PAGE, committed=True)
    pinned.pin(steady)
    wrong: list[object] = []

    def churn(seed: int) -> None:
        draw = random.Random(seed)
        mine = [Memory(PAGE * draw.randint(1, 4), committed=True) for _ in range(8)]
        for _ in range(200):
            memory = draw.choice(mine)
            draw.choice([pinned.pin, pinned.unpin])(memory)
            if list(pinned.pieces(steady.bytes)) != [(0, steady.nbytes)]:
                wrong.append(memory)
        for memory in mine:
            pinned.unpin(memory)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, driver.faults) == ([], [])
    assert (driver.ranges, pinned.pinned_bytes) == ({steady.address: 4 * PAGE}, 4 * PAGE)
