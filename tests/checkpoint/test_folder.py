"""A checkpoint folder that is not sound, or not one's own, is refused by name; a killed save leaves a whole one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded_ranks import sharded
from torch import nn

import tiered
from tiered.checkpoint import manifest
from tiered.checkpoint.folder import MANIFEST, Folder
from tiered.checkpoint.spans import PIECE_BYTES


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    with sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), device="cpu") as (model, optimizer, _):
        return tiered.save(model, optimizer, tmp_path / "saved", extra={"a": [torch.ones(2), 1.5]})


def refused(path: Path, kind: type[tiered.StorageError] = tiered.StorageError) -> str:
    """What loading from there says."""
    with (
        sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), device="cpu") as (model, optimizer, _),
        pytest.raises(kind) as caught,
    ):
        tiered.load(model, optimizer, path)
    assert caught.value.filename is not None
    return str(caught.value)


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest, and make its hash fit."""
    body = json.loads((path / MANIFEST).read_text())["manifest"]
    change(body)
    text = json.dumps(body, indent=1)
    digest = manifest.hash_of(text.encode())
    (path / MANIFEST).write_text(f'{{"xxh3": "{digest}", "manifest":\n{text}}}\n')


def test_a_manifest_comes_back_as_it_was(saved: Path) -> None:
    made = Folder(saved).read()
    assert manifest.decode(manifest.encode(made), "here") == made


def first(body: Any) -> Any:
    return next(iter(body["parameters"].values()))["kinds"]["value"]


def rename_file(body: Any, name: str) -> None:
    (old,) = body["files"]
    body["files"] = {name: body["files"][old]}
    for span in body["spans"]:
        span[0] = name


HOSTILE: dict[str, Callable[[Any], None]] = {
    "a path out of the folder": lambda body: rename_file(body, "../../etc/passwd"),
    "an absolute path": lambda body: rename_file(body, "/etc/passwd"),
    "a path with a null": lambda body: rename_file(body, "0" * 16 + "/rank-0.safetensors\0"),
    "an absurd size": lambda body: body["files"].update({next(iter(body["files"])): 1 << 60}),
    "a negative offset": lambda body: first(body)["parts"][0].__setitem__(1, -4),
    "an offset beyond the span": lambda body: first(body)["parts"][0].__setitem__(1, 1 << 40),
    "an offset inside of an element": lambda body: first(body)["parts"][0].__setitem__(1, 2),
    "a span that there is not": lambda body: first(body)["parts"][0].__setitem__(0, 99),
    "a span before the file": lambda body: body["spans"][0].__setitem__(1, -4096),
    "a span beyond the end": lambda body: body["spans"][0].__setitem__(1, 1 << 40),
    "spans that overlap": lambda body: body["spans"][1].__setitem__(1, body["spans"][0][1] + 8),
    "an unknown check": lambda body: body["spans"][0].__setitem__(3, "sum"),
    "pieces larger than memory": lambda body: body["spans"][0].__setitem__(4, 1 << 40),
    "pieces of nothing": lambda body: body["spans"][0].__setitem__(4, 0),
    "pieces that cut elements": lambda body: body["spans"][0].__setitem__(4, (1 << 20) + 2),
    "too many checksums": lambda body: body["spans"][0].__setitem__(5, "0" * 32),
    "a checksum that is no number": lambda body: body["spans"][0].__setitem__(5, "x" * 16),
    "an overflowing shape": lambda body: next(iter(body["parameters"].values())).update(shape=[1 << 40, 1 << 40]),
    "a shape that is no number": lambda body: next(iter(body["parameters"].values())).update(shape=["4", 4]),
    "a gap between parts": lambda body: first(body)["parts"][0].__setitem__(2, 1),
    "no parts": lambda body: first(body).update(parts=[]),
    "no checksums": lambda body: body["spans"][0].__setitem__(5, ""),
    "an unknown dtype": lambda body: first(body).update(dtype="float7"),
    "a dtype that is code": lambda body: body["tensors"][0].__setitem__(1, "__import__('os').system('true')"),
    "an unknown kind": lambda body: next(iter(body["parameters"].values()))["kinds"].update(evil={}),
    "a tensor that there is not": lambda body: body["buffers"].update({"1.running_mean": 999}),
    "a group of unknown names": lambda body: body["groups"][0]["params"].append("nobody"),
    "another version": lambda body: body.update(version=3),
    "another format": lambda body: body.update(format="tar"),
    "no parameters": lambda body: body.pop("parameters"),
    "a list for a dictionary": lambda body: body.update(files=[]),
    "negative steps": lambda body: body.update(step=-1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_crafted_manifest_is_refused(name: str, saved: Path) -> None:
    rewritten(saved, HOSTILE[name])
    assert "not a sound checkpoint manifest" in refused(saved, tiered.CorruptDataError)


def of_version_1(path: Path) -> None:
    """Make the manifest one of version 1: each part has hashes of its own."""

    def change(body: Any) -> None:
        def old(part: list[int], itemsize: int) -> None:
            number, at, start, stop = part
            file, offset = body["spans"][number][:2]
            data = (path / file).read_bytes()[offset + at :][: (stop - start) * itemsize]
            hashes = [manifest.hash_of(data[i : i + PIECE_BYTES]) for i in range(0, len(data), PIECE_BYTES)]
            part[:] = [file, offset + at, start, stop, hashes]

        for stored in body["parameters"].values():
            for kind in stored["kinds"].values():
                for part in kind["parts"]:
                    old(part, manifest.DTYPES[kind["dtype"]].itemsize)
        for lone in body["tensors"]:
            old(lone[2], 1)
        body.update(version=1)
        del body["spans"]

    rewritten(path, change)


def test_a_checkpoint_of_version_1_is_read_as_ever(saved: Path) -> None:
    with sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), device="cpu") as (model, optimizer, _):
        want = tiered.load(model, optimizer, saved), dict(model.state_dict())
    of_version_1(saved)
    with sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), device="cpu") as (model, optimizer, _):
        got = tiered.load(model, optimizer, saved), dict(model.state_dict())
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert tiered.inspect(saved, verify=True).sound
    (file,) = saved.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "not those that were written (xxh3)" in refused(saved, tiered.CorruptDataError)
    assert [fault.kind for fault in tiered.inspect(saved, verify=True).faults] == ["corrupt"]


def test_bytes_of_a_manifest_that_have_changed_are_noticed_wherever_they_are(saved: Path) -> None:
    good = (saved / MANIFEST).read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        at = draw.randrange(len(good))
        bad = good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :]
        for data in (bad, good[:at]):
            if data.rstrip() != good.rstrip():
                with pytest.raises(tiered.CorruptDataError):
                    manifest.decode(data, "here")


def test_a_manifest_mutated_at_random_gives_one_kind_of_error(saved: Path) -> None:
    body = json.loads((saved / MANIFEST).read_text())["manifest"]
    draw = random.Random(0)
    values = [None, -1, 1 << 70, 1.5, "x", [], {}, True, [[]], {"tensor": 9}, {"a": None}]

    def mutate(node: Any) -> Any:
        if isinstance(node, dict) and node and draw.random() < 0.8:
            key = draw.choice(list(node))
            return {**node, key: mutate(node[key])}
        if isinstance(node, list) and node and draw.random() < 0.8:
            index = draw.randrange(len(node))
            return [*node[:index], mutate(node[index]), *node[index + 1 :]]
        return draw.choice(values)

    for _ in range(1500):
        text = json.dumps(mutate(body), indent=1)
        data = f'{{"xxh3": "{manifest.hash_of(text.encode())}", "manifest":\n{text}}}\n'.encode()
        try:
            manifest.decode(data, "here")
        except tiered.CorruptDataError:
            continue


def test_where_there_is_no_checkpoint_that_is_said(tmp_path: Path) -> None:
    assert "no whole checkpoint" in refused(tmp_path / "nowhere")
    assert "no whole checkpoint" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert "file" in refused(tmp_path / "file")


def test_data_that_is_missing_cut_or_a_link_is_named(saved: Path, tmp_path: Path) -> None:
    (file,) = saved.glob("*/*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    assert str(file) in refused(saved, tiered.CorruptDataError)
    file.unlink()
    assert str(file) in refused(saved)
    (tmp_path / "elsewhere").write_bytes(good)
    file.symlink_to(tmp_path / "elsewhere")
    assert str(file) in refused(saved)
    file.unlink()
    os.mkfifo(file)
    assert "no regular file" in refused(saved)


def test_a_save_that_fails_after_its_manifest_is_in_place_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where another rank dies at that moment: the new checkpoint is the one that is there."""
    path = tmp_path / "saved"
    with sharded(nn.Linear(4, 4), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, path, extra=1)
        with monkeypatch.context() as patch, pytest.raises(tiered.RankError):
            patch.setattr(Folder, "sweep", lambda *_, **__: (_ for _ in ()).throw(tiered.RankError("rank 1 is gone")))
            tiered.save(model, optimizer, path, extra=2)
        assert tiered.load(model, optimizer, path) == 2
        tiered.save(model, optimizer, path, extra=3)
        assert tiered.load(model, optimizer, path) == 3


def test_ranks_that_drop_one_save_at_once_leave_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "saved")
    drawn = folder.begin()
    for name in ("rank-0.safetensors", "rank-1.safetensors", "rank-1.json.new"):
        (folder.path / drawn / name).touch()
    unlink = os.unlink

    def late(path: str) -> None:
        unlink(path)  # as the other rank does, between the listing and this
        unlink(path)

    monkeypatch.setattr(os, "unlink", late)
    folder.drop(drawn)
    assert list(folder.path.iterdir()) == []


def test_a_folder_that_is_a_link_or_writable_by_everybody_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    assert "link" in refused(tmp_path / "link")
    saved.chmod(0o777)
    assert "writable by everybody" in refused(saved)


def test_a_save_touches_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with (
        sharded(nn.Linear(2, 2), device="cpu") as (model, optimizer, _),
        pytest.raises(tiered.StorageError, match=r"thesis\.txt"),
    ):
        tiered.save(model, optimizer, tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


# --- killed ---

SAVER = """
import sys, torch, tiered
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
tiered.shard(model, tiered.Config(device="cpu"))
optimizer = tiered.AdamW(model.parameters())
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    with tiered.gather(model, modify=True), torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
    tiered.save(model, optimizer, sys.argv[1], extra=number)
"""


def test_a_save_that_is_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    draw, last = random.Random(1), 0
    path = tmp_path / "saved"
    with sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, path, extra=0)
        for attempt in range(6):
            before = (path / MANIFEST).stat().st_mtime_ns
            process = subprocess.Popen([sys.executable, "-c", SAVER, str(path), str(last)], stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                deadline = time.monotonic() + 60
                while attempt % 2 and (path / MANIFEST).stat().st_mtime_ns == before and time.monotonic() < deadline:
                    time.sleep(0.01)  # at least one whole save, however slow the drive
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
