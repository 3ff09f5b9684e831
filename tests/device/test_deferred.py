"""The late compute stream is late: what does not wait for it sees that it is, and what a host reads waits.

Order is checked by what is seen, never by the clock: a gate in the queue stands for the time that work takes. That it
computes what torch computes is `test_deferred_training`'s.
"""

import contextlib
import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import deferred
import pytest
import torch
import torch.nn.functional as F
from deferred import now
from torch import Tensor, nn

from tiered.config import Emulation
from tiered.device.emulated import EmulatedBuffer, EmulatedDevice

LIMIT_S = 60
DELAY_S = 2e-3
ELEMENTS = 1024


pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def device_buffer(*, poison: bool = False) -> Iterator[tuple[EmulatedDevice, EmulatedBuffer]]:
    """A committed buffer of `ELEMENTS` float32 ones; to be entered inside `deferred.compute`."""
    device = EmulatedDevice(Emulation(poison=poison))
    buffer = device.allocate(4 * ELEMENTS)
    device.commit(buffer)
    device.copy_in(buffer.view(torch.float32), torch.ones(ELEMENTS)).wait(LIMIT_S)
    yield device, buffer
    device.fence().wait(LIMIT_S)
    device.close()


def on_device(stream: deferred.LateStream, tensor: Tensor) -> Tensor:
    stream.took_tensor(tensor)
    return tensor


def test_a_graph_records_each_change_once() -> None:
    with deferred.compute(DELAY_S) as stream:
        x = on_device(stream, torch.ones(8))
        x.add_(1).mul_(2)
        torch.add(x, 1, out=x)
        assert x._version == 3
        weight = on_device(stream, torch.ones(8)).requires_grad_()
        squared = (weight * 2).square()
        leaf = weight * 3
        product = leaf * leaf
        leaf.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        squared.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [8.0] * 8


def test_what_happens_to_an_object_after_it_was_given_does_not_reach_the_kernel() -> None:
    with deferred.compute() as stream:
        x = on_device(stream, torch.arange(6.0).view(2, 3))
        weight = nn.Parameter(x.clone())
        with stream.held():
            columns = x.sum(0)
            doubled = weight.detach() * 2
            x.t_()
            weight.data = torch.zeros(5)
        assert columns.tolist() == [3.0, 5.0, 7.0]
        assert doubled.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_work_is_done_up_to_the_point_that_somebody_asks_for_and_no_further() -> None:
    with deferred.compute(1000.0, seed=1) as stream:
        x = on_device(stream, torch.ones(4))
        doubled, point = x * 2, stream.record()
        tripled, end = x * 3, stream.record()
        assert math.isnan(now(doubled))
        point.wait(LIMIT_S)
        assert now(doubled) == 2.0
        assert math.isnan(now(tripled))
        deadline = time.monotonic() + LIMIT_S
        while not end.done() and time.monotonic() < deadline:  # asking is enough: a GPU gets there by itself
            time.sleep(0.001)
        assert now(tripled) == 3.0


def test_every_thread_of_the_program_gives_to_the_one_stream() -> None:
    with deferred.compute() as stream:
        x = on_device(stream, torch.ones(4))
        seen: list[Tensor] = []
        other = threading.Thread(target=lambda: seen.append(doubled + 1))
        with stream.held():
            doubled = x * 2
            other.start()
            other.join(LIMIT_S)
            assert math.isnan(now(seen[0]))
        assert seen[0].tolist() == [3.0] * 4


def test_tensors_of_inference_mode_are_computed_on_in_place_late() -> None:
    with deferred.compute() as stream:
        x = on_device(stream, torch.ones(4))
        with torch.inference_mode(), stream.held():
            y = (x * 2).add_(1)
            y.mul_(2)
        assert y.tolist() == [6.0] * 4


# --- what waits ---

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 3),
    "equal": lambda x: torch.equal(x, torch.tensor([2.0, 4.0])),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "cpu": lambda x: x.cpu().numpy().tolist(),
    "nonzero": lambda x: (x > 3).nonzero().tolist(),
    "mask": lambda x: x[x > 3].tolist(),
    "to": lambda x: now(x.to("cpu", torch.float64).to(torch.float32)),
    "copy": lambda x: now(torch.zeros(2).copy_(x)),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_on_the_host_waits_for_what_was_given(name: str) -> None:
    read = READS[name]
    want = read(torch.tensor([2.0, 4.0]))
    with deferred.compute() as stream:
        x = on_device(stream, torch.tensor([1.0, 2.0]))
        gate = threading.Event()
        stream.run(lambda: passed(gate))
        doubled = x * 2
        opened = threading.Timer(0.02, gate.set)
        opened.start()
        assert read(doubled) == want
        assert gate.is_set()
        opened.join()


def test_a_copy_to_the_host_that_does_not_block_is_not_there_until_it_is_waited_for() -> None:
    with deferred.compute() as stream:
        x, host = on_device(stream, torch.ones(4)), torch.zeros(4)
        with stream.held():
            host.copy_(x, non_blocking=True)
            assert host.tolist() == [0.0] * 4
            source = torch.ones(4)
            x.copy_(source, non_blocking=True)
            source.fill_(5)
        stream.sync()
        assert host.tolist() == [1.0] * 4
        assert x.tolist() == [5.0] * 4, "the source was reused before the copy had read it"


def test_what_never_met_the_device_runs_at_once() -> None:
    with deferred.compute() as stream:
        kept = on_device(stream, torch.ones(64))
        for _ in range(300):  # addresses of storages that are gone come again
            kept = kept * 1
        stream.sync()
        given, waited = stream.deferred.total(), stream.at_once.total()
        with stream.held():
            for _ in range(300):
                host = torch.ones(64) * 2
                assert now(host) == 2.0
        assert (stream.deferred.total(), stream.at_once.total()) == (given, waited)


# --- what does not wait shows ---


def test_memory_that_is_overwritten_before_its_kernel_has_run_shows() -> None:
    results = []
    for waits in (True, False):
        with deferred.compute() as stream, device_buffer() as (_, buffer):
            with stream.held():
                doubled = buffer.view(torch.float32) * 2
                assert math.isnan(now(doubled)), "an output reads as NaN until it is written"
                if not waits:
                    ctypes.memset(buffer.address, 0, buffer.nbytes)
            if waits:
                stream.sync()
                ctypes.memset(buffer.address, 0, buffer.nbytes)
            results.append(doubled.sum().item())
    assert results == [2.0 * ELEMENTS, 0.0]


def test_a_copy_out_brings_what_the_stream_has_left_and_a_copy_past_it_does_not() -> None:
    with deferred.compute() as stream, device_buffer() as (device, buffer):
        early, right = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
        with stream.held():
            buffer.view(torch.float32).mul_(3)
            ctypes.memmove(early.data_ptr(), buffer.address, buffer.nbytes)
            arrived = device.copy_out(right, buffer.view(torch.float32))
            assert not arrived.done()
        arrived.wait(LIMIT_S)
        assert early.eq(1).all()
        assert right.eq(3).all()


def test_what_a_device_brings_to_the_host_is_the_hosts() -> None:
    """Its values are there, and what is done with it is done at once."""
    with deferred.compute() as stream, device_buffer() as (device, buffer):
        host = device.to_host(buffer.view(torch.float32) * 2)
        with stream.held():
            assert now(host.add(1)) == 3.0


@pytest.mark.parametrize("poison", [True, False])
def test_a_kernel_given_before_a_release_reads_what_was_there(poison: bool) -> None:
    with deferred.compute() as stream, device_buffer(poison=poison) as (device, buffer):
        with stream.held():
            before = buffer.view(torch.float32) * 2
            device.release(buffer)
            device.commit(buffer)
            arrived = device.copy_in(buffer.view(torch.float32), torch.full((ELEMENTS,), 7.0))
            assert not arrived.done(), "the copy came before the memory was committed anew"
            device.order(arrived)
            after = buffer.view(torch.float32) * 2
            again = buffer.view(torch.float32)  # a view by now does not stop the release that was given
        assert before.eq(2).all()
        assert after.eq(14).all()
        assert again.eq(7).all()


def test_a_wait_that_is_left_out_reads_poison() -> None:
    with deferred.compute() as stream, device_buffer(poison=True) as (device, buffer):
        gate = threading.Event()
        device.release(buffer)
        device.commit(buffer)
        stream.record().wait(LIMIT_S)
        device._inward.wait(Gated(gate))  # type: ignore[arg-type]
        arrived = device.copy_in(buffer.view(torch.float32), torch.ones(ELEMENTS))
        too_early = buffer.view(torch.float32).sum()
        assert too_early.isnan().item()
        gate.set()
        device.order(arrived)
        assert buffer.view(torch.float32).sum().item() == ELEMENTS


def passed(gate: threading.Event) -> None:
    assert gate.wait(LIMIT_S), "nobody opened the gate"


class Gated:
    """An event that a gate stands for."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def done(self) -> bool:
        return self._gate.is_set()

    def wait(self, timeout: float | None = None) -> None:
        passed(self._gate)


# --- lifetimes ---


def test_a_queued_operation_is_no_user_of_the_buffer() -> None:
    with deferred.compute() as stream, device_buffer() as (_, buffer):
        buffer.seal()
        with stream.held():
            kept = [buffer.view(torch.float32) * 2, buffer.view(torch.float32)[5:].add_(1).sum()]
            torch._foreach_mul_([buffer.view(torch.float32)], 2)
            kept.append(buffer.view(torch.bfloat16, 0, 7).float())
            assert not buffer.exported()
            view = buffer.view(torch.float32)
            assert buffer.exported()
            del view
        assert [kept[0].sum().item(), kept[1].item()] == [2.0 * ELEMENTS, 2.0 * (ELEMENTS - 5)]


def test_a_buffer_that_is_dropped_stays_mapped_until_its_kernels_have_run() -> None:
    with deferred.compute() as stream:
        device = EmulatedDevice(Emulation(poison=False))
        buffer = device.allocate(4 * ELEMENTS)
        device.commit(buffer)
        buffer.view(torch.float32).fill_(3)
        stream.sync()
        alive = weakref.ref(buffer)
        with stream.held():
            tripled = buffer.view(torch.float32) * 3
            del buffer
            assert alive() is not None
        assert tripled.sum().item() == 9.0 * ELEMENTS
        assert alive() is None
        device.close()


def test_a_view_that_outlives_its_buffer_is_still_the_devices() -> None:
    with deferred.compute() as stream:
        device = EmulatedDevice(Emulation(poison=False))
        buffer = device.allocate(4 * ELEMENTS)
        device.commit(buffer)
        view = buffer.view(torch.float32).fill_(3)
        stream.sync()
        del buffer
        with stream.held():
            tripled = view * 3
            del view
            assert math.isnan(now(tripled))
        assert tripled.sum().item() == 9.0 * ELEMENTS
        device.close()


def test_bytes_that_kernels_made_are_counted_while_they_live() -> None:
    with deferred.compute() as stream:
        x = on_device(stream, torch.ones(ELEMENTS))
        before = stream.allocated_bytes
        doubled = x * 2
        tail = doubled[10:]
        assert stream.allocated_bytes - before == 4 * ELEMENTS
        del doubled
        stream.sync()
        assert stream.allocated_bytes - before == 4 * ELEMENTS
        del tail
        assert stream.allocated_bytes == before


# --- errors and the end ---


def test_an_error_of_shapes_is_raised_at_once_and_leaves_the_stream_well() -> None:
    with deferred.compute() as stream:
        x = on_device(stream, torch.ones(3))
        with pytest.raises(RuntimeError, match="must match the size"):
            x + torch.ones(4)
        with pytest.raises(RuntimeError, match="must match the size"):
            x.add_(torch.ones(4))
        assert (x + 1).tolist() == [2.0] * 3


def test_an_error_of_values_comes_with_the_next_wait_and_at_the_end() -> None:
    raised = []
    with pytest.raises(IndexError), deferred.compute() as stream:
        table = on_device(stream, torch.ones(3, 2))
        F.embedding(torch.tensor([7]), table)
        for wait in (stream.sync, lambda: stream.record().wait(), lambda: table.sum().item()):
            with pytest.raises(IndexError) as caught:
                wait()
            raised.append(caught.value)
    assert len(raised) == 3


def test_an_error_that_nobody_waited_for_is_raised_at_the_end() -> None:
    with pytest.raises(IndexError), deferred.compute() as stream:
        F.embedding(torch.tensor([7]), on_device(stream, torch.ones(3, 2)))


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_waits_for_all_work_and_ends_the_thread(fails: bool) -> None:
    before = set(threading.enumerate())
    with contextlib.suppress(KeyError), deferred.compute(0.01, seed=4) as stream:
        x = on_device(stream, torch.zeros(4))
        for _ in range(20):
            x += 1
        event = stream.record()
        if fails:
            raise KeyError
    assert event.done()
    assert stream.idle
    assert x.tolist() == [20.0] * 4
    assert set(threading.enumerate()) <= before
    given = stream.deferred.total()
    assert now(x + 1) == 21.0
    assert stream.deferred.total() == given
