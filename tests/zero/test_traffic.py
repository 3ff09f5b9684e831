"""What goes between ranks, whole models on ranks that are threads of one process, with messages that come late.

Beside the CPU and the emulated device, a device is played here whose memory says that it is a GPU's, so that what only
GPUs do (collectives on a stream of their own) is run too.
"""

import contextlib
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from threaded_ranks import LIMIT_S, World, ranks_threads, sharded
from torch import nn

import tiered
from tiered.device.ticket import Completion, Event
from tiered.optim import kernels
from tiered.schedule.trace import Phase
from tiered.stats import Meter
from tiered.store.store import TieredStore
from tiered.store.tier import Budget, Tier
from tiered.zero import traffic as traffic_module
from tiered.zero.exchange import Exchange
from tiered.zero.model import MODEL_ATTRIBUTE, ShardedModel
from tiered.zero.traffic import Traffic, scratch_bytes

WIDTH, LAYERS = 24, 3
STAGES = (1, 2, 3)
LATE_S = 1e-3
LINK = tiered.Emulation(max_delay_s=LATE_S)
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu"},
    "drive": {"device": "cpu", "param_tier": "nvme", "optimizer_tier": "nvme"},
    "device": {"device": "emulated", "emulation": LINK},
    "device and drive": {"device": "emulated", "emulation": LINK, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "states on the device": {"device": "emulated", "emulation": LINK, "optimizer_tier": "device"},
    "only states on the device": {
        "device": "emulated",
        "emulation": LINK,
        "param_tier": "nvme",
        "optimizer_tier": "device",
    },
}


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batches(steps: int = 3, rows: int = 6) -> torch.Tensor:
    return torch.randn(steps, rows, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(session: tuple[nn.Module, Any, ShardedModel], steps: torch.Tensor) -> dict[str, torch.Tensor]:
    model, optimizer, _ = session
    for batch in steps:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def one_rank() -> dict[str, torch.Tensor]:
    with sharded(network(), device="cpu") as session:
        return trained(session, batches())


def close_to(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextlib.contextmanager
def ranks(size: int, late_s: float = LATE_S, **how: Any) -> Iterator[tuple[World, list[nn.Sequential]]]:
    """A world, and the same model for each of its ranks."""
    with World(size, late_s=late_s, **how).installed() as world:
        yield world, [network() for _ in range(size)]
    assert ranks_threads() == []


# --- whole models ---


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", PLACES)
def test_ranks_train_what_one_rank_trains_though_every_message_is_late(stage: int, place: str, tmp_path: Path) -> None:
    with ranks(3) as (world, models):

        def program(rank: int) -> dict[str, torch.Tensor]:
            with sharded(models[rank], stage=stage, nvme=tmp_path, **PLACES[place]) as session:
                return trained(session, batches().chunk(3, 1)[rank])

        results = world.run(program)
    for result in results:
        close_to(result, one_rank())
        assert all(torch.equal(value, results[0][name]) for name, value in result.items())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_reads_what_the_others_keep_though_they_do_nothing(place: str, tmp_path: Path) -> None:
    with ranks(3) as (world, models):
        over, plain = threading.Event(), network()

        def program(rank: int) -> bool:
            with sharded(models[rank], nvme=tmp_path, **PLACES[place]) as (model, _, _):
                if rank != 1:
                    return over.wait(LIMIT_S)
                values = [param.detach().clone() for param in model.parameters()]
                over.set()
                return all(map(torch.equal, values, plain.parameters()))

        assert world.run(program) == [True] * 3


def test_shards_that_come_from_a_drive_for_others_take_the_memory_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    memory = traffic_module.Memory

    def counted(nbytes: int, **how: Any) -> Any:
        made.append(nbytes)
        return memory(nbytes, **how)

    monkeypatch.setattr(traffic_module, "Memory", counted)
    with ranks(2) as (world, models):
        over, plain = threading.Event(), network()

        def program(rank: int) -> bool:
            with sharded(models[rank], nvme=tmp_path, device_budget="1MiB", **PLACES["drive"]) as (_, _, inside):
                if rank:
                    return over.wait(LIMIT_S)
                for group in inside.groups:  # all of one round
                    group.begin_fetch()
                values = []
                for group in inside.groups:
                    group.wait()
                    values.append(group.buffer.view(torch.float32)[: WIDTH**2].as_subclass(torch.Tensor).clone())
                over.set()
                return all(torch.equal(v, plain[i].weight.reshape(-1)) for i, v in enumerate(values))

        assert world.run(program) == [True, True]
    assert len(made) == 2, "one for each rank"


class Twice(nn.Module):
    """`f` is used outside of a checkpoint and, before that, inside of one that runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.utils.checkpoint.checkpoint(self.f, x.requires_grad_(), use_reentrant=True)
        return self.f(torch.tanh(self.g(torch.tanh(inner))))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_come_twice_in_a_backward_are_the_same_bits_however_late_messages_are(stage: int) -> None:
    seen = []
    for late_s in (0.0, 5e-3):
        models = [Twice() for _ in range(3)]  # torch has one generator for all threads
        with World(3, late_s=late_s).installed() as world:

            def program(
                rank: int, pause_s: float = 5e-3 - late_s, models: list[Twice] = models
            ) -> dict[str, torch.Tensor]:
                with sharded(models[rank], device="cpu", stage=stage) as session:
                    session[0].g.register_full_backward_hook(lambda *_: time.sleep(pause_s))
                    return trained(session, batches().chunk(3, 1)[rank])

            seen.append(world.run(program)[0])
    assert all(torch.equal(value, seen[1][name]) for name, value in seen[0].items())


def test_ranks_read_groups_in_orders_of_their_own() -> None:
    with ranks(2) as (world, models):
        plain = network()

        def program(rank: int) -> bool:
            with sharded(models[rank], device="cpu", device_budget="8KiB") as (model, _, inside):
                right = True
                for index in (0, 1, 2, 0, 2, 1) if rank else (2, 2, 1, 0):
                    right &= torch.equal(model[index].weight.detach().clone(), plain[index].weight)
                assert inside.runtime.meter.hits < inside.runtime.meter.uses, "nothing had to come twice"
                return right

        assert world.run(program) == [True, True]


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_backwards_add_up(stage: int, synced: bool) -> None:
    def program(rank: int, model: nn.Module, ranks: int) -> dict[str, torch.Tensor]:
        with sharded(model, device="cpu", stage=stage) as (_, optimizer, _):
            for batch in batches(4, 2 * 2).chunk(ranks, 1)[rank].split(2):
                with tiered.no_sync(model) if not synced else contextlib.nullcontext():
                    model(batch[0]).square().mean().backward()
                model(batch[1]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: value.clone() for name, value in model.state_dict().items()}

    with ranks(2) as (world, models):
        results = world.run(lambda rank: program(rank, models[rank], 2))
    for result in results:
        close_to(result, program(0, network(), 1))


@pytest.mark.parametrize("window", [1 << 20, 256])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_summed_in_the_order_of_ranks_and_rounded_once(
    stage: int, dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every stage to the same bits, though in another order they would be others; a window at a time."""
    monkeypatch.setattr(traffic_module, "_WINDOW", window)
    given = [torch.tensor(3e6), torch.tensor(0.3), torch.tensor(-3e6)]
    gradients = [torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(n)) * x for n, x in enumerate(given)]
    gradients = [each.to(dtype) for each in gradients]
    want, other = torch.empty(WIDTH**2, dtype=dtype), torch.empty(WIDTH**2, dtype=dtype)
    kernels.average(want, [each.reshape(-1) for each in gradients], 3, add=False)
    kernels.average(other, [gradients[n].reshape(-1) for n in (2, 0, 1)], 3, add=False)
    assert dtype != torch.float32 or not torch.equal(want, other)

    with ranks(3, eager=window < WIDTH**2) as (world, _):  # the next window comes while one is summed

        def program(rank: int) -> bool:
            model = nn.Linear(WIDTH, WIDTH, bias=False)
            precision = tiered.MixedPrecision(reduce_dtype=dtype)
            with sharded(model, device="cpu", stage=stage, precision=precision) as (_, optimizer, inside):
                (model.weight * gradients[rank].float()).sum().backward()
                inside.begin_step()
                group, start = inside.groups[0], inside.groups[0].base("grad")
                size = group.spec.shard_numel
                with inside.runtime.store.pinned(group.blocks["grad"]) as memory:
                    mean = memory.view(dtype, start, start + size).clone()
                optimizer.step()
            return torch.equal(mean, want[rank * size : (rank + 1) * size])

        assert world.run(program) == [True] * 3


# --- a device that says it is a GPU ---


class OnGpu(torch.Tensor):
    """Memory that says it is a GPU's."""

    is_cuda = True  # type: ignore[assignment]


class LateWork:
    """A stream for collectives: each is made later, in order, on a thread of its own."""

    def __init__(self, late_s: float) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._late_s = late_s
        self.ran = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait(self, event: Event) -> None:
        self._jobs.put(event.wait)

    def run(self, work: Callable[[], None]) -> None:
        def late() -> None:
            threading.Event().wait(self._late_s)
            work()
            self.ran += 1

        self._jobs.put(late)

    def record(self) -> Event:
        reached = Completion()
        self._jobs.put(reached.finish)
        return reached

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@contextlib.contextmanager
def on_gpu(
    model: nn.Module, late_s: float = 0.01, **settings: Any
) -> Iterator[tuple[Any, Any, ShardedModel, LateWork]]:
    """As `sharded`, on the emulated device, whose memory says that it is a GPU's."""
    between = LateWork(late_s)
    try:
        with sharded(model, device="emulated", **settings) as (model, optimizer, inside):
            inside.runtime.device._between = between  # type: ignore[attr-defined]
            for group in inside.groups:
                group.buffer.bytes = group.buffer.bytes.as_subclass(OnGpu)
            yield model, optimizer, inside, between
    finally:
        between.close()


def test_on_a_gpu_what_all_ranks_want_comes_by_collectives_on_a_stream_that_compute_waits_for() -> None:
    with ranks(2) as (world, models):

        def program(rank: int) -> tuple[dict[str, torch.Tensor], int]:
            with on_gpu(models[rank]) as (model, optimizer, inside, between):
                return trained((model, optimizer, inside), batches().chunk(2, 1)[rank]), between.ran

        for result, collectives in world.run(program):
            close_to(result, one_rank())
            assert collectives > 0  # how often both want a group at once is a matter of time


def test_on_a_gpu_what_one_rank_wants_comes_through_the_host() -> None:
    with ranks(3) as (world, models):
        over, plain = threading.Event(), network()

        def program(rank: int) -> bool:
            with on_gpu(models[rank]) as (_, _, inside, between):
                if rank != 1:
                    return over.wait(LIMIT_S)
                with inside.groups[1].opened(Phase.EVALUATION):
                    buffer = inside.groups[1].buffer.view(torch.float32)
                    value = buffer[: WIDTH**2].as_subclass(torch.Tensor).clone()
                over.set()
                return torch.equal(value, plain[1].weight.reshape(-1)) and between.ran == 0

        assert world.run(program) == [True] * 3


# --- memory ---


class Alone:
    """In place of what an exchange needs of ranks that never meet."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def close(self) -> None:
        return None


def test_scratch_is_charged_to_the_host_and_given_back_at_the_end() -> None:
    host = Budget(Tier.HOST, 64 << 20)
    store = TieredStore(host, None, Meter())
    exchange = Exchange(Alone(3), Meter(), 1, 1.0)  # type: ignore[arg-type]
    between = Traffic(exchange, None, store, Meter(), lambda *_: 0.0, 5000)  # type: ignore[arg-type]
    assert host.used == scratch_bytes(3, 5000) == (2 * 2 + 1) * traffic_module._WINDOW + 8192
    for _ in range(2):
        between.close()
        assert host.used == 0
    assert scratch_bytes(1, 5000) == 0
    with pytest.raises(tiered.BudgetError, match="what goes between ranks"):
        Traffic(exchange, None, TieredStore(Budget(Tier.HOST, 4096), None, Meter()), Meter(), lambda *_: 0.0, 0)  # type: ignore[arg-type]


def run_one_backward(model: nn.Module) -> None:
    model(batches()[0]).square().mean().backward()


def offered(model: nn.Module, inside: ShardedModel) -> None:
    """Gradients that this rank alone has offered."""
    for index, group in enumerate(inside.groups):
        grads: Any = inside.grads[index]
        grads.add(0, torch.ones(WIDTH**2))
        grads.add(1, torch.ones(WIDTH))
        grads.arrived = [True, True]
        if grads.reduction is None:
            grads.offer(grads.expected)
        assert group.blocks["grad"].pins


def kept_back(model: nn.Module, inside: ShardedModel) -> None:
    """Gradients that wait for the next reduction."""
    with tiered.no_sync(model):
        run_one_backward(model)


def being_gathered(model: nn.Module, inside: ShardedModel) -> None:
    """A group on its way."""
    for group in inside.groups:
        if not group.present:
            group.begin_fetch()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("before", [offered, kept_back, being_gathered])
@pytest.mark.parametrize("place", ["host", "device and drive"])
def test_closing_in_the_middle_waits_for_no_other_rank_and_gives_back_all_memory_and_the_thread(
    place: str, before: Callable[[nn.Module, ShardedModel], None], stage: int, tmp_path: Path
) -> None:
    with ranks(2) as (world, models):
        closed = threading.Event()

        def program(rank: int) -> tuple[int, int, int]:
            where = {"host_budget": "32MiB", "nvme": tmp_path, "rank_timeout_s": LIMIT_S, **PLACES[place]}
            tiered.shard(models[rank], tiered.Config(stage=stage, **where))
            inside: ShardedModel = models[rank].__dict__[MODEL_ATTRIBUTE]
            if rank == 0:
                before(models[0], inside)
            else:
                assert closed.wait(LIMIT_S / 2)
            tiered.close(models[rank], keep_weights=False)
            closed.set()
            return inside.runtime.store.host.used, inside.runtime.budget.used, inside.runtime.store.staged

        assert world.run(program) == [(0, 0, 0)] * 2
        assert ranks_threads() == []


def test_a_model_that_nobody_closes_is_collected_and_the_others_are_told() -> None:
    with ranks(2) as (world, models):
        told = threading.Event()

        def program(rank: int) -> str:
            config = tiered.Config(device="cpu", host_budget="32MiB", stage=2, rank_timeout_s=LIMIT_S)
            model = tiered.shard(models[rank], config)
            models[rank] = None  # type: ignore[call-overload]
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            run_one_backward(model)
            optimizer.step()
            if rank == 0:
                gone = weakref.ref(model.__dict__[MODEL_ATTRIBUTE])
                del model, optimizer
                while gone() is not None and not told.wait(0.1):
                    gc.collect()
                return "" if gone() is None else "kept"
            try:
                with pytest.raises(tiered.RankError) as caught:
                    tiered.average(model, 0.0)
            finally:
                told.set()
            tiered.close(model, keep_weights=False)
            return str(caught.value)

        kept, message = world.run(program)
        assert kept == ""
        assert message.startswith("rank 0 has left the run")
