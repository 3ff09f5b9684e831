"""What an inspection says of swap directories: owners, generations, what is left, and each way one can be wrong."""

import dataclasses
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspection_support import PLACES, Ended, flip, kinds, leave, running, step, untouched
from threaded_ranks import World
from torch import nn

import tiered
from tiered.io import commit, look, owner


def only(path: Any, **how: Any) -> tuple[tiered.Inspection, Any]:
    found = tiered.inspect(path, **how)
    (directory,) = found.directories
    return found, directory


def last_record(left: Path) -> Path:
    (found,) = [Path(record.path) for record in only(left)[1].records if record.last]
    return found


def test_what_a_dead_run_left_is_said_whole_and_nothing_of_it_is_touched(left: Path) -> None:
    with untouched(left.parent):
        found, directory = only(left.parent, verify=True)
        assert only(left)[1].path == str(left), "one of them may be given itself"
    assert (found.kind, found.sound, list(found.all_findings())) == ("swap", True, [])
    assert (directory.path, directory.rank, directory.owner) == (str(left), 0, "dead")
    assert directory.resumable, directory.why
    assert sorted((record.state, record.serial, record.last) for record in directory.records) == [
        ("sound", 1, False),
        ("sound", 2, True),
    ]
    contents = directory.contents
    assert (contents.step, contents.ranks, contents.stage, contents.parameters) == (2, 1, 3, 6)
    assert contents.elements == 300 * 300 + 300 + 600 + 2100 + 7
    assert set(contents.bytes_by_kind) == {"param", "exp_avg", "exp_avg_sq"}
    assert contents.versions["python"]
    assert contents.config["optimizer_tier"] == "nvme"
    held = sum(contents.bytes_by_kind.values())
    assert directory.bytes_by_drive == {str(left): held}
    assert directory.verified_bytes == held
    assert directory.disk_bytes >= 2 * held, "there are two slots"


def test_it_goes_on_after_an_inspection_as_without(left: Path) -> None:
    tiered.inspect(left, verify=True)
    with running(left.parent, 0) as (model, optimizer):
        assert tiered.resume(model, optimizer) == 2


def test_a_live_run_is_said_to_be_one_and_goes_on(swap: Path) -> None:
    with running(swap, 2) as (model, optimizer):
        found, directory = only(swap, verify=True)
        assert found.sound
        assert (directory.owner, directory.pid, directory.resumable) == ("alive", os.getpid(), False)
        assert "may be changing" in directory.why
        step(model, optimizer)
    assert list(swap.iterdir()) == []
    assert tiered.inspect(swap).kind == "empty"


def test_a_live_run_that_goes_on_while_it_is_read_is_no_fault(swap: Path) -> None:
    with running(swap, 2) as (model, optimizer):

        def progress(done: int, total: int) -> None:
            step(model, optimizer)
            step(model, optimizer)

        found = tiered.inspect(swap, verify=True, progress=progress)
    assert found.sound
    assert {finding.kind for finding in found.all_findings()} <= {"changing"}


def test_a_flipped_bit_is_named_with_its_file_its_place_and_its_parameters(left: Path) -> None:
    found = commit.decode(last_record(left).read_bytes(), "")
    kept = next(kept for kept in found.extents if kept.label.startswith("exp_avg of "))
    start = kept.starts[int(kept.slots[0])][0]
    flip(left / "swap", start + 10)
    assert only(left)[0].sound, "only --verify reads the bytes"
    (fault,) = tiered.inspect(left, verify=True).faults
    assert (fault.kind, fault.path, fault.offset) == ("corrupt", str(left / "swap"), start)
    assert "0.weight" in fault.of
    assert kept.label in fault.says


def test_bytes_of_the_portable_engine_are_checked_by_its_own_checksum(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TIERED_PORTABLE", "1")
        leave(swap)
    found, directory = only(swap, verify=True)
    assert found.sound
    assert directory.verified_bytes
    made = commit.decode(last_record(Path(directory.path)).read_bytes(), "")
    kept = made.extents[0]
    flip(Path(directory.path) / "swap", kept.starts[int(kept.slots[0])][0])
    assert kinds(tiered.inspect(swap, verify=True)) == ["corrupt"]


@pytest.mark.native
def test_bytes_of_the_native_engine_are_checked_without_the_extension(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_PORTABLE", "1")
    assert only(left, verify=True)[0].sound


def test_over_two_drives_both_are_read_and_one_alone_says_that_the_other_was_not(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    leave(drives)
    found = tiered.inspect(drives, verify=True)
    assert found.sound
    first, second = sorted(found.directories, key=lambda directory: directory.path)
    assert first.resumable
    assert first.run == second.run is not None
    assert len(first.bytes_by_drive) == 2
    assert list(first.weight_by_drive) == list(first.bytes_by_drive)
    assert all(weight >= 0 for weight in first.weight_by_drive.values())
    assert first.verified_bytes == sum(first.bytes_by_drive.values())
    alone, directory = only(drives[0], verify=True)
    assert (alone.sound, directory.resumable) == (True, False)
    assert [finding.kind for finding in alone.all_findings()] == ["not looked at"]
    assert "first drive" in only(drives[1])[1].why


def test_of_two_ranks_one_alone_cannot_go_on(swap: Path) -> None:
    models = [nn.Linear(64, 64), nn.Linear(64, 64)]

    def program(rank: int) -> None:
        with tiered.shard(models[rank], tiered.Config(nvme=swap, **PLACES)):
            optimizer = tiered.AdamW(models[rank].parameters())
            models[rank](torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            raise Ended

    with World(2).installed() as world:
        assert [type(end) for end in world.ended(program)] == [Ended, Ended]
    found = tiered.inspect(swap, verify=True)
    assert [(each.rank, each.resumable) for each in found.directories] == [(0, True), (1, True)]
    assert found.directories[0].contents is not None
    assert found.directories[0].contents.ranks == 2
    found = tiered.inspect(found.directories[0].path)
    assert [(each.rank, each.resumable) for each in found.directories] == [(0, False)]
    assert "of 2 ranks, 1 " in found.directories[0].why


def test_a_directory_without_a_generation_is_a_leftover_and_a_note(left: Path) -> None:
    (left / "kept").unlink()
    found, directory = only(left)
    assert found.sound
    assert [finding.kind for finding in found.all_findings()] == ["leftover"]
    assert not directory.resumable


def test_a_torn_record_is_named_and_the_other_one_is_the_last(left: Path) -> None:
    torn = last_record(left)
    flip(torn, 100)
    found, directory = only(left, verify=True)
    assert "torn" in kinds(found)
    assert [(r.state, r.serial, r.last) for r in directory.records if r.path != str(torn)] == [("sound", 1, True)]
    for record in directory.records:
        Path(record.path).write_bytes(b"x" * 200)
    found, directory = only(left)
    assert kinds(found) == ["unsound", "unsound"]
    assert not directory.resumable


def test_an_owner_of_another_host_or_of_no_words_is_unclear(left: Path) -> None:
    fields = {"pid": 1, "started": "1", "host": "elsewhere", "boot": "x"}
    (left / "lock").write_text(json.dumps(fields))
    directory = only(left)[1]
    assert (directory.owner, directory.host, directory.resumable) == ("unclear", "elsewhere", False)
    (left / "lock").write_bytes(b"\xff" * 90)
    assert only(left)[1].owner == "unclear"


def test_the_reader_and_the_writer_of_a_lock_file_agree(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert owner.read(descriptor) is None
    owner.write(descriptor, owner.this_process())
    assert owner.read(descriptor) == owner.this_process()
    assert owner.this_process().alive is True
    owner.write(descriptor, owner.nobody())
    assert owner.read(descriptor).alive is False  # type: ignore[union-attr]
    os.close(descriptor)


def link(left: Path) -> None:
    (left / "swap").rename(left.parent.parent / "elsewhere")
    (left / "swap").symlink_to(left.parent.parent / "elsewhere")


def hard_link(left: Path) -> None:
    os.link(left / "swap", left.parent.parent / "elsewhere")


def linked_directory(left: Path) -> None:
    left.rename(left.parent.parent / left.name)
    left.symlink_to(left.parent.parent / left.name)


def fifo(left: Path) -> None:
    for name in look.RECORDS:
        (left / name).unlink()
        os.mkfifo(left / name)


def huge(left: Path) -> None:
    for name in look.RECORDS:
        data = (left / name).read_bytes()
        (left / name).write_bytes(data[:16] + (1 << 39).to_bytes(8, "little") + data[24:])
        os.truncate(left / name, 1 << 40)


def renamed(left: Path) -> None:
    left.rename(left.parent / "tiered-0000000000000000-r0")


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (link, {"refused"}),
        (hard_link, {"refused"}),
        (linked_directory, {"refused"}),
        (fifo, {"unsound"}),
        (huge, {"unsound"}),
        (renamed, {"unsound"}),
        (lambda left: left.chmod(0o777), {"refused"}),
        (lambda left: (left / "swap").unlink(), {"missing"}),
        (lambda left: os.truncate(left / "swap", 5000), {"short"}),
        (lambda left: (left / "notes").touch(), {"foreign"}),
        (lambda left: [(left / name).unlink() for name in look.RECORDS], set()),
    ],
)
def test_a_crafted_directory_is_a_named_fault_and_costs_no_memory(
    left: Path, harm: Callable[[Path], Any], kind: set[str]
) -> None:
    harm(left)
    tracemalloc.start()
    with untouched(left.parent):
        found = tiered.inspect(left.parent, verify=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert set(kinds(found)) == kind
    assert not [each for each in found.directories if each.resumable] or kind == {"foreign"}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), at=st.floats(0, 1))
def test_whatever_a_record_and_a_lock_hold_it_is_said(left: Path, data: bytes, at: float) -> None:
    for path in (last_record(left), left / "lock"):
        before = path.read_bytes()
        index = int(at * len(before))
        path.write_bytes(before[:index] + data)
        try:
            tiered.inspect(left, verify=True)
        finally:
            path.write_bytes(before)


def test_a_record_of_any_words_with_a_hash_that_fits_is_said(left: Path) -> None:
    path = last_record(left)
    made = commit.decode(path.read_bytes(), "")
    for change in (
        {"payload": b"x" * 100},
        {"payload": b""},
        {"identity": commit.Identity("m", "no engine", "w")},
        {"extents": tuple([made.extents[0]] * 2)},
    ):
        path.write_bytes(commit.encode(dataclasses.replace(made, **change)))  # type: ignore[arg-type]
        found, directory = only(left, verify=True)
        assert kinds(found) == ["unsound"] * len(kinds(found)) != []
        assert not directory.resumable


def test_a_directory_that_goes_meanwhile_or_is_another_users_is_a_note(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look.look(str(left.parent / "tiered-0000000000000000-r0")).harmless
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = tiered.inspect(left.parent, verify=True)
    assert found.sound
    assert [finding.kind for finding in found.all_findings()] == ["refused"]
    assert "belongs to user" in found.directories[0].why


def test_a_flood_of_files_is_refused(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_MOST_ENTRIES", 3)
    assert kinds(tiered.inspect(left)) == ["refused"]
