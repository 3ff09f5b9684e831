"""A save beside training holds the state of the call, changes no bit of the run, and fails by name, on every rank.

The thread that writes is held up here until somebody waits for it: what does not wait shows in what it then reads.
"""

import contextlib
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deferred
import pytest
import torch
from checkpoint.test_save_load import (
    LINK,
    PLACES,
    Outcome,
    equal,
    network,
    on_ranks,
    outcome,
    session,
    train,
    uninterrupted,
)
from threaded_ranks import LIMIT_S, World, sharded
from torch import nn

import tiered
from tiered.checkpoint import background, folder, sidecar, slices
from tiered.store.snapshot import Snapshot
from tiered.store.window import WINDOW_BYTES
from tiered.zero.model import MODEL_ATTRIBUTE

SAVER = "tiered-save"
RESIDENT = {"device": "emulated", "emulation": LINK, "param_tier": "device", "optimizer_tier": "device"}
EVERYWHERE = {**PLACES, "resident": RESIDENT}
Gate = Callable[[], None]


@pytest.fixture(autouse=True)
def bounded(one_thread: None) -> Iterator[None]:
    """Sums have one order, and a test that hangs ends."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writers stand before their first state until this is set, as it is by the first that waits for one of them."""
    opened = threading.Event()
    wait_for = background.Background._await

    def late(usual: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_go_on(*given: Any) -> Any:
            if threading.current_thread().name == SAVER:
                assert opened.wait(LIMIT_S), "nobody waits"
            return usual(*given)

        return wait_and_go_on

    def waiting(self: background.Background, event: threading.Event) -> None:
        opened.set()
        wait_for(self, event)

    for way in ("read", "link"):
        monkeypatch.setattr(Snapshot, way, late(getattr(Snapshot, way)))
    monkeypatch.setattr(background.Background, "_await", waiting)
    return opened


def savers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == SAVER]


def loaded(path: Path) -> Outcome:
    """What a checkpoint holds."""
    with session(9, 1.0) as (model, optimizer):
        tiered.load(model, optimizer, path)
        return outcome(model, optimizer)


def same_state(got: Outcome, want: Outcome) -> None:
    equal({**got, "norm": want["norm"]}, want)


# --- what it holds ---


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_run_goes_on_bit_for_bit_and_what_is_saved_is_the_state_of_the_call(
    place: str, gate: threading.Event, tmp_path: Path
) -> None:
    with session(nvme=tmp_path, **EVERYWHERE[place]) as (model, optimizer):
        train(model, optimizer, range(5))
        want = outcome(model, optimizer)
    with session(nvme=tmp_path, **EVERYWHERE[place]) as (model, optimizer):
        train(model, optimizer, range(3))
        then = outcome(model, optimizer)
        extra = {"rng": torch.arange(3)}
        optimizer.param_groups[0]["lr"] = 0.5
        tiered.save(model, optimizer, tmp_path / "saved", extra=extra, background=True)
        optimizer.param_groups[0]["lr"] = 1e-2
        extra["rng"].zero_()
        with torch.no_grad():
            model.eval()(torch.ones(12, 12))
            model.train()
        rows = torch.randn(12, 12, generator=torch.Generator().manual_seed(3))
        model(rows).backward()
        assert tiered.saving(model)
        assert not gate.is_set(), "neither evaluation nor forward nor backward waits"
        optimizer.step()
        assert gate.is_set()
        optimizer.zero_grad()
        train(model, optimizer, range(4, 5))
        equal(outcome(model, optimizer), want)
        assert not tiered.saving(model, wait=True)
        assert tiered.stats(model).staging_buffers == 0
    got = loaded(tmp_path / "saved")
    assert got["groups"][0].pop("lr") == 0.5
    then["groups"][0].pop("lr")
    same_state(got, then)
    with session() as (model, optimizer):
        assert torch.equal(tiered.load(model, optimizer, tmp_path / "saved")["rng"], torch.arange(3))


def edit_in_place(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model.blocks[1].weight.mul_(2)
        model.gain += 1


def edit_by_data(model: nn.Module, optimizer: Any) -> None:
    model.blocks[1].weight.data.mul_(2)


def edit_gathered(model: nn.Module, optimizer: Any) -> None:
    with tiered.gather(model.blocks[1], modify=True), torch.no_grad():
        model.blocks[1].weight.mul_(2)


def edit_by_init(model: nn.Module, optimizer: Any) -> None:
    nn.init.ones_(model.blocks[1].weight)


def load_weights(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def load_moments(model: nn.Module, optimizer: Any) -> None:
    given = optimizer.state_dict()
    for each in given["state"].values():
        each["exp_avg"] += 1
    optimizer.load_state_dict(given)


def thaw_and_step(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].requires_grad_(True)
    train(model, optimizer, range(7, 8))


CHANGES = [edit_in_place, edit_by_data, edit_gathered, edit_by_init, load_weights, load_moments, thaw_and_step]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", EVERYWHERE)
def test_what_changes_states_waits_until_they_have_been_read(
    place: str, change: Callable[[nn.Module, Any], None], gate: threading.Event, tmp_path: Path
) -> None:
    with session(nvme=tmp_path, **EVERYWHERE[place]) as (model, optimizer):
        train(model, optimizer, range(2))
        then = outcome(model, optimizer)
        tiered.save(model, optimizer, tmp_path / "saved", background=True)
        change(model, optimizer)
        changed = outcome(model, optimizer)  # an edit of a copy that computes has reached the states by then
        assert gate.is_set()
        assert not tiered.saving(model, wait=True)
    same_state(loaded(tmp_path / "saved"), then)
    assert any(not torch.equal(changed["values"][name], value) for name, value in then["values"].items()) or any(
        not torch.equal(changed["state"][n]["exp_avg"], each["exp_avg"]) for n, each in then["state"].items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_saved_as_they_were(dtype: torch.dtype, gate: threading.Event, tmp_path: Path) -> None:
    with session(precision=tiered.MixedPrecision(param_dtype=dtype)) as (model, optimizer):
        train(model, optimizer, range(2))
        then = outcome(model, optimizer)
        tiered.save(model, optimizer, tmp_path / "saved", background=True)
        train(model, optimizer, range(2, 4))
    same_state(loaded(tmp_path / "saved"), then)


@pytest.mark.parametrize("place", ["device", "resident"])
def test_what_a_device_has_yet_to_compute_is_saved_as_it_will_be(place: str, tmp_path: Path) -> None:
    seen = []
    for late in (False, True):
        with deferred.compute(2e-3) if late else contextlib.nullcontext(), session(**EVERYWHERE[place]) as pair:
            train(*pair, range(2))
            tiered.save(*pair, tmp_path / str(late), background=True)
            train(*pair, range(2, 3))
        seen.append(loaded(tmp_path / str(late)))
    same_state(seen[1], seen[0])


class Clipped(nn.Module):
    """Edits its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x @ self.weight


def test_weights_that_a_forward_edits_where_they_are_saved_from_fail_the_save_by_name(
    gate: threading.Event, tmp_path: Path
) -> None:
    with sharded(nn.Sequential(Clipped()), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, tmp_path / "saved", extra="before")
        tiered.save(model, optimizer, tmp_path / "saved", background=True)
        model(torch.ones(1, 4))
        with pytest.raises(tiered.UsageError, match=r"'0\.weight' was edited in place"):
            tiered.saving(model, wait=True)
        assert tiered.load(model, optimizer, tmp_path / "saved") == "before"


def test_buffers_are_those_of_the_call(gate: threading.Event, tmp_path: Path) -> None:
    with sharded(nn.Sequential(nn.BatchNorm1d(4)), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, tmp_path / "saved", background=True)
        model(torch.randn(3, 4))
        assert int(model[0].num_batches_tracked) == 1
        tiered.load(model, optimizer, tmp_path / "saved")
        assert int(model[0].num_batches_tracked) == 0


# --- who waits, and what is left ---


def test_the_next_save_a_load_and_the_end_wait_for_it(gate: threading.Event, tmp_path: Path) -> None:
    with session() as (model, optimizer):
        for number in range(3):
            tiered.save(model, optimizer, tmp_path / "saved", extra=number, background=True)
            assert len(savers()) == 1
        assert tiered.load(model, optimizer, tmp_path / "saved") == 2
        gate.clear()
        tiered.save(model, optimizer, tmp_path / "saved", extra=3, background=True)
    assert savers() == []
    with session() as (model, optimizer):
        assert tiered.load(model, optimizer, tmp_path / "saved") == 3
    assert len(list((tmp_path / "saved").iterdir())) == 2, "the manifest, and the data it names"


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        for seed in range(4):
            train(model, optimizer, range(seed, seed + 1))
            tiered.save(model, optimizer, tmp_path, extra=seed, keep=2, background=True)
    assert sorted(os.listdir(tmp_path)) == ["step-000000003", "step-000000004"]


@pytest.mark.parametrize("place", PLACES)
def test_threads_descriptors_and_memory_are_back_and_the_budget_is_not_touched(place: str, tmp_path: Path) -> None:
    with session(nvme=tmp_path, **PLACES[place]) as (model, optimizer):
        train(model, optimizer, range(2))
        sharded = model.__dict__[MODEL_ATTRIBUTE]
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for number in range(3):
            sharded.finish_update()
            before = tiered.stats(model)
            tiered.save(model, optimizer, tmp_path / "saved", background=True)
            during = tiered.stats(model)
            assert (during.resident_bytes, during.peak_bytes) == (before.resident_bytes, before.peak_bytes)
            share = sharded.saving._job._share
            assert share is None or share._snapshot._window.nbytes <= WINDOW_BYTES
            train(model, optimizer, range(number, number + 1))
            tiered.saving(model, wait=True)
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_an_interrupt_ends_the_wait_of_a_step_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, read, wait_for = threading.Event(), Snapshot.read, background.Background._await
    interrupts = iter([True])

    def late(self: Snapshot, *span: Any) -> Iterator[memoryview]:
        if threading.current_thread().name == SAVER:
            assert opened.wait(LIMIT_S)
        return read(self, *span)

    def waiting(self: background.Background, event: threading.Event) -> None:
        if next(interrupts, False):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait_for(self, event)

    want = uninterrupted()
    with session() as (model, optimizer):
        train(model, optimizer, range(3))
        then = outcome(model, optimizer)
        monkeypatch.setattr(Snapshot, "read", late)
        monkeypatch.setattr(background.Background, "_await", waiting)
        tiered.save(model, optimizer, tmp_path / "saved", background=True)
        rows = torch.randn(12, 12, generator=torch.Generator().manual_seed(3))
        model(rows).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert tiered.saving(model)
        opened.set()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(4, 5))
        equal(outcome(model, optimizer), want)
    same_state(loaded(tmp_path / "saved"), then)


# --- failures ---


def ask(model: nn.Module, optimizer: Any, path: Path) -> None:
    tiered.saving(model, wait=True)


def save(model: nn.Module, optimizer: Any, path: Path) -> None:
    tiered.save(model, optimizer, path, extra="never")


def load(model: nn.Module, optimizer: Any, path: Path) -> None:
    tiered.load(model, optimizer, path)


def close(model: nn.Module, optimizer: Any, path: Path) -> None:
    tiered.close(model)


@pytest.mark.parametrize("then", [ask, save, load, close])
@pytest.mark.parametrize("place", ["write", "fsync", "rename"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_failure_is_named_by_the_next_call_on_every_rank_and_the_checkpoint_before_stays(
    size: int,
    place: str,
    then: Callable[[nn.Module, Any, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual = getattr(os, place)

    def fails(*args: Any) -> Any:
        if threading.current_thread().name == SAVER:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*args)

    def program(rank: int) -> None:
        with session(stage=2) as (model, optimizer):
            train(model, optimizer, range(1), rank, size)
            tiered.save(model, optimizer, tmp_path / "saved", extra=1)
            if rank == 0:
                monkeypatch.setattr(os, place, fails)
            tiered.average(model, 0.0)  # every rank is here
            tiered.save(model, optimizer, tmp_path / "saved", extra=2, background=True)
            train(model, optimizer, range(1, 2), rank, size)
            with pytest.raises(tiered.StorageError, match="the save in the background to") as caught:
                then(model, optimizer, tmp_path / "saved")
            assert str(tmp_path) in str(caught.value)
            if then is not close:
                assert not tiered.saving(model), "it is told once"
                assert tiered.load(model, optimizer, tmp_path / "saved") == 1

    with caplog.at_level(logging.ERROR):
        on_ranks(size, program)
    assert "the save in the background to" in caplog.text
    assert savers() == []
    assert len(list((tmp_path / "saved").iterdir())) == 2, "the manifest, and the data it names"
    monkeypatch.undo()
    with session(stage=2) as (model, optimizer):
        assert tiered.load(model, optimizer, tmp_path / "saved") == 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_folder_that_cannot_be_flushed_once_the_manifest_is_in_place_loses_nothing(
    in_background: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = folder.flush_folder

    def fails(path: Path) -> None:
        if path == tmp_path / "saved":
            raise OSError(errno.EIO, "Input/output error")
        flush(path)

    monkeypatch.setattr(folder, "flush_folder", fails)

    def program(rank: int) -> None:
        with session(stage=2) as (model, optimizer):
            with pytest.raises(tiered.StorageError):
                tiered.save(model, optimizer, tmp_path / "saved", extra=1, background=in_background)
                tiered.saving(model, wait=True)
            assert tiered.load(model, optimizer, tmp_path / "saved") == 1

    on_ranks(size, program)


# --- several ranks ---


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_save_together_while_they_train(stage: int, gate: threading.Event, tmp_path: Path) -> None:
    nets = [network() for _ in range(4)]  # made here, as torch has one generator for all threads

    def program(rank: int) -> tuple[Outcome, Outcome]:
        with session(model=nets[rank], stage=stage, nvme=tmp_path, **PLACES["drive"]) as (model, optimizer):
            train(model, optimizer, range(2), rank, 2)
            then = outcome(model, optimizer)
            tiered.save(model, optimizer, tmp_path / "saved", extra={"rank": rank}, background=True)
            train(model, optimizer, range(2, 4), rank, 2)
            tiered.saving(model, wait=True)
            after = outcome(model, optimizer)
            assert tiered.load(model, optimizer, tmp_path / "saved") == {"rank": rank}
            return then, after

    (then, after), _ = on_ranks(2, program)
    same_state(loaded(tmp_path / "saved"), then)
    with session(stage=stage) as (model, optimizer):
        tiered.load(model, optimizer, tmp_path / "saved")
    (data,) = [path for path in (tmp_path / "saved").iterdir() if path.is_dir()]
    assert sorted(os.listdir(data)) == ["rank-0.safetensors", "rank-1.safetensors"]

    def without(rank: int) -> Outcome:
        with session(model=nets[2 + rank], stage=stage, nvme=tmp_path, **PLACES["drive"]) as (model, optimizer):
            train(model, optimizer, range(4), rank, 2)
            return outcome(model, optimizer)

    equal(after, on_ranks(2, without)[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_on_one_rank_alone_is_an_error_on_both(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = slices.Writer.finish

    def fails(self: slices.Writer) -> int:
        if f"rank-{failing}." in self._path and threading.current_thread().name == SAVER:
            raise tiered.StorageError(errno.EIO, "cannot be flushed", self._path)
        return finish(self)

    monkeypatch.setattr(slices.Writer, "finish", fails)

    def program(rank: int) -> str:
        with session() as (model, optimizer):
            tiered.save(model, optimizer, tmp_path / "saved", extra=1)
            tiered.save(model, optimizer, tmp_path / "saved", extra=2, background=True)
            train(model, optimizer, range(2), rank, 2)
            with pytest.raises(tiered.StorageError, match="the save in the background to") as caught:
                tiered.saving(model, wait=True)
            assert tiered.load(model, optimizer, tmp_path / "saved") == 1
            return str(caught.value)

    told = on_ranks(2, program)
    assert "cannot be flushed" in told[failing]
    assert "cannot be flushed" in told[0], "rank 0 knows why"
    assert len(list((tmp_path / "saved").iterdir())) == 2


@pytest.mark.parametrize("silent", ["say", "dismiss"])
def test_ranks_do_not_wait_for_ever_for_one_that_says_nothing(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar.Sidecars, silent, lambda *_: None)
    monkeypatch.setattr("tiered.checkpoint.save.COMPUTING_FACTOR", 0.01)  # of LIMIT_S

    def program(rank: int) -> str:
        with session() as (model, optimizer):
            tiered.save(model, optimizer, tmp_path / "saved", extra=2, background=True)
            try:
                return str(tiered.saving(model, wait=True))
            except tiered.TieredError as error:
                return f"{type(error).__name__}: {error}"

    waited = on_ranks(2, program)[0 if silent == "say" else 1]
    assert waited.startswith("RankError")
    assert "no rank has written anything" in waited
    assert savers() == []


def test_a_rank_that_is_lost_ends_the_save_of_the_others_and_nothing_hangs(
    gate: threading.Event, tmp_path: Path
) -> None:
    def program(rank: int) -> None:
        with session() as (model, optimizer):
            train(model, optimizer, range(1), rank, 2)
            tiered.save(model, optimizer, tmp_path / "saved", background=True)
            if rank:
                raise ValueError("lost")
            train(model, optimizer, range(1, 3), rank, 2)

    with World(2).installed() as world:
        ends = world.ended(program)
    assert isinstance(ends[0], (tiered.RankError, tiered.StorageError)), ends
    assert isinstance(ends[1], ValueError), ends
    assert savers() == []


# --- the end of a process ---

PROGRAM = """
import sys, torch, tiered
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
tiered.shard(model, tiered.Config(device="cpu"))
optimizer = tiered.AdamW(model.parameters())
"""
LOOP = """
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    with tiered.gather(model, modify=True), torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
    tiered.save(model, optimizer, sys.argv[1], extra=number, background=True)
"""


def test_a_program_that_ends_without_close_has_saved(tmp_path: Path) -> None:
    line = "tiered.save(model, optimizer, sys.argv[1], extra='end', background=True)\n"
    subprocess.run([sys.executable, "-c", PROGRAM + line, str(tmp_path / "saved")], check=True, timeout=90)
    with sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), device="cpu") as (model, optimizer, _):
        assert tiered.load(model, optimizer, tmp_path / "saved") == "end"


def test_a_save_in_the_background_that_is_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    draw, last, path = random.Random(1), 0, tmp_path / "saved"
    with sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, path, extra=0)
        for attempt in range(4):
            before = (path / folder.MANIFEST).stat().st_mtime_ns
            arguments = [sys.executable, "-c", PROGRAM + LOOP, str(path), str(last)]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                deadline = time.monotonic() + 20
                while attempt % 2 and (path / folder.MANIFEST).stat().st_mtime_ns == before:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                time.sleep(draw.uniform(0.02, 0.3))
            finally:
                process.send_signal(signal.SIGKILL)
                process.communicate()
            number = tiered.load(model, optimizer, path)
            assert number >= last
            assert number == 0 or all(bool((p.detach() == number).all()) for p in model.parameters())
            last = number
        assert last > 0
        tiered.save(model, optimizer, path, extra=last)
    assert len(list(path.iterdir())) == 2, "what killed saves have left is gone"
