"""What an inspection says of checkpoints: what is in them, and each way in which one can be wrong, by name."""

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
from inspection_support import data_file, flip, kinds, rewritten, running, step, untouched
from threaded_ranks import World, sharded
from torch import nn

import tiered
from tiered.checkpoint.folder import MANIFEST
from tiered.inspection import report


def test_a_sound_checkpoint_is_said_whole_and_nothing_of_it_is_touched(saved: Path) -> None:
    with untouched(saved):
        found = tiered.inspect(saved, verify=True)
    assert (found.kind, found.sound, list(found.all_findings())) == ("checkpoint", True, [])
    (checkpoint,) = found.checkpoints
    contents = checkpoint.contents
    assert contents is not None
    assert (contents.step, contents.ranks, contents.stage, contents.parameters) == (2, 1, 3, 6)
    assert contents.elements == 300 * 300 + 300 + 600 + 2100 + 7
    values = contents.elements * 4
    other = 2 * 300 * 4 + 8 + 12  # of the norm, and the extra
    expected = {"value": values, "exp_avg": values, "exp_avg_sq": values, "other": other}
    assert contents.bytes_by_kind == expected
    assert checkpoint.bytes_by_rank == {"0": expected}
    assert contents.versions["torch"] == torch.__version__
    assert contents.config["optimizer_tier"] == "nvme"
    assert checkpoint.verified_bytes == data_file(saved).stat().st_size, "every byte of the data was read"
    assert checkpoint.disk_bytes >= checkpoint.verified_bytes


def test_of_several_ranks_each_one_has_its_bytes(tmp_path: Path) -> None:
    models = [nn.Linear(40, 40), nn.Linear(40, 40)]

    def program(rank: int) -> None:
        with sharded(models[rank], device="cpu") as (model, optimizer, _):
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            tiered.save(model, optimizer, tmp_path / "saved", extra=torch.ones(rank + 1))

    with World(2).installed() as world:
        world.run(program)
    found = tiered.inspect(tmp_path / "saved", verify=True)
    assert found.sound, found.faults
    (checkpoint,) = found.checkpoints
    assert checkpoint.contents is not None
    assert checkpoint.contents.ranks == 2
    assert checkpoint.bytes_by_rank.keys() == {"0", "1"}
    assert sum(kinds["value"] for kinds in checkpoint.bytes_by_rank.values()) == 1640 * 4
    assert [kinds["other"] for kinds in checkpoint.bytes_by_rank.values()] == [4, 8]


def test_of_several_all_are_said_and_the_one_that_load_takes_is_marked(swap: Path, tmp_path: Path) -> None:
    with running(swap, 1) as (model, optimizer):
        for _ in range(3):
            tiered.save(model, optimizer, tmp_path / "run", keep=2)
            step(model, optimizer)
        (tmp_path / "run" / "step-000000009").mkdir()
        found = tiered.inspect(tmp_path / "run")
    steps = [(each.contents and each.contents.step, each.newest) for each in found.checkpoints]
    assert steps == [(3, True), (2, False), (None, False)]
    assert found.sound, "a first save that was not committed is not a fault"
    assert [finding.kind for finding in found.all_findings()] == ["unfinished"]


def test_a_flipped_bit_is_named_with_its_file_its_place_and_its_parameter(saved: Path) -> None:
    body = json.loads((saved / MANIFEST).read_text())["manifest"]
    number, at, *_ = body["parameters"]["2.weight"]["kinds"]["exp_avg"]["parts"][0]
    _, offset, nbytes, *_ = body["spans"][number]
    flip(data_file(saved), offset + at + 40)
    assert tiered.inspect(saved).sound, "only --verify reads the bytes"
    (fault,) = tiered.inspect(saved, verify=True).faults
    assert (fault.kind, fault.path, fault.offset) == ("corrupt", str(data_file(saved)), offset)
    assert fault.nbytes == nbytes < 1 << 20, "the piece around it"
    assert "exp_avg of 2.weight" in fault.of
    assert all(of.startswith("exp_avg of ") for of in fault.of)


def test_a_changed_header_is_found_though_it_has_no_hash(saved: Path) -> None:
    data = data_file(saved).read_bytes()
    at = data.index(b'"data_offsets": [') + len(b'"data_offsets": [')
    data_file(saved).write_bytes(data[:at] + b"1" + data[at + 1 :])
    (fault,) = tiered.inspect(saved, verify=True).faults
    assert (fault.kind, fault.offset) == ("unsound", 0)


def test_files_that_are_missing_short_long_or_foreign_are_each_named(saved: Path) -> None:
    file = data_file(saved)
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    found = tiered.inspect(saved, verify=True)
    assert kinds(found) == ["short", "corrupt"], "and the piece that is cut"
    file.write_bytes(data + b"more")
    assert kinds(tiered.inspect(saved)) == ["long"]
    file.unlink()
    assert kinds(tiered.inspect(saved, verify=True)) == ["missing"]
    file.write_bytes(data)
    (saved / "notes.txt").write_text("mine")
    (file.parent / "more").write_text("mine")
    assert sorted(os.path.basename(fault.path) for fault in tiered.inspect(saved).faults) == ["more", "notes.txt"]


def test_what_a_killed_save_left_is_a_note(saved: Path) -> None:
    (saved / "manifest.json.new").write_text("{")
    (saved / ("0" * 16)).mkdir()
    found = tiered.inspect(saved)
    assert found.sound
    assert [finding.kind for finding in found.all_findings()] == ["unfinished"] * 2


def test_a_save_that_replaces_it_meanwhile_is_no_fault(swap: Path, tmp_path: Path) -> None:
    with running(swap, 1) as (model, optimizer):
        tiered.save(model, optimizer, tmp_path / "saved")
        flip(data_file(tmp_path / "saved"), -1)
        told = []

        def progress(done: int, total: int) -> None:
            if not told:
                tiered.save(model, optimizer, tmp_path / "saved")
            told.append((done, total))

        found = tiered.inspect(tmp_path / "saved", verify=True, progress=progress)
    assert found.sound
    assert [finding.kind for finding in found.all_findings()] == ["changing"]
    assert all(done <= total for done, total in told)


def link_the_manifest(saved: Path) -> None:
    (saved / MANIFEST).rename(saved.parent / "elsewhere")
    (saved / MANIFEST).symlink_to(saved.parent / "elsewhere")


def link_the_data(saved: Path) -> None:
    file = data_file(saved)
    file.rename(saved.parent / "elsewhere")
    file.symlink_to(saved.parent / "elsewhere")


def fifo(saved: Path) -> None:
    (saved / MANIFEST).unlink()
    os.mkfifo(saved / MANIFEST)


def traversal(saved: Path) -> None:
    def change(body: Any) -> None:
        body["files"]["../../etc/passwd"] = 1

    rewritten(saved, change)


def absurd(saved: Path) -> None:
    def change(body: Any) -> None:
        body["files"] = dict.fromkeys(body["files"], 1 << 52)

    rewritten(saved, change)


def huge(saved: Path) -> None:
    os.truncate(saved / MANIFEST, 1 << 40)


def deep(saved: Path) -> None:
    (saved / MANIFEST).write_text("[" * 200_000)


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (link_the_manifest, {"unsound", "refused", "foreign"}),
        (link_the_data, {"refused"}),
        (fifo, {"unsound", "foreign"}),
        (traversal, {"unsound"}),
        (absurd, {"short"}),
        (huge, {"unsound"}),
        (deep, {"unsound"}),
        (lambda saved: saved.chmod(0o777), {"refused"}),
        (lambda saved: (saved / MANIFEST).write_bytes(b""), {"unsound"}),
        (lambda saved: (saved / MANIFEST).write_bytes(os.urandom(3000)), {"unsound"}),
    ],
)
def test_a_crafted_folder_is_a_named_fault_and_costs_no_memory(
    saved: Path, harm: Callable[[Path], Any], kind: set[str]
) -> None:
    harm(saved)
    tracemalloc.start()
    found = tiered.inspect(saved, verify=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert kinds(found)
    assert set(kinds(found)) <= kind


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
def test_whatever_one_byte_of_a_manifest_is_it_is_a_fault_or_the_same(
    saved: Path, at: float, byte: int, cut: bool
) -> None:
    before = (saved / MANIFEST).read_bytes()
    index = int(at * len(before))
    after = before[:index] + (b"" if cut else bytes([byte]) + before[index + 1 :])
    (saved / MANIFEST).write_bytes(after)
    try:
        found = tiered.inspect(saved)
        assert found.sound == (after.rstrip() == before.rstrip())
    finally:
        (saved / MANIFEST).write_bytes(before)


def test_however_much_is_wrong_the_report_is_bounded() -> None:
    found = report.Findings()
    for number in range(3 * report.MOST):
        found.add("foreign", number, "so")
    every = found.all("here")
    assert len(every) == report.MOST + 1
    assert (every[-1].kind, every[-1].fault) == ("more", True)
    assert str(2 * report.MOST) in every[-1].says


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("saved"), lambda path: None])
def test_what_is_no_folder_is_an_error_with_its_path(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "given")
    with pytest.raises(tiered.StorageError, match="given") as caught:
        tiered.inspect(tmp_path / "given")
    assert caught.value.filename == str(tmp_path / "given")


def test_a_folder_of_others_is_refused_by_name_and_an_empty_one_is_sound(tmp_path: Path) -> None:
    assert tiered.inspect(tmp_path).kind == "empty"
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(tiered.UsageError, match=r"model.safetensors.*tiered import"):
        tiered.inspect(tmp_path)
