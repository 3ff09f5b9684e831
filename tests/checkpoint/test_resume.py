"""Going on from the swap directory of a run that ended before its time: bit for bit, or an error by name.

Runs end here in processes of their own (a kill, an error), or by leaving a `with` block by an exception. Leaves kills
at random instants to tools/kill_storm, and the bytes of records to tests/io/test_generations.py.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded_ranks import World, sharded
from torch import nn

import tiered
from tiered.io import directory, owner

WIDTH, STEPS = 40, 5
LIMIT_S = 120
ALL = {"param_tier": "nvme", "optimizer_tier": "nvme"}
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", **ALL},
    "emulated": {"device": "emulated", "emulation": tiered.Emulation(max_delay_s=5e-4), **ALL},
    "masters alone": {
        "device": "cpu",
        "param_tier": "host",
        "optimizer_tier": "nvme",
        "precision": tiered.MixedPrecision(param_dtype=torch.float16),
    },
}


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "swap"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "a run that ended well left files"


class Ended(Exception):
    """How a run ends before its time."""


class Counted(nn.Module):
    """Computes with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * (1 + self.seen[0] / 64)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), Counted(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers)


def settings(place: str, swap: Path, **more: Any) -> dict[str, Any]:
    return {"host_budget": "64MiB", "nvme": swap, **PLACES[place], **more}


def train(model: nn.Module, optimizer: tiered.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        if step == 3:
            optimizer.param_groups[0]["lr"] = 3e-3  # as a scheduler would
        batch = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(batch).float().square().mean()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state(model: nn.Module, optimizer: tiered.AdamW) -> dict[str, Any]:
    moments = optimizer.state_dict()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return {"values": values, "optimizer": moments, "skipped": optimizer.skipped_steps}


def made(model: nn.Module) -> tiered.AdamW:
    return tiered.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)


def run(where: dict[str, Any], upto: int = STEPS, *, ends: bool = False, model: nn.Module | None = None) -> Any:
    """A run that goes on from what is there, up to so many steps; `ends`: by an error."""
    model = network() if model is None else model
    with tiered.shard(model, tiered.Config(**where)):
        optimizer = made(model)
        start = tiered.resume(model, optimizer)
        losses = train(model, optimizer, range(start, upto))
        if ends:
            raise Ended
        return start, losses, state(model, optimizer)


def ended(where: dict[str, Any], upto: int, **how: Any) -> None:
    with pytest.raises(Ended):
        run(where, upto, ends=True, **how)


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    else:
        assert got == want


@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_bit_for_bit_though_it_ends_by_an_error_again_and_again(place: str, swap: Path) -> None:
    start, losses, want = run(settings(place, swap))
    assert start == 0
    for seed, upto in ((0, 2), (5, 2), (6, 4)):
        ended(settings(place, swap), upto, model=network(seed))
    start, again, got = run(settings(place, swap), model=network(seed=9))
    assert start == 4
    assert again == losses[4:]
    same(got, want)


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from checkpoint.test_resume import WIDTH, made, network, settings, train
import tiered
model = network(7)
tiered.shard(model, tiered.Config(**settings("cpu", Path(sys.argv[1]))))
optimizer = made(model)
train(model, optimizer, range(tiered.resume(model, optimizer), 3))
{ending}
"""


@pytest.mark.parametrize("complete", ["", "optimizer.keep(); ", "model(torch.ones(2, WIDTH)); "])
@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "1 / 0", "os._exit(3)"])
def test_whatever_ends_the_process_the_next_goes_on_from_its_last_step(ending: str, complete: str, swap: Path) -> None:
    """The last that was complete: a step is in progress until the next forward has used all parameters."""
    program = PROGRAM.format(paths=[str(Path(__file__).parents[1])], ending=complete + ending)
    done = subprocess.run(
        [sys.executable, "-c", program, str(swap)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode, done.stdout
    start, _, got = run(settings("cpu", swap), model=network(8))
    assert start == (3 if complete else 2), done.stderr
    (swap / "other").mkdir()
    _, _, want = run(settings("cpu", swap / "other"), model=network(7))
    (swap / "other").rmdir()
    same(got, want)


def test_a_process_that_ends_well_without_closing_leaves_nothing(swap: Path) -> None:
    program = PROGRAM.format(paths=[str(Path(__file__).parents[1])], ending="")
    subprocess.run([sys.executable, "-c", program, str(swap)], timeout=LIMIT_S, check=True)


def test_a_run_killed_while_it_removes_its_files_stands_in_nobodys_way(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: int, name: str, descriptor: int) -> None:
        os.unlink("swap", dir_fd=descriptor)
        lock = os.open(directory._LOCK, os.O_RDWR, dir_fd=descriptor)
        owner.write(lock, owner.nobody())
        os.close(lock)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "_remove", killed)
        run(settings("cpu", swap), 2)
    assert run(settings("cpu", swap), 2)[0] == 0


def test_a_step_that_was_skipped_counts_as_a_call_and_its_loss_scale_is_kept(swap: Path) -> None:
    where = settings("masters alone", swap)

    def overflow(model: nn.Module, optimizer: tiered.AdamW) -> None:
        optimizer.scale_loss(model(torch.full((6, WIDTH), torch.inf)).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(Ended), tiered.shard(model := network(), tiered.Config(**where)):
        optimizer = made(model)
        train(model, optimizer, range(1))
        overflow(model, optimizer)
        scale, skipped = optimizer.loss_scale, optimizer.skipped_steps
        assert skipped
        raise Ended
    with tiered.shard(model := network(), tiered.Config(**where)):
        optimizer = made(model)
        assert tiered.resume(model, optimizer) == 2
        assert (optimizer.loss_scale, optimizer.skipped_steps, optimizer.updates) == (scale, skipped, 1)


def test_a_step_that_failed_before_anything_was_known_is_no_call(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise Ended

    with tiered.shard(model := network(), tiered.Config(**settings("cpu", swap))):
        optimizer = made(model)
        with monkeypatch.context() as patch:
            patch.setattr(tiered.AdamW, "_norm", fails)
            with pytest.raises(Ended):
                train(model, optimizer, range(1))
        assert optimizer.calls == 0
        train(model, optimizer, range(1))
        assert optimizer.calls == 1


def test_without_resume_the_first_step_takes_the_place_of_what_was_left(
    swap: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended(settings("cpu", swap), 3)
    with pytest.raises(Ended), tiered.shard(model := network(), tiered.Config(**settings("cpu", swap))):
        assert "tiered.resume(model, optimizer) goes on from it" in caplog.text
        train(model, made(model), range(1))
        raise Ended
    assert run(settings("cpu", swap), 1)[0] == 1


def test_a_run_that_is_closed_before_it_did_anything_leaves_what_it_found(swap: Path) -> None:
    ended(settings("cpu", swap), 3)
    tiered.close(tiered.shard(network(), tiered.Config(**settings("cpu", swap))))
    assert run(settings("cpu", swap), 3)[0] == 3


def test_a_step_that_fails_half_way_is_as_if_it_had_not_been_and_the_next_run_takes_it_again(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, want = run(settings("cpu", swap))
    calls = 0
    update = tiered.optim.update.on_host

    def failing(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4 * 2 + 2:
            raise Ended
        update(*given)

    with monkeypatch.context() as patch:
        patch.setattr(tiered.optim.update, "on_host", failing)
        ended({**settings("cpu", swap), "overlap": "forward"}, STEPS)  # before a step an update only hints
    start, _, got = run(settings("cpu", swap))
    assert 0 < start < STEPS
    same(got, want)


def test_loading_a_checkpoint_is_a_generation_too(swap: Path, tmp_path: Path) -> None:
    with tiered.shard(model := network(), tiered.Config(**settings("cpu", swap))):
        optimizer = made(model)
        train(model, optimizer, range(2))
        tiered.save(model, optimizer, tmp_path / "saved")
        want = state(model, optimizer)
    with pytest.raises(Ended), tiered.shard(model := network(4), tiered.Config(**settings("cpu", swap))):
        tiered.load(model, made(model), tmp_path / "saved")
        raise Ended
    with tiered.shard(model := network(5), tiered.Config(**settings("cpu", swap))):
        optimizer = made(model)
        assert tiered.resume(model, optimizer) == 2, "steps before the checkpoint count"
        same(state(model, optimizer), want)


# --- what cannot be gone on from ---


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"durability": "none"}, "durability='none'"),
        ({"param_tier": "host"}, r"in RAM would be lost"),
        ({"param_tier": "host", "optimizer_tier": "host", "nvme": None}, "there is no swap directory"),
    ],
)
def test_a_run_that_would_leave_nothing_says_so_at_its_start_and_refuses_to_go_on(
    more: dict[str, Any], says: str, swap: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiered"):
        model = tiered.shard(network(), tiered.Config(**settings("cpu", swap, **more)))
    assert ("it can go on from a checkpoint only" in caplog.text) == ("nvme" not in more and "durability" not in more)
    with model, pytest.raises(tiered.UsageError, match=says):
        tiered.resume(model, made(model))


def test_where_the_drive_has_no_room_for_two_slots_there_is_one_and_resume_says_why(
    swap: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiered.io.swapfile.SwapSpace, "free_bytes", lambda _: 20_000)
    with tiered.shard(model := network(), tiered.Config(**settings("cpu", swap))):
        assert "so there is one" in caplog.text
        optimizer = made(model)
        with pytest.raises(tiered.UsageError, match="two slots of the states take"):
            tiered.resume(model, optimizer)
        train(model, optimizer, range(2))


@pytest.mark.parametrize("more", [{"stage": 2}, {"precision": tiered.MixedPrecision(param_dtype=torch.float16)}])
def test_a_run_of_the_model_that_was_laid_out_otherwise_is_named_and_kept(more: dict[str, Any], swap: Path) -> None:
    ended(settings("cpu", swap), 2)
    (left,) = swap.iterdir()
    with tiered.shard(model := network(), tiered.Config(**settings("cpu", swap, **more))):
        optimizer = made(model)
        with pytest.raises(tiered.UsageError, match=rf"laid out otherwise: {left}"):
            tiered.resume(model, optimizer)
    assert run(settings("cpu", swap), 2)[0] == 2


def test_a_run_of_another_model_is_no_concern_of_this_one(swap: Path) -> None:
    ended(settings("cpu", swap), 2)
    with tiered.shard(model := nn.Sequential(nn.Linear(5, 5)), tiered.Config(**settings("cpu", swap))):
        assert tiered.resume(model, made(model)) == 0
    assert run(settings("cpu", swap), 2)[0] == 2


def test_what_does_not_fit_is_refused_before_anything_changes(swap: Path) -> None:
    ended(settings("cpu", swap), 2)
    with tiered.shard(model := network(3), tiered.Config(**settings("cpu", swap))):
        model[1].register_buffer("more", torch.zeros(2))
        with pytest.raises(tiered.UsageError, match=r"the buffers \['1.more'\] are others"):
            tiered.resume(model, made(model))
        del model[1].more
        groups = [
            {"params": [model[0].weight]},
            {"params": [p for n, p in model.named_parameters() if n != "0.weight"]},
        ]
        with pytest.raises(tiered.UsageError, match="parameter groups; this one has 2"):
            tiered.resume(model, tiered.AdamW(groups))
        for name, value in network(3).state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    assert run(settings("cpu", swap), 2)[0] == 2


def test_resume_comes_before_the_first_step(swap: Path) -> None:
    with tiered.shard(model := network(), tiered.Config(**settings("cpu", swap))):
        optimizer = made(model)
        train(model, optimizer, range(1))
        with pytest.raises(tiered.UsageError, match="call it before the first one"):
            tiered.resume(model, optimizer)


def test_a_flipped_byte_of_what_was_left_never_trains_on(swap: Path) -> None:
    ended(settings("cpu", swap), 2)
    (left,) = swap.iterdir()
    data = bytearray((left / "swap").read_bytes())
    for at in range(0, len(data), 4096):
        data[at] ^= 1
    (left / "swap").write_bytes(data)
    with pytest.raises(tiered.CorruptDataError):
        run(settings("cpu", swap))
    for file in left.iterdir():
        file.unlink()
    left.rmdir()


# --- several ranks ---


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_ranks_go_on_from_the_newest_step_that_all_of_them_have(place: str, stage: int, swap: Path) -> None:
    """The run ends on one rank after its commit, on the other before: what both have is one step back."""

    def program(rank: int, upto: int, ends: bool) -> Any:
        where = settings(place, swap, stage=stage)
        with sharded(models[rank], **where) as (model, optimizer, inside):
            start = tiered.resume(model, optimizer)
            train(model, optimizer, range(start, upto))
            if ends and rank:  # the last commit of this rank is gone
                inside.runtime.store.generations._files[inside.runtime.store.generations._last].clear()
            if ends:
                inside.runtime.store.generations.left = True
                raise Ended
            return start, state(model, optimizer)

    results = []
    for end in (True, False):
        models = [network(), network()]
        with World(2).installed() as world:
            if end:
                assert [type(one) for one in world.ended(lambda rank: program(rank, 3, True))] == [Ended, Ended]
            else:
                results = world.run(lambda rank: program(rank, STEPS, False))
    models = [network(), network()]
    with World(2).installed() as world:
        wants = world.run(lambda rank: program(rank, STEPS, False))
    assert [start for start, _ in results] == [2, 2]
    for (_, got), (_, want) in zip(results, wants, strict=True):
        same(got, want)


def test_a_rank_that_alone_resumes_is_named(swap: Path) -> None:
    models = [network(), network()]

    def program(rank: int) -> None:
        with sharded(models[rank], **settings("cpu", swap, rank_timeout_s=5.0)) as (model, optimizer, _):
            if rank:
                tiered.resume(model, optimizer)
            else:
                train(model, optimizer, range(1))

    with World(2).installed() as world:
        ends = world.ended(program)
    assert all(isinstance(end, tiered.RankError) for end in ends), ends
    assert "resume()" in str(ends[0])
