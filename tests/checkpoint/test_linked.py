"""A save that links states on drives is the one that copies them, to the last byte, and has moved none of them.

Blocks are shared here by a stand-in that copies; the last test runs most of this again on file systems that share.
"""

import errno
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.test_background import gate, same_state  # noqa: F401
from checkpoint.test_save_load import DRIVE, LINK, Net, Outcome, equal, on_ranks, outcome, session, train
from safetensors import safe_open
from safetensors.torch import load_file
from shared_blocks import REAL, Shares, shared_blocks
from threaded_ranks import sharded
from torch import nn

import tiered
from tiered import api
from tiered.checkpoint.folder import MANIFEST, Folder
from tiered.checkpoint.spans import Span
from tiered.io import SwapSpace
from tiered.io.drive import BLOCK
from tiered.store.snapshot import Snapshot
from tiered.store.tier import Tier

PLACES: dict[str, dict[str, Any]] = {
    "drive": {"device": "cpu", **DRIVE},
    "optimizer on a drive": {"device": "cpu", "optimizer_tier": "nvme"},
    "device and drive": {"device": "emulated", "emulation": LINK, **DRIVE},
    "low precision": {"device": "cpu", "precision": tiered.MixedPrecision(param_dtype=torch.bfloat16), **DRIVE},
    "one slot": {"device": "cpu", "durability": "none", **DRIVE},
}


@pytest.fixture(autouse=True)
def small_pieces(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have several pieces, the last one a short one."""
    monkeypatch.setattr(api, "SwapSpace", functools.partial(SwapSpace, piece_bytes=BLOCK))


@pytest.fixture
def shares() -> Iterator[Shares]:
    with shared_blocks() as made:
        yield made


class Wide(Net):
    """All that Net has, and layers of several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(12, 301), nn.Tanh(), nn.Linear(301, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.wide(x))


def wide(seed: int = 0) -> Wide:
    torch.manual_seed(seed)
    return Wide()


def run(path: Path, size: int = 1, *, drives: int = 1, background: bool = False, **settings: Any) -> list[Outcome]:
    """Train and save to `path`; what was there at the save, and after steps that followed, of rank 0."""
    swaps = [path.parent / f"swap-{number}" for number in range(drives)]
    for swap in swaps:
        swap.mkdir(exist_ok=True)
    models = [wide() for _ in range(size)]  # here, as torch has one generator for all threads

    def program(rank: int) -> list[Outcome]:
        with session(model=models[rank], nvme=swaps, **{**PLACES["drive"], **settings}) as (model, optimizer):
            train(model, optimizer, range(2), rank, size)
            found = [outcome(model, optimizer)]
            tiered.save(model, optimizer, path, extra={"rank": rank}, background=background)
            train(model, optimizer, range(2, 5), rank, size)
            return [*found, outcome(model, optimizer)]

    return on_ranks(size, program)[0]


def refusing(number: int) -> int:
    return errno.EXDEV


def load_wide(path: Path, seed: int = 9, **settings: Any) -> Outcome:
    with session(9, 1.0, model=wide(seed), **settings) as (model, optimizer):
        tiered.load(model, optimizer, path)
        return outcome(model, optimizer)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*/*.safetensors")}


def spans(path: Path) -> list[Span]:
    made = Folder(path).read()
    found = {part.span for stored in made.parameters.values() for kind in stored.kinds.values() for part in kind.parts}
    return sorted(found, key=lambda span: (span.file, span.offset))


def checks(path: Path) -> set[str]:
    return {span.check for span in spans(path)}


# --- it is what a copy is ---


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("size", "stage", "drives"), [(1, 3, 1), (1, 3, 2), (2, 3, 1), (2, 1, 2)])
def test_a_linked_save_is_the_copied_one_to_the_last_byte_and_changes_nothing_of_the_run(
    size: int, stage: int, drives: int, place: str, shares: Shares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"stage": stage, "drives": drives, **PLACES[place]}
    shares.failing = refusing
    want = run(tmp_path / "copied", size, **settings)
    shares.failing, shares.calls = lambda number: None, []
    moved: list[Tier] = []
    read = Snapshot.read
    monkeypatch.setattr(
        Snapshot, "read", lambda self, block, *span: moved.append(block.home) or read(self, block, *span)
    )
    equal(run(tmp_path / "linked", size, **settings), want)
    assert shares.calls
    assert files(tmp_path / "linked") == files(tmp_path / "copied")
    assert checks(tmp_path / "copied") == {"xxh3"}
    assert checks(tmp_path / "linked") & {"crc32c", "crc32"}
    assert stage == 1 or Tier.NVME not in moved, "no byte of a drive has been read"
    for saved in ("linked", "copied"):
        assert tiered.inspect(tmp_path / saved, verify=True).sound
    same_state(load_wide(tmp_path / "linked", **PLACES[place], nvme=tmp_path), want[0])


@pytest.mark.parametrize("saving", [1, 2])
@pytest.mark.parametrize(("loading", "stage"), [(1, 3), (2, 1), (3, 2)])
def test_it_loads_on_any_ranks_stage_and_tiers(
    saving: int, loading: int, stage: int, shares: Shares, tmp_path: Path
) -> None:
    want, _ = run(tmp_path / "saved", saving)
    assert shares.calls
    models = [wide(9) for _ in range(loading)]

    def load(rank: int) -> Outcome:
        with session(9, 1.0, model=models[rank], stage=stage) as (model, optimizer):
            assert tiered.load(model, optimizer, tmp_path / "saved") == {"rank": rank if rank < saving else 0}
            return outcome(model, optimizer)

    for found in on_ranks(loading, load):
        same_state(found, want)


def test_any_reader_of_safetensors_opens_it(shares: Shares, tmp_path: Path) -> None:
    want, _ = run(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*/*.safetensors")
    with safe_open(str(file), framework="pt") as opened:
        got = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    for name, value in want["values"].items():
        if f"{name}:value:0" in got:
            assert torch.equal(got[f"{name}:value:0"], value.reshape(-1))
    assert sum("wide" in key for key in got) == 4 * 3
    assert set(load_file(file)) == set(got)


def test_it_is_exported_to_others(shares: Shares, tmp_path: Path) -> None:
    want, _ = run(tmp_path / "saved")
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "gpt")
    got = load_file(tmp_path / "gpt" / "model.safetensors")
    for name in got:
        assert torch.equal(got[name], want["values"][name])
    assert "wide.0.weight" in got


@pytest.mark.parametrize("engines", [("0", "1"), ("1", "0"), ("1", "1")])
def test_it_is_verified_with_the_extension_and_without(
    engines: tuple[str, str], shares: Shares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_PORTABLE", engines[0])
    want, _ = run(tmp_path / "saved")
    monkeypatch.setenv("TIERED_PORTABLE", engines[1])
    same_state(load_wide(tmp_path / "saved"), want)
    assert tiered.inspect(tmp_path / "saved", verify=True).sound


# --- what is wrong is found ---


def test_a_flipped_byte_is_named_by_load_and_by_inspect_wherever_it_is(shares: Shares, tmp_path: Path) -> None:
    run(tmp_path / "saved")
    found = [span for span in spans(tmp_path / "saved") if span.check != "xxh3"]
    largest = max(found, key=lambda span: span.nbytes)
    assert largest.pieces > 3
    file = tmp_path / "saved" / largest.file
    good = file.read_bytes()
    for at in (largest.offset, largest.offset + BLOCK + 5, largest.stop - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        place = largest.offset + (at - largest.offset) // BLOCK * BLOCK
        with pytest.raises(
            tiered.CorruptDataError, match=rf"bytes at {place} are not those that were written"
        ) as caught:
            load_wide(tmp_path / "saved")
        assert caught.value.filename == str(file)
        (fault,) = tiered.inspect(tmp_path / "saved", verify=True).faults
        assert (fault.kind, fault.path, fault.offset) == ("corrupt", str(file), place)
        assert fault.of
    file.write_bytes(good)
    assert tiered.inspect(tmp_path / "saved", verify=True).sound


# --- where it is refused, or fails ---


@pytest.mark.parametrize("number", [1, 2, 9])
def test_what_is_refused_half_way_is_copied(number: int, shares: Shares, tmp_path: Path) -> None:
    shares.failing = refusing
    want, _ = run(tmp_path / "copied", drives=2)
    shares.calls, shares.failing = [], {number: errno.EOPNOTSUPP}.get
    run(tmp_path / "linked", drives=2)
    assert len(shares.calls) > number
    assert files(tmp_path / "linked") == files(tmp_path / "copied")
    assert len(checks(tmp_path / "linked")) == 2
    same_state(load_wide(tmp_path / "linked"), want)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_a_file_system_that_fails_leaves_the_checkpoint_before_and_the_run_goes_on(
    size: int, number: int, background: bool, shares: Shares, tmp_path: Path
) -> None:
    models = [wide() for _ in range(size)]

    def program(rank: int) -> Outcome:
        with session(model=models[rank], nvme=tmp_path, **DRIVE) as (model, optimizer):
            train(model, optimizer, range(1), rank, size)
            tiered.save(model, optimizer, tmp_path / "saved", extra=1)
            tiered.average(model, 0.0)  # every rank is here
            shares.calls, shares.failing = [], {number: errno.ENOSPC}.get
            tiered.average(model, 0.0)
            with pytest.raises(tiered.StorageError) as caught:
                tiered.save(model, optimizer, tmp_path / "saved", extra=2, background=background)
                tiered.saving(model, wait=True)
            assert str(tmp_path / "saved") in str(caught.value)
            assert tiered.load(model, optimizer, tmp_path / "saved") == 1
            train(model, optimizer, range(1, 3), rank, size)
            return outcome(model, optimizer)

    (got, *_) = on_ranks(size, program)
    assert len(list((tmp_path / "saved").iterdir())) == 2, "the manifest, and the data it names"
    shares.failing = lambda number: None
    models = [wide() for _ in range(size)]

    def without(rank: int) -> Outcome:
        with session(model=models[rank], nvme=tmp_path, **DRIVE) as (model, optimizer):
            train(model, optimizer, range(3), rank, size)
            return outcome(model, optimizer)

    equal(got, on_ranks(size, without)[0])


def test_where_the_drive_has_no_room_for_later_writes_to_shared_blocks_it_is_copied(
    shares: Shares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(model=wide(), nvme=tmp_path, **DRIVE) as (model, optimizer):
        train(model, optimizer, range(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=20, f_frsize=BLOCK))
            tiered.save(model, optimizer, tmp_path / "saved")
        assert shares.calls == []
        tiered.save(model, optimizer, tmp_path / "saved")
        assert shares.calls


# --- what follows ---


def test_steps_after_a_linked_save_change_nothing_of_it(shares: Shares, tmp_path: Path) -> None:
    with session(model=wide(), nvme=tmp_path, **DRIVE) as (model, optimizer):
        train(model, optimizer, range(2))
        saved, then = {}, {}
        for number in range(3):
            path = tmp_path / str(number)
            then[path] = outcome(model, optimizer)
            tiered.save(model, optimizer, path)
            saved[path] = files(path)
            train(model, optimizer, range(number, number + 3))
        for path, want in then.items():
            assert files(path) == saved[path]
            assert tiered.inspect(path, verify=True).sound
            same_state(load_wide(path), want)


@pytest.mark.usefixtures("gate")
def test_in_the_background_it_is_the_state_of_the_call(shares: Shares, tmp_path: Path) -> None:
    shares.failing = refusing
    want = run(tmp_path / "copied")
    shares.failing = lambda number: None
    equal(run(tmp_path / "linked", background=True), want)
    assert files(tmp_path / "linked") == files(tmp_path / "copied")


PROGRAM = """
import sys
sys.path.append(sys.argv[3])
import torch, tiered
from shared_blocks import shared_blocks
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
places = {"param_tier": "nvme", "optimizer_tier": "nvme", "device_budget": "1MiB"}
tiered.shard(model, tiered.Config(device="cpu", nvme=sys.argv[4], **places))
optimizer = tiered.AdamW(model.parameters())
print("ready", flush=True)
number = int(sys.argv[2])
with shared_blocks() as shares:
    while True:
        number += 1
        with tiered.gather(model, modify=True), torch.no_grad():
            for p in model.parameters():
                p.fill_(number)
        tiered.save(model, optimizer, sys.argv[1], extra=number, background=number % 2 == 0)
"""


def test_killed_at_any_instant_it_leaves_a_whole_checkpoint(shares: Shares, tmp_path: Path) -> None:
    draw, last, path = random.Random(1), 0, tmp_path / "saved"
    tests = str(Path(__file__).parents[1])
    with sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, path, extra=0)
        for attempt in range(3):
            before = (path / MANIFEST).stat().st_mtime_ns
            arguments = [sys.executable, "-c", PROGRAM, str(path), str(last), tests, str(tmp_path)]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                deadline = time.monotonic() + 20
                while attempt % 2 == 0 and (path / MANIFEST).stat().st_mtime_ns == before:
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
        assert {span.check for span in spans(path)} & {"crc32c", "crc32"}


# --- for real ---

MOUNTED = ("unshare", "--mount", "--propagation", "private")
ON_IT = 'truncate -s 400M "$2" && "$1" -q -f "$2" && mount -o loop "$2" "$3" && shift 3 && exec "$@"'


@pytest.mark.slow
@pytest.mark.parametrize("made", ["mkfs.xfs", "mkfs.btrfs"])
def test_this_holds_on_a_file_system_that_shares_blocks(made: str, tmp_path: Path) -> None:
    if os.environ.get(REAL):
        pytest.skip("this is it")
    place = tmp_path / "place"
    place.mkdir()
    mounted = [*MOUNTED, "sh", "-c", ON_IT, "sh", made, str(tmp_path / "image"), str(place)]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True, timeout=60)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        says = getattr(error, "stderr", b"").decode().strip()
        pytest.skip(f"a file system in a file needs {made}, root and loop devices: {error} {says}")
    some = "not any_ranks and not fails and not precision and not optimizer"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={place}/tests", "-k", some]
    tests = [__file__, str(Path(__file__).parents[1] / "io" / "test_share.py")]
    command = [*mounted, sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, env={**os.environ, REAL: "1"}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
