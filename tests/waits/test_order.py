"""What must wait for what, each held up by a gate: without the wait the test reads what is not there yet, or leaks."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deferred
import pytest
import torch
from torch import nn
from waits.gate import HELD_S, LIMIT_S, Gate, Moving

import tiered
from tiered.device import emulated
from tiered.device.memory import Memory
from tiered.device.ticket import Completion, Ticket, settled
from tiered.io.swapfile import SwapSpace
from tiered.optim import kernels, pipeline
from tiered.store.store import TieredStore
from tiered.zero import residence
from tiered.zero.group import ParamGroup
from tiered.zero.model import MODEL_ATTRIBUTE, ShardedModel

WIDTH = 64


def network(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


@contextlib.contextmanager
def sharded(layers: int = 4, **settings: Any) -> Iterator[tuple[nn.Sequential, Any, ShardedModel]]:
    """A model, its optimizer and its inside, on an emulated device unless told otherwise. With two layers all their
    gradients may be on their way at once."""
    model = network(layers)
    tiered.shard(model, tiered.Config(**{"device": "emulated", "host_budget": "16MiB", **settings}))
    inside: ShardedModel = model.__dict__[MODEL_ATTRIBUTE]
    try:
        yield model, tiered.AdamW(model.parameters(), lr=1e-2), inside
    finally:
        tiered.close(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, WIDTH)).square().sum()


def everything_has_landed(inside: ShardedModel) -> None:
    """Copies out happen in order: after one more, all before it are over, whoever waited for them."""
    inside.runtime.device.copy_out(torch.zeros(1), torch.zeros(1)).wait(LIMIT_S)


def fetched(group: ParamGroup) -> torch.Tensor:
    """The group's first parameter, once it is there."""
    group.wait()
    slot = group.spec.slots[0]
    return group.buffer.view(group.dtype, slot.start, slot.stop).clone().view(slot.shape)


def test_reading_a_gradient_waits_until_it_has_been_added(gate: Gate) -> None:
    plain = network(2)
    loss_of(plain).backward()
    with sharded(2) as (model, _, _):
        gate.close("tiered-d2h")
        loss_of(model).backward()
        with gate.opening_soon():
            got = model[0].weight.grad.clone()
    torch.testing.assert_close(got, plain[0].weight.grad)


def test_setting_a_gradient_is_not_undone_by_one_on_its_way(gate: Gate) -> None:
    with sharded(2) as (model, _, inside):
        gate.close("tiered-d2h")
        loss_of(model).backward()
        with gate.opening_soon():
            model[0].weight.grad = torch.ones(WIDTH, WIDTH)
        everything_has_landed(inside)
        assert model[0].weight.grad.eq(1).all()


def test_zeroing_a_gradient_is_not_undone_by_one_on_its_way(gate: Gate) -> None:
    with sharded(2) as (model, optimizer, inside):
        gate.close("tiered-d2h")
        loss_of(model).backward()
        with gate.opening_soon():
            optimizer.zero_grad(set_to_none=False)
        everything_has_landed(inside)
        assert model[0].weight.grad.eq(0).all()


def test_a_step_takes_every_gradient_on_its_way(gate: Gate) -> None:
    norms = []
    for held in (False, True):
        with sharded(2) as (model, optimizer, _):
            if held:
                gate.close("tiered-d2h")
            loss_of(model).backward()
            with gate.opening_soon():
                optimizer.step()
            norms.append((optimizer.grad_norm, model[0].weight.detach().clone()))
    assert norms[0][0] == norms[1][0] > 0
    assert torch.equal(norms[0][1], norms[1][1])


def test_a_gradient_that_cannot_be_added_is_an_error_of_the_step(gate: Gate) -> None:
    def broken(*_: Any) -> float:
        raise OSError("the memory is gone")

    with sharded(2) as (model, optimizer, inside):
        inside.departures._kernels = type(inside.kernels)(broken, broken, broken)
        with pytest.raises(OSError, match="the memory is gone"):  # of the backward that sees it, else of the step
            loss_of(model).backward()
            optimizer.step()


def test_closing_takes_back_gradients_on_their_way(gate: Gate) -> None:
    with sharded(1) as (model, _, inside):
        loss_of(model).backward()
        inside.departures.drain()
        gate.close("tiered-d2h")
        loss_of(model).backward()  # is added to the first, so staging carries it
        with gate.opening_soon():
            tiered.close(model)
        assert inside.runtime.store.staged == 0
        assert inside.runtime.store.host.used == 0


def test_parameters_that_cannot_be_read_are_an_error_of_their_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme") as (model, _, _):
        loss_of(model)

        def broken(*_: Any) -> Ticket:
            ticket = Moving()
            ticket.finish(OSError("the drive is gone"))
            return ticket

        monkeypatch.setattr(SwapSpace, "read", broken)
        monkeypatch.setattr(TieredStore, "_fail", lambda *_: None)  # which the next use of the block would show
        with pytest.raises(OSError, match="the drive is gone"):
            loss_of(model)
        monkeypatch.undo()


def test_closing_takes_back_what_is_on_its_way(gate: Gate, slow_drive: Gate, tmp_path: Path) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme", device_budget="64KiB") as (model, _, inside):
        gate.close("drive")
        inside.groups[3].begin_fetch()
        with gate.opening_soon():
            tiered.close(model)
        assert inside.runtime.store.host.used == 0
        assert inside.runtime.store.staged == 0


def test_what_has_arrived_gives_back_what_carried_it_without_being_used(gate: Gate, tmp_path: Path) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme") as (_, _, inside):
        group = inside.groups[1]
        group.begin_fetch()
        assert inside.runtime.store.staged == 1
        inside.runtime.device.fence().wait()
        deadline = threading.Event()
        for _ in range(LIMIT_S * 100):
            if group.poll():
                break
            deadline.wait(0.01)
        assert inside.runtime.store.staged == 0


def test_what_carries_something_fetched_ahead_is_waited_for_where_its_memory_is_needed(
    gate: Gate, slow_drive: Gate, tmp_path: Path
) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme") as (_, _, inside):
        group, store = inside.groups[1], inside.runtime.store
        gate.close("drive")
        group.begin_fetch()
        inside.executor.expect(group)
        room = store.host.limit - store.host.used
        with gate.opening_soon():
            store.unstage(store.staging(room + 1, "all that is free, and a little more"))
        assert store.staged == 0


@pytest.mark.parametrize("verb", ["drop", "refresh"])
def test_letting_go_of_what_is_on_its_way_leaks_nothing(
    verb: str, gate: Gate, slow_drive: Gate, tmp_path: Path
) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme") as (model, _, inside):
        group = inside.groups[1]
        want = model[1].weight.detach().clone()
        group.drop() if group.present else None
        gate.close("drive")
        group.begin_fetch()
        with gate.opening_soon():
            getattr(group, verb)()
        if verb == "drop":
            group.begin_fetch()
        assert torch.equal(fetched(group), want)
        inside.runtime.store._arena.poll()
        assert inside.runtime.store.staged == 0


def test_a_view_kept_over_a_step_shows_the_new_values_at_once(gate: Gate) -> None:
    with sharded() as (model, optimizer, _):
        view = model[0].weight.view(-1)
        loss_of(model).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        gate.close("tiered-h2d")
        with gate.opening_soon():
            optimizer.step()
            seen = view.detach().clone()
        assert torch.equal(seen, model[0].weight.detach().view(-1))
        del view


def test_a_step_waits_for_the_parameters_it_updates_where_they_arrive(
    gate: Gate, slow_drive: Gate, tmp_path: Path
) -> None:
    """On the CPU a group on its way from a drive is updated in the memory it arrives in."""
    results = []
    for held in (False, True):
        settings = {"device": "cpu", "nvme": tmp_path, "param_tier": "nvme", "device_budget": "128KiB"}
        with sharded(**settings) as (model, optimizer, inside):
            loss_of(model).backward()
            for group in inside.groups:
                if group.present:
                    group.drop()
            inside.groups[0].begin_fetch()
            inside.groups[0].wait()
            if held:
                inside.groups[0].drop()
                gate.close("drive")
                inside.groups[0].begin_fetch()
            with gate.opening_soon():
                optimizer.step()
            results.append(model[0].weight.detach().clone())
    assert torch.equal(results[0], results[1])


def test_a_wait_for_a_drive_is_counted_as_stalled(gate: Gate, slow_drive: Gate, tmp_path: Path) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme") as (_, _, inside):
        group = inside.groups[2]
        gate.close("drive")
        group.begin_fetch()
        assert inside.runtime.meter.stalls["fetch"] == 0
        with gate.opening_soon():
            group.wait()
        assert inside.runtime.meter.stalls["fetch"] > HELD_S / 2


def test_a_step_waits_for_copies_of_parameters_that_a_forward_given_before_still_needs() -> None:
    def losses(late: bool) -> list[float]:
        with contextlib.ExitStack() as scope:
            if late:
                scope.enter_context(deferred.compute(max_delay_s=60))
            model = network()
            slow = tiered.Emulation(h2d_bytes_per_s=1e6 if late else None)
            tiered.shard(
                model,
                tiered.Config(device="emulated", host_budget="16MiB", device_budget="64KiB", emulation=slow),
            )
            optimizer = tiered.AdamW(model.parameters(), lr=0.1)
            seen = []
            for _ in range(2):
                loss_of(model).backward()
                with torch.no_grad():
                    between = loss_of(model)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(between.item())
            tiered.close(model)
            return seen

    assert losses(late=True) == losses(late=False)


def test_a_step_waits_for_what_is_fetched_ahead_of_what_it_writes(slow_drive: Gate, tmp_path: Path) -> None:
    with sharded(nvme=tmp_path, param_tier="nvme", optimizer_tier="nvme", device_budget="64KiB") as (
        model,
        opt,
        inside,
    ):
        loss_of(model).backward()
        for group in inside.groups:
            if group.present:
                group.drop()
        slow_drive.close("drive")
        inside.groups[1].begin_fetch()
        inside.executor.expect(inside.groups[1])
        order: list[str] = []
        begun = pipeline.Run

        def noted(*given: Any, **more: Any) -> pipeline.Run:
            order.append("open" if slow_drive.lets("drive") else "held")
            return begun(*given, **more)

        with slow_drive.opening_soon(), mock.patch.object(pipeline, "Run", noted):
            opt.step()
        assert order == ["open"], "the step began while a read of what it writes was under way"
        assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_wait_for_the_devices_decision_is_counted_as_stalled(gate: Gate) -> None:
    with sharded(optimizer_tier="device") as (model, optimizer, inside):
        loss_of(model).backward()
        gate.close("tiered-d2h")
        optimizer.step()
        with gate.opening_soon():
            assert optimizer.grad_norm > 0
        assert inside.runtime.meter.stalls["norm"] > HELD_S / 2


def test_a_view_of_a_gradient_kept_over_a_backward_shows_the_sum(gate: Gate) -> None:
    with sharded(2) as (model, _, _):
        loss_of(model).backward()
        view = model[0].weight.grad
        before = view.clone()
        gate.close("tiered-d2h")
        with gate.opening_soon():
            loss_of(model).backward()
            seen = view.clone()
        torch.testing.assert_close(seen, 2 * before)
        del view


def test_a_copy_in_waits_for_what_the_buffer_was_used_for_before() -> None:
    with deferred.compute(max_delay_s=2e-3):
        device = emulated.EmulatedDevice(tiered.Emulation())
        buffer = device.allocate(4096)
        device.commit(buffer)
        device.order(device.copy_in(buffer.bytes, torch.ones(1024).view(torch.uint8)))
        kept = [buffer.view(torch.float32) * 2 for _ in range(200)]
        device.release(buffer)
        device.commit(buffer)
        device.order(device.copy_in(buffer.bytes, torch.full((1024,), 3.0).view(torch.uint8)))
        after = buffer.view(torch.float32) * 2
        assert all(each.eq(2).all() for each in kept)
        assert after.eq(6).all()
        device.close()


def test_a_copy_out_waits_for_what_makes_its_source() -> None:
    with deferred.compute(max_delay_s=60):  # all work is left until somebody waits for it
        device = emulated.EmulatedDevice(tiered.Emulation())
        buffer = device.allocate(4096)
        device.commit(buffer)
        device.order(device.copy_in(buffer.bytes, torch.ones(1024).view(torch.uint8)))
        host = Memory(4096, committed=True)
        device.copy_out(host.view(torch.float32), buffer.view(torch.float32) * 2).wait()
        assert deferred.now(host.view(torch.float32)) == 2
        device.close()


def test_pages_do_not_go_while_a_copy_uses_them() -> None:
    memory, copied = Memory(4096, committed=True), Completion()
    memory.busy(copied)
    timer = threading.Timer(HELD_S, copied.finish)
    timer.start()
    memory.decommit()
    assert copied.done()
    timer.join()


def on_a_drive(swap: Path) -> dict[str, Any]:
    return {"device": "cpu", "nvme": swap, "param_tier": "nvme", "optimizer_tier": "nvme", "host_budget": "1MiB"}


def test_filling_a_drive_waits_before_it_uses_its_buffer_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = SwapSpace.write

    def late(space: SwapSpace, *where: Any) -> Ticket:
        whole = Moving()

        def later() -> None:
            time.sleep(HELD_S / 10)
            settled(write(space, *where))
            whole.finish()

        threading.Thread(target=later).start()
        return whole

    monkeypatch.setattr(SwapSpace, "write", late)
    torch.manual_seed(0)
    model = nn.Linear(2048, 1536, bias=False)  # three windows
    want = model.weight.detach().clone()
    settings: dict[str, Any] = {"nvme": tmp_path, "param_tier": "nvme", "optimizer_tier": "nvme"}
    with tiered.shard(model, tiered.Config(device="cpu", host_budget="64MiB", device_budget="16MiB", **settings)):
        assert torch.equal(model.weight.detach(), want)


def test_a_group_that_is_promoted_has_arrived(gate: Gate) -> None:
    with sharded() as (model, _, inside):
        group = inside.groups[1]
        want = model[1].weight.detach().clone()
        if group.present:
            group.drop()
        gate.close("tiered-h2d")
        with gate.opening_soon():
            assert residence.promote(group)
            got = group.on_device("param", group.dtype)[: want.numel()].clone()
        assert torch.equal(got.view_as(want), want)


def test_a_step_waits_for_the_states_it_updates(slow_drive: Gate, tmp_path: Path) -> None:
    results = []
    for held in (False, True):
        with sharded(**on_a_drive(tmp_path)) as (model, optimizer, _):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(model).backward()
            if held:
                slow_drive.close("drive")
            with slow_drive.opening_soon():
                optimizer.step()
            results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


class Writes:
    """Every write to a drive, and what a test makes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[Moving] = []
        self.gate: Gate | None = None
        self.failing = -1  # the number of the write that fails
        write = SwapSpace.write

        def changed(space: SwapSpace, *where: Any) -> Ticket:
            ticket, whole, number = write(space, *where), Moving(), len(self.given)
            self.given.append(whole)

            def finish() -> None:
                settled(ticket)
                if self.gate is not None:
                    self.gate.hold("drive")
                whole.finish(OSError("the write failed") if number == self.failing else None)

            if self.gate is None:
                finish()
            else:
                threading.Thread(target=finish).start()
            return whole

        monkeypatch.setattr(SwapSpace, "write", changed)


def test_a_step_that_fails_leaves_nothing_in_flight(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with sharded(**on_a_drive(tmp_path)) as (model, optimizer, _):
        loss_of(model).backward()
        writes = Writes(monkeypatch)
        writes.gate = gate
        adamw, calls = kernels.adamw, []

        def broken(*given: Any, **how: Any) -> None:
            calls.append(1)
            if len(calls) > 2:
                raise ArithmeticError
            adamw(*given, **how)

        monkeypatch.setattr(kernels, "adamw", broken)
        monkeypatch.setattr(TieredStore, "unstage", lambda *_: None)  # which would wait as well, for what was staged
        gate.close("drive")
        with gate.opening_soon():
            with pytest.raises(ArithmeticError):
                optimizer.step()
                optimizer.keep()  # all of it
            done = [write.done() for write in writes.given]
        assert done
        assert all(done)
        monkeypatch.undo()
        tiered.close(model, keep_weights=False)


def test_a_write_that_fails_early_fails_its_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with sharded(**on_a_drive(tmp_path)) as (model, optimizer, inside):
        loss_of(model).backward()
        writes = Writes(monkeypatch)
        writes.failing = 0
        monkeypatch.setattr(TieredStore, "_fail", lambda *_: None)  # which the next use of the block would show
        with pytest.raises(OSError, match="the write failed"):
            optimizer.step()
            optimizer.keep()  # all of it
        assert inside.failure is not None
        tiered.close(model, keep_weights=False)


def test_a_wait_for_a_block_is_counted_as_stalled(slow_drive: Gate, tmp_path: Path) -> None:
    with sharded(**on_a_drive(tmp_path)) as (model, optimizer, inside):
        loss_of(model).backward()
        optimizer.step()
        block = inside.groups[1].blocks["exp_avg"]
        before = inside.runtime.meter.stalls["fetch"]
        slow_drive.close("drive")
        with slow_drive.opening_soon(), inside.runtime.store.pinned(block):
            assert inside.runtime.meter.stalls["fetch"] > before + HELD_S / 2


def test_a_read_that_fails_and_that_nobody_waits_for_fails_its_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with sharded(**on_a_drive(tmp_path)) as (_, _, inside):
        store, block = inside.runtime.store, inside.groups[1].blocks["param"]
        ticket = Moving()
        monkeypatch.setattr(SwapSpace, "read", lambda *_: ticket)
        staging = store.staging(block.nbytes, "a test")
        store.read(block, staging)
        ticket.finish(OSError("the drive is gone"))
        with pytest.raises(tiered.StorageError, match="param of group 1 was lost"):
            block.check()
        monkeypatch.undo()
        store.unstage(staging)
        tiered.close(inside.module, keep_weights=False)


def test_closing_waits_for_what_still_computes() -> None:
    with deferred.compute(max_delay_s=2e-3):
        model = network()
        tiered.shard(model, tiered.Config(device="emulated", host_budget="16MiB"))
        out = model(torch.ones(2, WIDTH))
        kept = [out]
        for _ in range(20):
            kept.append(model(torch.ones(2, WIDTH)))
        tiered.close(model)
        assert all(torch.equal(each, out) for each in kept)
    assert out.isfinite().all()
