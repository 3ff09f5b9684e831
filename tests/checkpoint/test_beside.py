"""What is written beside its place gets there whole or not at all, and takes nothing away that was not asked for."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiered
from tiered.checkpoint import beside

OWN = re.compile(r"data-[0-9]+")


def write(path: Path, text: str) -> None:
    with os.fdopen(beside.create(path), "w") as file:
        file.write(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_that_fails_half_way_leaves_what_was_there_and_nothing_beside(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for before in ({}, {"data-1": "old"}):
        with pytest.raises(KeyboardInterrupt), beside.new_folder(place, OWN, force=True) as made:
            write(made / "data-2", "new")
            raise KeyboardInterrupt
        assert (contents(place) if before else os.listdir(tmp_path)) == (before or [])
        place.mkdir(exist_ok=True)
        (place / "data-1").write_text("old")
    assert os.listdir(tmp_path) == ["place"]


def test_a_folder_is_replaced_only_with_force_and_keeps_files_of_others(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with beside.new_folder(place, OWN, force=False) as made:
        write(made / "data-1", "one")
    (place / "card.md").write_text("ours")
    with pytest.raises(tiered.StorageError, match="force"), beside.new_folder(place, OWN, force=False):
        pytest.fail("nothing may be written")
    with beside.new_folder(place, OWN, force=True) as made:
        write(made / "data-2", "two")
    assert contents(place) == {"data-2": "two", "card.md": "ours"}
    assert os.listdir(tmp_path) == ["place"]


def test_a_folder_with_folders_in_it_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "place" / "inner").mkdir(parents=True)
    with pytest.raises(tiered.StorageError, match="'inner'"), beside.new_folder(tmp_path / "place", OWN, force=True):
        pytest.fail("nothing may be written")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_never_replaced_by_one(kind: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    if kind == "file":
        (tmp_path / "place").write_text("mine")
    else:
        (tmp_path / "place").symlink_to(tmp_path / "other")
    with (
        pytest.raises(tiered.StorageError, match="expected a folder"),
        beside.new_folder(tmp_path / "place", OWN, force=True),
    ):
        pytest.fail("nothing may be written")
    with pytest.raises(tiered.StorageError, match="expected a file"):
        beside.check(tmp_path / "other", force=True, folder=False)


def test_a_file_is_replaced_whole_and_only_with_force(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for number, force in enumerate((False, True)):
        with beside.new_file(place, force=force) as made:
            write(made, str(number))
        assert contents(tmp_path) == {"place": str(number)}
    with pytest.raises(tiered.StorageError, match="force"), beside.new_file(place, force=False):
        pytest.fail("nothing may be written")
    with pytest.raises(ValueError, match="oops"), beside.new_file(place, force=True) as made:
        write(made, "2")
        raise ValueError("oops")
    assert contents(tmp_path) == {"place": "1"}


def test_where_folders_cannot_be_exchanged_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.ctypes, "CDLL", lambda *_, **__: object())
    place = tmp_path / "place"
    for number in range(2):
        with beside.new_folder(place, OWN, force=True) as made:
            write(made / f"data-{number}", "")
    assert os.listdir(place) == ["data-1"]
    assert os.listdir(tmp_path) == ["place"]


def test_what_a_killed_run_left_is_gone_after_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".place.0123456789abcdef.new"
    left.mkdir()
    (left / "data-1").write_text("half")
    (tmp_path / ".place.0123456789abcde.new").mkdir()  # not one of ours
    with beside.new_folder(tmp_path / "place", OWN, force=False):
        pass
    assert sorted(os.listdir(tmp_path)) == [".place.0123456789abcde.new", "place"]


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_call_of_the_system_that_fails_is_named_and_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "saved")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(tiered.StorageError, match="No space left"):
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    with pytest.raises(tiered.StorageError, match="No space left"):
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "saved", force=True)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["saved", "x.safetensors"]
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")


def test_a_place_in_the_checkpoint_itself_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    saved = tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "saved")
    for place in (saved, saved / "hf"):
        with pytest.raises(tiered.UsageError, match="in the checkpoint itself"):
            tiered.export_checkpoint(saved, place, force=True)


def test_a_checkpoint_is_replaced_by_an_import_only_with_force(tmp_path: Path) -> None:
    for number in range(2):
        save_file({"a": torch.full((2,), float(number))}, tmp_path / f"{number}.safetensors")
    tiered.import_checkpoint(tmp_path / "0.safetensors", tmp_path / "saved")
    with pytest.raises(tiered.StorageError, match="force") as caught:
        tiered.import_checkpoint(tmp_path / "1.safetensors", tmp_path / "saved")
    assert caught.value.filename == str(tmp_path / "saved")
    tiered.import_checkpoint(tmp_path / "1.safetensors", tmp_path / "saved", force=True)
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors")["a"].tolist() == [1.0, 1.0]


# --- killed ---

CONVERTER = """
import sys, tiered
print("ready", flush=True)
number = 0
while True:
    number += 1
    tiered.export_checkpoint(f"{sys.argv[1]}/saved{number % 2}", f"{sys.argv[1]}/hf", max_shard_size=8000, force=True)
    tiered.import_checkpoint(f"{sys.argv[1]}/hf", f"{sys.argv[1]}/back", force=True)
    tiered.export_checkpoint(f"{sys.argv[1]}/back", f"{sys.argv[1]}/dcp", format="dcp", force=True)
"""


def test_a_conversion_that_is_killed_at_any_instant_leaves_the_old_or_the_new_whole(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(2):  # of different shapes and counts, so that a mixture would show
        values = {f"{n}.weight": torch.full((50, 20 + 20 * number), float(number)) for n in range(8 + 8 * number)}
        save_file(values, tmp_path / "x.safetensors")
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / f"saved{number}")
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", CONVERTER, str(tmp_path)], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(draw.uniform(0.02, 0.3))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        for kind in ("hf", "dcp", "back"):
            if (tmp_path / kind / "manifest.json").exists() or (kind != "back" and (tmp_path / kind).exists()):
                whole(tmp_path, kind)
    assert (tmp_path / "back" / "manifest.json").exists(), "no conversion ever ended"
    tiered.export_checkpoint(tmp_path / "saved0", tmp_path / "hf", force=True)
    tiered.export_checkpoint(tmp_path / "saved0", tmp_path / "dcp", format="dcp", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"x.safetensors", "saved0", "saved1", "hf", "dcp", "back"}


def whole(folder: Path, kind: str) -> None:
    """The tensors there are all those of one of the two."""
    held = folder / kind
    if kind != "back":
        held = tiered.import_checkpoint(held, folder / "seen" / "checkpoint")
    tiered.export_checkpoint(held, folder / "seen" / "hf")
    values = load_file(folder / "seen" / "hf" / "model.safetensors")
    shutil.rmtree(folder / "seen")
    number = int(next(iter(values.values()))[0, 0])
    assert len(values) == 8 + 8 * number
    assert all(bool((value == number).all()) for value in values.values())
