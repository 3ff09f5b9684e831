"""What must wait for what where there are several ranks, each held up by a gate: see `test_order`."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from threaded_ranks import World, sharded
from torch import nn
from waits.gate import HELD_S, LIMIT_S, Gate, Moving

import tiered
from tiered.device import cpu, emulated
from tiered.device.base import Device
from tiered.device.buffer import Buffer
from tiered.device.ticket import Completion, Event, Ticket
from tiered.io.swapfile import SwapSpace
from tiered.schedule.trace import Phase
from tiered.zero.grads import Kernels
from tiered.zero.group import ParamGroup
from tiered.zero.model import ShardedModel

T = TypeVar("T")
WIDTH = 16  # so small that all gradients may be on their way at once
STAGES = (1, 2, 3)
DRIVE = {"param_tier": "nvme"}


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


class Two:
    """Two ranks, with the same model each, and points at which they meet beside everything under test."""

    def __init__(self, world: World, models: list[nn.Sequential], plain: nn.Sequential) -> None:
        self.world = world
        self.models = models
        self.plain = plain  # what the models begin as
        self._barrier = threading.Barrier(2)

    def run(self, program: Callable[[int], T]) -> list[T]:
        return self.world.run(program)

    def meet(self) -> None:
        self._barrier.wait(LIMIT_S / 2)


@pytest.fixture
def two() -> Iterator[Two]:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    with World(2).installed() as world:
        yield Two(world, [network(), network()], network())


def loss_of(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    return model(torch.full((2, WIDTH), scale)).square().sum()


def away(group: ParamGroup) -> ParamGroup:
    """The group, which has been let go."""
    if group.present:
        group.drop()
    return group


def values(group: ParamGroup) -> torch.Tensor:
    """A copy of the present group's parameter."""
    slot = group.spec.slots[0]
    return group.buffer.view(group.dtype, slot.start, slot.stop).clone().view(slot.shape)


# --- what a rank wants ---


def test_a_wait_for_other_ranks_is_counted_as_stalled(two: Two) -> None:
    def program(rank: int) -> float:
        with sharded(two.models[rank], device="cpu") as (_, _, inside):
            stalled = 0.0
            two.meet()
            if rank == 0:
                group, meter = away(inside.groups[1]), inside.runtime.meter
                two.world.stop(1)
                group.begin_fetch()
                before = meter.stalls["gather"]
                timer = threading.Timer(HELD_S, lambda: two.world.go_on(1))
                timer.start()
                group.wait()
                timer.join()
                stalled = meter.stalls["gather"] - before
            two.meet()
            return stalled

    assert two.run(program)[0] > HELD_S / 2


def test_a_rank_sends_its_own_shard_when_it_has_come_to_the_device(two: Two, gate: Gate) -> None:
    def program(rank: int) -> bool:
        with sharded(two.models[rank], device="emulated") as (_, _, inside):
            group = away(inside.groups[1])
            two.meet()
            gate.close("tiered-h2d")
            group.begin_fetch()
            two.meet()
            with gate.opening_soon():
                group.wait()
            return torch.equal(values(group), two.plain[1].weight)

    assert two.run(program) == [True, True]


def test_a_shard_that_another_rank_wants_is_sent_when_the_drive_has_read_it(
    two: Two, gate: Gate, slow_drive: Gate, tmp_path: Path
) -> None:
    def program(rank: int) -> bool:
        with sharded(two.models[rank], device="cpu", nvme=tmp_path, **DRIVE) as (_, _, inside):
            group, right = away(inside.groups[1]), True
            two.meet()
            if rank == 0:
                gate.close("drive")
                group.begin_fetch()
                with gate.opening_soon():
                    group.wait()
                right = torch.equal(values(group), two.plain[1].weight)
            two.meet()
            return right

    assert two.run(program) == [True, True]


def failing_read(inside: Any) -> None:
    """From now on this rank's drive reads nothing."""

    def broken(*_: Any) -> Ticket:
        ticket = Moving()
        ticket.finish(tiered.StorageError("the drive is gone"))
        return ticket

    inside.runtime.store.space.read = broken


def test_a_shard_that_cannot_be_read_is_an_error_on_the_rank_that_wants_it(two: Two, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with (
            contextlib.suppress(tiered.RankError),
            sharded(two.models[rank], device="cpu", nvme=tmp_path, **DRIVE) as (model, _, inside),
        ):
            away(inside.groups[1])
            two.meet()
            if rank == 1:
                failing_read(inside)
            two.meet()
            if rank == 0:
                with pytest.raises(tiered.RankError, match="the drive is gone"):
                    model[1].weight.detach().clone()
            two.meet()

    two.run(program)


def test_where_all_want_a_group_and_one_cannot_read_its_shard_all_say_so(two: Two, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with (
            contextlib.suppress(tiered.RankError),
            sharded(two.models[rank], device="cpu", nvme=tmp_path, **DRIVE) as (_, _, inside),
        ):
            group = away(inside.groups[1])
            two.meet()
            if rank == 1:
                failing_read(inside)
            else:
                two.world.stop(0)
            two.meet()
            group.begin_fetch()
            two.meet()  # so that both want it in one round
            if rank == 0:
                two.world.go_on(0)
            with pytest.raises((tiered.RankError, tiered.StorageError)):
                group.wait()
            two.meet()

    two.run(program)


def test_a_fetch_that_the_ranks_refuse_leaves_nothing_on_its_way(
    two: Two, gate: Gate, slow_drive: Gate, tmp_path: Path
) -> None:
    def program(rank: int) -> tuple[int, int, bool]:
        found = 0, 0, False
        with sharded(two.models[rank], device="emulated", nvme=tmp_path, **DRIVE) as (_, _, inside):
            group, runtime = away(inside.groups[1]), inside.runtime
            two.meet()
            if rank == 0:
                used = runtime.budget.used

                def refuse(*_: Any) -> None:
                    raise tiered.RankError("a rank is gone")

                want, runtime.traffic.want = runtime.traffic.want, refuse  # type: ignore[union-attr]
                gate.close("drive")
                with gate.opening_soon(), pytest.raises(tiered.RankError, match="a rank is gone"):
                    group.begin_fetch()
                found = runtime.store.staged, runtime.budget.used - used, group.present
                runtime.traffic.want = want  # type: ignore[union-attr]
            two.meet()
            return found

    assert two.run(program)[0] == (0, 0, False)


# --- what another thread reads ---


class OwnStreams:
    """A compute stream for `computing_on` of which each thread has its own, as on a GPU: what one thread has given late
    is done when an event of that thread is waited for, and whatever others wait for."""

    def __init__(self) -> None:
        self._here = threading.local()

    def later(self, work: Callable[[], None]) -> None:
        self._late.append(work)

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _Reached(self._late)

    def wait(self, event: Event) -> None:
        event.wait()

    def took(self, buffer: Buffer) -> None:
        return None

    @property
    def _late(self) -> list[Callable[[], None]]:
        if not hasattr(self._here, "late"):
            self._here.late = []
        return self._here.late


class _Reached:
    def __init__(self, late: list[Callable[[], None]]) -> None:
        self._late = late

    def done(self) -> bool:
        return not self._late

    def wait(self, timeout: float | None = None) -> None:
        while self._late:
            self._late.pop(0)()


def fill(group: ParamGroup, value: float) -> Callable[[], None]:
    def work() -> None:
        group.buffer.view(group.dtype).fill_(value)

    return work


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_is_shared_when_the_stream_that_makes_it_has_made_it(two: Two, stage: int) -> None:
    streams = OwnStreams()

    def program(rank: int) -> torch.Tensor:
        with sharded(two.models[rank], device="emulated", stage=stage) as (model, _, inside):
            group = inside.groups[1]
            with group.opened(Phase.EVALUATION):
                group.note_write()
                streams.later(fill(group, 7.0))
            return model.state_dict()["1.weight"]

    with emulated.computing_on(streams):
        assert all(weight.eq(7).all() for weight in two.run(program))


@pytest.mark.parametrize("stage", STAGES)
def test_what_gather_modifies_is_given_out_when_the_stream_that_does_has_done_it(two: Two, stage: int) -> None:
    streams = OwnStreams()

    def program(rank: int) -> torch.Tensor:
        with sharded(two.models[rank], device="emulated", stage=stage) as (model, _, inside):
            with tiered.gather(model[1], modify=True):
                if rank == 0:
                    streams.later(fill(inside.groups[1], 7.0))
            return model.state_dict()["1.weight"]

    with emulated.computing_on(streams):
        assert all(weight.eq(7).all() for weight in two.run(program))


# --- gradients ---


def reduced(inside: ShardedModel, index: int) -> list[torch.Tensor]:
    """What this rank keeps of the mean gradient of each parameter of a group, once a step looks."""
    inside.begin_step()
    group = inside.groups[index]
    base, own = group.base("grad"), [group.spec.owned_shard(s, inside.runtime.ranks.rank) for s in group.spec.slots]
    with inside.runtime.store.pinned(group.blocks["grad"]) as memory:
        return [memory.view(group.dtype, base + start, base + stop).clone() for start, stop in own]


def joined(shards: list[list[torch.Tensor]], position: int) -> torch.Tensor:
    """One parameter's gradient."""
    return torch.cat([each[position] for each in shards])


@pytest.mark.parametrize("stage", STAGES)
def test_what_backward_ends_with_has_left_the_device_before_the_ranks_look_what_there_is(
    two: Two, stage: int, gate: Gate
) -> None:
    def program(rank: int) -> list[torch.Tensor]:
        with sharded(two.models[rank], device="emulated", stage=stage) as (model, _, inside):
            two.meet()
            gate.close("tiered-d2h")
            two.meet()
            with gate.opening_soon():
                loss_of(model).backward()
            return reduced(inside, 0)

    loss_of(two.plain).backward()
    torch.testing.assert_close(joined(two.run(program), 0), two.plain[0].weight.grad.reshape(-1))


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("how", ["alone", "none", "zero"])
@pytest.mark.parametrize("stage", STAGES)
def test_dropping_a_gradient_of_a_backward_that_failed_is_not_undone_by_one_on_its_way(
    two: Two, stage: int, how: str, synced: bool, gate: Gate
) -> None:
    """What is added to an earlier gradient is added by a thread, which here is late."""

    def fails(grad: torch.Tensor) -> None:
        raise ArithmeticError

    def program(rank: int) -> list[torch.Tensor]:
        with sharded(two.models[rank], device="emulated", stage=stage) as (model, _, inside):
            optimizer = tiered.AdamW(list(model.parameters())[::-1])  # which drops the last gradient first
            kernels = inside.kernels

            def late(*given: Any) -> float:
                gate.hold("adding")
                return kernels.accumulate(*given)

            inside.departures._kernels = Kernels(late, kernels.sum_of_squares, kernels.average)
            with tiered.no_sync(model):
                loss_of(model).backward()
            two.meet()
            gate.close("adding")
            two.meet()
            with contextlib.nullcontext() if synced else tiered.no_sync(model):
                middle = model[0](torch.ones(2, WIDTH))
                middle.register_hook(fails)
                with pytest.raises(ArithmeticError):
                    model[1](middle).square().sum().backward()
                with gate.opening_soon():
                    if how == "alone":  # what the group has of its bias stays
                        model[1].weight.grad = None
                    else:
                        optimizer.zero_grad(set_to_none=how == "none")
                    loss_of(model, 0.5).backward()
            return reduced(inside, 1)

    loss_of(two.plain, 0.5).backward()
    got = two.run(program)
    torch.testing.assert_close(joined(got, 0), two.plain[1].weight.grad.reshape(-1))
    if how != "alone":
        torch.testing.assert_close(joined(got, 1), two.plain[1].bias.grad)


# --- the step ---


def test_what_a_step_has_updated_in_the_gathered_group_is_on_its_drive_when_the_step_returns(
    two: Two, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def program(rank: int) -> bool:
        settings = {"device": "cpu", "stage": 1, "nvme": tmp_path, "device_budget": "1MiB", **DRIVE}
        with sharded(two.models[rank], **settings) as (model, optimizer, inside):
            loss_of(model).backward()
            assert all(group.present for group in inside.groups)
            two.meet()
            gate.close("drive")
            two.meet()
            with gate.opening_soon():
                optimizer.step()
                at_once = {name: value.clone() for name, value in model.state_dict().items()}
            changed = any(not torch.equal(at_once[f"{i}.weight"], two.plain[i].weight) for i in range(2))
            return changed and all(torch.equal(at_once[name], value) for name, value in model.state_dict().items())

    monkeypatch.setattr(SwapSpace, "write", gate.holding("drive", SwapSpace.write))
    assert two.run(program) == [True, True]


# --- collectives of devices ---


@pytest.mark.parametrize("device", [cpu.CpuDevice(), emulated.EmulatedDevice(tiered.Emulation())], ids=lambda d: d.name)
def test_a_device_communicates_after_what_it_is_told_to_wait_for(device: Device) -> None:
    made: list[str] = []
    first = Completion()

    def finish() -> None:
        made.append("first")
        first.finish()

    timer = threading.Timer(HELD_S, finish)
    timer.start()
    device.communicate(lambda: made.append("then"), first).wait()
    timer.join()
    assert made == ["first", "then"]
    device.close()
