"""The CUDA device on a stand-in for torch.cuda: same bits as the CPU, memory page-locked and given back, refusals."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from models import CASES, GPT, Case
from parity.harness import HOST, Session, same, tiered_session
from torch import nn

import tiered
from tiered.device import cuda, pinning
from tiered.device.ticket import Finished


@pytest.fixture
def gpu() -> Iterator[fake_cuda.Runtime]:
    with fake_cuda.installed() as runtime:
        yield runtime


def train(session: Session) -> dict[str, Any]:
    seen: dict[str, Any] = {"steps": [session.train(0), session.train(1)]}
    session.backward(2, 0.5)
    session.backward(3, 0.5)
    session.optimizer.step()
    session.optimizer.zero_grad()
    return {**seen, "last": session.train(4), "weights": session.weights(), "moments": session.moments()}


IN_RAM = {"host_budget": "64MiB", "optimizer_tier": "host"}
SETTINGS = {
    "everything in RAM": IN_RAM,
    "little on the device": {**IN_RAM, "device_budget": "budget"},
    "parameters stay": {**IN_RAM, "param_tier": "device"},
    "everything on a drive": {"host_budget": "8MiB", "param_tier": "nvme", "optimizer_tier": "nvme"},
    "gradients in another dtype": {**IN_RAM, "precision": tiered.MixedPrecision(reduce_dtype=torch.bfloat16)},
}


def on_gpu(case: Case, swap: Path, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(11)
    settings = dict(settings)
    if settings.get("device_budget") == "budget":
        settings["device_budget"] = 4 * max(p.numel() for p in case.build().parameters()) * 4 + (1 << 16)
        torch.manual_seed(11)
    config = tiered.Config(device="cuda", nvme=swap, **settings)
    model = case.build()
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(
            model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, max_grad_norm=0.5
        )
        return train(Session(case, model, optimizer, config))


def on_cpu(case: Case, swap: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = {k: v for k, v in settings.items() if k == "precision"}
    with tiered_session(case, HOST, swap, config=config, max_grad_norm=0.5) as session:
        return train(session)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_has_the_bits_of_the_cpu_wherever_its_bytes_live(
    gpu: fake_cuda.Runtime, settings: dict[str, Any], tmp_path: Path
) -> None:
    same(on_gpu(GPT, tmp_path, settings), on_cpu(GPT, tmp_path, settings), exact=True)
    assert gpu.registered == {}, "host memory is still page-locked"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_architecture_has_the_bits_of_the_cpu(gpu: fake_cuda.Runtime, case: Case, tmp_path: Path) -> None:
    same(on_gpu(case, tmp_path, IN_RAM), on_cpu(case, tmp_path, IN_RAM), exact=True)


def test_states_on_the_device_give_the_same_within_rounding(gpu: fake_cuda.Runtime, tmp_path: Path) -> None:
    settings = {"host_budget": "8MiB", "param_tier": "device", "optimizer_tier": "device"}
    same(on_gpu(GPT, tmp_path, settings), on_cpu(GPT, tmp_path, {}), exact=False)


def test_memory_that_moves_is_page_locked_and_counted(gpu: fake_cuda.Runtime, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    with tiered.shard(model, tiered.Config(device="cuda", host_budget="16MiB", optimizer_tier="host")):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = tiered.stats(model)
        assert stats.pinned_bytes == sum(gpu.registered.values()) > 4 * 256 * 257 * 4 * 4
        assert stats.pinned_bytes <= stats.resident_bytes["host"] + 4096 <= 16 << 20
        assert stats.device_fragmentation_bytes == 2 << 20
    assert gpu.registered == {}


def test_a_driver_that_locks_nothing_is_named_once_and_training_goes_on(
    gpu: fake_cuda.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "_warned", False)
    gpu.refuses_above = 0
    with caplog.at_level(logging.WARNING, logger="tiered"):
        got = on_gpu(GPT, tmp_path, SETTINGS["everything in RAM"])
    same(got, on_cpu(GPT, tmp_path, {}), exact=True)
    assert len([r for r in caplog.records if "page-locked only" in r.message]) == 1


class Hungry(nn.Linear):
    """A layer that leaves `takes` bytes of activations on the stand-in, and has twice as many for a moment."""

    def __init__(self, width: int, takes: int, gpu: fake_cuda.Runtime) -> None:
        super().__init__(width, width)
        self._takes, self._gpu = takes, gpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._gpu.holds(self._gpu.activations + 2 * self._takes)
        self._gpu.holds(self._gpu.activations - self._takes)
        return super().forward(x)


LAYER = 256 * 257 * 4


def hungry(gpu: fake_cuda.Runtime, layers: int, takes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Hungry(256, takes, gpu) for _ in range(layers)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gpu: fake_cuda.Runtime) -> float:
    loss = model(torch.ones(2, 256)).square().sum()
    loss.backward()
    gpu.holds(0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_what_activations_take_is_left_to_them(gpu: fake_cuda.Runtime) -> None:
    model = hungry(gpu, 8, LAYER // 2)
    config = tiered.Config(
        device="cuda", host_budget="64MiB", device_budget=9 * LAYER, param_tier="host", optimizer_tier="host"
    )
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(4):
            step(model, optimizer, gpu)
            stats = tiered.stats(model)
            want = 4 * LAYER + LAYER // 2  # eight layers', and the last one's moment
            assert want - 8 * 4096 <= stats.activation_bytes <= want, "less what the budget is charged in whole pages"
            assert stats.resident_bytes["device"] <= 9 * LAYER - stats.activation_bytes
            assert stats.device_peak_allocated_bytes <= 9 * LAYER


def test_activations_that_do_not_fit_beside_the_groups_are_named_once(
    gpu: fake_cuda.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    model = hungry(gpu, 3, 1 << 29)
    with tiered.shard(model, tiered.Config(device="cuda", host_budget="16MiB", device_budget="1MiB")):
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer, gpu)
    assert len([r for r in caplog.records if "activations and temporaries took 2.0 GiB" in r.message]) == 1


def test_where_a_step_leaves_room_the_first_groups_stay_with_their_states(gpu: fake_cuda.Runtime) -> None:
    model = hungry(gpu, 6, LAYER // 4)
    config = tiered.Config(device="cuda", host_budget="64MiB", device_budget=14 * LAYER)
    with tiered.shard(model, config):
        optimizer = tiered.AdamW(model.parameters())
        losses = [step(model, optimizer, gpu) for _ in range(6)]
        stats = tiered.stats(model)
        there = stats.placement["exp_avg"]["device"]
        assert there in (LAYER, 2 * LAYER)
        assert stats.placement["exp_avg"]["host"] == 6 * LAYER - there
        assert model[0].weight.grad is None
        assert stats.peak_bytes["device"] <= 14 * LAYER
        assert stats.steps == 6
        states = optimizer.state_dict()["state"]
        assert all(state["step"] == 6 for state in states.values())
    plain = hungry(gpu, 6, 0)
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    assert losses == pytest.approx([step(plain, reference, gpu) for _ in range(6)], rel=1e-4)


@pytest.mark.parametrize("failing", range(1, 13))
def test_a_gpu_that_is_short_of_memory_for_a_moment_costs_time_and_nothing_else(
    gpu: fake_cuda.Runtime, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for fails in (False, True):
        model = hungry(gpu, 6, LAYER // 4)
        config = tiered.Config(
            device="cuda", host_budget="64MiB", device_budget=5 * LAYER, param_tier="host", optimizer_tier="host"
        )
        with tiered.shard(model, config):
            optimizer = tiered.AdamW(model.parameters())
            seen = [step(model, optimizer, gpu) for _ in range(2)]
            commit, calls = fake_cuda.Buffer.commit, []

            def short(buffer: Any, stream: Any, calls: list[int] = calls, commit: Any = commit) -> None:
                calls.append(1)
                if len(calls) == failing:
                    raise gpu.OutOfMemoryError("no memory")
                commit(buffer, stream)

            if fails:
                monkeypatch.setattr(fake_cuda.Buffer, "commit", short)
            seen += [step(model, optimizer, gpu) for _ in range(2)]
            monkeypatch.undo()
        losses.append(seen)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("tiers", [("host", "host"), ("device", "host"), ("device", "device"), ("auto", "auto")])
def test_a_closed_model_holds_nothing_of_the_devices_budget(gpu: fake_cuda.Runtime, tiers: tuple[str, str]) -> None:
    model = hungry(gpu, 4, LAYER // 4)
    config = tiered.Config(
        device="cuda", host_budget="64MiB", device_budget=40 * LAYER, param_tier=tiers[0], optimizer_tier=tiers[1]
    )
    tiered.shard(model, config)
    optimizer = tiered.AdamW(model.parameters())
    step(model, optimizer, gpu)
    runtime = optimizer.model.runtime
    tiered.close(model)
    assert (runtime.budget.used, runtime.store.host.used) == (0, 0)


def test_what_others_hold_is_no_activation_of_a_budget_made_of_what_is_free(gpu: fake_cuda.Runtime) -> None:
    gpu.holds(50 * LAYER)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    with tiered.shard(model, tiered.Config(device="cuda", host_budget="64MiB")):
        optimizer = tiered.AdamW(model.parameters())
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        assert tiered.stats(model).activation_bytes < LAYER


def test_a_collection_inside_the_pinning_lock_does_not_block(gpu: fake_cuda.Runtime) -> None:
    model = hungry(gpu, 2, 0)
    with tiered.shard(model, tiered.Config(device="cuda", host_budget="64MiB", optimizer_tier="device")):
        optimizer: Any = tiered.AdamW(model.parameters())
        step(model, optimizer, gpu)
        optimizer.itself = optimizer  # so that only the collector ends it
        del optimizer
        register = gpu._register

        def collecting(*given: int) -> int:
            gc.collect()
            return register(*given)

        gpu._register = collecting  # type: ignore[method-assign]
        other = tiered.AdamW(model.parameters())
        step(model, other, gpu)


# --- the device's own waits: each is given while a gate holds what it waits for ---


class Held:
    """A link for a stand-in stream that does nothing until it is let go."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.stream = fake_cuda.Stream()
        self.stream.link.wait(self)

    def done(self) -> bool:
        return self._open.is_set()

    def wait(self, timeout: float | None = None) -> None:
        assert self._open.wait(60)

    def let_go(self) -> None:
        self._open.set()


def test_an_event_waits_for_its_stream(gpu: fake_cuda.Runtime) -> None:
    held = Held()
    event = cuda.CudaEvent(held.stream)  # type: ignore[arg-type]
    timer = threading.Timer(0.1, held.let_go)
    timer.start()
    event.wait()
    assert held.done()
    timer.join()


def test_a_copy_waits_for_the_event_it_is_given_after(gpu: fake_cuda.Runtime) -> None:
    device, held, source = cuda.CudaDevice(), Held(), torch.zeros(8)
    there = torch.zeros(8)
    copied = device.copy_in(there, source, cuda.CudaEvent(held.stream))  # type: ignore[arg-type]
    timer = threading.Timer(0.1, lambda: (source.fill_(1), held.let_go()))  # what the copy waits for
    timer.start()
    copied.wait()
    assert there.eq(1).all()
    timer.join()
    device.close()


def test_compute_waits_for_what_it_is_ordered_after(gpu: fake_cuda.Runtime) -> None:
    device, held = cuda.CudaDevice(), Held()
    timer = threading.Timer(0.1, held.let_go)
    timer.start()
    device.order(cuda.CudaEvent(held.stream))  # type: ignore[arg-type]
    assert held.done(), "the stand-in's compute stream has done its work when it has been given"
    timer.join()
    device.close()


def test_memory_given_up_on_another_stream_waits_for_that_stream(gpu: fake_cuda.Runtime) -> None:
    device, held = cuda.CudaDevice(), Held()
    buffer = device.allocate(4096)
    gpu.current, own = fake_cuda.Stream(), gpu.current
    device.commit(buffer)
    mine, gpu.current = gpu.current, held.stream
    device.release(buffer)
    reached = mine.link.record()  # of the stream that may hand the memory on
    with pytest.raises(TimeoutError):
        reached.wait(0.1)
    held.let_go()
    reached.wait(60)
    gpu.current = own
    device.close()


def test_closing_the_device_waits_for_its_copies(gpu: fake_cuda.Runtime) -> None:
    device, held = cuda.CudaDevice(), Held()
    copied = device.copy_in(torch.zeros(8), torch.ones(8), cuda.CudaEvent(held.stream))  # type: ignore[arg-type]
    timer = threading.Timer(0.1, held.let_go)
    timer.start()
    device.close()
    assert copied.done()
    timer.join()


def gives(there: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    """Work for the communication stream, as a collective gives it: done in the order of the stream it is called on."""

    def work() -> None:
        there.copy_(source, non_blocking=True)

    return work


def test_a_collective_waits_for_the_event_it_is_given_after(gpu: fake_cuda.Runtime) -> None:
    device, held, there, source = cuda.CudaDevice(), Held(), torch.zeros(8), torch.zeros(8)
    made = device.communicate(gives(there, source), cuda.CudaEvent(held.stream))  # type: ignore[arg-type]
    assert not made.done()
    timer = threading.Timer(0.1, lambda: (source.fill_(1), held.let_go()))  # what the collective waits for
    timer.start()
    made.wait()
    assert there.eq(1).all()
    timer.join()
    device.close()


def test_the_event_of_a_collective_comes_after_what_it_gave_and_compute_can_wait_for_it(gpu: fake_cuda.Runtime) -> None:
    device, there = cuda.CudaDevice(), torch.zeros(8)
    for value in range(1, 20):  # each after a delay of its own
        device.order(device.communicate(gives(there, torch.full((8,), float(value))), device.fence()))
        assert there.eq(value).all(), "the stand-in's compute stream has done its work when it has been given"
    device.close()


def test_collectives_are_given_by_the_thread_that_calls_and_go_beside_the_copies(
    gpu: fake_cuda.Runtime,
) -> None:
    device, held = cuda.CudaDevice(), Held()
    there, threads, current = torch.zeros(40, 8), set(), gpu.current

    def give(first: int) -> None:
        for row in range(first, 40, 4):
            work = gives(there[row], torch.ones(8))
            made = device.communicate(lambda work=work: (threads.add(threading.get_ident()), work())[1], device.fence())
            made.wait()
            assert there[row].eq(1).all()

    stuck = device.copy_in(torch.zeros(8), torch.ones(8), cuda.CudaEvent(held.stream))  # type: ignore[arg-type]
    giving = [threading.Thread(target=give, args=(first,)) for first in range(4)]
    for thread in giving:
        thread.start()
    for thread in giving:
        thread.join(60)
    assert there.eq(1).all()
    assert not stuck.done()
    assert threads == {thread.ident for thread in giving}
    assert gpu.current is current
    held.let_go()
    device.close()


def test_closing_the_device_waits_for_its_collectives(gpu: fake_cuda.Runtime) -> None:
    device, held, there = cuda.CudaDevice(), Held(), torch.zeros(8)
    device.communicate(gives(there, torch.ones(8)), cuda.CudaEvent(held.stream))  # type: ignore[arg-type]
    timer = threading.Timer(0.1, held.let_go)
    timer.start()
    device.close()
    assert there.eq(1).all()
    timer.join()


def test_a_stream_refuses_to_wait_for_what_is_no_event_of_cuda(gpu: fake_cuda.Runtime) -> None:
    device = cuda.CudaDevice()
    with pytest.raises(RuntimeError, match="cannot wait for a Finished"):
        device.order(Finished())
    device.close()


# --- 16 bits over the link ---


@pytest.mark.parametrize(
    ("precision", "in_bytes", "out_bytes"),
    [
        (tiered.MixedPrecision(), 4, 4),
        (tiered.MixedPrecision(param_dtype=torch.bfloat16), 2, 2),
        (tiered.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 2, 2),
        (tiered.MixedPrecision(reduce_dtype=torch.bfloat16), 4, 2),
    ],
)
def test_parameters_arrive_and_gradients_leave_in_the_narrower_dtype(
    gpu: fake_cuda.Runtime, precision: tiered.MixedPrecision, in_bytes: int, out_bytes: int
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    config = tiered.Config(
        device="cuda", host_budget="16MiB", param_tier="host", optimizer_tier="host", precision=precision
    )
    with tiered.shard(model, config):
        tiered.AdamW(model.parameters())
        model(torch.ones(2, 64, requires_grad=True)).float().square().mean().backward()
        model[0].weight.grad  # noqa: B018  # all are there
        stats = tiered.stats(model)
    assert stats.written_bytes["device"] == 4 * 64 * 64 * in_bytes, "two fit at first: the first one comes again"
    assert stats.read_bytes["device"] == 3 * 64 * 64 * out_bytes


def test_buffers_are_tensors_of_the_device_and_one_where_they_were_one(gpu: fake_cuda.Runtime) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with tiered.shard(model, tiered.Config(device="cuda", host_budget="16MiB")):
        model(torch.randn(3, 4))
        assert model[1].num_batches_tracked == 1


def test_without_a_gpu_the_default_is_the_cpu_and_cuda_is_refused_by_name() -> None:
    if cuda.available():
        pytest.skip("there is a GPU here")
    with pytest.raises(tiered.ConfigError, match=r"device='cuda': torch sees no GPU"):
        tiered.shard(nn.Linear(2, 2), tiered.Config(device="cuda", host_budget="1MiB"))
    with tiered.shard(nn.Linear(2, 2), tiered.Config(host_budget="1MiB")) as model:
        assert model.weight.device.type == "cpu"


def test_with_a_gpu_it_is_the_default(gpu: fake_cuda.Runtime) -> None:
    with tiered.shard(nn.Linear(64, 64), tiered.Config(host_budget="1MiB")):
        assert gpu.registered
