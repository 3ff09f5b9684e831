"""The late compute stream computes what torch computes, and is late: what does not wait for it sees that it is.

Order is checked by what is seen, never by the clock: a gate in the queue stands for the time that work takes.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deferred
import pytest
import torch
import torch.nn.functional as F
from models import CASES, CONV, GPT, MIXED, Case, Gpt, token_batch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tiered.config import Emulation
from tiered.device.emulated import EmulatedBuffer, EmulatedDevice

LIMIT_S = 60
DELAY_S = 2e-4
ELEMENTS = 1024


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def held(stream: deferred.LateStream) -> Iterator[None]:
    """What the stream is given inside runs when the block is left."""
    gate = threading.Event()
    stream.run(lambda: passed(gate))
    try:
        yield
    finally:
        gate.set()


def passed(gate: threading.Event) -> None:
    assert gate.wait(LIMIT_S), "nobody opened the gate"


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


def now(tensor: Tensor) -> float:
    """The first element as memory has it now, past every wait."""
    return ctypes.c_float.from_address(tensor.data_ptr()).value


# --- the same results ---


class Dropped(nn.Module):
    """Dropout, a batch norm in evaluation, operations in place, a view that is written, and a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24).eval()
        self.down = nn.Linear(24, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (batch, 16), (batch,) float32
        hidden = F.dropout(self.norm(self.up(x)), 0.5).mul_(2).add_(1)
        hidden[:, :3].copy_(hidden[:, 3:6] * 2)
        hidden = torch.cat([hidden[:, ::2], hidden[:, 1::2].clamp(min=0.1)], 1).relu_()
        return F.mse_loss(self.down(hidden).squeeze(1), y)


EVERY_CASE = (
    *CASES,
    MIXED,
    Case("dropped", Dropped, MIXED.make_batch),
    Case("reentrant", partial(Gpt, 2, checkpointing="reentrant"), token_batch),
    Case("non-reentrant", partial(Gpt, 2, checkpointing="non-reentrant"), token_batch),
)


def train(case: Case, optimizer: Callable[..., Any], stream: deferred.LateStream | None) -> list[Any]:
    """Losses, gradients, and at the end weights, buffers and moments of two steps; on the device if there is one."""
    torch.manual_seed(3)
    model = case.build()
    for tensor in (*model.parameters(), *model.buffers()):
        if stream is not None:
            stream.took_tensor(tensor.data)
    steps = optimizer(model.parameters())
    seen: list[Any] = []
    for step in range(2):
        loss = model(*case.make_batch(step))
        loss.backward()
        seen.append([loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        steps.zero_grad()
    return [*seen, dict(model.state_dict()), steps.state_dict()["state"]]


def same_bits(got: Any, want: Any) -> None:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for one, other in pairs:
        if isinstance(other, Tensor):
            bits = other.detach().contiguous().view(-1).view(torch.uint8)
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert one.detach().contiguous().view(-1).view(torch.uint8).equal(bits)
        else:
            assert one == other


OPTIMIZERS = {
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "single": partial(torch.optim.AdamW, foreach=False),
    "fused": partial(torch.optim.AdamW, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_training_late_gives_the_bits_of_training_at_once(case: Case) -> None:
    want = train(case, OPTIMIZERS["foreach"], None)
    with deferred.compute(DELAY_S, seed=1) as stream:
        got = train(case, OPTIMIZERS["foreach"], stream)
    same_bits(got, want)
    assert stream.deferred.total() > 50


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_kind_of_optimizer_steps_late_with_the_same_bits(kind: str) -> None:
    want = train(CONV, OPTIMIZERS[kind], None)
    with deferred.compute(DELAY_S, seed=2) as stream:
        got = train(CONV, OPTIMIZERS[kind], stream)
    same_bits(got, want)


@pytest.mark.parametrize("case", [GPT, CONV, MIXED, EVERY_CASE[-1], EVERY_CASE[-2]], ids=lambda case: case.name)
def test_a_whole_step_without_reads_is_given_while_nothing_runs(case: Case) -> None:
    """Forward, backward and optimizer, all of it given before the first kernel has run."""
    with deferred.compute() as stream:
        rehearsal = train(case, OPTIMIZERS["fused"], stream)
        stream.sync()
        with held(stream):
            got = train(case, OPTIMIZERS["fused"], stream)
            assert all(torch.tensor(now(loss)).isnan() for loss in (got[0][0], got[1][0]))
            assert not stream.idle
    same_bits(got, rehearsal)
    assert not stream.at_once
    assert stream.deferred.keys() >= {"aten.addmm.default", "aten._fused_adamw_.default"}
    assert any("backward" in name for name in stream.deferred)


def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    def draw(x: Tensor) -> list[Tensor]:
        torch.manual_seed(7)
        return [F.dropout(x, 0.3), torch.rand(3), torch.rand_like(x), x.clone().uniform_(), torch.randn(2) + x[:2]]

    want = draw(torch.ones(64))
    with deferred.compute(DELAY_S, seed=3) as stream:
        got = draw(on_device(stream, torch.ones(64)))
    same_bits(got, want)


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
        with held(stream):
            columns = x.sum(0)
            doubled = weight.detach() * 2
            x.t_()
            weight.data = torch.zeros(5)
        assert columns.tolist() == [3.0, 5.0, 7.0]
        assert doubled.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


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
        opened = threading.Timer(0.02, gate.set)
        doubled = x * 2
        opened.start()
        assert read(doubled) == want
        assert gate.is_set()
        opened.join()


def test_a_copy_to_the_host_that_does_not_block_is_not_there_until_it_is_waited_for() -> None:
    with deferred.compute() as stream:
        x, host = on_device(stream, torch.ones(4)), torch.zeros(4)
        with held(stream):
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
        with held(stream):
            for _ in range(300):
                host = torch.ones(64) * 2
                assert now(host) == 2.0
        assert (stream.deferred.total(), stream.at_once.total()) == (given, waited)


# --- what does not wait shows ---


def test_memory_that_is_overwritten_before_its_kernel_has_run_shows() -> None:
    results = []
    for waits in (True, False):
        with deferred.compute() as stream, device_buffer() as (_, buffer):
            with held(stream):
                doubled = buffer.view(torch.float32) * 2
                assert torch.tensor(now(doubled)).isnan(), "an output reads as NaN until it is written"
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
        with held(stream):
            buffer.view(torch.float32).mul_(3)
            ctypes.memmove(early.data_ptr(), buffer.address, buffer.nbytes)
            arrived = device.copy_out(right, buffer.view(torch.float32))
            assert not arrived.done()
        arrived.wait(LIMIT_S)
        assert early.eq(1).all()
        assert right.eq(3).all()


@pytest.mark.parametrize("poison", [True, False])
def test_a_kernel_given_before_a_release_reads_what_was_there(poison: bool) -> None:
    with deferred.compute() as stream, device_buffer(poison=poison) as (device, buffer):
        with held(stream):
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
        with held(stream):
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
        with held(stream):
            tripled = buffer.view(torch.float32) * 3
            view = buffer.view(torch.float32)[:4]
            del buffer
            last = view * 1
            del view
        assert tripled.sum().item() == 9.0 * ELEMENTS
        assert last.tolist() == [3.0] * 4
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
