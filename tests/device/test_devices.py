"""Both devices copy right; the emulated one also behaves like a device behind a link, so that mistakes show.

Order and lifetime are checked by what is seen, never by the clock: a gate stands for the time a slow copy takes.
"""

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from tiered.config import Emulation
from tiered.device import emulated
from tiered.device.base import Device
from tiered.device.cpu import CpuDevice
from tiered.device.emulated import EmulatedDevice

LIMIT_S = 60


@pytest.fixture(params=["cpu", "emulated", "late"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each device; `late` delays every copy at random."""
    late = Emulation(max_delay_s=0.002, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    made: Device = (
        CpuDevice() if request.param == "cpu" else EmulatedDevice(late if request.param == "late" else Emulation())
    )
    yield made
    made.close()


def test_copies_go_both_ways_in_every_dtype(device: Device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
        buffer = device.allocate(4096)
        device.commit(buffer)
        source = torch.arange(100).to(dtype)
        device.copy_in(buffer.view(dtype, 0, 100), source).wait(LIMIT_S)
        back = torch.zeros(100, dtype=dtype)
        device.copy_out(back, buffer.view(dtype, 0, 100)).wait(LIMIT_S)
        assert torch.equal(back, source)


def test_copies_of_one_direction_end_in_order(device: Device) -> None:
    buffer = device.allocate(4096)
    device.commit(buffer)
    ended: list[int] = []
    tickets = []
    for index in range(20):
        tickets.append(device.copy_in(buffer.view(torch.float32, 0, 8), torch.full((8,), float(index))))
        tickets[-1].add_done_callback(lambda index=index: ended.append(index))
    for ticket in tickets:
        ticket.wait(LIMIT_S)
    device.close()
    assert ended == list(range(20))
    assert buffer.view(torch.float32, 0, 8).eq(19).all()


def test_a_released_buffer_can_be_filled_again_at_its_address(device: Device) -> None:
    buffer = device.allocate(8192)
    device.commit(buffer)
    for value in (1.0, 2.0):
        device.copy_in(buffer.view(torch.float32), torch.full((2048,), value)).wait(LIMIT_S)
        assert buffer.view(torch.float32).eq(value).all()
        address = buffer.address
        device.release(buffer)
        device.commit(buffer)
        assert buffer.address == address


def test_closing_twice_is_closing_once(device: Device) -> None:
    device.close()
    device.close()


# --- the emulated device ---


def open_link(**settings: float) -> EmulatedDevice:
    return EmulatedDevice(Emulation(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_released_and_not_yet_arrived_memory_reads_as_nan(dtype: torch.dtype) -> None:
    device = open_link()
    buffer = device.allocate(4096)
    device.commit(buffer)
    assert buffer.view(dtype).isnan().all()
    device.copy_in(buffer.view(dtype), torch.ones(4096 // dtype.itemsize, dtype=dtype)).wait(LIMIT_S)
    assert buffer.view(dtype).eq(1).all()
    device.release(buffer)
    assert buffer.view(dtype).isnan().all()
    device.close()


def test_without_poison_released_memory_is_given_back() -> None:
    device = EmulatedDevice(Emulation(poison=False))
    buffer = device.allocate(4096)
    assert not buffer.committed
    device.commit(buffer)
    device.release(buffer)
    assert not buffer.committed
    device.close()


class Gate:
    """Stands for the time a link's copies take: they are held until `open`, and how long they asked for is kept."""

    def __init__(self, held: str) -> None:
        self.asked: list[float] = []
        self._held = held
        self._event = threading.Event()

    def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        if threading.current_thread().name == self._held:
            assert self._event.wait(LIMIT_S)

    def open(self) -> None:
        self._event.set()


def test_a_slow_link_shows_a_destination_that_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("tiered-h2d")
    monkeypatch.setattr(emulated, "time", gate)
    device = open_link(h2d_bytes_per_s=8192.0)
    buffer = device.allocate(4096)
    device.commit(buffer)
    ticket = device.copy_in(buffer.bytes, torch.zeros(4096, dtype=torch.uint8))
    assert buffer.view(torch.float32).isnan().all()
    assert not ticket.done()
    gate.open()
    ticket.wait(LIMIT_S)
    assert buffer.bytes.eq(0).all()
    assert gate.asked == [0.5], "4 KiB at 8 KiB a second"
    device.close()


def test_a_slow_link_shows_a_source_that_is_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("tiered-d2h")
    monkeypatch.setattr(emulated, "time", gate)
    device = open_link(d2h_bytes_per_s=8192.0)
    source, destination = torch.ones(1024), torch.zeros(1024)
    ticket = device.copy_out(destination, source)
    source.fill_(5)
    gate.open()
    ticket.wait(LIMIT_S)
    assert destination.eq(5).all(), "the copy was made before its time"
    device.close()


def test_one_slow_direction_does_not_hold_up_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("tiered-h2d")
    monkeypatch.setattr(emulated, "time", gate)
    device = open_link(h2d_bytes_per_s=4096.0, d2h_bytes_per_s=4096.0)
    inward = device.copy_in(torch.zeros(1024), torch.ones(1024))
    device.copy_out(torch.zeros(1024), torch.ones(1024)).wait(LIMIT_S)
    assert not inward.done()
    gate.open()
    device.close()
    assert inward.done()


def test_random_delays_are_repeatable_and_within_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for _ in range(2):
        gate = Gate("none")
        monkeypatch.setattr(emulated, "time", gate)
        device = open_link(max_delay_s=0.25, seed=7)
        for _ in range(20):
            device.copy_in(torch.zeros(4), torch.ones(4))
        device.close()
        asked.append(gate.asked)
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 40, "one delay before each wait, one before each copy"
    assert all(0 <= seconds <= 0.25 for seconds in asked[0])


def test_close_waits_for_both_queues_and_joins_their_threads() -> None:
    before = set(threading.enumerate())
    device = open_link(h2d_bytes_per_s=1e5, d2h_bytes_per_s=1e5)
    destinations = [torch.zeros(256) for _ in range(10)]
    tickets = [device.copy_in(d, torch.ones(256)) for d in destinations[:5]]
    tickets += [device.copy_out(d, torch.ones(256)) for d in destinations[5:]]
    assert len(set(threading.enumerate()) - before) == 2
    device.close()
    assert set(threading.enumerate()) <= before
    assert all(ticket.done() for ticket in tickets)
    assert all(d.eq(1).all() for d in destinations)


def test_a_copy_that_cannot_be_made_is_its_tickets_error_and_the_link_lives_on() -> None:
    device = open_link()
    with pytest.raises(RuntimeError, match="size"):
        device.copy_in(torch.zeros(3), torch.zeros(4)).wait(LIMIT_S)
    good = torch.zeros(4)
    device.copy_in(good, torch.ones(4)).wait(LIMIT_S)
    assert good.eq(1).all()
    device.close()


def test_a_finished_copy_holds_no_memory() -> None:
    device = open_link()
    source = torch.ones(16)
    alive = weakref.ref(source)
    device.copy_in(torch.zeros(16), source).wait(LIMIT_S)
    del source
    assert alive() is None
    device.close()
